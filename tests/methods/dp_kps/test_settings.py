from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dpray.methods.dp_kps.settings import DpKpsSettings
from dpray.types import InputError


def settings(**keys: Any) -> DpKpsSettings:
    return DpKpsSettings.model_validate({"name": "dp_kps", "vocabulary": "terms.txt", **keys})


def sharing(vocabulary: float | None, kde: float | None) -> DpKpsSettings:
    return settings(epsilon_vocabulary=vocabulary, epsilon_kde=kde)


@pytest.mark.parametrize(
    ("vocabulary", "kde", "total", "labels", "expected"),
    [
        (None, None, 4.2, 0.1, (2.05, 2.05, 4.2)),
        (None, None, 6.0, 0.0, (3.0, 3.0, 6.0)),
        (1.0, None, 6.0, 0.0, (1.0, 5.0, 6.0)),
        (None, 5.0, 6.0, 0.0, (1.0, 5.0, 6.0)),
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
    assert sharing(vocabulary, kde).epsilons(total, labels) == expected


@pytest.mark.parametrize(
    ("vocabulary", "kde", "total", "labels"),
    [
        (6.0, None, 6.0, 0.0),
        (None, 7.0, 6.0, 0.0),
        (0.1, 0.2000000000001, 0.3, 0.0),
        (0.1, 0.2, 0.3, 1e-9),
        (0.2, None, 0.3, 0.1),
        (None, 0.2, 0.3, 0.1),
    ],
)
def test_what_is_over_by_any_digit_is_refused(
    vocabulary: float | None, kde: float | None, total: float, labels: float
) -> None:
    with pytest.raises(
        InputError, match=r"^method\.epsilon_vocabulary and .* privacy\.epsilon [06]"
    ):
        sharing(vocabulary, kde).epsilons(total, labels)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"noise": "gaussian"}, "noise"),
        ({"sampling": "iterative"}, "sampling"),
    ],
)
def test_settings_that_make_no_sense(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        settings(**change)
