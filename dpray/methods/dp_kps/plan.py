"""`make_plan` makes the frozen plan of DP-KPS from a configuration."""

from __future__ import annotations

import math
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from types import MappingProxyType

import numpy as np

from dpray.accounting.accountant import calibrate, cost
from dpray.accounting.event import Event
from dpray.config.config import Config
from dpray.engines.base import Engine, EngineError, Sampling
from dpray.engines.embedder import SentenceTransformerEmbedder
from dpray.engines.embedding_endpoint import EmbeddingEndpoint
from dpray.engines.requests import Request, try_request
from dpray.engines.schema.forms import schema_for
from dpray.engines.schema.schema import Schema
from dpray.engines.text import token_counter
from dpray.io.public_files import check_public, read_few_shot
from dpray.mechanisms.monte_carlo import Target
from dpray.methods.dp_kps.algorithm import DpKps
from dpray.methods.dp_kps.prompts import KeyphrasePrompts, load_keyphrase_prompts
from dpray.methods.dp_kps.settings import TEXTS_FDR, DpKpsSettings
from dpray.runs.forecast import Work
from dpray.runs.plan import Choice, Plan, PublicCalls, Signal, with_spent
from dpray.types import InputError, Prompt

NOISE_FACTORS = (2.0**-20, 4.0)
"""The range of the common factor on the noise of both mechanisms. The factor is above 1 only if the
accountant's bound on both mechanisms is worse than the sum of its bounds on each."""

WORDS = 50.0
"""The signal that is enough to tell topics apart: on AG News a classifier trained on the sequences
has an accuracy of 0.43 with 6 expected words, at eps 1, and of 0.81 with 94, at eps 4."""

MOST_DIGITS = 18
"""A longer number is no count: Python reads no number of thousands of digits."""

MEANING = "words expected above the noise of the vocabulary, S ln |V| / eps"


@dataclass(frozen=True)
class DpKpsPlan(Plan):
    """The plan of DP-KPS. `method.dimension` is 0 until the embedder is loaded: the cost does not
    depend on it."""

    settings: DpKpsSettings
    method: DpKps
    prompts: KeyphrasePrompts
    schema: Schema | None = None

    @property
    def method_event(self) -> Event:
        return self.method.dp_event

    def check_embedder(self) -> None:
        if self.settings.estimator != "rff":
            return
        embedder = load_embedder(self.config)
        if isinstance(embedder, EmbeddingEndpoint):
            embedder.check()

    def audit_targets(self) -> Iterator[Target]:
        from dpray.methods.dp_kps.audit import targets

        return targets(self.method)

    def try_engine(self, engine: Engine) -> None:
        try_request(engine, Request("trial", self._trial(self.method.labels[0]), self.sampling))

    def _trial(self, label: str) -> Prompt:
        """Return a prompt with the first terms of the public vocabulary."""
        terms = public_terms(self)[: self.settings.sequence_length]
        rng, name_label = np.random.default_rng(0), self.settings.label_in_prompt
        return self.prompts.prompt(terms, label, rng, name_label=name_label)

    def public_calls(self, labels: Sequence[str]) -> PublicCalls:
        """Ask for texts with random terms of the public vocabulary."""
        if not self.makes_texts:
            return super().public_calls(labels)
        settings, rng = self.settings, np.random.default_rng()
        terms = public_terms(self)[: settings.vocabulary_size]

        def prompt(label: str) -> Prompt:
            chosen = rng.choice(terms, min(settings.sequence_length, len(terms)), replace=False)
            name_label = settings.label_in_prompt
            return self.prompts.prompt(chosen.tolist(), label, rng, name_label=name_label)

        requests = [
            Request(f"preview-{number}", prompt(label), self.sampling)
            for number, label in enumerate(labels)
        ]
        return PublicCalls(requests, self.prompts.template.shows("user", "about"))

    @property
    def work(self) -> Work:
        if not self.makes_texts:
            return Work()
        count, records = token_counter(self.config.engine), self.settings.records
        prompt = max(count(self._trial(label)) for label in self.method.labels)
        return Work(records * prompt, records * self.settings.max_tokens)

    @property
    def sampling(self) -> Sampling:
        """Return the parameters of every call of the language model."""
        settings = self.settings
        return Sampling(
            settings.max_tokens,
            temperature=settings.generation_temperature,
            stop=self.prompts.template.stop,
            schema=self.schema,
        )

    @property
    def makes_texts(self) -> bool:
        return self.config.engine.kind != "none"

    def method_summary(self) -> dict[str, object]:
        settings = self.settings
        resolved = settings.model_dump(exclude={"epsilon_vocabulary", "epsilon_kde"})
        return {
            "method": resolved
            | {
                "epsilon_vocabulary": self.method.epsilon_vocabulary,
                "epsilon_kde": self.method.epsilon_kde,
                "noise_factor": self.method.noise_factor,
            },
            "records": settings.records,
            "llm_calls": settings.records if self.makes_texts else 0,
            "most_completion_tokens": settings.records * settings.max_tokens * self.makes_texts,
            "warnings": [],
        }

    def lines(self) -> dict[str, str]:
        method, settings = self.method, self.settings
        calls = f"{settings.records:,}" if self.makes_texts else "none: the sequences themselves"
        noise_size = "Laplace scale" if settings.noise == "laplace" else "standard deviation"
        return {
            "vocabulary": f"{method.terms:,} of {method.public_terms:,} terms, "
            f"noise of Laplace scale {method.vocabulary.scale:.3g} on every count",
            "densities": f"{settings.estimator}, {settings.sampling}, "
            f"noise of {noise_size} {method.kde.scale:.3g}",
            "noise": f"{method.noise_factor:.3g} times the noise that would cost eps "
            f"{method.epsilon_vocabulary:g} (vocabulary) and {method.epsilon_kde:g} (densities) "
            "alone",
            "records": f"{settings.records:,}, {settings.sequence_length} terms each",
            "LLM calls": calls,
        }


