"""Aug-PE (Xie et al. 2024, Algorithm 1) and the original PE, for texts.

The paper's symbols: n_syn `records`, T `iterations`, L `variations`, K `lookahead`, sigma the
noise of `votes`, S the population, S' (`kept`) the texts that are selected from it, Phi the
embedder, x a text, w the words asked for.

Private records are touched in one place, `dp_nn_histogram`. All else is public: what goes into it,
what follows from its noisy answer, and the prompts, which show synthetic texts only.

Shapes: N texts of a label's population, D dimensions of an embedding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.event import Event
from dpray.engines.base import Sampling
from dpray.engines.requests import Ask, Request, answered
from dpray.mechanisms.discrete_noise import Counts
from dpray.mechanisms.randomness import generator, named_key
from dpray.mechanisms.votes import VoteHistogram
from dpray.methods.aug_pe.prompts import VariationPrompts
from dpray.methods.aug_pe.settings import AugPeSettings
from dpray.types import DprayError, OnProgress, Progress

Doing = Literal["random texts", "variations", "lookahead", "embeddings", "votes"]
Population = dict[str, list[str]]
"""Maps each label to its texts; without labels, the one label is ""."""


Embeddings = npt.NDArray[np.float32]

Embed = Callable[[Sequence[str]], Embeddings]
"""Phi: returns L2-normalised embeddings, shape (number of texts, D)."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after an iteration's vote, as plain JSON values. `votes` are the noisy
    ones."""

    iteration: int
    population: Population = field(repr=False)
    votes: dict[str, list[int]] = field(repr=False)

    def __post_init__(self) -> None:
        lengths = {label: len(texts) for label, texts in self.population.items()}
        if lengths != {label: len(counts) for label, counts in self.votes.items()}:
            raise ValueError("a checkpoint has one vote count for each text of its population")


Histogram = Callable[[int, Population, Mapping[str, Embeddings]], Checkpoint]
"""DP_NN_HISTOGRAM: `(t, S, embeddings_ND of each label)` to the checkpoint of iteration t.

