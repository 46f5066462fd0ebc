"""Tests of vLLM's second model runner alone, where one step is under way when a text ends.

`test_second_runner.py` runs these tests in a process of their own, with `interpreted` as a plugin.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from dpray.engines.base import Engine, EngineError, LockstepResult, Prompt, SelectorSpec
from dpray.engines.vllm.lockstep import LockstepProcessor
from dpray.engines.vllm.second_runner import SecondRunnerProcessor
from dpray.methods.private_prediction.mechanism import SELECTOR, PrivateToken
from tests.engines.test_conformance import MAX_TOKENS, decode, make_group
from tests.engines.test_vllm import draws, processor, scheduler

__all__ = ["draws"]

KEY = "5" * 64


def runner(engine: Any) -> Any:
    return engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner


def test_the_runner_is_the_second_and_a_step_is_under_way_when_a_token_is_seen(
    vllm_engine: Any,
) -> None:
    assert type(runner(vllm_engine)).__mro__[1].__module__ == "vllm.v1.worker.gpu.model_runner"
    assert isinstance(processor(vllm_engine), SecondRunnerProcessor)
    assert vllm_engine.llm.llm_engine.vllm_config.max_concurrent_batches == 2


@pytest.mark.parametrize(
    "selector", [{}, {"script": [100, 101, 2]}, {"limit": 4}], ids=["length", "eos", "exhausted"]
)
def test_nothing_is_drawn_after_an_end_that_the_processor_sees(
    vllm_engine: Any, draws: list[int], selector: dict[str, Any]
) -> None:
    result = decode(vllm_engine, make_group(vllm_engine, "a", 5, **selector))["a"]
    assert len(draws) == len(result.token_ids) + (result.finish_reason == "exhausted")
    assert result.state["calls"] == len(result.token_ids)


@pytest.mark.parametrize("then", [None, "fail_at", "limit"], ids=["draws", "fails", "exhausted"])
def test_what_is_selected_after_a_stop_string_leaves_no_trace(
    vllm_engine: Any, draws: list[int], then: str | None
) -> None:
    script = list(vllm_engine.encode(Prompt("", "cough and fever"))[3:])
    public = make_group(vllm_engine, "a", 5).public_prompt
    length = next(n for n in range(1, 99) if "and f" in vllm_engine.text(public, script[:n]))
    after = {"fail_at": {"fail_at": length + 1}, "limit": {"limit": length}}.get(then or "", {})
    asked = {"script": [*script[:length], 300, 301], "stop": ("and f",), "max_tokens": length + 2}
    result = decode(vllm_engine, make_group(vllm_engine, "a", 5, **asked, **after))["a"]
    assert result.finish_reason == "stop"
    assert list(result.token_ids) == script[:length]
    assert len(draws) == length + 1, "one step more was selected for"
    assert result.state["calls"] == len(result.state["rows"]) == length, "and is not counted"


def texts_of_a_batch(engine: Engine, stop: tuple[str, ...]) -> list[LockstepResult]:
    """Return three texts, each of which goes on from the state of the one before."""
    token = PrivateToken(
        5, 40, "dclip", 3.0, 1.0, 1.0, candidates="top_k_plus", k=40, threshold=0.4, noise=0.05
    )

    def spec(number: int, **state: Any) -> SelectorSpec:
        arguments = {"mechanism": asdict(token), "key": f"{number}{KEY[1:]}"}
        return SelectorSpec(SELECTOR, arguments | state)

    group = make_group(engine, "a", 5, stop=stop, max_tokens=20)
    found: list[LockstepResult] = []

    def following(result: LockstepResult) -> Any:
        found.append(result)
        state = {name: result.state[name] for name in ("t", "noisy_threshold")}
        if len(found) == 3:
            return None
        return replace(group, selector=spec(len(found), **state))

    assert list(engine.decode_lockstep([replace(group, selector=spec(0))], following)) == found
    return found


def test_a_batch_has_the_texts_counts_and_coins_that_it_has_without_a_step_ahead(
    vllm_engine: Any, transformers_engine: Any, draws: list[int]
) -> None:
    whole = texts_of_a_batch(transformers_engine, ())
    stop = tuple(result.text[len(result.text) // 2 :][:2] for result in whole)
    expected = texts_of_a_batch(transformers_engine, stop)
    assert [result.finish_reason for result in expected] == ["stop"] * 3
    assert texts_of_a_batch(vllm_engine, stop) == expected
    assert len(draws) == sum(len(result.token_ids) for result in expected) + 3


def test_a_row_that_was_given_another_token_is_seen_on_the_device(
    vllm_engine: Any, monkeypatch: pytest.MonkeyPatch, draws: list[int]
) -> None:
    """In the next step, whose draw is thrown away; or, after the last token, at the end."""
    force = LockstepProcessor.force

    def leaking(self: LockstepProcessor, logits: Any) -> Any:
        forced = force(self, logits)
        if self._present and len(self._present[0].tokens) == leaks_at:
            row = self._present[0].indices[0]
            forced[row] = 0.0
            forced[row, 99] = 1.0
        return forced

    monkeypatch.setattr(LockstepProcessor, "force", leaking)
    for leaks_at in (3, MAX_TOKENS):
        draws.clear()
        with pytest.raises(EngineError, match=f"not whole at token {leaks_at}: nothing was drawn"):
            decode(vllm_engine, make_group(vllm_engine, "a", 5))
        assert len(draws) == min(leaks_at + 1, MAX_TOKENS)


def test_a_preempted_row_ends_the_group(
    vllm_engine: Any, draws: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token of the step under way is not in its history when it comes back."""
    step, steps, core = vllm_engine.step, [], scheduler(vllm_engine)

    def preempting() -> Any:
        steps.append(1)
        if len(steps) == 5:
            core._preempt_request(core.running.pop(), 0.0)
        return step()

    monkeypatch.setattr(vllm_engine, "step", preempting)
    with pytest.raises(EngineError, match="not whole at token 4"):
        decode(vllm_engine, make_group(vllm_engine, "a", 5))
    assert draws == [5] * 4
