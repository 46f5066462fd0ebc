"""DP-KPS measures the private vocabulary and the private densities, and makes sequences and texts
from them.

Each of the two passes over the private records has one noisy output, which is published once. One
charge before the first pass pays for both. A shard's answers are exact and private: the noise is
added once, to the sum of all shards. All later steps are post-processing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dpray.config.config import Config
from dpray.engines.base import Embeddings
from dpray.engines.embedding_endpoint import PUBLIC_TEXTS, same_model
from dpray.engines.requests import Ask, Request, ask_until_accepted
from dpray.io.languages import words_named
from dpray.mechanisms.discrete_noise import INTEGER_NOISE_SOURCE, Counts
from dpray.mechanisms.labels import largest_remainder
from dpray.mechanisms.term_matcher import TermMatcher
from dpray.methods.dp_kps.algorithm import DensityPass, DpKps, Sequences, Sums
from dpray.methods.dp_kps.plan import DpKpsPlan, load_embedder, public_terms
from dpray.runs.privacy_report import MethodPart
from dpray.runs.session import Release, Session
from dpray.types import Resumable
from dpray.workers.rows import Row
from dpray.workers.shards import Shards

DpKpsSession = Session[DpKpsPlan]


def release(session: DpKpsSession) -> Release:
    """Measure the vocabulary and the densities, draw sequences, and write a text for each."""
    plan, data = session.plan, session.config.data
    embed = embedder(session)  # loaded first: a missing embedder ends the run before a pass begins
    terms = vocabulary(session)
    vectors_ND = embed([*PUBLIC_TEXTS, *terms])  # of one and the same model
    public_ND, vectors_ND = np.split(vectors_ND, [len(PUBLIC_TEXTS)])
    # The file may have lost terms since they were published.
    method = replace(plan.method, public_terms=len(terms), dimension=vectors_ND.shape[1])
    noisy = densities(session, method, terms, vectors_ND, public_ND)

    drawn = Sequences(method, vectors_ND, noisy)
    wanted = largest_remainder(plan.settings.records, plan.proportions)
    sequences = [
        (label, [terms[i] for i in ids])
        for label, number in wanted.items()
        for ids in drawn.draw(label, number, session.public_generator(f"sequences-{label}"))
    ]
    texts = [" ".join(words) for _, words in sequences]
    attributes: list[Mapping[str, str]] = [{} for _ in sequences]
    if plan.makes_texts:
        session.show("texts")
        attributes = [
            values
            for label, number in wanted.items()
            for values in session.drawn_values(label, number)
        ]
        with session.language_model() as ask:
            texts = write_texts(session, sequences, attributes, ask)
    # Texts that the model did not write are left out.
    records = [
        {
            "text": text,
            "label": data.released_label(label),
            **(data.released_attributes(values) if values else {}),
            "terms": words,
        }
        for text, (label, words), values in zip(texts, sequences, attributes, strict=True)
        if text
    ]
    return Release(records, report(session))


def vocabulary(session: DpKpsSession) -> list[str]:
    """Return the N terms with the highest noisy counts; measure them if they are not published."""
    if (found := session.published("vocabulary")) is None:
        method, terms_V = session.plan.method, public_terms(session.plan)
        session.show("vocabulary")
        with session.shards(VocabularyShard, method, terms_V) as shards:
            found = session.publish_once("vocabulary", noisy_terms, session, shards, terms_V)
    terms: list[str] = found["terms"]
    return terms


def noisy_terms(
    session: DpKpsSession, shards: Shards[VocabularyShard], terms_V: Sequence[str]
) -> dict[str, object]:
    exact_V = total_counts(shards)
    chosen = session.plan.method.noisy_vocabulary(exact_V, session.public_generator("ties"))
    return {"terms": [terms_V[term_id] for term_id in chosen]}


def densities(
    session: DpKpsSession,
    method: DpKps,
    terms: list[str],
    vectors_ND: Embeddings,
    public_ND: Embeddings,
) -> dict[str, Sums]:
    """Return each class's noisy sums; measure them if they are not published. A class without
    records has noisy sums, too. Raises Resumable if the embedder gives `PUBLIC_TEXTS` other vectors
    than when they were measured: sequences would be drawn at other places."""
    if (found := session.published("density")) is None:
        session.show("densities")
        with session.shards(DensityShard, method, terms, vectors_ND) as shards:
            found = session.publish_once("density", noisy_densities, method, shards, public_ND)
    elif not same_model(public_ND, np.array(found["public_vectors"], np.float32)):
        raise Resumable(
            "embedder.model: gives a public text another vector than when the densities were "
            "measured; use the model with which the run began"
        )
    dtype = np.int64 if method.settings.estimator == "exact" else np.float64
    return {label: np.array(sums, dtype=dtype) for label, sums in found["sums"].items()}


def noisy_densities(
    method: DpKps, shards: Shards[DensityShard], public_ND: Embeddings
) -> dict[str, object]:
    noisy = {label: method.noisy_sums(sums) for label, sums in total_sums(shards).items()}
    return {
        "sums": {label: sums.tolist() for label, sums in noisy.items()},
        "public_vectors": public_ND.tolist(),
    }


class VocabularyShard:
    """Pass 1: counts the records that hold each public term."""

    def __init__(self, config: Config, method: DpKps, terms: Sequence[str]) -> None:
        self._method, self._matcher = method, TermMatcher(terms)
        self._counts_V = np.zeros(method.public_terms, dtype=np.int64)

    def load(self, rows: Sequence[Row]) -> None:
        texts = (row["text"] for row in rows)
        self._counts_V += self._method.vocabulary_counts(self._matcher, texts)

    def counts(self) -> Counts:
        return self._counts_V


class DensityShard:
    """Pass 2: adds up each class's sums."""

    def __init__(
        self, config: Config, method: DpKps, terms: Sequence[str], vectors_ND: Embeddings
    ) -> None:
        self._pass = DensityPass(method, terms, vectors_ND)
        self._sums = {label: self._pass.sums([]) for label in method.labels}

    def load(self, rows: Sequence[Row]) -> None:
        texts: defaultdict[str, list[str]] = defaultdict(list)
        for row in rows:
            texts[row["label"]].append(row["text"])
        for label, some in texts.items():
            self._sums[label] = self._sums[label] + self._pass.sums(some)

    def sums(self) -> dict[str, Sums]:
        return self._sums


