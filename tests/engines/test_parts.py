"""Groups larger than the engine: decoded in parts, with the tokens that they have when whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, get_args

import jsonschema
import pytest

from dpray.config.sections import EngineConfig
from dpray.engines.base import Engine, EngineError, LockstepGroup, SelectorFailed, SelectorSpec
from dpray.engines.schema.schema import Form, Schema
from dpray.engines.transformers import TransformersEngine
from dpray.mechanisms.randomness import new_key
from dpray.methods.private_prediction.logits import Clip
from dpray.methods.private_prediction.mechanism import PrivateToken
from tests.engines.schemas import FILM
from tests.engines.test_conformance import MAX_TOKENS, decode, make_group

GIB = 0.001
"""1,024 tokens of the tests' model, half of what the largest groups below want."""

LARGE = 25
"""The rows of these."""

TOKEN = PrivateToken(
    20, 10_000, "dclip", 3.0, 1.0, 1.0, candidates="top_k_plus", k=40, threshold=0.9, noise=0.05
)


@pytest.fixture(scope="module")
def small_transformers(model_folder: str) -> Iterator[Engine]:
    config = EngineConfig(model=model_folder, kv_cache_gib=GIB)
    engine = TransformersEngine(config, device="cpu", max_rows=5)
    yield engine
    engine.close()


