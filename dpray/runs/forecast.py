"""The tokens of a plan, and the time and the price that they take at a rate: all public."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dpray.config.config import Config
from dpray.engines.kv_cache import may_have_gpu
from dpray.engines.model_path import is_at_hand, plain_name
from dpray.engines.rates import Rates
from dpray.engines.text import CHARACTERS_A_TOKEN, codec_of
from dpray.io.files import read_json
from dpray.types import InputError, Json

T = TypeVar("T")

RATE_FROM, RATES, PRICE = "--rate-from", "--tokens-per-second", "--per-hour"

CPU_PREFILL, CPU_DECODE, CPU_TRAIN = 120e9, 40e9, 24e9
"""A token of a model with so many parameters takes a second on two CPU cores: measured with
SmolLM2-135M (docs/clusters.md, "What a run costs"). A forecast without a rate takes these."""

LEAST_PARAMETERS = 3e7
"""A smaller model is not faster: its tokens cost what is not its matrices."""


@dataclass(frozen=True)
class Work:
    """The most tokens that a run's model reads and writes, with batches of the expected size and
    without empty answers, which are asked for once more.

    prefill: the tokens of prompts; decode: those after them; train: those of the forward and
        backward passes of a training, for batches of the expected size.
    """

    prefill: int = 0
    decode: int = 0
    train: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.prefill + other.prefill, self.decode + other.decode, self.train + other.train
        )

    def describe(self, config: Config) -> str:
        words = f"about {self.prefill:,} to prefill, at most {self.decode:,} to decode"
        if self.train:
            words = f"about {self.train:,} to train; then {words}"
        if self.prefill and not (config.engine.is_local and is_at_hand(config.engine.model)):
            words += (
                f"; of the prompts {CHARACTERS_A_TOKEN} characters count as one, without the "
                "tokenizer"
            )
        return words


@dataclass(frozen=True)
class Forecast:
    """The hours of one engine that does all the work, and those of the run's actors."""

    rates: Rates
    engine_hours: float
    hours: float
    gpu_hours: float | None
    price: float | None

    @staticmethod
    def of(work: Work, rates: Rates, config: Config, per_hour: float | None = None) -> Forecast:
        """Forecast the time of a plan's work. Without `runtime.gpus_per_actor`, a local engine has
        its GPUs where there may be some."""
        hours = rates.seconds(work.prefill, work.decode, work.train) / 3600
        runtime, gpus = config.runtime, config.runtime.gpus_per_actor
        if gpus is None:
            gpus = config.engine.gpus if config.engine.is_local and may_be_on_gpu(config) else 0
        actors = runtime.actors if runtime.uses_ray and config.engine.is_local else 1
        return Forecast(
            rates,
            hours,
            hours / actors,
            gpus * hours if gpus else None,
            None if per_hour is None else per_hour * hours,
        )

    @property
    def duration(self) -> str:
        """Return the time of all actors in words."""
        return _hours(self.hours)

    def lines(self) -> dict[str, str]:
        words = f"about {_hours(self.engine_hours)} of one engine"
        if self.gpu_hours is not None:
            words += f", {_hours(self.gpu_hours)} of a GPU"
        if self.hours != self.engine_hours:
            words += f"; {self.duration} with all of runtime.actors"
        lines = {"time": words}
        if self.price is not None:
            lines["price"] = f"about {self.price:,.2f}"
        return lines


def _hours(hours: float) -> str:
    if hours >= 2:
        return f"{hours:,.1f} h"
    return f"{60 * hours:.0f} min" if hours >= 1 / 30 else f"{3600 * hours:.0f} s"


def may_be_on_gpu(config: Config) -> bool:
    """Return whether the model may be on a GPU: that of this machine, or the one that the
    configuration describes."""
    return config.engine.gpu_memory_gib is not None or may_have_gpu()


def rates_here(config: Config) -> Rates | None:
    """Return the usual rates of the model on a CPU, by the sizes in its configuration. None on a
    machine that may have a GPU, for an endpoint, and if the model's files are not here."""
    engine = config.engine
    if not (engine.is_local and is_at_hand(engine.model)) or may_be_on_gpu(config):
        return None
    try:
        size = max(LEAST_PARAMETERS, _parameters(codec_of(engine.model, None).model_config))
    except (AttributeError, TypeError, ValueError):  # sizes of another shape than usual
        return None
    return Rates(CPU_PREFILL / size, CPU_DECODE / size, CPU_TRAIN / size)


def _parameters(sizes: Any) -> int:
    """Return about how many parameters a token is multiplied with. Unlike `kv_cache.parameters`,
    this needs no torch, which a plan would take seconds to import."""
    hidden, heads = sizes.hidden_size, sizes.num_attention_heads
    key_value = getattr(sizes, "num_key_value_heads", None) or heads
    inner = getattr(sizes, "intermediate_size", None) or 4 * hidden
    layer = 2 * hidden * hidden * (1 + key_value / heads) + 3 * hidden * inner
    return int(sizes.num_hidden_layers * layer + sizes.vocab_size * hidden)


def given_rates(text: str, work: Work) -> Rates:
    """Read the tokens a second of an engine: "prefill,decode" or "prefill,decode,train"."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or not all(0 < number < float("inf") for number in numbers):
        raise InputError(f"{RATES}: two numbers above 0, PREFILL,DECODE; a third one for training")
    if work.train and len(numbers) == 2:
        raise InputError(f"{RATES}: this plan trains a model; add a third number, for training")
    return Rates(numbers[0], numbers[1], numbers[2] if numbers[2:] else None)


def rates_of_run(folder: str, config: Config, work: Work) -> Rates:
    """Return the rates of a finished run of the same method with the same model. Raises InputError
    if it has none, or is of another method or model."""
    file = Path(folder) / "run.json"
    run = read_json(file, RATE_FROM)
    method = _value_in(str, run, "config", "method", "name")
    if method != config.method.name:
        raise InputError(
            f"{RATE_FROM}: {folder} is a run of {method}, which uses models in another way than "
            f"{config.method.name}; give {RATES}"
        )
    kind = _value_in(str, run, "config", "engine", "kind")
    name, now = (
        plain_name(_value_in(str, run, "config", "engine", "model")),
        plain_name(config.engine.model),
    )
    if (name, kind) != (now, config.engine.kind):
        raise InputError(
            f"{RATE_FROM}: {folder} used {name} by {kind}, and this plan uses {now} by "
            f"{config.engine.kind}"
        )
    if work.train:
        raise InputError(
            f"{RATE_FROM}: a run records no rate of its training, which would tell how many "
            f"records it had; give {RATES} PREFILL,DECODE,TRAIN"
        )
    if run.get("rates") is None:
        raise InputError(
            f"{RATE_FROM}: {file} has no rates: the run has not finished, is of an older version, "
            f"or its endpoint counts no tokens; give {RATES}"
        )
    prefill, decode = (_value_in(float, run, "rates", name) for name in ("prefill", "decode"))
    return Rates(prefill, decode, together=_value_in(bool, run, "rates", "together"))


def _value_in(kind: type[T], run: Json, *names: str) -> T:
    """Return a value in `run.json`, a number above 0 if it is one. Raises InputError that names its
    key."""
    found: object = run
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    is_number = isinstance(found, float) and 0 < found < math.inf
    if not isinstance(found, kind) or (kind is float and not is_number):
        key = ".".join(names)
        raise InputError(
            f"{RATE_FROM}: {key} in run.json is not what dpray writes there; give {RATES}"
        )
    return found
