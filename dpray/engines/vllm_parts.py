"""A lockstep group that is larger than vLLM's KV cache is decoded in parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dpray.engines.base import (
    EngineError,
    FinishReason,
    LockstepGroup,
    LockstepResult,
    selector_error,
)
from dpray.engines.vllm_model import VllmModel


class PartedRun:
    """Decodes one group, with the engine to itself.

    For every token each row is a request for one token, after the prompt and the tokens so far, and
    vLLM runs as many side by side as it holds. The selector adds up the rows' clipped logits, so
    the token is the one that the whole group would have drawn. vLLM recomputes the rows that its
    cache has dropped. The order of the rows alternates, because the prefix cache keeps those that
    were used last.
    """

    def __init__(self, model: VllmModel, group: LockstepGroup) -> None:
        self.model, self.group = model, group
        self.name = f"parts-{next(model.serial)}"
        self.waiting: set[str] = set()

    def result(self) -> LockstepResult:
        try:
            return self._decode()
        except BaseException:
            self.model.abort(self.waiting)
            raise

    def _decode(self) -> LockstepResult:
        model, group = self.model, self.group
        rows = len(group.private_prompts)
        start = (self.name, rows, group.public_prompt, group.selector)
        has_public_row = model.ask_workers("parts_start", *start)[0]["public_row"]
        tokens: list[int] = []
        reason: FinishReason = "length"
        text: str | None = None
        order = range(rows)
        while text is None and len(tokens) < group.max_tokens:
            if has_public_row:
                self._compute([rows], tokens)
            self._compute(order, tokens)
            order = order[::-1]
            if self._drawn(tokens) is None:
                reason = "exhausted"
                break
            text = model.ended(group.public_prompt, tokens, group.stop)
        if text is None:
            text = model.text(group.public_prompt, tokens)
        else:
            reason = "stop"
        state = model.ask_workers("parts_finish", self.name)[0]
        return LockstepResult(group.group_id, text, tuple(tokens), reason, state)

    def _compute(self, rows: Iterable[int], tokens: list[int]) -> None:
        """Send the rows through the model, with the tokens so far."""
        for row in rows:
            request = f"row-{next(self.model.serial)}"
            self.waiting.add(request)
            self.model.add(request, [*self.group.prompts[row], *tokens], self._params(row))
        while self.waiting:
            finished = {output.request_id for output in self.model.step() if output.finished}
            self.waiting -= finished
            if self.waiting and self.model.is_idle:
                raise EngineError("vLLM lost a row of a group; nothing is drawn without it")

    def _params(self, row: int) -> Any:
        return self.model.sampling_params(
            max_tokens=1,
            temperature=0,
            detokenize=False,
            output_kind=self.model.final_only,
            extra_args={"dpray": {"group": self.name, "row": row}},
        )

    def _drawn(self, tokens: list[int]) -> int | None:
        """Draw the next token, append it to `tokens` and return it; None if the selector drew
        none."""
        reports = self.model.ask_workers("parts_draw", self.name)
        report = reports[0]
        if report["fate"] == "failed":
            raise selector_error(report["error"])
        if report["fate"] == "broken":
            raise EngineError(
                f"a group was not whole at token {len(tokens)}: nothing was drawn from it"
            )
        if any(other != report for other in reports):
            raise EngineError("the ranks of a tensor-parallel model drew different tokens")
        if report["fate"] == "exhausted":
            return None
        tokens.append(report["tokens"][-1])
        return tokens[-1]