It adds the noise of `AugPe.votes` once, and keeps the checkpoint durably before it returns it. It
never counts an iteration that has a checkpoint a second time."""


def words(settings: AugPeSettings, x: str, rng: np.random.Generator) -> int | None:
    """Return w = max(words(x) + N(0, (p * word_var)^2), min_words), or None if no number of words
    is asked for."""
    if settings.word_var is None:
        return None
    std = settings.mask_probability * settings.word_var
    return max(round(len(x.split()) + rng.normal(0.0, std)), settings.min_words)


def sampling(settings: AugPeSettings, w: int | None, stop: tuple[str, ...]) -> Sampling:
    """Allow at most min(w * tokens_per_word, max_tokens) tokens."""
    tokens = settings.max_tokens
    if w is not None:
        tokens = min(math.ceil(w * settings.tokens_per_word), tokens)
    return Sampling(tokens, temperature=settings.temperature, top_p=settings.top_p, stop=stop)


def masked(settings: AugPeSettings, x: str, rng: np.random.Generator) -> str:
    """Return x with each of its words and marks written as a blank with probability p."""
    p = settings.mask_probability
    return _TOKEN.sub(lambda token: "_" if rng.random() < p else token.group(), x)


_TOKEN = re.compile(r"[\w'’-]+|[^\w\s]+")


@dataclass(frozen=True)
class _Call:
    """One text to ask for: a variation of its `parent`, or a random one without. `name` identifies
    it for the whole run."""

    name: str
    label: str
    parent: str | None = field(repr=False)


def _calls(
    kind: str, t: int, parents: Mapping[str, Sequence[str | None]], each: int
) -> list[_Call]:
    """Return `each` calls for each parent of each label."""
    return [
        _Call(f"{kind}-{t}-{label}/{i}", label, x)
        for label, texts in parents.items()
        for i, x in enumerate(x for x in texts for _ in range(each))
    ]


@dataclass(frozen=True)
class AugPe:
    """The frozen plan of a run; it is public. `records` is n_syn of each label.

    Guarantee: add or remove one unit. A record votes in its own label only, so an iteration is ONE
    application of `votes`, over the counts of all labels together, and a run costs `dp_event`: T of
    them, each on a population that depends on the noisy votes before. All else is post-processing.
    A run without noise has None for `votes`: it is not private and has no event.
    Proof: docs/privacy.md, section 3.4.
    """

    settings: AugPeSettings
    records: Mapping[str, int]
    votes: VoteHistogram | None = None

    def __post_init__(self) -> None:
        if not sum(self.records.values()) or min(self.records.values()) < 0:
            raise ValueError("records: there is no text to make")

    @property
    def dp_event(self) -> Event:
        if self.votes is None:
            raise ValueError("a run without noise has no privacy event")
        return SelfComposed(self.votes.dp_event, self.settings.iterations)

    @property
    def calls_by_purpose(self) -> dict[str, int]:
        """Return how often a whole run calls the language model if no answer is empty."""
        settings = self.settings
        T, L, K = settings.iterations, settings.variations, settings.lookahead
        n_syn = sum(self.records.values())
        return {
            "random texts": n_syn * L,
            "variations": n_syn * (T - 1) * max(L - 1, 1),
            "lookahead": n_syn * T * L * K,
        }

    @property
    def llm_calls(self) -> int:
        return sum(self.calls_by_purpose.values())

    def kept(self, checkpoint: Checkpoint, salt: str) -> Population:
        """Return S' of the checkpoint's iteration, n_syn texts of each label; after the last
        iteration it is the run's output."""
        kept: Population = {}
        for label, texts in checkpoint.population.items():
            name = named_key(salt, f"select-{checkpoint.iteration}-{label}")
            noisy_N, n_syn = np.array(checkpoint.votes[label], np.int64), self.records[label]
            if self.settings.selection == "rank":
                chosen = select_by_rank(noisy_N, min(n_syn, len(texts)), generator(name))
            else:
                chosen = select_by_probability(noisy_N, n_syn, generator(name))
            kept[label] = [texts[i] for i in chosen]
        return kept


