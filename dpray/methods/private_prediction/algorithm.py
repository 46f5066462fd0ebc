"""Private prediction (Amin et al. 2024, Algorithm 1).

The paper's symbols: s batch_size, r private_tokens, c clip_bound, tau temperature, theta and sigma
the sparse vector's threshold and noise, S a batch of private prompts, X the synthetic examples, x
a text, t the private tokens drawn for the batch so far. Lines 12 to 20, one token, are
`dpray.methods.private_prediction.step`, which runs where the logits are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from dpray.accounting.event import Event
from dpray.engines.base import Engine, LockstepGroup, LockstepResult
from dpray.engines.schema.schema import Form
from dpray.engines.sentences import ended_text, is_cut_short
from dpray.mechanisms.randomness import named_key
from dpray.methods.private_prediction.mechanism import PrivateToken

BatchPrompts = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""The token ids of private prompts, and of the public one."""

PromptsAfter = Callable[[Sequence[LockstepResult]], BatchPrompts]


@dataclass(frozen=True)
class Batch:
    """The token ids of a batch's private prompts (none if the batch is empty) and of its public
    prompt, and the secret `key` of its coins.

    `following` makes the prompts of a later section from the sections of the document that are
    written: one private prompt for each record of the batch, in the order of `private_prompts`,
    and the public one.

    Claim: a batch with the same key and the same rows gives the same texts each time it is
    drawn. So a batch that was lost is drawn again at no cost, whatever private
    rows or draws had to do with the loss. Proof: docs/privacy.md, section 2.7.
    """

    batch_id: str
    private_prompts: tuple[tuple[int, ...], ...] = field(repr=False)
    public_prompt: tuple[int, ...] = field(repr=False)
    key: str = field(repr=False)
    following: PromptsAfter | None = field(default=None, repr=False)


@dataclass
class BatchState:
    """A batch S between two of its texts. `t` of its `tokens` were drawn from the private prompts.
    The text that t == r left unfinished counts in both, and is not among the examples X. `cut` has
    the places in X of texts that `max_tokens` cut in a sentence, and that have no ending yet."""

    S: Batch
    X: list[LockstepResult] = field(default_factory=list)  # line 1, for this batch only
    noisy_threshold: float | None = None  # line 4: the selector draws it before its first token
    t: int = 0  # line 5
    texts: int = 0
    tokens: int = 0
    cut: list[int] = field(default_factory=list)

    def add(self, x: LockstepResult) -> None:
        """Take a text up, by line 21. A text that t == r cut off is dropped."""
        self.t, self.noisy_threshold = int(x.state["t"]), x.state["noisy_threshold"]
        self.texts += 1
        self.tokens += len(x.token_ids)
        if x.finish_reason != "exhausted":
            if x.finish_reason == "length" and is_cut_short(x.text):
                self.cut.append(len(self.X))
            # It has an end token, too, if its schema closed it before the model did.
            self.X.append(replace(x, finish_reason="length") if x.state.get("was_closed") else x)

    def end(self, ending: LockstepResult) -> None:
        """Take the first text that was cut with its ending, up to the first end of a sentence.
        Without one, the text stays as it is."""
        place = self.cut.pop(0)
        x, self.tokens = self.X[place], self.tokens + len(ending.token_ids)
        text = ended_text(x.text, ending.text, ending.finish_reason == "stop")
        if text is not None:
            tokens = (*x.token_ids, *ending.token_ids)
            self.X[place] = replace(x, text=text, token_ids=tokens, finish_reason="stop")


