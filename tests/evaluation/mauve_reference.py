"""Figures of the authors' own MAUVE package, with which test_fidelity.py compares dpray's.

    pip install '.[reference]' && python -m tests.evaluation.mauve_reference

writes `mauve_reference.json` anew and prints it beside dpray's own. The package is under the GPL,
so dpray does not depend on it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dpray.evaluation.fidelity import (
    EXPLAINED_VARIANCE,
    KMEANS_STEPS,
    SCALING,
    cluster_histograms,
    divergence_area,
)

FIGURES = Path(__file__).with_suffix(".json")
SEEDS = range(10)
CASES = {
    f"{size} x {dimension}, shift {shift:g}": (size, dimension, shift)
    for size, dimension in ((400, 8), (1500, 64))
    for shift in (0.0, 1.0, 2.0, 5.0)
}


def pair(size: int, dimension: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Two normal samples whose coordinates have falling deviations, one of them moved along the
    first."""
    rng = np.random.default_rng(0)
    p, q = rng.normal(size=(2, size, dimension)) * np.linspace(2.0, 0.1, dimension)
    q[:, 0] += shift
    return p, q


def package_figures(size: int, dimension: int, shift: float) -> dict[str, Any]:
    """MAUVE of the package for each seed, and the two histograms behind the first of them."""
    from mauve import compute_mauve

    p, q = pair(size, dimension, shift)
    found = [
        compute_mauve(
            p_features=p,
            q_features=q,
            seed=seed,
            mauve_scaling_factor=SCALING,
            kmeans_explained_var=EXPLAINED_VARIANCE,
            kmeans_num_redo=1,
            kmeans_max_iter=KMEANS_STEPS,
        )
        for seed in SEEDS
    ]
    histograms = [
        np.rint(h * size).astype(int).tolist() for h in (found[0].p_hist, found[0].q_hist)
    ]
    return {"mauve": [float(each.mauve) for each in found], "histograms": histograms}


def our_figures(size: int, dimension: int, shift: float) -> list[float]:
    """MAUVE of dpray for each seed."""
    p, q = pair(size, dimension, shift)
    return [divergence_area(*cluster_histograms(p, q, seed)) for seed in SEEDS]


if __name__ == "__main__":
    figures = {name: package_figures(*case) for name, case in CASES.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in figures.items()]
    FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for name, case in CASES.items():
        pair_of_figures = (figures[name]["mauve"], our_figures(*case))
        shown = [f"{np.mean(f):.3f} ± {np.std(f, ddof=1):.3f}" for f in pair_of_figures]
        print(f"| {name} | {' | '.join(shown)} |")
