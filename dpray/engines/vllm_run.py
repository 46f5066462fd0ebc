"""Lockstep groups are admitted to vLLM whole: a group's rows enter in one step, or none of them.

A group waits, warms vLLM's prefix cache, and runs.
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

_MAX_ATTEMPTS = 3


@dataclass
class _Running:
    """A group has a new name in vLLM for every attempt."""

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
    """Carries out one call of `decode_lockstep`.

    A group whose prompts may not fit one scheduling step first sends them through as ordinary
    requests of one token, which fills the prefix cache; then all its rows enter together. Where it
    entered in pieces all the same (a cached prompt was evicted), the processor has refused it
    before anything was drawn, and it warms the cache anew: `_MAX_ATTEMPTS` times in all.
    """

    def __init__(self, model: VllmModel, source: Iterator[LockstepGroup]) -> None:
        self.model, self.source = model, source
        # The prompts of a group that is ready are in the prefix cache, or fit one step.
        self.ready: deque[_Running] = deque()
        self.cold: deque[_Running] = deque()
        self.warming: _Running | None = None
        self.running: dict[str, _Running] = {}
        self.by_request: dict[str, _Running] = {}

    def run(self) -> Lockstep:
        try:
            while self._admit():
                outputs = self.model.step()
                for running in self.running.values():
                    running.next_tokens = running.rows
                for output in outputs:
                    self._take(output)
                finished = [r for r in self.running.values() if self._is_finished(r)]
                for running in finished:
                    yield from self._finish(running)
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
                running = self.ready[0]
                uncached = running.rows * max(self.model.block_sizes)
                if not self._fits(running, uncached):
                    break
                self._start(self.ready.popleft(), uncached)
            elif self._pull() and self._fits(self.cold[0], self.cold[0].rows):
                running = self.cold.popleft()
                tokens = sum(map(len, running.group.prompts))
                if running.attempt == 0 and tokens <= self._step_tokens_left():
                    self._start(running, tokens)
                else:
                    self._warm(running)
            else:
                break
        return bool(self.running or self.warming)

    def _pull(self) -> bool:
        """Return whether `cold` holds a group; where it did not, take one from the source."""
        if not self.cold:
            group = next(self.source, None)
            if group is not None:
                self.cold.append(self._checked(group))
        return bool(self.cold)

    def _checked(self, group: LockstepGroup) -> _Running:
        """Return the group with the KV blocks that it needs at full length. Raises EngineError
        where it can never run."""
        model = self.model
        prompts = group.prompts
        model.check_length(max(map(len, prompts)), group.max_tokens)
        if len(prompts) > model.max_rows:
            raise EngineError(
                f"a group has more rows than engine.max_num_seqs, {model.max_rows}: raise it, or "
                "lower method.batch_size"
            )
        blocks = sum(
            -(-(len(prompt) + group.max_tokens) // size)
            for prompt in prompts
            for size in model.block_sizes
        )
        if blocks > model.blocks:
            raise EngineError(
                f"a group does not fit the KV cache of {model.blocks} blocks: raise "
                "engine.kv_cache_gib (CPU) or engine.gpu_memory_utilization (GPU), or lower "
                "engine.max_model_len"
            )
        return _Running(group, blocks)

    def _fits(self, running: _Running, tokens: int) -> bool:
        """Return whether there are rows and KV cache for the whole group at full length, and room
        for `tokens` in the next step; by itself a group always fits (`_checked`)."""
        active = self.running.values()
        return not active or (
            sum(r.rows for r in active) + running.rows <= self.model.max_rows
            and sum(r.blocks for r in active) + running.blocks <= self.model.blocks
            and tokens <= self._step_tokens_left()
        )

    def _step_tokens_left(self) -> int:
        """Count the tokens that the next scheduling step has left beside the groups that run."""
        return self.model.max_step_tokens - sum(r.next_tokens for r in self.running.values())

    def _warm(self, running: _Running) -> None:
        params = self.model.sampling_params(
            max_tokens=1, temperature=0, detokenize=False, output_kind=self.model.final_only
        )
        self.warming = running
        self._submit(running, [params] * running.rows)

    def _start(self, running: _Running, next_tokens: int) -> None:
        running.attempt += 1
        running.next_tokens = next_tokens
        running.name = str(next(self.model.serial))
        self.running[running.name] = running
        self._submit(running, self._row_params(running))

    def _row_params(self, running: _Running) -> list[Any]:
        model, group = self.model, running.group
        eos = model.eos_ids
        params = []
        for row in range(running.rows):
            public = row == running.rows - 1
            ticket = {"group": running.name, "row": row, "size": running.rows, "eos": eos[0]}
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

    def _submit(self, running: _Running, params: list[Any]) -> None:
        running.requests, running.outputs, running.public_ids = [], {}, []
        for ids, row_params in zip(running.group.prompts, params, strict=True):
            request = f"row-{next(self.model.serial)}"
            running.requests.append(request)
            self.by_request[request] = running
            self.model.add(request, ids, row_params)

    # Results

    def _take(self, output: Any) -> None:
        running = self.by_request[output.request_id]
        ids = list(output.outputs[0].token_ids)
        if running.group.stop and output.request_id == running.requests[-1]:
            running.public_ids.extend(ids)
            ids = running.public_ids
        if output.finished:
            del self.by_request[output.request_id]
            running.outputs[output.request_id] = ids
            if running is self.warming and len(running.outputs) == running.rows:
                self.warming = None
                self.ready.append(running)

    def _is_finished(self, running: _Running) -> bool:
        """Return whether vLLM ended all rows, or a stop string ended the text."""
        group, ids = running.group, running.public_ids
        stopped = ids and self.model.ended(group.public_prompt, ids, group.stop) is not None
        return bool(stopped) or len(running.outputs) == running.rows

    def _finish(self, running: _Running) -> Lockstep:
        reports = self.model.ask_workers("lockstep_finish", running.name)
        report = reports[0]
        left = [request for request in running.requests if request in self.by_request]
        self.model.abort(left)
        for request in left:
            del self.by_request[request]
        del self.running[running.name]
        if report["fate"] == "broken" and not report["tokens"] and running.attempt < _MAX_ATTEMPTS:
            self.cold.appendleft(running)
            return
        self._check(running, reports)
        following = yield self._result(running, report)
        if following is not None:
            self.ready.append(self._checked(following))

    def _check(self, running: _Running, reports: list[dict[str, Any]]) -> None:
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
        if any(ids != drawn for ids in running.outputs.values()):
            raise EngineError("the rows of a group were not given the same tokens")

    def _result(self, running: _Running, report: dict[str, Any]) -> LockstepResult:
        group, tokens = running.group, report["tokens"]
        text: str | None = None
        reason: FinishReason = "exhausted"
        if report["fate"] == "running":
            text = self.model.ended(group.public_prompt, tokens, group.stop)
            reason = "length" if text is None else "stop"
        if text is None:
            text = self.model.text(group.public_prompt, tokens)
        return LockstepResult(group.group_id, text, tuple(tokens), reason, report["state"])
