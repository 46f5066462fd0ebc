"""`make_plan` makes the frozen plan of DP-KPS from a configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

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
from dpray.io.languages import ENGLISH, frequent_words, function_words, language_of, listed
from dpray.io.public_files import check_public, read_few_shot
from dpray.io.template_file import About
from dpray.mechanisms.monte_carlo import Target
from dpray.mechanisms.term_matcher import folded
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

CARRIES = 200.0
"""The records of a class, in standard deviations of the noise of one density, from which on
sequences from Fourier features are like the class. On AG News, with contrast and without stop
words, a classifier of the sequences has 0.39, 0.73 and 0.80 at 40, 200 and 800; a guess has 0.25,
the estimator `exact` 0.83 (experiments/kps_over_n.py)."""

MEANING = "words expected above the noise of the vocabulary, S ln |V| / eps"


@dataclass(frozen=True)
class DpKpsPlan(Plan):
    """The plan of DP-KPS. `method.dimension` is 0 until the embedder is loaded: the cost does not
    depend on it. `vocabulary` has each public term with its public count or None."""

    settings: DpKpsSettings
    method: DpKps
    vocabulary: Mapping[str, int | None] = field(repr=False)
    prompts: KeyphrasePrompts
    schema: Schema | None = None

    @property
    def method_event(self) -> Event:
        return self.method.dp_event

    def language_advice(self) -> list[str]:
        return super().language_advice() + _without_stop_words(self.config, self.settings)

    def check_embedder(self) -> None:
        if not self.settings.uses_embedder:
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

        drawn = [self.drawn_values(label, 1, rng)[0] for label in labels]
        requests = []
        for number, (label, values) in enumerate(zip(labels, drawn, strict=True)):
            chosen = rng.choice(terms, min(settings.sequence_length, len(terms)), replace=False)
            prompt = self.prompts.prompt(
                chosen.tolist(), label, rng, name_label=settings.label_in_prompt, attributes=values
            )
            requests.append(Request(f"preview-{number}", prompt, self.sampling))
        return PublicCalls(requests, self.prompts.template.shows("user", "about"), attributes=drawn)

    @property
    def about(self) -> About:
        about = super().about
        return about if self.settings.label_in_prompt else replace(about, labels={})

    @property
    def signal(self) -> Signal | None:
        """Return the number of public terms with an expected count above the largest noise on |V|
        counts, if private texts use words as often as public ones; None if the file of terms has no
        counts."""
        counts = list(self.vocabulary.values())
        known = [count for count in counts if count is not None]
        if len(known) < len(counts) or not sum(known):
            return None
        total, noise = sum(known), self.method.vocabulary.scale * math.log(len(counts))
        # A record names S terms; one that is in every record is counted once in each.
        n, S = self.config.data.public_size, self.settings.phrases_per_record
        expected = [n * min(1.0, S * count / total) for count in known]
        return Signal(sum(count > noise for count in expected), WORDS, MEANING)

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
            top_p=settings.generation_top_p,
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
            "warnings": self._too_few_records(),
        }

    def _too_few_records(self) -> list[str]:
        """Return a warning if noise hides the densities of the smallest class."""
        n = self.config.data.public_size * min(self.proportions.values())
        if self.least_records is None or n >= self.least_records:
            return []
        return [
            f"method.estimator: the noise of rff hides densities of fewer than about "
            f"{self.least_records:,} records, and the smallest class has about {n:,.0f}; take "
            "exact, or a larger method.epsilon_kde (docs/results.md, DP-KPS at the paper's size)"
        ]

    @property
    def least_records(self) -> int | None:
        """Return the records of a class from which on Fourier features carry; None for a histogram,
        which has much less noise."""
        if self.settings.estimator == "exact":
            return None
        return math.ceil(CARRIES * self.method.density_noise_std)

    def lines(self) -> dict[str, str]:
        method, settings = self.method, self.settings
        from_on = self.least_records
        carries = f"; they carry from some {from_on:,} records of a class on" if from_on else ""
        calls = f"{settings.records:,}" if self.makes_texts else "none: the sequences themselves"
        noise_size = "Laplace scale" if settings.noise == "laplace" else "standard deviation"
        return {
            "vocabulary": f"{method.terms:,} of {method.public_terms:,} terms, "
            f"noise of Laplace scale {method.vocabulary.scale:.3g} on every count",
            "densities": f"{settings.estimator}, {settings.sampling}, "
            f"noise of {noise_size} {method.kde.scale:.3g}{carries}",
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
    for key, file in (("template", settings.template), ("vocabulary", settings.vocabulary)):
        if file is not None:
            check_public(file, f"method.{key}", config.data.path)
    prompts = load_keyphrase_prompts(
        settings.template, settings.document_type, few_shot, config.data.about_texts
    )
    spent = config.measured_epsilon
    epsilon_vocabulary, epsilon_kde, whole = settings.epsilons(privacy.epsilon, *spent)
    if settings.vocabulary_fdr is None and config.engine.kind != "none":
        settings = settings.model_copy(update={"vocabulary_fdr": TEXTS_FDR})
    vocabulary = vocabulary_of(config, settings)
    method = DpKps(
        settings=settings,
        labels=tuple(config.data.label_names) or ("",),
        public_terms=len(vocabulary),
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
    return DpKpsPlan(config, config.data.proportions, settings, method, vocabulary, prompts, schema)


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


def choose(config: Config, settings: DpKpsSettings, records: int) -> Choice:
    """Take the settings as they are. Raises InputError if there is no public vocabulary."""
    plan = make_plan(config.model_copy(update={"method": settings}), settings)
    return Choice(plan, plan.signal, ("the defaults and what is set: no key is free",))


def public_terms(plan: DpKpsPlan) -> list[str]:
    """Return all terms that a sequence may have."""
    return [*plan.vocabulary]


def vocabulary_of(config: Config, settings: DpKpsSettings) -> Mapping[str, int | None]:
    """Return the public vocabulary without the stop words: that of the file, or else the frequent
    words of data.language. Raises InputError that names the key if there is none."""
    left_out = stop_words(settings.stop_words, config.data.language)
    if settings.vocabulary is not None:
        return read_vocabulary(settings.vocabulary, left_out)
    if config.data.language is None:
        raise InputError(
            "method.vocabulary: give a file of public terms, one a line, or set data.language, "
            "whose frequent words are then counted"
        )
    if (language := language_of(config.data.language)) is None:
        raise InputError(
            f"method.vocabulary: no list of words is known of the language "
            f"'{config.data.language}', only of {listed()}; give a file of public terms"
        )
    words = frequent_words(language.code)
    return {word: count for word, count in words.items() if folded(word) not in left_out}


def stop_words(which: str, language: str | None) -> frozenset[str]:
    """Return the folded words that `method.stop_words` leaves out."""
    if which == "keep":
        return frozenset()
    found = language_of(language)
    if which == "english" or language is None or (found and found.code == ENGLISH):
        return english_stop_words()
    return frozenset(map(folded, function_words(found.code) if found else ()))


def _without_stop_words(config: Config, settings: DpKpsSettings) -> list[str]:
    """Return a warning if there is no list of function words of the language."""
    if settings.stop_words != "language" or stop_words("language", config.data.language):
        return []
    return [
        "method.stop_words: no list of function words is known of the language "
        f"'{config.data.language}'; take them out of method.vocabulary and set method.stop_words: "
        "keep"
    ]


def read_vocabulary(
    path: str | Path, left_out: frozenset[str] = frozenset()
) -> Mapping[str, int | None]:
    """Return the terms of a UTF-8 file, one per line, each with the public count behind its tab or
    None. Blank lines are left out, and so are the folded words `left_out` and terms that are equal
    to an earlier one after folding. Raises InputError that names the line."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise InputError(f"method.vocabulary: {path}: {reason}") from None
    terms: dict[str, tuple[str, int | None]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise InputError(
                f"method.vocabulary: {path}, line {number}: the bytes are not valid UTF-8"
            ) from None
        first, _, rest = text.partition("\t")
        term, count = " ".join(first.split()), rest.strip()
        if term and (same := folded(term)) not in left_out:
            known = count.isdecimal() and len(count) <= MOST_DIGITS
            terms.setdefault(same, (term, int(count) if known else None))
    if not terms:
        raise InputError(f"method.vocabulary: {path}: there is no term in the file")
    return dict(terms.values())


@cache
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