def total_counts(shards: Shards[VocabularyShard]) -> Counts:
    """Return the exact counts over V of all shards; private."""
    total: Counts = np.sum(shards.each(VocabularyShard.counts), axis=0, dtype=np.int64)
    return total


def total_sums(shards: Shards[DensityShard]) -> dict[str, Sums]:
    """Return each class's exact sums over all shards; private."""
    parts = shards.each(DensityShard.sums)
    return {label: sum(part[label] for part in parts) for label in parts[0]}  # type: ignore[misc]


def embedder(session: DpKpsSession) -> Callable[[Sequence[str]], Embeddings]:
    """Return the embedder of the public terms. It returns zeros for the estimator `exact`, which
    uses no vectors."""
    if session.plan.settings.estimator == "exact":
        return lambda terms: np.zeros((len(terms), 1), dtype=np.float32)
    return load_embedder(session.config).embed


def write_texts(
    session: DpKpsSession,
    sequences: list[tuple[str, list[str]]],
    attributes: Sequence[Mapping[str, str]],
    ask: Ask,
) -> list[str]:
    """Return a text for each sequence, "" if the model wrote none with `least_terms` of it."""
    settings, prompts = session.plan.settings, session.plan.prompts

    def request(number: int, retry: int) -> Request:
        label, terms = sequences[number]
        rng = session.public_generator(f"examples-{number}")
        prompt = prompts.prompt(
            terms,
            label,
            rng,
            name_label=settings.label_in_prompt,
            attributes=attributes[number],
        )
        return Request(f"text-{number}/{retry}", prompt, session.plan.sampling)

    def refused(number: int, text: str) -> bool:
        held = set(TermMatcher(sequences[number][1]).matches(text))
        return len(held) < settings.least_terms or prompts.template.refused(text)

    return ask_until_accepted(ask, request, len(sequences), settings.max_retries, refused)


def report(session: DpKpsSession) -> MethodPart:
    plan, data = session.plan, session.config.data
    calls = {"calls": session.calls} if plan.makes_texts else {}
    densities = "one estimator of all records"
    if data.labels and data.max_records_per_unit == 1:
        densities = "one estimator a class, on classes that are disjoint: parallel composition"
    elif data.labels:
        densities = (
            "one estimator a class; a unit's records may be in several, and the noise is for all "
            "of them together"
        )
    return MethodPart(
        **calls,
        llm_calls=plan.summary()["llm_calls"],
        sampling={
            "vocabulary": "the first distinct terms of each record are counted, and every "
            "count of the public vocabulary gets noise, once",
            "densities": densities,
            "sequences": "post-processing, from public randomness",
        },
        public_inputs={
            "template": plan.settings.template,
            "vocabulary": plan.settings.vocabulary or words_named(data.language),
            "few_shot": plan.settings.few_shot,
        }
        | ({"embedder": session.config.embedder.shown} if plan.settings.estimator == "rff" else {}),
        noise_source=INTEGER_NOISE_SOURCE,
    )
