"""`make_plan` makes the frozen plan of private prediction from a configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from dpray.accounting.accountant import cost
from dpray.accounting.calibration import calibrate
from dpray.accounting.events import Event
from dpray.auditing.target import Target
from dpray.config.config import Config
from dpray.engines.model_path import check_model_path
from dpray.engines.text import TextCodec
from dpray.engines.vllm_model import DEFAULT_CONTEXT
from dpray.mechanisms.partition import HashPartition
from dpray.methods.private_prediction.algorithm import PrivatePrediction
from dpray.methods.private_prediction.prompts import PromptTemplate, load_template
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.methods.private_prediction.token import PrivateToken
from dpray.runs.plan import Plan, with_labels
from dpray.types import InputError

MOST_PRIVATE_TOKENS = 10_000_000

TOO_LARGE = 1e-9
"""A batch has more rows than `engine.max_num_seqs` allows for with at most this probability."""


@dataclass(frozen=True)
class PrivatePredictionPlan(Plan):
    """Holds the plan of private prediction. `salt` is the partition's, "" in a plan that is not
    run. `config.engine.dtype` is what the model computes in, never "auto"."""

    settings: PrivatePredictionSettings
    private_tokens: int
    template: PromptTemplate
    salt: str = ""

    @property
    def charges(self) -> dict[str, Event]:
        return {"": with_labels(self.config, self.method.dp_event)}

    @cached_property
    def partition(self) -> HashPartition:
        size, s = self.config.data.public_size, self.settings.batch_size
        return HashPartition.expected(size, self.proportions, s, self.salt)

    @cached_property
    def method(self) -> PrivatePrediction:
        mechanism = _mechanism(self.config, self.settings, self.private_tokens)
        texts = _texts(self.settings, self.private_tokens, self.partition.num_batches)
        return PrivatePrediction(mechanism, self.settings.max_tokens, texts, self.template.stop)

    def audit_targets(self) -> Iterator[Target]:
        from dpray.methods.private_prediction.audit import targets

        return targets(self.method.mechanism)

    @property
    def texts_from_columns(self) -> bool:
        return self.template.private is not None

    def with_salt(self, salt: str) -> Self:
        return replace(self, salt=salt)

    @property
    def engine_options(self) -> dict[str, Any]:
        return {"public_alone": self.cuts_candidates}

    def how_far(self, published: int) -> str:
        done = self.published_batches(published)
        return f": {done} of {max(done, self.batches_decoded)} batches are published"

    def published_batches(self, published: int) -> int:
        """Return how many of the published units are batches: the measured labels are one more."""
        return max(published - (self.label_histogram is not None), 0)

    @property
    def batches_decoded(self) -> int:
        """Return the fewest batches that are decoded: all, or, for fewer records than batches, one
        for each record. A batch that gives no record takes one more."""
        most, batches = self.settings.max_records, self.partition.num_batches
        return batches if most is None else min(most, batches)

    @property
    def expected_texts(self) -> int:
        """Return the number of texts that are decoded if each is as long as it may be: usually
        there are more."""
        a_batch = self.private_tokens // self.settings.max_tokens
        texts = self.method.examples_per_batch
        return self.batches_decoded * min(texts, max(1, a_batch))

    @property
    def expected_records(self) -> int:
        """Return how many of these texts `method.max_records` lets be released."""
        return min(self.expected_texts, self.settings.max_records or self.expected_texts)

    @property
    def cuts_candidates(self) -> bool:
        """Return whether some tokens cannot be drawn, by their public logits."""
        return self.settings.candidates != "all"

    @property
    def rounding(self) -> list[str]:
        """Return a warning where the model computes in 16 bits, whose effect a run measures;
        nothing in float32."""
        dtype = self.config.engine.dtype
        if dtype == "float32":
            return []
        return [
            f"engine.dtype {dtype}: a model that computes in 16 bits lets a row's logits depend, "
            "in their last bits, on the other rows of its forward pass; the sensitivity c / s "
            "holds only up to that"
        ]

    def method_summary(self) -> dict[str, Any]:
        mechanism, settings = self.method.mechanism, self.settings
        prompts = mechanism.batch_size + 1
        return {
            "method": {"name": settings.name, "template": settings.template}
            | {k: v for k, v in asdict(mechanism).items() if k not in ("threshold", "noise")}
            | {
                "sparse_vector": settings.sparse_vector and settings.sparse_vector.model_dump(),
                "max_tokens": settings.max_tokens,
                "max_records_per_batch": self.method.examples_per_batch,
                "max_copies": settings.max_copies,
                "model_dtype": self.config.engine.dtype,
            },
            "records": self.expected_records,
            "batches": self.partition.num_batches,
            "batches_decoded": self.batches_decoded,
            "batches_per_label": dict(self.partition.batches_per_label),
            "private_tokens": self.batches_decoded * mechanism.private_tokens,
            "llm_calls": self.expected_texts * prompts,
            "warnings": self._warnings(),
        }

    def lines(self) -> dict[str, str]:
        batches, r, decoded = self.partition.num_batches, self.private_tokens, self.batches_decoded
        part = "" if decoded == batches else f"{decoded} of them decoded (more if some give none); "
        return {
            "batches": f"{batches}; {part}{self.settings.batch_size} records expected in each",
            "private tokens": f"{r} a batch, {decoded * r} in all",
            "records": self._records(),
            "prompts decoded": f"about {self.expected_texts * (self.settings.batch_size + 1)}",
            "model": f"{self.config.engine.model}, in {self.config.engine.dtype}",
        }

    def _records(self) -> str:
        expected, most = self.expected_records, self.settings.max_records
        if expected == most:
            return f"at most {most}"
        more = f"about {expected}, more if they are shorter than {self.settings.max_tokens} tokens"
        return more if most is None else f"{more}; at most {most}"

    def _warnings(self) -> list[str]:
        if self.private_tokens >= self.settings.max_tokens:
            return self.rounding
        return [
            *self.rounding,
            "method.private_tokens is below method.max_tokens: a batch may end before its "
            "first text does; a larger batch_size or epsilon, or a shorter text, helps",
        ]


def make_plan(config: Config, settings: PrivatePredictionSettings) -> PrivatePredictionPlan:
    """Resolve everything that is null or auto. Raises InputError where the keys together cost more
    than `privacy.epsilon`, or do not fit the engine, or the model, where that is a folder here."""
    config = _with_dtype(config)
    template = load_template(settings.template)
    check_rows(config, settings)
    if Path(config.engine.model).expanduser().is_dir():
        check_lengths(config, settings, template)
    proportions = config.data.proportions
    r = settings.private_tokens
    if r is None:
        most = MOST_PRIVATE_TOKENS
        if settings.max_records is not None:
            expected = HashPartition.expected(
                config.data.public_size, proportions, settings.batch_size, ""
            )
            most = _texts(settings, most, expected.num_batches) * settings.max_tokens
        r = _affordable_tokens(config, settings, most)
    plan = PrivatePredictionPlan(config, proportions, settings, r, template)
    if plan.cost.epsilon > config.privacy.epsilon:
        raise InputError(
            f"method.private_tokens: {r} tokens a batch cost eps {plan.cost.epsilon:.4f}, more "
            f"than privacy.epsilon {config.privacy.epsilon:g}"
        )
    return plan


def _with_dtype(config: Config) -> Config:
    """Return the configuration with float32 unless another dtype is asked for: the charged
    sensitivity is that of rows whose logits do not depend on the other rows of a forward pass."""
    if config.engine.dtype != "auto":
        return config
    engine = config.engine.model_copy(update={"dtype": "float32"})
    return config.model_copy(update={"engine": engine})


def check_rows(config: Config, settings: PrivatePredictionSettings) -> None:
    """Raise InputError where a batch may have more rows than vLLM decodes at once.

    A batch's size is a sum over units, each of which is in it or not, with at most w rows: its
    number of records, or of copies of one record. By Bernstein's inequality such a sum of mean m is
    above m + wL/3 + sqrt((wL/3)^2 + 2mwL) with a probability below e^-L, here `TOO_LARGE`, if
    `public_size` is right. A batch that is larger all the same is refused by the engine before
    anything is drawn from it, and the run stops until `engine.max_num_seqs` is raised.
    """
    engine, data = config.engine, config.data
    if engine.kind != "vllm":
        return
    counts = HashPartition.expected(data.public_size, data.proportions, settings.batch_size, "")
    # A whole number of batches makes them larger than s where they are few.
    means = (
        data.public_size * data.proportions[label] / count
        for label, count in counts.batches_per_label.items()
    )
    mean = max(settings.batch_size, *means)
    most = settings.max_copies if data.unit is None else data.max_records_per_unit
    jump = -math.log(TOO_LARGE) * most
    needed = math.ceil(mean + 1 + jump / 3 + math.sqrt((jump / 3) ** 2 + 2 * mean * jump))
    if engine.max_num_seqs < needed:
        raise InputError(
            f"engine.max_num_seqs: {engine.max_num_seqs} is too few for batches of {mean:.0f} "
            f"records, more or less by chance, and a public prompt: {needed} are needed"
        )


def check_lengths(
    config: Config, settings: PrivatePredictionSettings, template: PromptTemplate
) -> None:
    """Raise InputError where a prompt without its private text, or the public one, leaves no room
    in the model's context for a text of `method.max_tokens`."""
    engine = config.engine
    codec = TextCodec(check_model_path(engine.model), engine.max_model_len)
    context = codec.context_length
    if engine.kind == "vllm" and engine.max_model_len is None:
        context = min(context, DEFAULT_CONTEXT)
    longest = max(
        len(codec.encode(prompt))
        for label in config.data.proportions
        for prompt in (template.private_prompt("", label), template.public_prompt(label))
    )
    if longest + settings.max_tokens > context:
        raise InputError(
            f"method.max_tokens: {settings.max_tokens} and the {longest} tokens of "
            f"method.template's prompt are more than the context of the model, {context} tokens"
        )