@dataclass(frozen=True)
class PrivatePrediction:
    """The method, with the public numbers that all batches of a run have in common.

    Guarantee: add or remove one unit. A batch draws at most r private tokens and costs `dp_event`.
    That is the cost of the whole run if batches are disjoint
    (`dpray.mechanisms.batches.HashPartition`); `dpray.mechanisms.batches.PoissonBatches`
    says what secret batches cost. Lengths and numbers of texts are bounded by `max_tokens` and
    `examples_per_batch`.

    A document is `sections` texts in a row. r counts the private tokens of all sections, so the
    cost is `dp_event` whatever their number is. `sections` is public: text number i of a batch is
    section i mod `sections` of a document, and has one row of each record.

    A text that `max_tokens` cut in a sentence goes on with at most `end_tokens` tokens that are
    drawn from the public prompt alone. They are a function of what was drawn and of coins of their
    own, so they cost nothing and do not count against r.
    Proof: docs/privacy.md, sections 2.6, 2.8, 2.11 and 2.12.
    """

    mechanism: PrivateToken
    max_tokens: int
    examples_per_batch: int
    stop: tuple[str, ...] = ()
    longest_copy: int | None = None
    form: Form | None = None
    sections: int = 1
    end_tokens: int = 0

    @property
    def dp_event(self) -> Event:
        return self.mechanism.dp_event

    def decode(self, engine: Engine, batches: Iterable[Batch]) -> Generator[BatchState]:
        """Run Algorithm 1. The engine takes a batch when it has room for it, decodes as many side
        by side as fit, and goes on with the rows of a batch until it is whole. Yield each batch as
        soon as it is."""
        states: dict[str, BatchState] = {}

        def first(S: Batch) -> LockstepGroup:
            states[S.batch_id] = BatchState(S)  # lines 4 and 5
            return self.next_text(states[S.batch_id])

        def following(x: LockstepResult) -> LockstepGroup | None:
            state = states[x.group_id]
            if self.goes_on(state):
                state.add(x)
            else:
                state.end(x)
            if self.goes_on(state):
                return self.next_text(state)
            self.drop_unfinished(state)
            return self.next_ending(state, engine.context_length) if self.end_tokens else None

        groups = map(first, batches)  # line 3
        with closing(engine.decode_lockstep(groups, following)) as texts:
            for x in texts:
                state = states[x.group_id]
                if not self.goes_on(state) and not (self.end_tokens and state.cut):
                    del states[x.group_id]
                    yield state

    def document(self, state: BatchState) -> list[LockstepResult]:
        """Return the sections of the document that is not whole yet."""
        return state.X[len(state.X) - len(state.X) % self.sections :]

    def drop_unfinished(self, state: BatchState) -> None:
        """Drop the sections of a document that is not whole once the batch has no other text."""
        del state.X[len(state.X) - len(self.document(state)) :]
        state.cut = [place for place in state.cut if place < len(state.X)]

    def goes_on(self, state: BatchState) -> bool:
        """Return the condition of line 6, and whether the batch may have another text."""
        texts = self.sections * self.examples_per_batch
        return state.t < self.mechanism.private_tokens and state.texts < texts

    def next_text(self, state: BatchState) -> LockstepGroup:
        """Return the text to decode next, which the engine does by lines 7 to 20."""
        S, written = state.S, self.document(state)
        private, public = S.private_prompts, S.public_prompt
        if written and S.following is not None:
            private, public = S.following(written)
        others: dict[str, object] = {"t": state.t, "noisy_threshold": state.noisy_threshold}
        if self.longest_copy is not None:
            others |= {"prompt": public, "longest_copy": self.longest_copy}
        if self.form is not None:
            others["form"] = self.form.mask_arguments(self.max_tokens)
        return LockstepGroup(
            group_id=S.batch_id,
            private_prompts=private,
            public_prompt=public,
            selector=self.mechanism.selector(named_key(S.key, str(state.texts)), **others),
            max_tokens=self.max_tokens,
            stop=self.stop if self.form is None else (),
        )

    def next_ending(self, state: BatchState, context: int) -> LockstepGroup | None:
        """Return the next ending to decode, for which the model's `context` has room; None if no
        other text is cut."""
        while state.cut:
            # With later sections, too, the first one's prompt leads: they are texts by themselves.
            S, x = state.S, state.X[state.cut[0]]
            prompt = (*S.public_prompt, *x.token_ids)
            if (most := min(self.end_tokens, context - len(prompt))) > 0:
                key, others = named_key(S.key, f"ending {state.cut[0]}"), {}
                if self.longest_copy is not None:
                    others = {"prompt": S.public_prompt, "longest_copy": self.longest_copy}
                    others |= {"written": x.token_ids}
                selector, written = self.mechanism.ending.selector(key, **others), len(x.token_ids)
                return LockstepGroup(S.batch_id, (), prompt, selector, most, self.stop, written)
            state.cut.pop(0)
        return None
