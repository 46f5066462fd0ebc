"""How often a selection runs, and which output it keeps."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare, logser, nbinom

from dpray.accounting.selection import expected_runs
from dpray.mechanisms.private_selection import TruncatedNegativeBinomial, best
from dpray.mechanisms.randomness import generator

DRAWS, CELLS = 20_000, 12


def expected(shape: float, gamma: float) -> np.ndarray:
    """Return the probabilities of 1, 2, ..., and of all that is beyond, by scipy."""
    k = np.arange(1, CELLS)
    if shape == 0:
        pmf = logser.pmf(k, 1 - gamma)
    else:
        pmf = nbinom.pmf(k, shape, gamma) / (1 - nbinom.pmf(0, shape, gamma))
    return np.append(pmf, 1 - pmf.sum())


@pytest.mark.parametrize(("shape", "gamma"), [(0.0, 0.1), (0.5, 0.2), (1.0, 0.2), (3.0, 0.5)])
def test_the_number_of_runs_has_its_law_and_no_other(shape: float, gamma: float) -> None:
    """A right law fails once in a million times."""
    law, rng = TruncatedNegativeBinomial(shape, gamma), generator("ab" * 32)
    drawn = np.array([law.draw(rng) for _ in range(DRAWS)])
    counts = np.bincount(np.minimum(drawn, CELLS), minlength=CELLS + 1)[1:]
    assert counts.sum() == DRAWS, "never 0"
    assert chisquare(counts, DRAWS * expected(shape, gamma)).pvalue > 1e-6
    assert chisquare(counts, DRAWS * expected(shape, 0.8 * gamma)).pvalue < 1e-6
    assert chisquare(counts, DRAWS * expected(shape + 0.3, gamma)).pvalue < 1e-6
    error = drawn.std() / np.sqrt(DRAWS)
    assert drawn.mean() == pytest.approx(expected_runs(shape, gamma), abs=5 * error)


def test_the_best_output_is_kept_and_of_equal_ones_the_first() -> None:
    assert best([(1, "a"), (3, "b"), (3, "c"), (2, "d")]) == "b"
    assert best(iter([(-5, "only")])) == "only"
