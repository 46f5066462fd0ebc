"""A release by DP-KPS measures the private vocabulary and the private densities; sequences and
texts follow from them.

Each of the two passes over the private records gives one noisy output that is published once; one
charge, before the first, pays for both. All that follows is post-processing: it is drawn from
public randomness and may be drawn anew. A shard's answer to a pass is exact and private: the noise
is added to the sum of all shards. No text is kept after it was counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dpray.config.config import Config, DataConfig
from dpray.engines.base import Sampling
from dpray.engines.requests import Ask, Request, answered
from dpray.mechanisms.discrete_noise import INTEGER_NOISE_SOURCE, Counts
from dpray.mechanisms.randomness import generator
from dpray.mechanisms.shares import largest_remainder
from dpray.mechanisms.term_matcher import TermMatcher
from dpray.methods.dp_kps.algorithm import DensityPass, DpKps, Sequences, Sums
from dpray.methods.dp_kps.plan import DpKpsPlan
from dpray.methods.dp_kps.public_terms import read_vocabulary
from dpray.methods.dp_kps.settings import DpKpsSettings
from dpray.methods.dp_kps.tuning import Tuning, Weights, recognised, weights
from dpray.runs.folder import TUNING_KEY
from dpray.runs.session import Release, Session
from dpray.workers.rows import Row
from dpray.workers.shards import Shards

DpKpsSession = Session[DpKpsPlan]
Embeddings = npt.NDArray[np.float32]

TUNING = (
    "a run draws one candidate, uniformly, and scores its releases with noise; how many runs there "
    "are is drawn before the data is looked at, and is as secret as their releases"
)
TUNING_COST = (
    "charged: the best of a secret, random number of runs is released, and epsilon is that of all "
    "of them (Papernot and Steinke 2022); every other parameter is from the configuration"
)


def release(session: DpKpsSession) -> Release:
    """Measure the vocabulary and the densities, draw sequences, have a text written for each."""
    plan = session.plan
    method, vectors_ND, terms, noisy = measured(session)
    dtype = np.int64 if plan.settings.estimator == "exact" else np.float64
    sums: dict[str, Sums] = {label: np.array(v, dtype=dtype) for label, v in noisy.items()}

    drawn = Sequences(method, vectors_ND, sums)
    wanted = largest_remainder(plan.settings.records, plan.proportions)
    sequences = [
        (label, [terms[i] for i in ids])
        for label, number in wanted.items()
        for ids in drawn.draw(label, number, session.public_generator(f"sequences-{label}"))
    ]
    texts = [" ".join(words) for _, words in sequences]
    if plan.makes_texts:
        session.show("texts")
        with session.language_model() as ask:
            texts = write_texts(session, sequences, ask)
    # A text that the model never wrote is left out.
    records = [
        {"text": text, "label": session.config.data.released_label(label), "terms": words}
        for text, (label, words) in zip(texts, sequences, strict=True)
        if text
    ]
    return Release(records, report(session))


def measured(session: DpKpsSession) -> tuple[DpKps, Embeddings, list[str], dict[str, Any]]:
    """Return the releases: the method, its terms with their vectors, and each class's noisy
    sums."""
    plan, embed = session.plan, embedder(session)
    if plan.tuning is not None:
        output = tuned(session, plan.tuning)
        method, terms = plan.tuning.candidates[output["candidate"]], output["terms"]
        return replace(method, public_terms=len(terms)), embed(terms), terms, output["sums"]
    terms = vocabulary(session)["terms"]
    vectors_ND = embed(terms)
    # The file may have lost terms since they were published.
    method = replace(plan.method, public_terms=len(terms), dimension=vectors_ND.shape[1])
    return method, vectors_ND, terms, densities(session, method, terms, vectors_ND)["sums"]


def tuned(session: DpKpsSession, tuning: Tuning) -> dict[str, Any]:
    """Return the best run's candidate, terms, noisy sums and score.

    All runs are one mechanism, which the ledger begins and publishes once: the other runs, and how
    many there were, are in no ledger, log, progress or report.
    """
    if (found := session.published("tuning")) is not None:
        return found
    settings = session.plan.settings
    terms_V = read_vocabulary(settings.vocabulary, settings.stop_words)
    key = session.secret_key(TUNING_KEY, "nobody knows how often the tuning that was begun runs")
    session.show("tuning")
    with session.shards(partial(TuningShard, tuning=tuning, terms=terms_V)) as shards:
        ties = partial(session.public_generator, "ties")

        def run(candidate: int) -> dict[str, Any]:
            method = tuning.candidates[candidate]
            exact_V = total_counts(shards, candidate)
            terms = [terms_V[term_id] for term_id in method.noisy_vocabulary(exact_V, ties())]
            exact = total_sums(shards, candidate, terms)
            noisy = {label: method.noisy_sums(sums) for label, sums in exact.items()}
            right = sum(shards.call("right", candidate, terms, weights(method, noisy)))
            sums = {label: values.tolist() for label, values in noisy.items()}
            return {"terms": terms, "sums": sums, "right": right}

        def mechanism() -> dict[str, Any]:
            return tuning.selected(tuning.drawn(generator(key)), run)

        return session.publish_once("tuning", mechanism)


def vocabulary(session: DpKpsSession) -> dict[str, Any]:
    """Return the N terms of the highest noisy counts."""
    if (found := session.published("vocabulary")) is not None:
        return found
    settings, method = session.plan.settings, session.plan.method
    terms_V = read_vocabulary(settings.vocabulary, settings.stop_words)
    session.show("vocabulary")
    with session.shards(partial(VocabularyShard, plan=method, terms=terms_V)) as shards:

        def mechanism() -> dict[str, Any]:
            exact_V = total_counts(shards)
            chosen = method.noisy_vocabulary(exact_V, session.public_generator("ties"))
            return {"terms": [terms_V[term_id] for term_id in chosen]}

        return session.publish_once("vocabulary", mechanism)


def densities(
    session: DpKpsSession, method: DpKps, terms: list[str], vectors_ND: Embeddings
) -> dict[str, Any]:
    """Return each class's noisy sums; a class without records has them too."""
    if (found := session.published("density")) is not None:
        return found
    session.show("densities")
    make = partial(DensityShard, plan=method, terms=terms, vectors_ND=vectors_ND)
    with session.shards(make) as shards:

        def mechanism() -> dict[str, Any]:
            exact = total_sums(shards)
            noisy = {label: method.noisy_sums(sums) for label, sums in exact.items()}
            return {"sums": {label: sums.tolist() for label, sums in noisy.items()}}

        return session.publish_once("density", mechanism)


