"""From a configuration to the frozen plan of DP-SGD fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dpray.accounting.calibration import calibrate
from dpray.accounting.events import Event, PoissonSubsampledGaussian, SelfComposed
from dpray.auditing.target import Target
from dpray.config.config import Config
from dpray.engines.base import Engine
from dpray.engines.text import TextCodec
from dpray.methods.dp_sgd.algorithm import DpSgd
from dpray.methods.dp_sgd.control_codes import ControlCodes, control_codes
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.runs.engine import check_loads, with_absolute_model
from dpray.runs.plan import Losses, Plan, with_labels
from dpray.training.gradient_noise import DpSgdStep
from dpray.training.journal import Blocks
from dpray.training.model import Tuning, load_loss
from dpray.types import InputError

NO_NOISE = 1e-12
"""The noise multiplier of a run that is not private: lost in the rounding of every coordinate."""


@dataclass(frozen=True)
class DpSgdPlan(Plan):
    """`method.repeats` are the steps that are paid for beside the training's own."""

    settings: DpSgdSettings
    method: DpSgd
    blocks: Blocks
    codes: ControlCodes

    @property
    def tuning(self) -> Tuning:
        """What of the model is trained."""
        settings, engine = self.settings, self.config.engine
        return Tuning(
            with_absolute_model(engine).model,
            settings.tuning,
            settings.lora_rank,
            settings.lora_alpha,
            settings.precision,
            settings.gradient_checkpointing,
            name=engine.model,
        )

    def try_models(self, build: Callable[..., Engine]) -> None:
        """Load the model as it is tuned. An engine that cannot load the tuned one costs nothing:
        the tuned model is kept, and its texts are free."""
        check_loads(self.config, partial(load_loss, self.tuning))

    @property
    def charges(self) -> dict[str, Event]:
        if self.not_private:
            return {}
        return {"": with_labels(self.config, self.method.dp_event)}

    def audit_targets(self) -> Iterator[Target]:
        from dpray.methods.dp_sgd.audit import targets

        return targets(self.method)

    @property
    def column_values(self) -> dict[str, Sequence[str]]:
        control = {name: tuple(shares) for name, shares in self.settings.control_values.items()}
        return super().column_values | control

    def released_losses(self, folder: Path) -> Losses:
        from dpray.methods.dp_sgd.released_model import ReleasedModel
        from dpray.runs.folder import MODEL

        return ReleasedModel(self.config, folder / MODEL).losses

    @property
    def noise_multiplier(self) -> float:
        return 0.0 if self.not_private else self.method.mechanism.noise_multiplier

    @property
    def shares(self) -> dict[str, Mapping[str, float]]:
        """The public mix of the values of every control column."""
        return self.codes.shares(self.config.data.label, self.proportions)

    def method_summary(self) -> dict[str, Any]:
        settings, mechanism = self.settings, self.method.mechanism
        return {
            "method": settings.model_dump()
            | {
                "noise_multiplier": self.noise_multiplier,
                "sampling_probability": mechanism.sampling_probability,
                "steps": self.method.steps,
                "spare_steps": self.method.repeats,
                "checkpoint_steps": self.blocks.size,
                "control_columns": dict(self.codes.names),
            },
            "records": settings.records,
            "llm_calls": settings.records,
            "most_completion_tokens": settings.records * settings.max_length,
            "expected_examples": round(settings.epochs * self.config.data.public_size),
            "noise_multiplier": self.noise_multiplier,
            "warnings": self._warnings(),
        }

    def _warnings(self) -> list[str]:
        label = self.config.data.label
        if label is None or label in self.codes.names:
            return []
        return [
            "data.label is not in method.control_columns: the texts will be written without a label"
        ]

    def lines(self) -> dict[str, str]:
        settings, method = self.settings, self.method
        return {
            "tuning": f"{settings.tuning} of {self.config.engine.model}, C {settings.clip_norm:g}",
            "steps": f"{method.steps:,} of expected {settings.batch_size:,} units "
            f"(q {method.mechanism.sampling_probability:.4g}), and {method.repeats:,} charged "
            f"beforehand for what a run that was cut off makes again",
            "noise multiplier": f"{self.noise_multiplier:.4f}",
            "records": f"{settings.records:,}, at most {settings.max_length} tokens each",
        }


