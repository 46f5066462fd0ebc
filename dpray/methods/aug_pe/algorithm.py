"""Aug-PE (Xie et al. 2024, Algorithm 1) and the original PE, for texts.

The paper's symbols: n_syn `records`, T `iterations`, L `variations`, K `lookahead`, sigma
`votes.noise_std`, S the population, S' (`kept`) the texts selected from it, Phi the embedder, x a
text, w the number of words asked for.

Private records are touched in one place, `dp_nn_histogram`. Its inputs are public, and all else
follows from its noisy answers; prompts show synthetic texts only.

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
from dpray.engines.base import Embeddings, Sampling
from dpray.engines.requests import Ask, Request, ask_until_accepted
from dpray.engines.schema.schema import Schema
from dpray.mechanisms.discrete_noise import Counts
from dpray.mechanisms.randomness import generator, named_key
from dpray.mechanisms.term_matcher import count_words
from dpray.mechanisms.votes import VoteHistogram
from dpray.methods.aug_pe.prompts import VariationPrompts
from dpray.methods.aug_pe.settings import AugPeSettings
from dpray.types import Resumable

Doing = Literal["random texts", "variations", "lookahead", "embeddings", "votes"]
Population = dict[str, list[str]]
"""Maps each label to its texts; without labels, the one label is "". With attributes, the texts of
a label with the same attributes have a key of their own (`VariationPrompts.kinds`)."""


Embed = Callable[[Sequence[str]], Embeddings]
"""Phi: returns L2-normalised embeddings, shape (number of texts, D)."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after an iteration's vote, in plain JSON values. `votes` are noisy."""

    iteration: int
    population: Population = field(repr=False)
    votes: dict[str, list[int]] = field(repr=False)

    def __post_init__(self) -> None:
        lengths = {label: len(texts) for label, texts in self.population.items()}
        if lengths != {label: len(counts) for label, counts in self.votes.items()}:
            raise ValueError("a checkpoint has one vote count for each text of its population")


Histogram = Callable[[int, Population, Mapping[str, Embeddings]], Checkpoint]
"""DP_NN_HISTOGRAM takes t, S and each label's embeddings_ND. It returns the checkpoint of iteration
t: S with its noisy votes.

It draws the noise once and stores the checkpoint durably before it returns it. If iteration t has a
checkpoint already, it returns that one and holds no second vote."""

Show = Callable[[str, int, int, str], None]
"""Shows an activity, the iterations that are done, all iterations, and a detail."""


def words(settings: AugPeSettings, x: str, rng: np.random.Generator) -> int | None:
    """Return w = max(words(x) + N(0, (p * word_var)^2), min_words), or None if `word_var` is."""
    if settings.word_var is None:
        return None
    std = settings.mask_probability * settings.word_var
    return max(round(count_words(x) + rng.normal(0.0, std)), settings.min_words)


def sampling(
    settings: AugPeSettings, w: int | None, stop: tuple[str, ...], schema: Schema | None = None
) -> Sampling:
    """Allow at most min(w * tokens_per_word, max_tokens) tokens, or max_tokens with a schema."""
    tokens = settings.max_tokens
    if w is not None and schema is None:
        tokens = min(math.ceil(w * settings.tokens_per_word), tokens)
    return Sampling(
        tokens, temperature=settings.temperature, top_p=settings.top_p, stop=stop, schema=schema
    )


def masked(settings: AugPeSettings, x: str, rng: np.random.Generator) -> str:
    """Replace each word and punctuation mark of x by a blank with probability p."""
    p = settings.mask_probability
    return _TOKEN.sub(lambda token: "_" if rng.random() < p else token.group(), x)


_TOKEN = re.compile(r"[\w'’-]+|[^\w\s]+")


@dataclass(frozen=True)
class _Call:
    """A request for a variation of `parent`, or for a random text if there is no parent. `name` is
    unique in the run."""

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
    """The public parameters of a run, and its cost. `records` is n_syn of each label. A run without
    noise has no `votes`: it is not private and has no event.

    Guarantee: add or remove one unit. A record votes in its own label only, so an iteration is ONE
    application of `votes`, over the counts of all labels together. A run costs `dp_event`: T
    applications, each on a population that depends on the noisy votes before. All else is
    post-processing.
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
        """Return S' of the checkpoint's iteration, n_syn texts of each label. S' of the last
        iteration is the run's output."""
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
    """Return the indices of the n most voted texts, n <= N, best first (Aug-PE). Counts below the
    paper's threshold H = 0 become 0. Ties are broken at random."""
    shuffled = rng.permutation(len(noisy_N))
    order = np.argsort(-np.maximum(noisy_N, 0)[shuffled], kind="stable")
    return shuffled[order[:n]]


