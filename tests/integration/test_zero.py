"""DP-SGD under DeepSpeed ZeRO makes the reference's steps on one, two and four ranks.

False-alarm rate of what is random here: below 1e-5 in all.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from scipy import stats

from dpray.mechanisms.randomness import new_key
from dpray.methods.dp_sgd.training.clipped_loss import PASS_ROUNDING, PerExampleLoss
from dpray.methods.dp_sgd.training.model import load_loss
from dpray.methods.dp_sgd.training.training import ReferenceTrainer
from tests.integration.processes import free_ports
from tests.integration.zero_ranks import (
    CASES,
    MODELS,
    STAGES,
    STD,
    TUNINGS,
    deep_llama,
    flat,
    in_parts,
    plan,
    rank_main,
    steps,
)
from tests.methods.dp_sgd.training.states import weights_of
from tests.methods.dp_sgd.training.tiny_gradients import gpt2
from tests.statistical.two_sided import ALPHA, WRONG_SCALES, fits_distribution

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Saved:
    """Reads the files that the ranks left in a folder."""

    ranks: int
    folder: Path

    def trained(self, stage: int, *case: str) -> list[torch.Tensor]:
        """Return the weights of every rank."""
        name = f"{stage}-{'-'.join(case)}"
        return [flat(torch.load(self.folder / f"{name}-{rank}.pt")) for rank in range(self.ranks)]

    def noise(self, stage: int) -> list[dict[str, torch.Tensor]]:
        return [torch.load(self.folder / f"{stage}-noise-{rank}.pt") for rank in range(self.ranks)]


# Two ranks are in `test_ray_run`.
@pytest.fixture(scope="module", params=(1, 4))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder, ranks = tmp_path_factory.mktemp("zero"), request.param
    gpt2().save_pretrained(folder / "base")
    deep_llama().save_pretrained(folder / "deep")
    # One process loads the libraries, and each rank is a fork of it.
    multiprocessing.set_forkserver_preload(
        [rank_main.__module__, "dpray.methods.dp_sgd.training.zero"]
    )
    torch.multiprocessing.start_processes(
        rank_main, (ranks, free_ports(1)[0], folder), nprocs=ranks, start_method="forkserver"
    )
    return Saved(ranks, folder)


@pytest.mark.parametrize(("name", "optimizer", "precision"), CASES)
def test_every_stage_makes_the_references_steps(
    saved: Saved, name: str, optimizer: Any, precision: Any
) -> None:
    for stage in STAGES:
        loss = PerExampleLoss(MODELS[name](), precision, two_passes=stage == 3).eval()
        ours = plan(1e-9, optimizer)
        trainer = ReferenceTrainer(ours.mechanism, ours.settings, loss, new_key())
        start = flat(weights_of(trainer)).clone()
        steps(trainer, optimizer, 0, 4)
        reference = flat(weights_of(trainer))
        assert torch.isfinite(reference).all() and (reference - start).abs().max() > 1e-3
        # bfloat16 has 8 bits, and how it rounds depends on threads and ranks: 3.01 % was seen.
        moved = float((reference - start).abs().max())
        # float32's, in another order: 1.06e-6 was seen.
        tolerance = 5e-6 if precision == "float32" else 2 * PASS_ROUNDING["bfloat16"] * moved
        for weights in saved.trained(stage, name, optimizer, precision):
            torch.testing.assert_close(weights, reference, rtol=0, atol=tolerance)


@pytest.mark.parametrize("tuning", TUNINGS)
def test_a_model_that_was_loaded_in_parts_makes_the_references_steps(
    saved: Saved, tuning: str
) -> None:
    """The second half of the steps is made by trainers that resume, with parts of the state."""
    ours = in_parts(tuning)
    trainer = ReferenceTrainer(
        ours.mechanism,
        ours.settings,
        load_loss(str(saved.folder / "base"), ours.settings),
        new_key(),
    )
    start = flat(weights_of(trainer))
    steps(trainer, "adamw", 0, 4)
    reference = flat(weights_of(trainer))
    assert (reference - start).abs().max() > 1e-3
    for weights in saved.trained(3, "parts", tuning):
        torch.testing.assert_close(weights, reference, rtol=0, atol=5e-6)


@pytest.mark.parametrize("tuning", TUNINGS)
def test_no_rank_holds_more_than_a_part_and_a_few_layers(saved: Saved, tuning: str) -> None:
    """Beside one of the two large matrices, a fifth of all each, a few of the 28 small ones are
    whole at a time, while a step is made too."""
    for rank in range(saved.ranks):
        share = float((saved.folder / f"most-whole-{tuning}-{rank}").read_text())
        assert share < 1 / 3 and (share > 0) is (saved.ranks > 1)


def test_a_layer_without_its_rule_is_found_under_the_engine(saved: Saved) -> None:
    """A weight that is used outside its layer is refused, once the model is in parts."""
    for rank in range(saved.ranks):
        assert (saved.folder / f"refused-{rank}").read_text().startswith("model.transformer.ln_f")


@pytest.mark.parametrize("stage", STAGES)
def test_every_coordinate_gets_its_noise_once(saved: Saved, stage: int) -> None:
    first, *others = (rank["moved"] for rank in saved.noise(stage))
    assert all((first == other).all() for other in others)  # replicas stay equal
    moved = first.double().numpy()
    assert (moved != 0).mean() > 0.999
    assert fits_distribution(moved, stats.norm(scale=STD).cdf)
    for scale in WRONG_SCALES:
        assert not fits_distribution(moved, stats.norm(scale=STD * scale).cdf)


@pytest.mark.parametrize("stage", STAGES)
def test_partitions_are_independent(saved: Saved, stage: int) -> None:
    ranks = saved.noise(stage)
    drawn = [rank["drawn"].double().numpy() for rank in ranks]
    weights = len(ranks[0]["moved"])
    # A partition may be padded by some coordinates; without gaps or overlaps otherwise.
    assert weights <= sum(map(len, drawn)) <= weights + 200 * saved.ranks
    for first, second in combinations(drawn, 2):
        shorter = min(len(first), len(second))
        assert stats.pearsonr(first[:shorter], second[:shorter]).pvalue > ALPHA
