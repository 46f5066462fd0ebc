"""The peers' rows show their own epsilons as their code gives them, and dpray's beside these."""

import peers_table
import pytest
from peers_table import DELTA, EPSILON, VOTE_NOISE, VOTES

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import Gaussian


@pytest.mark.parametrize(("batch", "clip"), [(16, 0.6083560332422212)])
def test_the_clip_is_that_of_invisibleink(batch: int, clip: float) -> None:
    """`get_clip` of invink 0.1.0 gave this number."""
    assert peers_table.invisibleink_clip(batch) == pytest.approx(clip, rel=1e-6)


def test_a_list_that_is_cut_into_batches_costs_more_than_is_accounted_for() -> None:
    own, ours = peers_table.invisibleink_epsilons(16)
    accounted, as_run = map(float, ours.split(" / "))
    assert accounted < float(own) == EPSILON < as_run


def test_the_votes_have_the_least_noise_that_is_worth_epsilon() -> None:
    def epsilon(noise: float) -> float:
        return cost(SelfComposed(Gaussian(noise), VOTES), DELTA).epsilon

    assert epsilon(VOTE_NOISE) <= EPSILON < epsilon(VOTE_NOISE - 0.01)
