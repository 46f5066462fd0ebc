"""Which groups of a `decode_lockstep` call wait, warm vLLM's prefix cache, and run."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dpray.engines.base import (
    EngineError,
    FinishReason,
    LockstepGroup,
    LockstepResult,
    selector_error,
)

if TYPE_CHECKING:
    from dpray.engines.vllm import VllmEngine

_MAX_ATTEMPTS = 3


@dataclass
class _Running:
    """A group in the engine, under a name of its own for every attempt."""

    group: LockstepGroup
    blocks: int
    name: str = ""
    attempt: int = 0
    next_tokens: int = 0
    requests: list[str] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    public_ids: list[int] = field(default_factory=list)

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        return (*self.group.private_prompts, self.group.public_prompt)

    @property
    def rows(self) -> int:
        return len(self.group.private_prompts) + 1


class LockstepRun:
    """One call of `decode_lockstep`: which groups wait, warm the prefix cache, run.

    A group whose prompts may not fit one scheduling step first sends them through as ordinary
    requests of one token, which fills the prefix cache; then all its rows enter together. A group
    that entered in pieces all the same (a cached prompt was evicted) was refused by the processor
    before anything was drawn: it warms again, `_MAX_ATTEMPTS` times in all.
    """

    def __init__(
        self,
        engine: VllmEngine,
        source: Iterator[LockstepGroup],
        then: Callable[[LockstepResult], LockstepGroup | None],
    ) -> None:
        self.engine, self.source, self.then = engine, source, then
        # Its prompts are in the prefix cache, or fit one step as they are.
        self.ready: deque[_Running] = deque()
        self.cold: deque[_Running] = deque()
        self.warming: _Running | None = None
        self.running: dict[str, _Running] = {}
        self.by_request: dict[str, _Running] = {}

    def run(self) -> None:
        try:
            while self._admit():
                outputs = self.engine.step()
                for running in self.running.values():
                    running.next_tokens = running.rows
                for output in outputs:
                    self._take(output)
                finished = [r for r in self.running.values() if self._is_finished(r)]
                for running in finished:
                    self._finish(running)
                if self.by_request and not self.engine.core.has_unfinished_requests():
                    raise EngineError("vLLM lost a row of a group; nothing is drawn without it")
        except BaseException:
            with contextlib.suppress(Exception):
                self.engine.core.abort_request(list(self.by_request))
                self.engine.llm.collective_rpc("lockstep_clear")
            raise

    # Admission

    def _admit(self) -> bool:
        """Starts what fits now; whether anything is under way. Nothing starts while a group warms:
        its rows would wait behind the warming ones."""
        while self.warming is None:
            if self.ready:
                running = self.ready[0]
                uncached = running.rows * max(self.engine.block_sizes)
                if not self._fits(running, uncached):
                    break
                self._start(self.ready.popleft(), uncached)
            elif self._pull() and self._fits(self.cold[0], self.cold[0].rows):
                running = self.cold.popleft()
                tokens = sum(map(len, running.prompts))
                if running.attempt == 0 and tokens <= self._step_tokens_left():
                    self._start(running, tokens)
                else:
                    self._warm(running)
            else:
                break
        return bool(self.running or self.warming)

    def _pull(self) -> bool:
        """Whether `cold` holds a group; takes one from the source where it does not."""
        if not self.cold:
            group = next(self.source, None)
            if group is not None:
                self.cold.append(self._checked(group))
        return bool(self.cold)

    def _checked(self, group: LockstepGroup) -> _Running:
        """The group with the KV blocks it needs at full length; raises where it can never run."""
        engine = self.engine
        prompts = (*group.private_prompts, group.public_prompt)
        engine.codec.check_length(max(map(len, prompts)), group.max_tokens)
        if len(prompts) > engine.max_rows:
            raise EngineError(
                f"a group has more rows than engine.max_num_seqs, {engine.max_rows}: raise it, or "
                "lower method.batch_size"
            )
        blocks = sum(
            -(-(len(prompt) + group.max_tokens) // size)
            for prompt in prompts
            for size in engine.block_sizes
        )
        if blocks > engine.blocks:
            raise EngineError(
                f"a group does not fit the KV cache of {engine.blocks} blocks: raise "
                "engine.kv_cache_gib (CPU) or engine.gpu_memory_utilization (GPU), or lower "
                "engine.max_model_len"
            )
        return _Running(group, blocks)

    def _fits(self, running: _Running, tokens: int) -> bool:
        """Rows and KV cache for the whole group at full length, and `tokens` in the next step;
        alone a group always fits (`_checked`)."""
        active = self.running.values()
        return not active or (
            sum(r.rows for r in active) + running.rows <= self.engine.max_rows
            and sum(r.blocks for r in active) + running.blocks <= self.engine.blocks
            and tokens <= self._step_tokens_left()
        )

    def _step_tokens_left(self) -> int:
        """Room in the next scheduling step beside the groups that run."""
        return self.engine.max_step_tokens - sum(r.next_tokens for r in self.running.values())

    def _warm(self, running: _Running) -> None:
        params = self.engine.sampling_params(
            max_tokens=1, temperature=0, detokenize=False, output_kind=self.engine.final_only
        )
        self.warming = running
        self._submit(running, [params] * running.rows)

    def _start(self, running: _Running, next_tokens: int) -> None:
        running.attempt += 1
        running.next_tokens = next_tokens
        running.name = str(next(self.engine.serial))
        self.running[running.name] = running
        self._submit(running, self._row_params(running))

    def _row_params(self, running: _Running) -> list[Any]:
        engine, group = self.engine, running.group
        eos = engine.codec.eos_ids
        params = []
        for row in range(running.rows):
            public = row == running.rows - 1
            ticket = {"group": running.name, "row": row, "size": running.rows, "eos": eos[0]}
            if public:
                ticket["factory"] = group.selector.factory
                ticket["arguments"] = dict(group.selector.arguments)
            params.append(
                engine.sampling_params(
                    max_tokens=group.max_tokens,
                    temperature=0,
                    ignore_eos=True,
                    stop_token_ids=list(eos),
                    detokenize=False,
                    output_kind=engine.delta if public and group.stop else engine.final_only,
                    extra_args={"dpray": ticket},
                )
            )
        return params

    def _submit(self, running: _Running, params: list[Any]) -> None:
        running.requests, running.outputs, running.public_ids = [], {}, []
        for ids, row_params in zip(running.prompts, params, strict=True):
            request = f"row-{next(self.engine.serial)}"
            running.requests.append(request)
            self.by_request[request] = running
            self.engine.add(request, ids, row_params)

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
        """By vLLM, all rows at once, or by a stop string in the text."""
        group, ids = running.group, running.public_ids
        stopped = ids and self.engine.codec.ended(group.public_prompt, ids, group.stop) is not None
        return bool(stopped) or len(running.outputs) == running.rows

    def _finish(self, running: _Running) -> None:
        reports = self.engine.ask_workers("lockstep_finish", running.name)
        report = reports[0]
        left = [request for request in running.requests if request in self.by_request]
        self.engine.core.abort_request(left)
        for request in left:
            del self.by_request[request]
        del self.running[running.name]
        if report["fate"] == "broken" and not report["tokens"] and running.attempt < _MAX_ATTEMPTS:
            self.cold.appendleft(running)
            return
        self._check(running, reports)
        following = self.then(self._result(running, report))
        if following is not None:
            self.ready.append(self._checked(following))

    def _check(self, running: _Running, reports: list[dict[str, Any]]) -> None:
        report = reports[0]
        if report["fate"] == "failed":
            raise selector_error(report["error"])
        if report["fate"] == "broken":
            raise EngineError(
                f"a group was not whole at token {len(report['tokens'])}: nothing was drawn from "
                f"it; raise engine.max_num_batched_tokens (now {self.engine.max_step_tokens}) or "
                "engine.kv_cache_gib / engine.gpu_memory_utilization"
            )
        if any((r["tokens"], r["fate"]) != (report["tokens"], report["fate"]) for r in reports):
            raise EngineError("the ranks of a tensor-parallel model drew different tokens")
        drawn = report["tokens"]
        if report["fate"] == "exhausted":
            drawn = [*drawn, self.engine.codec.eos_ids[0]]
        if any(ids != drawn for ids in running.outputs.values()):
            raise EngineError("the rows of a group were not given the same tokens")

    def _result(self, running: _Running, report: dict[str, Any]) -> LockstepResult:
        group, tokens, codec = running.group, report["tokens"], self.engine.codec
        text: str | None = None
        reason: FinishReason = "exhausted"
        if report["fate"] == "running":
            text = codec.ended(group.public_prompt, tokens, group.stop)
            reason = "length" if text is None else "stop"
        if text is None:
            text = codec.text(group.public_prompt, tokens)
        return LockstepResult(group.group_id, text, tuple(tokens), reason, report["state"])
