"""`PrivatePredictionPlan` holds all that a run of private prediction does, resolved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from dpray.accounting.event import Event
from dpray.auditing.target import Target
from dpray.config.config import Config
from dpray.mechanisms.batches import HashPartition, PoissonBatches
from dpray.mechanisms.labels import common_shares, largest_remainder
from dpray.methods.private_prediction.algorithm import PrivatePrediction
from dpray.methods.private_prediction.batch_memory import BatchMemory
from dpray.methods.private_prediction.prompts import PromptTemplate
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.methods.private_prediction.token import PrivateToken
from dpray.runs.plan import Handed, Plan, TokenLimit
from dpray.workers.rows import TextOf

RESTATED = ("threshold", "noise", "sure_probability", "sure_entropy")
"""These fields of a mechanism are in a plan's summary as the sections they come from."""

SPREAD = 5.0
"""A batch rarely has more records than this many standard deviations above its mean."""


@dataclass(frozen=True)
class PrivatePredictionPlan(Plan):
    """Holds the plan of private prediction. `settings.batches` is never "auto", and
    `config.engine.dtype` is what the model computes in.

    `private_tokens` is a batch's, and `texts` the number of texts from Poisson batches, None with
    disjoint ones. `salt` is the partition's, "" in a plan that is not run. `texts_affordable` is
    the number of texts that the epsilon pays for with each kind of batches that was considered.
    `memory` is what a batch takes on this machine, None where the model's files are not here.
    """

    settings: PrivatePredictionSettings
    private_tokens: int
    template: PromptTemplate
    texts: int | None = None
    texts_affordable: Mapping[str, int] = field(default_factory=dict)
    memory: BatchMemory | None = None
    salt: str = ""

    @property
    def disjoint(self) -> bool:
        return self.texts is None

    @property
    def method_event(self) -> Event:
        mechanism = self.method.mechanism
        if isinstance(self.batches, PoissonBatches):
            return self.batches.dp_event(
                mechanism.sampler.dp_event, self.private_tokens, mechanism.records_per_unit
            )
        return self.method.dp_event

    @cached_property
    def batches(self) -> HashPartition | PoissonBatches:
        size, s = self.config.data.public_size, self.settings.expected_batch_size
        if self.texts is None:
            return HashPartition.expected(size, self.proportions, s, self.salt)
        number = math.ceil(self.texts / self.settings.texts_per_batch)
        return PoissonBatches.expected(size, self.proportions, s, number)

    @cached_property
    def method(self) -> PrivatePrediction:
        mechanism = private_token(self.config, self.settings, self.private_tokens)
        texts = self.settings.texts_per_batch
        if self.disjoint:
            texts = texts_of_a_batch(self.settings, self.private_tokens, self.batches.num_batches)
        return PrivatePrediction(
            mechanism,
            self.settings.max_tokens,
            texts,
            self.template.template.stop,
            self.settings.longest_copy,
        )

    def audit_targets(self) -> Iterator[Target]:
        from dpray.methods.private_prediction.audit import runs_targets, targets

        yield from targets(self.method.mechanism)
        if isinstance(self.batches, PoissonBatches):
            yield from runs_targets(self.config.data, self.batches, self.method)

    @property
    def text_of(self) -> TextOf | None:
        return self.template.text_of if self.template.record else None

    @property
    def token_limits(self) -> Sequence[TokenLimit]:
        return (TokenLimit("method.max_prompt_tokens", self.settings.max_prompt_tokens),)

    @property
    def fewest_records(self) -> int:
        rarest = min(share for share in self.proportions.values() if share > 0)
        return math.ceil(self.settings.expected_batch_size / rarest)

    def of_size(self, texts: int) -> dict[str, Any]:
        batches = self.settings.batches
        if self.disjoint:
            r = self.private_tokens
            return {"batches": batches, "max_records": texts, "private_tokens": r}
        a_batch = self.settings.texts_per_batch
        return {"batches": batches, "texts": a_batch * texts, "max_records": None}

    def stand_in(self) -> list[dict[str, Any]]:
        wanted = largest_remainder(self.expected_records, self.proportions)
        return [{"label": label, "text": ""} for label, n in wanted.items() for _ in range(n)]

    def given(self, handed: Handed) -> Self:
        return replace(self, template=replace(self.template, sequences=handed.terms))

    def with_salt(self, salt: str) -> Self:
        return replace(self, salt=salt)

    @property
    def engine_options(self) -> dict[str, Any]:
        return {"public_alone": self.public_decides, "group": self.usual_group}

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
        most, batches = self.settings.max_records, self.batches.num_batches
        return batches if most is None or not self.disjoint else min(most, batches)

    @property
    def whole_texts(self) -> int:
        """Return the number of texts that the charge pays for in all batches, if each is as
        long as it may be."""
        texts = self.settings.texts_per_batch
        if self.disjoint:
            texts = self.private_tokens // self.settings.max_tokens
        return self.batches.num_batches * texts

    @property
    def expected_texts(self) -> int:
        """Return the number of texts that are decoded if each is as long as it may be. Disjoint
        batches usually give more: a short text leaves its tokens to the next one."""
        if self.texts is not None:
            return self.batches.num_batches * self.settings.texts_per_batch
        a_batch = self.private_tokens // self.settings.max_tokens
        texts = self.method.examples_per_batch
        return self.batches_decoded * min(texts, max(1, a_batch))

    @property
    def expected_records(self) -> int:
        """Return how many of these texts `method.max_records` lets be released."""
        return min(self.expected_texts, self.settings.max_records or self.expected_texts)

    @property
    def usual_rows(self) -> int:
        """Return the number of rows that a batch rarely exceeds where `data.public_size` is right,
        the public prompt's included. A batch with more is decoded all the same."""
        data, counts = self.config.data, self.batches.batches_per_label
        mean = float(self.settings.expected_batch_size)
        if self.disjoint:
            # A whole number of disjoint batches makes them larger than s where they are few.
            sizes = (data.public_size * self.proportions[k] / n for k, n in counts.items() if n)
            mean = max(mean, *sizes)
        return math.ceil(mean + SPREAD * math.sqrt(mean)) + 1

    @property
    def usual_group(self) -> tuple[int, int]:
        """Return the rows of a group of usual size, and the tokens of each: what the engine should
        hold at once."""
        if self.memory is not None:
            return self.usual_rows, self.memory.row_tokens
        return self.usual_rows, self.settings.max_prompt_tokens + self.settings.max_tokens

    @property
    def rare_labels(self) -> dict[str, float]:
        """Return the labels whose batches are smaller than those of the others, with the number of
        records that they expect."""
        if not isinstance(self.batches, PoissonBatches):
            return {}
        common, size = common_shares(self.proportions), self.config.data.public_size
        return {
            label: size * self.proportions[label] * q
            for label, q in self.batches.sampling_probabilities.items()
            if q and label not in common
        }

    @property
    def public_decides(self) -> bool:
        """Return whether public logits decide which tokens can be drawn, or whether from private
        ones at all."""
        return self.settings.candidates != "all" or self.settings.public_gate is not None

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
            | {k: v for k, v in asdict(mechanism).items() if k not in RESTATED}
            | {
                "batches": settings.batches,
                "public_gate": settings.public_gate and settings.public_gate.model_dump(),
                "sparse_vector": settings.sparse_vector and settings.sparse_vector.model_dump(),
                "max_tokens": settings.max_tokens,
                "max_prompt_tokens": settings.max_prompt_tokens,
                "max_records_per_batch": self.method.examples_per_batch,
                "max_copies": settings.max_copies,
                "longest_copy": settings.longest_copy,
                "model_dtype": self.config.engine.dtype,
            },
            "records": self.expected_records,
            "affordable_texts": dict(self.texts_affordable),
            "batches": self.batches.num_batches,
            "batches_decoded": self.batches_decoded,
            "batches_per_label": dict(self.batches.batches_per_label),
            "private_tokens": self.batches_decoded * mechanism.private_tokens,
            "llm_calls": self.expected_texts * prompts,
            "memory": self.memory and self.memory.summary(self.usual_rows),
            "warnings": self._warnings(),
        }

    def lines(self) -> dict[str, str]:
        batches, r, decoded = self.batches.num_batches, self.private_tokens, self.batches_decoded
        s = self.settings.expected_batch_size
        part = "" if decoded == batches else f"{decoded} of them decoded (more if some give none); "
        kinds = [f"{number} from {kind} batches" for kind, number in self.texts_affordable.items()]
        affordable = {"affordable texts": ", ".join(kinds)} if kinds else {}
        return {
            "batches": f"{batches}, {self.settings.batches}; {part}{s} records expected in each",
            **affordable,
            "private tokens": f"{r} a batch, {decoded * r} in all",
            "records": self._records(),
            "prompts decoded": f"about {self.expected_texts * (s + 1)}",
            "texts read": f"up to {self.settings.max_prompt_tokens} tokens of each "
            "(method.max_prompt_tokens)",
            **({} if self.memory is None else {"memory": self.memory.describe(self.usual_rows)}),
            "model": f"{self.config.engine.model}, in {self.config.engine.dtype}",
        }

    def _records(self) -> str:
        expected, most = self.expected_records, self.settings.max_records
        if expected == most or not self.disjoint:
            return f"at most {expected}"
        more = f"about {expected}, more if they are shorter than {self.settings.max_tokens} tokens"
        return more if most is None else f"{more}; at most {most}"

    def _warnings(self) -> list[str]:
        settings, warnings = self.settings, list(self.rounding)
        if self.disjoint and self.private_tokens < settings.max_tokens:
            warnings.append(
                "method.private_tokens is below method.max_tokens: a batch may end before its "
                "first text does; a larger batch_size or epsilon, or a shorter text, helps"
            )
        if not self.disjoint and settings.public_gate and settings.private_tokens is None:
            warnings.append(
                "method.public_gate saves nothing while method.private_tokens is null: a Poisson "
                "batch is charged for its private_tokens, which are then all tokens of its texts"
            )
        if self.rare_labels:
            named = ", ".join(f"{k} ({n:.1f})" for k, n in self.rare_labels.items())
            warnings.append(
                f"data.label_proportions: rare labels have smaller batches, so that they do not "
                f"raise the cost of all: {named} records expected, not "
                f"{settings.expected_batch_size}. Their texts lean on the public prompt; a run of "
                "their own gives them whole batches"
            )
        if self.memory is not None:
            all_rows = self.expected_texts * (settings.expected_batch_size + 1)
            warnings += self.memory.warnings(self.usual_rows, all_rows)
        return warnings