def load_embedder(config: Config) -> SentenceTransformerEmbedder | EmbeddingEndpoint:
    """Load the embedder of the public terms, which reads no private text. Raises InputError."""
    if config.embedder.kind == "openai":
        return EmbeddingEndpoint(config.embedder)
    try:
        return SentenceTransformerEmbedder(config.embedder.model)
    except EngineError as error:
        raise InputError(str(error)) from None


def make_plan(config: Config, settings: DpKpsSettings) -> DpKpsPlan:
    """Resolve everything that is null; reads the public vocabulary. Raises InputError if the keys
    together cost more than `privacy.epsilon`."""
    privacy = config.privacy
    if settings.noise == "gaussian" and privacy.delta == 0:
        raise InputError("privacy.delta: must be above 0 for method.noise gaussian")
    few_shot = read_few_shot(settings.few_shot, settings.few_shot_examples, config.data.path)
    for key in ("template", "vocabulary"):
        check_public(getattr(settings, key), f"method.{key}", config.data.path)
    prompts = load_keyphrase_prompts(
        settings.template, settings.document_type, few_shot, config.data.about_texts
    )
    labels = privacy.epsilon_labels if config.data.label_proportions == "measured" else 0.0
    epsilon_vocabulary, epsilon_kde, whole = settings.epsilons(privacy.epsilon, labels)
    if settings.vocabulary_fdr is None and config.engine.kind != "none":
        settings = settings.model_copy(update={"vocabulary_fdr": TEXTS_FDR})
    method = DpKps(
        settings=settings,
        labels=tuple(config.data.label_names) or ("",),
        public_terms=len(read_vocabulary(settings.vocabulary, settings.stop_words)),
        dimension=0,
        epsilon_vocabulary=epsilon_vocabulary,
        epsilon_kde=epsilon_kde,
        delta=privacy.delta,
        records_per_unit=config.data.max_records_per_unit,
    )
    try:
        _ = method.vocabulary, method.kde
    except ValueError as error:
        raise InputError(f"privacy.epsilon: {error}") from None
    method = replace(method, noise_factor=joint_noise(config, method, whole))
    schema = schema_for(settings.schema, config.engine, settings.max_tokens)
    return DpKpsPlan(config, config.data.proportions, settings, method, prompts, schema)


