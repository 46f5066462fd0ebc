"""The vLLM engine decodes lockstep groups whole: a group's rows enter in one step, or none of them.

A group waits, sends its prompts ahead into vLLM's prefix cache if they do not fit one step, and
runs. A group that is larger than the engine is decoded in parts.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dpray.engines.base import (
    EngineError,
    Following,
    LockstepGroup,
    LockstepResult,
    nothing_follows,
    selector_error,
)
from dpray.engines.vllm.model import VllmModel
from dpray.types import Json

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

_MAX_ATTEMPTS = 3


class VllmEngine(VllmModel):
    """An `Engine` that generates and decodes in vLLM.

    `max_model_len` defaults to the model's context, 8192 at most. `max_num_seqs` rows run at a
    time; a larger group is decoded in parts. `max_num_batched_tokens` defaults to what a group of
    `max_num_seqs` rows needs when its prompts are in the prefix cache. On a CPU the KV cache
    defaults to what `group` needs: the rows of a typical group, and the tokens of each.

    `private_rows` says that groups of private prompts are decoded. `public_alone` says that a
    public row's logits decide which tokens may be drawn, or from which rows. Then no bit of them
    may move with private rows: kernels whose rows do not depend on each other are taken if vLLM has
    them (`VLLM_BATCH_INVARIANT`: NVIDIA GPUs of compute capability 8.0 or higher), with
    FlashAttention 2 or Triton's attention, and a loaded model that says it has others is refused.
    Elsewhere a second copy of the model computes the public rows. These kernels are slower: where
    public logits do not decide, they are taken in 16 bits, whose rounding would be refused without
    them, and for a mixture of experts, which is refused without them.
    The values of a model that was `tried` before are not looked at again.
    """

    def rows_at_once(self, tokens: int) -> int:
        return min(self.max_rows, self.blocks // self.blocks_of(tokens))

    def decode_lockstep(
        self, groups: Iterable[LockstepGroup], following: Following = nothing_follows
    ) -> Generator[LockstepResult]:
        return LockstepRun(self, iter(groups), following).run()


@dataclass
class _Entry:
    """A group on its way through vLLM. It has a new name for every attempt."""

    group: LockstepGroup
    blocks: int
    name: str = ""
    attempt: int = 0
    next_tokens: int = 0
    requests: list[str] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    public_ids: list[int] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return len(self.group.private_prompts) + 1


class LockstepRun:
    """Carries out one call of `decode_lockstep`. A group that is larger than the engine is decoded
    in parts (`PartedText`).

    A group whose prompts may not fit one scheduling step first sends them through as ordinary
    requests of one token, which fills the prefix cache; then all its rows enter together. If it
    enters in parts all the same (a cached prompt was evicted), the processor refuses it before
    anything is drawn, and it warms the cache again: `_MAX_ATTEMPTS` times in all.
    """

    def __init__(
        self, model: VllmModel, source: Iterator[LockstepGroup], following: Following
    ) -> None:
        self.model, self.source, self.following = model, source, following
        # The prompts of a group that is ready are in the prefix cache, or fit one step.
        self.ready: deque[_Entry] = deque()
        self.cold: deque[_Entry] = deque()
        self.large: deque[LockstepGroup] = deque()
        self.warming: _Entry | None = None
        self.running: dict[str, _Entry] = {}
        self.by_request: dict[str, _Entry] = {}

    def run(self) -> Generator[LockstepResult]:
        try:
            while (is_busy := self._admit()) or self.large:
                if not is_busy:
                    yield self._decode_large()
                    continue
                outputs = self.model.step()
                for entry in self.running.values():
                    entry.next_tokens = entry.rows  # one a row, once its prompt is computed
                for output in outputs:
                    self._take(output)
                finished = [r for r in self.running.values() if self._is_finished(r)]
                for entry in finished:
                    if (result := self._finish(entry)) is not None:
                        yield result
                if self.by_request and self.model.is_idle:
                    raise EngineError("vLLM lost a row of a group; nothing is drawn without it")
        except BaseException:
            with contextlib.suppress(Exception):
                self.model.abort(self.by_request)
                self.model.ask_workers("lockstep_clear")
            raise

    # Admission

    def _admit(self) -> bool:
        """Start what fits now; return whether anything is under way. Nothing starts while a group
        warms the cache: its rows would wait behind the warming ones."""
        while self.warming is None:
            if self.ready:
                entry = self.ready[0]
                uncached = entry.rows * max(self.model.block_sizes)
                if not self._fits(entry, uncached):
                    break
                self._start(self.ready.popleft(), uncached)
            elif self._pull() and self._fits(self.cold[0], self.cold[0].rows):
                entry = self.cold.popleft()
                tokens = sum(map(len, entry.group.prompts))
                if entry.attempt == 0 and tokens <= self._step_tokens_left():
                    self._start(entry, tokens)
                else:
                    self._warm(entry)
            else:
                break
        return bool(self.running or self.warming)

    def _pull(self) -> bool:
        """Take a group from the source if none waits; return whether `cold` has one then. A
        group that does not fit the engine is put by until the others are through."""
        if not (self.cold or self.large) and (group := next(self.source, None)) is not None:
            entry = self._checked(group)
            if self._is_large(entry):
                self.large.append(group)
            else:
                self.cold.append(entry)
        return bool(self.cold)

    def _is_large(self, entry: _Entry) -> bool:
        """Return whether the rows do not fit the engine, or cannot enter in one step: neither with
        their whole prompts nor with what is left of cached ones. Whether a group is refused may not
        depend on its size, which is secret."""
        model = self.model
        fewest = min(sum(map(len, entry.group.prompts)), entry.rows * max(model.block_sizes))
        return (
            entry.rows > model.max_rows
            or entry.blocks > model.blocks
            or fewest > model.max_step_tokens
        )

    def _checked(self, group: LockstepGroup) -> _Entry:
        """Return the group with the KV blocks that it needs at full length. Raises EngineError
        if a prompt does not fit the context."""
        self.model.check_length(max(map(len, group.prompts)), group.max_tokens)
        lengths = [len(prompt) + group.max_tokens for prompt in group.prompts]
        return _Entry(group, sum(map(self.model.blocks_of, lengths)))

    def _fits(self, entry: _Entry, tokens: int) -> bool:
        """Return whether there are rows and KV cache for the whole group at full length, and room
        for `tokens` in the next step; by itself a group always fits (`_checked`)."""
        active = self.running.values()
        return not active or (
            sum(r.rows for r in active) + entry.rows <= self.model.max_rows
            and sum(r.blocks for r in active) + entry.blocks <= self.model.blocks
            and tokens <= self._step_tokens_left()
        )

    def _step_tokens_left(self) -> int:
        """Count the tokens of the next scheduling step that the running groups leave."""
        return self.model.max_step_tokens - sum(r.next_tokens for r in self.running.values())

    def _warm(self, entry: _Entry) -> None:
        params = self.model.sampling_params(
            max_tokens=1, temperature=0, detokenize=False, output_kind=self.model.final_only
        )
        self.warming = entry
        self._submit(entry, [params] * entry.rows)

    def _start(self, entry: _Entry, next_tokens: int) -> None:
        entry.attempt += 1
        entry.next_tokens = next_tokens
        entry.name = str(next(self.model.serial))
        self.running[entry.name] = entry
        self._submit(entry, self._row_params(entry))

    def _row_params(self, entry: _Entry) -> list[SamplingParams]:
        model, group = self.model, entry.group
        eos = model.eos_ids
        params = []
        for row in range(entry.rows):
            public = row == entry.rows - 1
            ticket = {"group": entry.name, "row": row, "size": entry.rows, "eos": eos[0]}
            if public:
                ticket["prompt"] = list(group.public_prompt)
                ticket["factory"] = group.selector.factory
                ticket["arguments"] = dict(group.selector.arguments)
                ticket["stop"] = bool(group.stop)
            params.append(
                model.sampling_params(
                    max_tokens=group.max_tokens,
                    temperature=0,
                    ignore_eos=True,
                    stop_token_ids=list(eos),
                    detokenize=False,
                    output_kind=model.delta if public and group.stop else model.final_only,
                    extra_args={"dpray": ticket},
                )
            )
        return params

    def _submit(self, entry: _Entry, params: list[SamplingParams]) -> None:
        entry.requests, entry.outputs, entry.public_ids = [], {}, []
        for ids, row_params in zip(entry.group.prompts, params, strict=True):
            request = f"row-{next(self.model.serial)}"
            entry.requests.append(request)
            self.by_request[request] = entry
            self.model.add(request, ids, row_params)

    def _decode_large(self) -> LockstepResult:
        """Decode a text of the group that was put by, with the engine to itself. The batch's next
        text takes its place, however many rows that has."""
        result = PartedText(self.model, self.large.popleft()).decode()
        if (following := self.following(result)) is not None:
            self.large.appendleft(following)
        return result

    # Results

    def _take(self, output: RequestOutput) -> None:
        entry = self.by_request[output.request_id]
        ids = list(output.outputs[0].token_ids)
        if entry.group.stop and output.request_id == entry.requests[-1]:
            entry.public_ids.extend(ids)
            ids = entry.public_ids
        if output.finished:
            del self.by_request[output.request_id]
            entry.outputs[output.request_id] = ids
            if entry is self.warming and len(entry.outputs) == entry.rows:
                self.warming = None
                self.ready.append(entry)

    def _is_finished(self, entry: _Entry) -> bool:
        """Return whether vLLM ended all rows, or a stop string ended the text."""
        group, ids = entry.group, entry.public_ids
        stopped = ids and self.model.ended(group, ids) is not None
        return bool(stopped) or len(entry.outputs) == entry.rows

    def _finish(self, entry: _Entry) -> LockstepResult | None:
        """Return the group's text; None if it was not whole when it entered, and enters again."""
        left = [request for request in entry.requests if request in self.by_request]
        if left:  # a stop string ended the text: what follows it is no part of it
            entry.outputs[entry.requests[-1]] = entry.public_ids
        length = len(entry.public_ids) if left else None
        reports = self.model.ask_workers("lockstep_finish", entry.name, length)
        report = reports[0]
        self.model.abort(left)
        for request in left:
            del self.by_request[request]
        del self.running[entry.name]
        if report["fate"] == "broken" and not report["tokens"] and entry.attempt < _MAX_ATTEMPTS:
            self.cold.appendleft(entry)
            return None
        self._check(entry, reports)
        exhausted = report["fate"] == "exhausted"
        result = self.model.result(entry.group, report["tokens"], exhausted, report["state"])
        if (following := self.following(result)) is not None:
            self._follow(entry.group, self._checked(following))
        return result

    def _follow(self, before: LockstepGroup, entry: _Entry) -> None:
        """Let a batch's next text go on: at once if its prompts are those of the text before it,
        which are in the prefix cache, else as a group that begins."""
        if entry.group.prompts == before.prompts:
            self.ready.append(entry)
        elif self._is_large(entry):
            self.large.append(entry.group)
        else:
            self.cold.appendleft(entry)

    def _check(self, entry: _Entry, reports: list[Json]) -> None:
        report = agreed(reports)
        if report["fate"] == "broken":
            raise EngineError(
                f"a group was not whole at token {len(report['tokens'])}: nothing was drawn from "
                f"it; raise engine.max_num_batched_tokens (now {self.model.max_step_tokens}) or "
                "engine.kv_cache_gib / engine.gpu_memory_utilization"
            )
        drawn = report["tokens"]
        if report["fate"] == "exhausted":
            drawn = [*drawn, self.model.eos_ids[0]]
        if any(ids != drawn for ids in entry.outputs.values()):
            raise EngineError("the rows of a group were not given the same tokens")