def texts_of_a_batch(settings: PrivatePredictionSettings, private_tokens: int, batches: int) -> int:
    """Return the largest number of texts of a batch."""
    if settings.max_records is not None:
        return math.ceil(settings.max_records / batches)
    # Without public tokens a text has at least one private one; public ones have to end, too.
    if settings.sparse_vector is None and settings.public_gate is None:
        return private_tokens
    return math.ceil(10 * private_tokens / settings.max_tokens)


def private_token(
    config: Config, settings: PrivatePredictionSettings, private_tokens: int
) -> PrivateToken:
    """Return the mechanism of a batch of so many private tokens."""
    sparse_vector, gate = settings.sparse_vector, settings.public_gate
    return PrivateToken(
        batch_size=settings.expected_batch_size,
        private_tokens=private_tokens,
        clip=settings.clip,
        clip_bound=settings.clip_bound,
        temperature=settings.temperature,
        public_temperature=settings.public_temperature,
        candidates=settings.candidates,
        k=settings.k,
        threshold=None if sparse_vector is None else sparse_vector.threshold,
        noise=None if sparse_vector is None else sparse_vector.noise,
        sure_probability=None if gate is None else gate.probability,
        sure_entropy=None if gate is None else gate.entropy,
        records_per_unit=config.data.max_records_per_unit,
    )
