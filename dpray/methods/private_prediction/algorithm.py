"""`PrivatePrediction` runs private prediction (Amin et al. 2024, Algorithm 1).

The paper's symbols: s batch_size, r private_tokens, c clip_bound, tau temperature, theta and sigma
the sparse vector's threshold and noise, S a batch of private prompts, X the synthetic examples, x
the text under way, t the private tokens drawn for the batch so far. Lines 9 to 20, one token, are
`dpray.methods.private_prediction.token`, which runs where the logits are.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from dpray.accounting.event import Event
from dpray.engines.base import Engine, LockstepGroup, LockstepResult, SelectorSpec
from dpray.mechanisms.randomness import new_key
from dpray.methods.private_prediction.token import PrivateToken, selector_arguments

SELECTOR = "dpray.methods.private_prediction.token:PrivateTokenSelector"


@dataclass(frozen=True)
class Batch:
    """Holds the token ids of a batch's private prompts (none if the batch is empty) and of its
    public prompt."""

    batch_id: str
    private_prompts: tuple[tuple[int, ...], ...] = field(repr=False)
    public_prompt: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True)
class Example:
    """Holds a finished synthetic text, which is released."""

    text: str
    finish_reason: str
    tokens: int


@dataclass(frozen=True)
class BatchOutput:
    """Holds the released output of a batch. `private_tokens` of its `tokens` were drawn from the
    private prompts; those of the text that t == r left unfinished are counted, the text is not
    among `examples`."""

    batch_id: str
    examples: tuple[Example, ...]
    private_tokens: int
    tokens: int


@dataclass(frozen=True)
class PrivatePrediction:
    """Holds what all batches of a run have in common, all of it public.

    Guarantee: add or remove one unit. A batch draws at most r private tokens and costs `dp_event`.
    That is the cost of the whole run where batches are disjoint
    (`dpray.mechanisms.batches.HashPartition`); `dpray.mechanisms.batches.PoissonBatches`
    says what secret batches cost. Lengths and numbers of texts are bounded by `max_tokens` and
    `examples_per_batch`, public both.
    Proof: docs/privacy.md, sections 2.6 and 2.8.
    """

    mechanism: PrivateToken
    max_tokens: int
    examples_per_batch: int
    stop: tuple[str, ...] = ()
    longest_copy: int | None = None

    @property
    def dp_event(self) -> Event:
        return self.mechanism.dp_event

    def decode(self, engine: Engine, batches: Iterable[Batch]) -> Generator[BatchOutput]:
        """Run Algorithm 1 on every batch, as many side by side as the engine takes, each of which
        it takes when it has room; yield each one's output as soon as it is whole."""
        running: dict[str, Generator[LockstepGroup, LockstepResult, BatchOutput]] = {}

        def first_groups() -> Iterator[LockstepGroup]:
            for batch in batches:
                running[batch.batch_id] = self.algorithm_1(batch)
                yield next(running[batch.batch_id])

        with closing(engine.decode_lockstep(first_groups())) as texts:
            following: LockstepGroup | None = None
            while True:
                try:
                    text = texts.send(following)
                except StopIteration:
                    return
                try:
                    following = running[text.group_id].send(text)
                except StopIteration as finished:
                    following = None
                    del running[text.group_id]
                    yield finished.value

    def algorithm_1(self, S: Batch) -> Generator[LockstepGroup, LockstepResult, BatchOutput]:
        """Run lines 4 to 21 for one batch; yields each text to decode and is sent what it
        became."""
        X: list[Example] = []
        noisy_threshold: float | None = None  # line 4: the selector draws it before its first token
        t = tokens = texts = 0
        while t < self.mechanism.private_tokens and texts < self.examples_per_batch:
            selector = selector_arguments(
                self.mechanism, new_key(), t=t, noisy_threshold=noisy_threshold, **self._bar(S)
            )
            x = yield LockstepGroup(
                group_id=S.batch_id,
                private_prompts=S.private_prompts,
                public_prompt=S.public_prompt,
                selector=SelectorSpec(SELECTOR, selector),
                max_tokens=self.max_tokens,
                stop=self.stop,
            )
            t, noisy_threshold = int(x.state["t"]), x.state["noisy_threshold"]
            texts += 1
            tokens += len(x.token_ids)
            if x.finish_reason != "exhausted":
                X.append(Example(x.text, x.finish_reason, len(x.token_ids)))
        return BatchOutput(S.batch_id, tuple(X), t, tokens)

    def _bar(self, S: Batch) -> dict[str, Any]:
        """Return what keeps a text from copying the public prompt."""
        if self.longest_copy is None:
            return {}
        return {"prompt": S.public_prompt, "longest_copy": self.longest_copy}