def select_by_rank(noisy_N: Counts, n: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return the indices of the n most voted texts, n <= N, best first (Aug-PE). Counts are cut at
    the paper's threshold H = 0. Ties are broken at random: the order of the population says nothing
    about its texts."""
    shuffled = rng.permutation(len(noisy_N))
    order = np.argsort(-np.maximum(noisy_N, 0)[shuffled], kind="stable")
    return shuffled[order[:n]]


def select_by_probability(
    noisy_N: Counts, n: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draw n indices with replacement in proportion to the counts cut at 0 (original PE), uniformly
    if no count is above 0."""
    weights_N = np.maximum(noisy_N, 0).astype(np.float64)
    if not weights_N.any():
        weights_N[:] = 1.0
    return rng.choice(len(noisy_N), size=n, replace=True, p=weights_N / weights_N.sum())


@dataclass(frozen=True)
class AugPeRun:
    """A run of a plan: `ask` is the language model, `embed` is Phi.

    All random choices depend on names and on `salt` (`new_salt`), which is public and fixed for a
    run, so that a run goes on from a checkpoint as if it had not stopped.
    """

    plan: AugPe
    prompts: VariationPrompts
    ask: Ask
    embed: Embed
    dp_nn_histogram: Histogram
    salt: str
    on_progress: OnProgress = lambda progress: None

    def algorithm_1(self, checkpoint: Checkpoint | None = None) -> Population:
        """Return S' of the last iteration, at most n_syn texts of each label. Raises `DprayError`
        if the model gave no text for a label."""
        done, kept = 0, Population()
        if checkpoint is not None:
            done, kept = checkpoint.iteration, self.plan.kept(checkpoint, self.salt)
        for t in range(done + 1, self.plan.settings.iterations + 1):
            S = self.random_api() if t == 1 else self.variation_api(t, kept)
            phi = self.embeddings(t, S)
            self.progress(t, "votes", sum(map(len, S.values())))
            kept = self.plan.kept(self.dp_nn_histogram(t, S, phi), self.salt)
        return kept

    def random_api(self) -> Population:
        """Return L * n_syn random texts of each label."""
        L = self.plan.settings.variations
        requests = {label: [None] * (n_syn * L) for label, n_syn in self.plan.records.items()}
        return self.population(1, "random texts", _calls("random", 1, requests, 1), {})

    def variation_api(self, t: int, kept: Population) -> Population:
        """Return the kept texts and L - 1 variations of each; for L = 1 (the original PE) one
        variation in the place of each."""
        L = self.plan.settings.variations
        calls = _calls("variation", t, kept, max(L - 1, 1))
        return self.population(t, "variations", calls, kept if L > 1 else {})

    def embeddings(self, t: int, S: Population) -> dict[str, Embeddings]:
        """Return each label's embeddings_ND: the mean over K variations of each text, or its own if
        K = 0 or none was answered. As in PE, the mean is not renormalised."""
        K = self.plan.settings.lookahead
        answers = self.answers(t, "lookahead", _calls("lookahead", t, S, K))
        texts = [x for of_label in S.values() for x in of_label]
        looked_at = [
            [answer for answer in answers[i * K : (i + 1) * K] if answer] or [x]
            for i, x in enumerate(texts)
        ]
        self.progress(t, "embeddings", sum(map(len, looked_at)))
        phi = np.asarray(self.embed([x for group in looked_at for x in group]))
        lengths = np.array([len(group) for group in looked_at])
        starts = np.cumsum(lengths) - lengths
        mean_ND = np.add.reduceat(phi, starts, axis=0) / lengths[:, None].astype(np.float32)
        ends = np.cumsum([len(of_label) for of_label in S.values()])
        return dict(zip(S, np.split(mean_ND, ends[:-1]), strict=True))

    def population(
        self, t: int, doing: Doing, calls: Sequence[_Call], kept: Population
    ) -> Population:
        """Return the kept texts and the answers that are not empty, by label."""
        S = {label: list(kept.get(label, [])) for label, n in self.plan.records.items() if n}
        for call, text in zip(calls, self.answers(t, doing, calls), strict=True):
            if text:
                S[call.label].append(text)
        for label, texts in S.items():
            if not texts:
                raise DprayError(
                    f"the model answered none of the requests for label '{label}' in iteration "
                    f"{t}: every answer was empty or a refusal (method.template, key refusals)"
                )
        return S

    def answers(self, t: int, doing: Doing, calls: Sequence[_Call]) -> list[str]:
        """Return texts in the order of the calls. An empty or refused one is asked for up to
        `max_retries` times more, with new random choices; then it is ""."""
        return answered(
            self.ask,
            lambda number, attempt: self.request(calls[number], attempt),
            len(calls),
            self.plan.settings.max_retries,
            self.prompts.template.refused,
            lambda texts: self.progress(t, doing, texts),
        )

    def request(self, call: _Call, attempt: int) -> Request:
        request_id = f"{call.name}/{attempt}"
        rng = generator(named_key(self.salt, request_id))
        settings, stop = self.plan.settings, self.prompts.template.stop
        if call.parent is None:
            prompt = self.prompts.random(call.label, rng)
            return Request(request_id, prompt, sampling(settings, None, stop))
        w, x = words(settings, call.parent, rng), call.parent
        if settings.variation == "fill_in_the_blanks":
            x = masked(settings, x, rng)
        prompt = self.prompts.variation(settings.variation, call.label, x, w, rng)
        return Request(request_id, prompt, sampling(settings, w, stop))

    def progress(self, t: int, doing: Doing, texts: int) -> None:
        T = self.plan.settings.iterations
        self.on_progress(Progress(f"iteration {t} of {T}: {doing}", t - 1, T, f"{texts} texts"))
