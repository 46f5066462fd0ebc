"""Sizes of a first run that a CPU ends in about ten minutes, for `dpray init`."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from dpray.io.yaml_text import parse_yaml
from dpray.methods.config import parse_config
from dpray.methods.registry import make_plan
from dpray.runs.forecast import Forecast, rates_here
from dpray.types import InputError

HOURS = 1 / 6

_FEWER_CALLS = {"iterations": 3, "variations": 4, "max_tokens": 128, "min_words": 10}

SIZES: dict[str, list[dict[str, int]]] = {
    "private_prediction": [{}, {"max_records": 10}, {"max_records": 5}],
    "aug_pe": [{}, *({"records": n} | _FEWER_CALLS for n in (200, 100, 50, 20))],
    "dp_kps": [{}, *({"records": n, "max_tokens": 128} for n in (400, 200, 100, 50, 20))],
    "dp_sgd": [{}, *({"epochs": n, "max_length": 128, "records": 50} for n in (10, 3, 1))],
}
"""The sizes of each method, from what `init` writes on a GPU (no other key) to the smallest: the
first that ends in `HOURS` is taken."""


def first_sizes(text: str) -> tuple[dict[str, int], str]:
    """Return the keys of `method` that make the run of a configuration as `init` writes it short
    enough for this machine's CPU, and the time that it then takes in words. Nothing where the time
    is not known: with a GPU, an endpoint or a model that is not here."""
    tree: Any = parse_yaml(text)
    found: tuple[dict[str, int], str] = {}, ""
    with suppress(InputError):  # a plan says later what is wrong
        for sizes in SIZES.get(tree["method"]["name"], []):
            config = parse_config(tree | {"method": tree["method"] | sizes})
            if config.method.can_run_without_noise:  # the noise moves no size, and takes seconds
                privacy = config.privacy.model_copy(update={"epsilon": math.inf})
                config = config.model_copy(update={"privacy": privacy})
            if (rates := rates_here(config)) is None:
                return found
            forecast = Forecast.of(make_plan(config).work, rates, config)
            found = sizes, forecast.duration
            if forecast.hours <= HOURS:
                break
    return found
