"""DP-KPS's run: the private vocabulary, the private densities, then sequences and texts.

Each of the two passes over the private records is a charge of its own, made before any of them is
opened, and gives one noisy output that is published once. All that follows is post-processing: it
is drawn from public randomness and may be drawn anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from dpray.config.config import Config
from dpray.engines.base import EngineError, Sampling, TextGenerator
from dpray.engines.requests import Ask, Request, answered
from dpray.mechanisms.discrete_noise import INTEGER_NOISE_SOURCE
from dpray.mechanisms.randomness import generator, named_key
from dpray.mechanisms.shares import largest_remainder
from dpray.methods.dp_kps.algorithm import DpKps, Sequences, Sums
from dpray.methods.dp_kps.passes import (
    DensityShard,
    Embeddings,
    VocabularyShard,
    public_terms,
    total_counts,
    total_sums,
)
from dpray.methods.dp_kps.plan import DpKpsPlan
from dpray.runs.call_cache import CALLS, CallCache
from dpray.runs.llm_calls import ask_cached
from dpray.runs.runner import Progress, Run
from dpray.runs.shards import Shards, Worker


class DpKpsRun(Run[DpKpsPlan]):
    _records: list[dict[str, Any]]

    def perform(self) -> None:
        embedder = self._embedder()
        terms = (self.published("vocabulary") or self._vocabulary())["terms"]
        vectors_ND = embedder(terms)
        method = replace(self.plan.method, dimension=vectors_ND.shape[1])
        noisy = (self.published("density") or self._density(method, terms, vectors_ND))["sums"]
        dtype = np.int64 if method.estimator == "exact" else np.float64
        sums: dict[str, Sums] = {label: np.array(v, dtype=dtype) for label, v in noisy.items()}
        self._records = self._texts(self._sequences(method, terms, vectors_ND, sums))

    def _vocabulary(self) -> dict[str, Any]:
        """The N terms of the highest noisy counts."""
        terms_V = public_terms(self.config)
        make = partial(VocabularyShard, plan=self.plan.method, terms=terms_V)

        def mechanism() -> dict[str, Any]:
            exact_V = total_counts(shards)
            chosen = self.plan.method.noisy_vocabulary(exact_V, self._public("ties"))
            return {"terms": [terms_V[term_id] for term_id in chosen]}

        with self._loaded("vocabulary", make) as shards:
            return self.publish_once("vocabulary", mechanism, "vocabulary")

    def _density(self, method: DpKps, terms: list[str], vectors_ND: Embeddings) -> dict[str, Any]:
        """Each class's noisy sums; a class without records has them too."""
        make = partial(DensityShard, plan=method, terms=terms, vectors_ND=vectors_ND)

        def mechanism() -> dict[str, Any]:
            exact = total_sums(shards)
            noisy = {label: method.noisy_sums(sums) for label, sums in exact.items()}
            return {"sums": {label: sums.tolist() for label, sums in noisy.items()}}

        with self._loaded("densities", make) as shards:
            return self.publish_once("density", mechanism, "kde")

    def _embedder(self) -> Callable[[list[str]], Embeddings]:
        """Of terms: public text. Without a kernel nothing asks for them."""
        if self.plan.method.estimator == "exact" and self.plan.method.bandwidth == 0:
            return lambda terms: np.zeros((len(terms), 1), dtype=np.float32)
        from dpray.engines.embedder import SentenceTransformerEmbedder

        return SentenceTransformerEmbedder(self.config.embedder.model).embed

    def _sequences(
        self, method: DpKps, terms: list[str], vectors_ND: Embeddings, sums: dict[str, Sums]
    ) -> list[tuple[str, list[str]]]:
        """A label and L terms for each record."""
        sequences = Sequences(method, vectors_ND, sums)
        wanted = largest_remainder(self.plan.settings.records, self.plan.proportions)
        drawn = []
        for label, number in wanted.items():
            ids = sequences.draw(label, number, self._public(f"sequences-{label}"))
            drawn += [(label, [terms[i] for i in row]) for row in ids]
        return drawn

    def _texts(self, sequences: list[tuple[str, list[str]]]) -> list[dict[str, Any]]:
        """One text a sequence; one that the model never answered is left out."""
        if not self.plan.makes_texts:
            return [_record(" ".join(terms), label, terms) for label, terms in sequences]
        settings, prompts = self.plan.settings, self.plan.prompts
        sampling = Sampling(
            settings.max_tokens,
            temperature=settings.generation_temperature,
            stop=prompts.stop,
        )

        def request(number: int, attempt: int) -> Request:
            label, terms = sequences[number]
            named = label if settings.label_in_prompt else ""
            return Request(f"text-{number}/{attempt}", prompts.prompt(terms, named), sampling)

        engine = self.open_generator()
        try:
            texts = answered(
                self._ask(engine), request, len(sequences), settings.max_retries, prompts.refused
            )
        except EngineError as error:
            raise self.unfinished(str(error)) from None
        finally:
            engine.close()
        pairs = zip(sequences, texts, strict=True)
        return [_record(text, label, terms) for (label, terms), text in pairs if text]

    def _ask(self, engine: TextGenerator) -> Ask:
        total, done = self.plan.settings.records, 0

        def on_completion() -> None:
            nonlocal done
            done += 1
            self.on_progress(Progress("LLM calls", done, total))

        return ask_cached(engine, self.cache, on_completion)

    @cached_property
    def cache(self) -> CallCache:
        return CallCache(self.folder.private / CALLS)

    def _loaded(self, what: str, make: Callable[[Config], Worker]) -> closing[Shards]:
        """Shards that hold all records."""
        self.on_progress(Progress(what, detail=f"eps {self.plan.cost.epsilon:.3f} (charged)"))
        return closing(Shards(self.config, make))

    def _public(self, name: str) -> np.random.Generator:
        """Public randomness: the same in a resumed run."""
        return generator(named_key(self.salt, name))

    def released(self) -> Iterator[dict[str, Any]]:
        yield from self._records

    def method_report(self) -> dict[str, Any]:
        calls = {"calls": asdict(self.cache.totals())} if self.plan.makes_texts else {}
        return calls | {
            "llm_calls": self.plan.summary()["llm_calls"],
            "sampling": {
                "vocabulary": "the first distinct terms of each record are counted, and every "
                "count of the public vocabulary gets noise, once",
                "densities": "one estimator a class, on classes that are disjoint: parallel "
                "composition",
                "sequences": "post-processing, from public randomness",
            },
            "public_inputs": {
                "template": self.plan.settings.template,
                "vocabulary": self.plan.settings.vocabulary,
                "embedder": self.config.embedder.model,
            },
            "noise_source": INTEGER_NOISE_SOURCE,
        }


def _record(text: str, label: str, terms: list[str]) -> dict[str, Any]:
    return {"text": text, "label": label or None, "terms": terms}