# To close an engine ends what all engines of the process share: like the other one, this is closed
# at the end.
@pytest.fixture(scope="session")
def small_vllm(vllm_installed: None, model_folder: str) -> Iterator[Engine]:
    from dpray.engines.vllm.engine import VllmEngine

    config = EngineConfig(model=model_folder, max_num_seqs=24, kv_cache_gib=GIB)
    engine = VllmEngine(config, private_rows=True, public_alone=True)
    yield engine
    engine.close()


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
def small(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(f"small_{request.param}")
    return found


@pytest.fixture
def group(transformers_engine: Engine) -> Callable[..., LockstepGroup]:
    """Makes a group whose selector is that of private prediction, with a key of its own."""

    def make(name: str, rows: int, mechanism: PrivateToken = TOKEN, **more: Any) -> LockstepGroup:
        arguments = {"mechanism": asdict(mechanism), "key": new_key()} | more
        spec = SelectorSpec("tests.engines.token_selectors:Adder", arguments)
        return replace(make_group(transformers_engine, name, rows), selector=spec)

    return make


@pytest.mark.parametrize("clip", get_args(Clip))
def test_the_tokens_are_those_of_the_whole_group(
    small: Engine, transformers_engine: Engine, group: Callable[..., LockstepGroup], clip: Any
) -> None:
    """From the same coins, with the sparse vector on: every position has each row once."""
    groups = [group(f"{clip} {rows}", rows, replace(TOKEN, clip=clip)) for rows in (3, LARGE, 7)]
    whole, in_parts = decode(transformers_engine, *groups), decode(small, *groups)
    for each in groups:
        one, other = whole[each.group_id], in_parts[each.group_id]
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        rows = len(each.private_prompts)
        assert [sum(parts) for parts in other.state["parts"]] == [rows] * len(other.token_ids)
        assert one.state | {"parts": 0} == other.state | {"parts": 0}
        fits = rows < small.rows_at_once(max(map(len, each.prompts)) + MAX_TOKENS)
        assert fits == all(parts == [rows] for parts in other.state["parts"])
    assert not fits or rows == 7


def test_a_schema_gives_the_same_text_in_parts(
    small: Engine,
    transformers_engine: Engine,
    group: Callable[..., LockstepGroup],
    model_folder: str,
) -> None:
    schema = Schema("json", json.dumps(FILM))
    form = Form(schema, model_folder).mask_arguments(60)
    mechanism = replace(TOKEN, private_tokens=9)
    groups = [
        replace(group(f"film {rows}", rows, mechanism, form=form), max_tokens=60)
        for rows in (0, LARGE)
    ]
    whole, in_parts = decode(transformers_engine, *groups), decode(small, *groups)
    for each in groups:
        one, other = whole[each.group_id], in_parts[each.group_id]
        assert (one.token_ids, one.text, one.finish_reason) == (
            other.token_ids, other.text, "stop",
        )  # fmt: skip
        jsonschema.validate(json.loads(one.text), FILM)
        assert one.state["t"] <= 9 and one.state["public_tokens"] > 20


def test_the_next_texts_of_a_large_group(
    small: Engine, transformers_engine: Engine, group: Callable[..., LockstepGroup]
) -> None:
    following = {name: group(name, LARGE, t=5) for name in "ab"}

    def texts(engine: Engine) -> list[tuple[str, tuple[int, ...]]]:
        found = []

        def next_one(result: Any) -> LockstepGroup | None:
            found.append((result.group_id, result.token_ids))
            names = [name for name, _ in found]
            return following[result.group_id] if names.count(result.group_id) == 1 else None

        list(engine.decode_lockstep(iter(first), next_one))
        return sorted(found)

    first = [group("a", LARGE), group("small", 2), group("b", LARGE)]
    following["small"] = group("small", 2, t=5)
    assert texts(small) == texts(transformers_engine)


def test_a_text_without_private_rows_follows_one_of_a_large_group(
    small: Engine, transformers_engine: Engine, group: Callable[..., LockstepGroup]
) -> None:
    """Such as an ending: no size of the batch before it, which is secret, makes it fail."""

    def texts(engine: Engine, large: LockstepGroup, ending: LockstepGroup) -> Any:
        following = iter([ending])
        found = list(engine.decode_lockstep([large], lambda x: next(following, None)))
        return [(x.token_ids, x.text, x.state | {"parts": 0}) for x in found]

    large, none = group("a", LARGE), group("a", 0)
    ending = replace(none, public_prompt=(*large.public_prompt, *large.public_prompt[:5]))
    found = texts(small, large, ending)
    assert len(found) == 2 and found == texts(transformers_engine, large, ending)


def test_a_stop_string_the_end_and_an_exhausted_selector_end_a_large_group(
    small: Engine, transformers_engine: Engine, group: Callable[..., LockstepGroup]
) -> None:
    plain = group("plain", LARGE)
    text = decode(transformers_engine, plain)["plain"].text
    stopping = replace(plain, stop=(text[4:7],))
    spent = group("spent", LARGE, replace(TOKEN, private_tokens=3, threshold=None, noise=None))
    for each, reason in ((stopping, "stop"), (spent, "exhausted")):
        one = decode(transformers_engine, each)[each.group_id]
        other = decode(small, each)[each.group_id]
        assert (one.text, one.token_ids) == (other.text, other.token_ids)
        assert one.finish_reason == other.finish_reason == reason


def test_what_fails_while_rows_are_added_is_never_drawn_again(
    small: Engine, group: Callable[..., LockstepGroup]
) -> None:
    with pytest.raises(SelectorFailed) as raised:
        decode(small, group("a", LARGE, fail_at=3))
    assert "42" not in str(raised.value)
    decode(small, group("b", LARGE))


@pytest.mark.slow
def test_rows_that_cannot_enter_in_one_step_come_in_parts(
    vllm_engine: Any,
    transformers_engine: Engine,
    group: Callable[..., LockstepGroup],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They fit the KV cache, and `engine.max_num_batched_tokens` is small: no size is refused."""
    core = vllm_engine.llm.llm_engine.engine_core.engine_core.scheduler
    monkeypatch.setattr(core, "max_num_scheduled_tokens", 200)
    monkeypatch.setattr(vllm_engine, "max_step_tokens", 200)
    groups = [group("few", 3), group("middling", 20)]
    whole, found = decode(transformers_engine, *groups), decode(vllm_engine, *groups)
    for name in ("few", "middling"):
        assert found[name].token_ids == whole[name].token_ids
    assert max(map(len, found["middling"].state["parts"])) > 1
    assert all(len(parts) == 1 for parts in found["few"].state["parts"])


@pytest.mark.slow
def test_a_row_that_vllm_loses_ends_the_group(
    small_vllm: Any, group: Callable[..., LockstepGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = small_vllm.step, []

    def lossy() -> Any:
        steps.append(1)
        if len(steps) == 9:
            core = small_vllm.llm.llm_engine.engine_core.engine_core
            lost = [*core.scheduler.running, *core.scheduler.waiting][0].request_id
            small_vllm.llm.llm_engine.abort_request([lost], internal=True)
        return step()

    monkeypatch.setattr(small_vllm, "step", lossy)
    with pytest.raises(EngineError, match="lost a row of a group"):
        decode(small_vllm, group("a", LARGE))
    monkeypatch.undo()
    decode(small_vllm, group("b", LARGE))
    worker = small_vllm.llm.llm_engine.model_executor.driver_worker.worker
    assert worker._lockstep_processor().parted == {}


@pytest.mark.slow
def test_a_row_that_comes_twice_counts_once_and_without_one_nothing_is_drawn(
    small_vllm: Any, group: Callable[..., LockstepGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = small_vllm.add

    def confused(request: str, ids: Any, params: Any) -> None:
        ticket = params.extra_args["dpray"]
        if ticket["row"] == 2:
            ticket["row"] = 1
        add(request, ids, params)

    monkeypatch.setattr(small_vllm, "add", confused)
    with pytest.raises(EngineError, match="not whole at token 0: nothing was drawn"):
        decode(small_vllm, group("a", LARGE))
