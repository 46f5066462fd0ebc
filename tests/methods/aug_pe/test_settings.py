from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dpray.methods.aug_pe.settings import AugPeSettings


@pytest.mark.parametrize(
    "wrong",
    [
        {"records": 0},
        {"iterations": 0},
        {"variations": 0},
        {"lookahead": -1},
        {"noise_multiplier": 0},
        {"noise_multiplier": float("inf")},
        {"mask_probability": 1.5},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"word_var": -1},
        {"max_retries": -1},
        {"variatons": 3},
    ],
    ids=str,
)
def test_bad_values_are_refused_by_key(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        AugPeSettings.model_validate({"name": "aug_pe"} | wrong)
    assert next(iter(wrong)) in str(error.value)