def joint_noise(config: Config, method: DpKps, epsilon: float) -> float:
    """Return the smallest common factor on the noise of both mechanisms at which they, with the
    measured label proportions, cost `epsilon`, the sum of all shares.

    At delta 0 the shares add up exactly, and the factor only makes up for rounding.
    """
    delta = config.privacy.delta

    def whole(factor: float) -> Event:
        return with_spent(config, replace(method, noise_factor=factor).dp_event)

    if delta > 0:
        try:
            return calibrate(whole, epsilon, delta, bracket=NOISE_FACTORS, increasing=False)
        except ValueError as error:
            raise InputError(f"privacy.epsilon: {error}") from None
    factor, step = 1.0, math.ulp(1.0)
    while cost(whole(factor), delta).epsilon > epsilon:
        factor, step = 1.0 + step, 2.0 * step
    return factor


def public_terms(plan: DpKpsPlan) -> list[str]:
    """Return all terms that a sequence may have."""
    return read_vocabulary(plan.settings.vocabulary, plan.settings.stop_words)


def choose(config: Config, settings: DpKpsSettings, records: int) -> Choice:
    """Take the settings as they are. Raises InputError if there is no public vocabulary."""
    plan = make_plan(config.model_copy(update={"method": settings}), settings)
    found = words_found(plan)
    signal = None if found is None else Signal(found, WORDS, MEANING)
    return Choice(plan, signal, ("the defaults and what is set: no key is free",))


def words_found(plan: DpKpsPlan) -> int | None:
    """Return the number of public terms with an expected count above the largest noise on |V|
    counts, if private texts use words as often as public ones; None if the file of terms has no
    counts."""
    settings, n = plan.settings, plan.config.data.public_size
    counts = list(read_counts(settings.vocabulary, settings.stop_words).values())
    known = [count for count in counts if count is not None]
    if len(known) < len(counts) or not sum(known):
        return None
    total, noise = sum(known), plan.method.vocabulary.scale * math.log(len(counts))
    # A record names S terms; one that is in every record is counted once in each.
    expected = [n * min(1.0, settings.phrases_per_record * count / total) for count in known]
    return sum(count > noise for count in expected)


def read_vocabulary(path: str | Path, stop_words: str = "keep") -> list[str]:
    """Return the terms of a UTF-8 file, one per line. Anything after a tab, blank lines, and terms
    that differ from an earlier one only in case are left out. `stop_words` "english" also leaves
    out scikit-learn's 318 English function words. Raises InputError that names the line."""
    return list(read_counts(path, stop_words))


def read_counts(path: str | Path, stop_words: str = "keep") -> Mapping[str, int | None]:
    """Return the terms of `read_vocabulary`, each with its public count or None."""
    try:
        state = os.stat(path)
        return _counts_of_file(str(path), (state.st_mtime_ns, state.st_size), stop_words)
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise InputError(f"method.vocabulary: {path}: {reason}") from None


@lru_cache(maxsize=1)
def _counts_of_file(path: str, state: tuple[int, int], stop_words: str) -> Mapping[str, int | None]:
    """Return the terms of a file in this `state`; a plan asks for them twice."""
    terms: dict[str, tuple[str, int | None]] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise InputError(
                    f"method.vocabulary: {path}, line {number}: the bytes are not valid UTF-8"
                ) from None
            first, _, rest = text.partition("\t")
            term, count = " ".join(first.split()), rest.strip()
            if term:
                folded = unicodedata.normalize("NFC", term.casefold())
                known = count.isdecimal() and len(count) <= MOST_DIGITS
                terms.setdefault(folded, (term, int(count) if known else None))
    if stop_words == "english":
        for word in english_stop_words():
            terms.pop(word, None)
    if not terms:
        raise InputError(f"method.vocabulary: {path}: there is no term in the file")
    return MappingProxyType(dict(terms.values()))


def english_stop_words() -> frozenset[str]:
    """Return scikit-learn's English stop words, from the file that has them and nothing else."""
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None
    file = Path(package.origin).parent / "feature_extraction" / "_stop_words.py"
    if file.is_file():
        return frozenset(run_path(str(file))["ENGLISH_STOP_WORDS"])
    # A version that has them elsewhere. Imported late: it takes half a second.
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    return frozenset(ENGLISH_STOP_WORDS)