def make_plan(config: Config, settings: DpSgdSettings) -> DpSgdPlan:
    """Resolve everything that is null. Raises InputError where the keys together cost more than
    `privacy.epsilon`, or do not fit the model, where that is a folder here."""
    codes = control_codes(config.data, settings)
    if Path(config.engine.model).expanduser().is_dir():
        check_lengths(config, settings, codes)
    size = config.data.public_size
    if settings.batch_size > size:
        raise InputError(
            f"method.batch_size: {settings.batch_size} is more than data.public_size {size}"
        )
    # q = batch_size / size and steps = epochs / q, but for rounding.
    steps = math.ceil(settings.epochs * size / settings.batch_size - 1e-9)
    blocks = Blocks(steps, min(steps, settings.checkpoint_steps or -(-steps // 100)))
    method = DpSgd(
        mechanism=DpSgdStep(
            sampling_probability=settings.batch_size / size,
            noise_multiplier=_noise_multiplier(config, settings, steps, spare(settings, blocks)),
            clip_norm=settings.clip_norm,
            expected_batch_size=float(settings.batch_size),
            precision=settings.precision,
        ),
        steps=steps,
        micro_batch_size=settings.micro_batch_size,
        learning_rate=settings.learning_rate,
        schedule=settings.schedule,
        optimizer=settings.optimizer,
        weight_decay=settings.weight_decay,
        repeats=spare(settings, blocks),
    )
    plan = DpSgdPlan(config, config.data.proportions, settings, method, blocks, codes)
    return plan.affordable(method.mechanism.noise_multiplier)


def spare(settings: DpSgdSettings, blocks: Blocks) -> int:
    """One block, where the noise can be made to pay for it."""
    if settings.spare_steps is not None:
        return settings.spare_steps
    return blocks.size if settings.noise_multiplier is None else 0


def _noise_multiplier(config: Config, settings: DpSgdSettings, steps: int, repeats: int) -> float:
    if math.isinf(config.privacy.epsilon):
        if settings.noise_multiplier is not None:
            raise InputError("method.noise_multiplier: an infinite privacy.epsilon adds no noise")
        return NO_NOISE
    if settings.noise_multiplier is not None:
        return settings.noise_multiplier
    q = settings.batch_size / config.data.public_size

    def event(sigma: float) -> Event:
        steps_event = SelfComposed(PoissonSubsampledGaussian(q, sigma), steps + repeats)
        return with_labels(config, steps_event)

    try:
        return calibrate(
            event,
            config.privacy.epsilon,
            config.privacy.delta,
            bracket=(1e-2, 1e5),
            increasing=False,
        )
    except ValueError as error:
        raise InputError(f"privacy.epsilon: {error}") from None


def check_lengths(config: Config, settings: DpSgdSettings, codes: ControlCodes) -> None:
    """Raises InputError where `method.max_length` is more than the model's context, or leaves no
    token for a text after its control code."""
    codec = TextCodec(str(Path(config.engine.model).expanduser()), config.engine.max_model_len)
    if settings.max_length > codec.context_length:
        raise InputError(
            f"method.max_length: {settings.max_length} is more than the context of the model, "
            f"{codec.context_length} tokens"
        )
    longest = 1 + len(codec.ids(codes.longest(lambda value: len(codec.ids(value)))))
    if longest >= settings.max_length:
        raise InputError(
            f"method.max_length: {settings.max_length} leaves nothing for a text: a control code "
            f"has {longest} tokens"
        )