class VocabularyShard:
    """Counts, in pass 1, how many records hold each public term."""

    def __init__(self, config: Config, plan: DpKps, terms: Sequence[str]) -> None:
        self._plan, self._matcher = plan, TermMatcher(terms)
        self._counts_V = np.zeros(plan.public_terms, dtype=np.int64)

    def load(self, rows: Sequence[Row]) -> None:
        texts = (row["text"] for row in rows)
        self._counts_V += self._plan.vocabulary_counts(self._matcher, texts)

    def counts(self) -> Counts:
        return self._counts_V


class TuningShard:
    """Answers the passes of every run of a tuning: holds the texts while it lasts."""

    def __init__(self, config: Config, tuning: Tuning, terms: Sequence[str]) -> None:
        self._tuning, self._matcher = tuning, TermMatcher(terms)
        self._records: list[tuple[str, str]] = []

    def load(self, rows: Sequence[Row]) -> None:
        self._records += [(row["text"], row["label"] or "") for row in rows]

    def counts(self, candidate: int) -> Counts:
        texts = (text for text, _ in self._records)
        return self._tuning.candidates[candidate].vocabulary_counts(self._matcher, texts)

    def sums(self, candidate: int, terms: Sequence[str]) -> dict[str, Sums]:
        method = replace(self._tuning.candidates[candidate], public_terms=len(terms))
        density = DensityPass(method, terms, np.zeros((len(terms), 1)))
        return {
            label: density.sums(text for text, own in self._records if own == label)
            for label in method.labels
        }

    def right(self, candidate: int, terms: Sequence[str], weights_N: Weights) -> int:
        return recognised(self._tuning.candidates[candidate], terms, weights_N, self._records)


