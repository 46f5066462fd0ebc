"""The figures on a rehearsal's choice follow from the accuracies of both runs of each method."""

from __future__ import annotations

from typing import Any

import pytest
import regret


def cell(**figures: tuple[float | None, float | None, bool]) -> regret.Cell:
    """Return what is kept: of each method its accuracy in the rehearsal and on the private records,
    and whether its signal is enough."""

    def kept(value: float | None) -> dict[str, float] | None:
        return None if value is None else {"mean": value, "deviation": 0.35}

    missing: tuple[Any, ...] = (None, None, False)
    return {
        name: {"is_enough": enough, "rehearsed": kept(before), "private": kept(after)}
        for name in regret.METHODS
        for before, after, enough in [figures.get(name, missing)]
    }


def test_the_choice_doubts_methods_below_their_noise_and_regrets_the_best_of_all() -> None:
    found = cell(aug_pe=(0.5, 0.4, True), dp_sgd=(0.6, 0.7, True), dp_kps=(0.9, 0.8, False))
    assert regret.choice(found) == "dp_sgd"
    assert regret.choice(cell(dp_sgd=(0.5, 0.7, True), dp_kps=(0.9, 0.8, False))) == "dp_kps"
    assert regret.regret(found, "dp_sgd") == pytest.approx(0.1)
    assert regret.regret(found, "private_prediction") is None
    assert regret.regret(found, None) is None
    assert regret.correlation(found) == pytest.approx(1.0)


def test_there_is_no_correlation_of_two_methods_or_of_equal_ones() -> None:
    assert regret.correlation(cell(aug_pe=(0.5, 0.4, True), dp_sgd=(0.6, 0.7, True))) is None
    flat = dict.fromkeys(("aug_pe", "dp_sgd", "dp_kps"), (0.5, 0.4, True))
    assert regret.correlation(cell(**flat)) is None
    assert regret.choice(cell()) is None
