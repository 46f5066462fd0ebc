from __future__ import annotations

import pytest

from dpray.methods.dp_kps.settings import DpKpsSettings
from dpray.types import InputError


def settings(vocabulary: float | None, kde: float | None) -> DpKpsSettings:
    keys = {"epsilon_vocabulary": vocabulary, "epsilon_kde": kde}
    return DpKpsSettings.model_validate({"name": "dp_kps", "vocabulary": "terms.txt", **keys})


@pytest.mark.parametrize(
    ("vocabulary", "kde", "total", "labels", "expected"),
    [
        (None, None, 4.2, 0.1, (2.05, 2.05, 4.2)),
        (0.1, None, 0.3, 0.0, (0.1, 0.2, 0.3)),
        (None, 0.1, 0.3, 0.0, (0.2, 0.1, 0.3)),
        (0.1, 0.2, 0.3, 0.0, (0.1, 0.2, 0.3)),
        (0.1, 0.2, 5.0, 0.3, (0.1, 0.2, 0.6)),
        (0.1, None, 0.4, 0.1, (0.1, 0.2, 0.4)),
        (None, 0.7, 1.1, 0.3, (0.1, 0.7, 1.1)),
    ],
)
def test_epsilon_is_shared_out_in_decimals(
    vocabulary: float | None,
    kde: float | None,
    total: float,
    labels: float,
    expected: tuple[float, float, float],
) -> None:
    assert settings(vocabulary, kde).epsilons(total, labels) == expected


@pytest.mark.parametrize(
    ("vocabulary", "kde", "total", "labels"),
    [
        (0.1, 0.2000000000001, 0.3, 0.0),
        (0.1, 0.2, 0.3, 1e-9),
        (0.2, None, 0.3, 0.1),
        (None, 0.2, 0.3, 0.1),
    ],
)
def test_what_is_over_by_any_digit_is_refused(
    vocabulary: float | None, kde: float | None, total: float, labels: float
) -> None:
    with pytest.raises(InputError, match=r"^method\.epsilon_vocabulary and .* privacy\.epsilon 0"):
        settings(vocabulary, kde).epsilons(total, labels)