class DensityShard:
    """Computes, in pass 2, each class's sums."""

    def __init__(
        self, config: Config, plan: DpKps, terms: Sequence[str], vectors_ND: Embeddings
    ) -> None:
        self._pass = DensityPass(plan, terms, vectors_ND)
        self._sums = {label: self._pass.sums([]) for label in plan.labels}

    def load(self, rows: Sequence[Row]) -> None:
        for label, sums in self._sums.items():
            texts = [row["text"] for row in rows if row["label"] == label]
            self._sums[label] = sums + self._pass.sums(texts)

    def sums(self) -> dict[str, Sums]:
        return self._sums


def total_counts(shards: Shards, *arguments: Any) -> Counts:
    """Return the exact counts over V of all shards; private."""
    return np.sum(shards.call("counts", *arguments), axis=0, dtype=np.int64)


def total_sums(shards: Shards, *arguments: Any) -> dict[str, Sums]:
    """Return each class's exact sums over all shards, added in the order of the shards; private."""
    parts: list[dict[str, Sums]] = shards.call("sums", *arguments)
    return {label: sum(part[label] for part in parts) for label in parts[0]}  # type: ignore[misc]


def uses_vectors(settings: DpKpsSettings) -> bool:
    """Return whether anything looks at the vectors of terms."""
    return settings.estimator != "exact" or settings.kernel_bandwidth != 0


def densities_in_words(data: DataConfig) -> str:
    """Return the sentence of the report on the classes' densities."""
    if not data.labels:
        return "one estimator of all records"
    if data.max_records_per_unit == 1:
        return "one estimator a class, on classes that are disjoint: parallel composition"
    return (
        "one estimator a class; a unit's records may be in several, and the noise is for all of "
        "them together"
    )


def embedder(session: DpKpsSession) -> Callable[[list[str]], Embeddings]:
    """Return the embedder of terms, which are public. Without a kernel nothing looks at vectors."""
    if not uses_vectors(session.plan.settings):
        return lambda terms: np.zeros((len(terms), 1), dtype=np.float32)
    from dpray.engines.embedder import SentenceTransformerEmbedder

    return SentenceTransformerEmbedder(session.config.embedder.model).embed


def write_texts(
    session: DpKpsSession, sequences: list[tuple[str, list[str]]], ask: Ask
) -> list[str]:
    """Return a text for each sequence, "" where the model wrote none."""
    settings, prompts = session.plan.settings, session.plan.prompts
    sampling = Sampling(
        settings.max_tokens, temperature=settings.generation_temperature, stop=prompts.template.stop
    )

    def request(number: int, attempt: int) -> Request:
        label, terms = sequences[number]
        rng = session.public_generator(f"examples-{number}")
        prompt = prompts.prompt(terms, label, rng, name_label=settings.label_in_prompt)
        return Request(f"text-{number}/{attempt}", prompt, sampling)

    return answered(ask, request, len(sequences), settings.max_retries, prompts.template.refused)


def report(session: DpKpsSession) -> dict[str, Any]:
    plan = session.plan
    calls: dict[str, Any] = {"calls": session.calls} if plan.makes_texts else {}
    if plan.tuning is not None:
        assert plan.settings.tuning is not None
        chosen = plan.settings.tuning.candidates[tuned(session, plan.tuning)["candidate"]]
        calls |= {"tuned": chosen, "tuning_cost": TUNING_COST}
    return calls | {
        "llm_calls": plan.summary()["llm_calls"],
        "sampling": {
            **({} if plan.tuning is None else {"tuning": TUNING}),
            "vocabulary": "the first distinct terms of each record are counted, and every "
            "count of the public vocabulary gets noise, once",
            "densities": densities_in_words(session.config.data),
            "sequences": "post-processing, from public randomness",
        },
        "public_inputs": {
            "template": plan.settings.template,
            "vocabulary": plan.settings.vocabulary,
            "few_shot": plan.settings.few_shot,
        }
        | ({"embedder": session.config.embedder.model} if uses_vectors(plan.settings) else {}),
        "noise_source": INTEGER_NOISE_SOURCE,
    }