class PartedText:
    """Decodes one text of a group that is larger than vLLM's KV cache, with the engine to itself.

    For every token each row is a request for one token, after the prompt and the tokens so far, and
    vLLM runs as many side by side as it holds. The selector adds up the rows' clipped logits, so
    the token is the one that the whole group would have drawn. vLLM recomputes the rows that its
    cache has dropped. The order of the rows alternates, because the prefix cache keeps those that
    were used last.
    """

    def __init__(self, model: VllmModel, group: LockstepGroup) -> None:
        self.model, self.group = model, group
        self.name = f"parts-{next(model.serial)}"
        self.tokens: list[int] = []
        self.waiting: set[str] = set()

    def decode(self) -> LockstepResult:
        model, group, rows = self.model, self.group, len(self.group.private_prompts)
        start = (self.name, rows, group.public_prompt, group.selector)
        has_public_row = model.ask_workers("parts_start", *start)[0]["public_row"]
        order, exhausted = range(rows), False
        while not exhausted and not model.is_over(group, self.tokens):
            if has_public_row:
                self._compute([rows])
            self._compute(order)
            order = order[::-1]
            exhausted = self._draw()
        state = model.ask_workers("parts_finish", self.name)[0]
        return model.result(group, self.tokens, exhausted, state)

    def _compute(self, rows: Iterable[int]) -> None:
        """Send the rows through the model, with the tokens so far."""
        try:
            for row in rows:
                request = f"row-{next(self.model.serial)}"
                self.waiting.add(request)
                ids = [*self.group.prompts[row], *self.tokens]
                self.model.add(request, ids, self._params(row))
            while self.waiting:
                finished = {output.request_id for output in self.model.step() if output.finished}
                self.waiting -= finished
                if self.waiting and self.model.is_idle:
                    raise EngineError("vLLM lost a row of a group; nothing is drawn without it")
        except BaseException:
            self.model.abort(self.waiting)
            raise

    def _params(self, row: int) -> SamplingParams:
        params: SamplingParams = self.model.sampling_params(
            max_tokens=1,
            temperature=0,
            detokenize=False,
            output_kind=self.model.final_only,
            extra_args={"dpray": {"group": self.name, "row": row, "at": len(self.tokens)}},
        )
        return params

    def _draw(self) -> bool:
        """Draw the next token; return whether the selector drew none."""
        report = agreed(self.model.ask_workers("parts_draw", self.name))
        if report["fate"] == "broken":
            raise EngineError(
                f"a group was not whole at token {len(self.tokens)}: nothing was drawn from it"
            )
        self.tokens = list(report["tokens"])
        return bool(report["fate"] == "exhausted")


def agreed(reports: list[Json]) -> Json:
    """Return what all ranks report of a group. Raises EngineError for a selector that failed, and
    for ranks that drew different tokens."""
    report = reports[0]
    if report["fate"] == "failed":
        raise selector_error(report["error"])
    if any((r["tokens"], r["fate"]) != (report["tokens"], report["fate"]) for r in reports):
        raise EngineError("the ranks of a tensor-parallel model drew different tokens")
    return report