def _texts(settings: PrivatePredictionSettings, private_tokens: int, batches: int) -> int:
    """Return the largest number of texts of a batch."""
    if settings.max_records is not None:
        return math.ceil(settings.max_records / batches)
    # A private text has at least one private token; public ones are free and have to end too.
    if settings.sparse_vector is None:
        return private_tokens
    return math.ceil(10 * private_tokens / settings.max_tokens)


def _mechanism(
    config: Config, settings: PrivatePredictionSettings, private_tokens: int
) -> PrivateToken:
    sparse_vector = settings.sparse_vector
    return PrivateToken(
        batch_size=settings.batch_size,
        private_tokens=private_tokens,
        clip=settings.clip,
        clip_bound=settings.clip_bound,
        temperature=settings.temperature,
        public_temperature=settings.public_temperature,
        candidates=settings.candidates,
        k=settings.k,
        threshold=None if sparse_vector is None else sparse_vector.threshold,
        noise=None if sparse_vector is None else sparse_vector.noise,
        records_per_unit=config.data.max_records_per_unit,
    )


def _affordable_tokens(config: Config, settings: PrivatePredictionSettings, most: int) -> int:
    """Return the largest r whose cost stays within the configured epsilon (calibration in r)."""
    try:
        return int(
            calibrate(
                lambda r: with_labels(config, _mechanism(config, settings, int(r)).dp_event),
                config.privacy.epsilon,
                config.privacy.delta,
                bracket=(1, max(most, 2)),
                increasing=True,
                integer=True,
            )
        )
    except ValueError:
        one = cost(
            with_labels(config, _mechanism(config, settings, 1).dp_event), config.privacy.delta
        ).epsilon
        raise InputError(
            f"privacy.epsilon: {config.privacy.epsilon:g} does not pay for one private token, "
            f"which costs {one:.4f}; a larger method.batch_size or temperature is needed"
        ) from None
