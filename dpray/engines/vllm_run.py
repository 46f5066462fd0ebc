"""Lockstep groups are admitted to vLLM whole: a group's rows enter in one step, or none of them.

A group waits, sends its prompts ahead into vLLM's prefix cache where they do not fit one step, and
runs.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dpray.engines.base import (
    EngineError,
    FinishReason,
    Lockstep,
    LockstepGroup,
    LockstepResult,
    selector_error,
)
from dpray.engines.vllm_model import VllmModel
from dpray.engines.vllm_parts import PartedRun

_MAX_ATTEMPTS = 3


@dataclass
class _Entry:
    """Keeps a group on its way through vLLM, where it has a new name for every attempt."""

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
    in parts (`PartedRun`).

    A group whose prompts may not fit one scheduling step first sends them through as ordinary
    requests of one token, which fills the prefix cache; then all its rows enter together. Where it
    entered in pieces all the same (a cached prompt was evicted), the processor has refused it
    before anything was drawn, and it warms the cache anew: `_MAX_ATTEMPTS` times in all.
    """

    def __init__(self, model: VllmModel, source: Iterator[LockstepGroup]) -> None:
        self.model, self.source = model, source
        # The prompts of a group that is ready are in the prefix cache, or fit one step.
        self.ready: deque[_Entry] = deque()
        self.cold: deque[_Entry] = deque()
        self.large: deque[LockstepGroup] = deque()
        self.warming: _Entry | None = None
        self.running: dict[str, _Entry] = {}
        self.by_request: dict[str, _Entry] = {}

    def run(self) -> Lockstep:
        try:
            while (is_busy := self._admit()) or self.large:
                if not is_busy:
                    yield from self._decode_large()
                    continue
                outputs = self.model.step()
                for entry in self.running.values():
                    entry.next_tokens = entry.rows  # one a row, once its prompt is computed
                for output in outputs:
                    self._take(output)
                finished = [r for r in self.running.values() if self._is_finished(r)]
                for entry in finished:
                    yield from self._finish(entry)
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
        """Take a group from the source where none waits; return whether `cold` has one then. A
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
        where a prompt does not fit the context."""
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
        """Count the tokens that the next scheduling step has left beside the groups that run."""
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

    def _row_params(self, entry: _Entry) -> list[Any]:
        model, group = self.model, entry.group
        eos = model.eos_ids
        params = []
        for row in range(entry.rows):
            public = row == entry.rows - 1
            ticket = {"group": entry.name, "row": row, "size": entry.rows, "eos": eos[0]}
            if public:
                ticket["factory"] = group.selector.factory
                ticket["arguments"] = dict(group.selector.arguments)
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

    def _submit(self, entry: _Entry, params: list[Any]) -> None:
        entry.requests, entry.outputs, entry.public_ids = [], {}, []
        for ids, row_params in zip(entry.group.prompts, params, strict=True):
            request = f"row-{next(self.model.serial)}"
            entry.requests.append(request)
            self.by_request[request] = entry
            self.model.add(request, ids, row_params)

    def _decode_large(self) -> Lockstep:
        """Decode the group that was put by, with the engine to itself, and the batch's next texts,
        whose rows are as many."""
        following: LockstepGroup | None = self.large.popleft()
        while following is not None:
            following = yield PartedRun(self.model, following).result()

    # Results

    def _take(self, output: Any) -> None:
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
        stopped = ids and self.model.ended(group.public_prompt, ids, group.stop) is not None
        return bool(stopped) or len(entry.outputs) == entry.rows

    def _finish(self, entry: _Entry) -> Lockstep:
        reports = self.model.ask_workers("lockstep_finish", entry.name)
        report = reports[0]
        left = [request for request in entry.requests if request in self.by_request]
        self.model.abort(left)
        for request in left:
            del self.by_request[request]
        del self.running[entry.name]
        if report["fate"] == "broken" and not report["tokens"] and entry.attempt < _MAX_ATTEMPTS:
            self.cold.appendleft(entry)
            return
        self._check(entry, reports)
        following = yield self._result(entry, report)
        if following is not None:
            self.ready.append(self._checked(following))

    def _check(self, entry: _Entry, reports: list[dict[str, Any]]) -> None:
        report = reports[0]
        if report["fate"] == "failed":
            raise selector_error(report["error"])
        if report["fate"] == "broken":
            raise EngineError(
                f"a group was not whole at token {len(report['tokens'])}: nothing was drawn from "
                f"it; raise engine.max_num_batched_tokens (now {self.model.max_step_tokens}) or "
                "engine.kv_cache_gib / engine.gpu_memory_utilization"
            )
        if any((r["tokens"], r["fate"]) != (report["tokens"], report["fate"]) for r in reports):
            raise EngineError("the ranks of a tensor-parallel model drew different tokens")
        drawn = report["tokens"]
        if report["fate"] == "exhausted":
            drawn = [*drawn, self.model.eos_ids[0]]
        if any(ids != drawn for ids in entry.outputs.values()):
            raise EngineError("the rows of a group were not given the same tokens")

    def _result(self, entry: _Entry, report: dict[str, Any]) -> LockstepResult:
        group, tokens = entry.group, report["tokens"]
        text: str | None = None
        reason: FinishReason = "exhausted"
        if report["fate"] == "running":
            text = self.model.ended(group.public_prompt, tokens, group.stop)
            reason = "length" if text is None else "stop"
        if text is None:
            text = self.model.text(group.public_prompt, tokens)
        return LockstepResult(group.group_id, text, tuple(tokens), reason, report["state"])