def select_by_probability(
    noisy_N: Counts, n: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draw n indices with replacement in proportion to the positive counts (original PE), or
    uniformly if no count is above 0."""
    weights_N = np.maximum(noisy_N, 0).astype(np.float64)
    if not weights_N.any():
        weights_N[:] = 1.0
    return rng.choice(len(noisy_N), size=n, replace=True, p=weights_N / weights_N.sum())


@dataclass(frozen=True)
class AugPeRun:
    """A run of Algorithm 1: `ask` is the language model, `embed` is Phi.

    All random choices depend on names and on `salt` (`new_salt`), which is public and fixed for a
    run. So a run continues from a checkpoint as if it had not stopped.
    """

    method: AugPe
    prompts: VariationPrompts
    ask: Ask
    embed: Embed
    dp_nn_histogram: Histogram
    salt: str
    show: Show = lambda *progress: None
    schema: Schema | None = None

    def algorithm_1(self, done: Sequence[Checkpoint] = ()) -> list[Checkpoint]:
        """Return the checkpoints of all iterations, the first of which are `done`. Raises
        `Resumable` if the model gave no text for a label."""
        checkpoints = [*done]
        for t in range(len(done) + 1, self.method.settings.iterations + 1):
            if t == 1:
                S = self.random_api()
            else:
                S = self.variation_api(t, self.method.kept(checkpoints[-1], self.salt))
            phi = self.embeddings(t, S)
            self.progress(t, "votes", sum(map(len, S.values())))
            checkpoints.append(self.dp_nn_histogram(t, S, phi))
        return checkpoints

    def random_api(self) -> Population:
        """Return L * n_syn random texts of each label."""
        L = self.method.settings.variations
        requests = {label: [None] * (n_syn * L) for label, n_syn in self.method.records.items()}
        return self.population(1, "random texts", _calls("random", 1, requests, 1), {})

    def variation_api(self, t: int, kept: Population) -> Population:
        """Return the kept texts and L - 1 variations of each. With L = 1 (the original PE), one
        variation replaces each text."""
        L = self.method.settings.variations
        calls = _calls("variation", t, kept, max(L - 1, 1))
        return self.population(t, "variations", calls, kept if L > 1 else {})

    def embeddings(self, t: int, S: Population) -> dict[str, Embeddings]:
        """Return each label's embeddings_ND: for each text the mean embedding of K variations, or
        its own embedding if there is no variation. As in PE, the mean is not renormalised."""
        K = self.method.settings.lookahead
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
        S = {label: list(kept.get(label, [])) for label, n in self.method.records.items() if n}
        for call, text in zip(calls, self.answers(t, doing, calls), strict=True):
            if text:
                S[call.label].append(text)
        answered = {self.prompts.label_of(key) for key, texts in S.items() if texts}
        for label in map(self.prompts.label_of, S):
            if label not in answered:
                raise Resumable(
                    f"the model answered none of the requests for label '{label}' in iteration "
                    f"{t}: every answer was empty or a refusal (method.template, key refusals); "
                    "another engine.model or method.template may help"
                )
        return {key: texts for key, texts in S.items() if texts}

    def answers(self, t: int, doing: Doing, calls: Sequence[_Call]) -> list[str]:
        """Return texts in the order of the calls. After an empty or refused answer, or one with too
        few words, the call is repeated up to `max_retries` times, with new random choices; then the
        text is ""."""
        least, refused = self.method.settings.least_words, self.prompts.template.refused
        return ask_until_accepted(
            self.ask,
            lambda number, retry: self.request(calls[number], retry),
            len(calls),
            self.method.settings.max_retries,
            lambda number, text: refused(text) or count_words(text) < least,
            lambda texts: self.progress(t, doing, texts),
        )

    def request(self, call: _Call, retry: int) -> Request:
        request_id = f"{call.name}/{retry}"
        rng = generator(named_key(self.salt, request_id))
        settings, stop = self.method.settings, self.prompts.template.stop
        if call.parent is None:
            prompt = self.prompts.random(call.label, rng)
            return Request(request_id, prompt, sampling(settings, None, stop, self.schema))
        w, x = words(settings, call.parent, rng), call.parent
        if settings.variation == "fill_in_the_blanks":
            x = masked(settings, x, rng)
        prompt = self.prompts.variation(settings.variation, call.label, x, w, rng)
        return Request(request_id, prompt, sampling(settings, w, stop, self.schema))

    def progress(self, t: int, doing: Doing, texts: int) -> None:
        T = self.method.settings.iterations
        self.show(f"iteration {t} of {T}: {doing}", t - 1, T, f"{texts} texts")
