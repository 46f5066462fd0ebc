"""Wholeness of groups in vLLM: what may never be sampled, and what has to be refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from dpray.config.sections import EngineConfig
from dpray.engines.base import DeviceLost, EngineError
from dpray.engines.kv_cache import GIB, choice_bytes
from dpray.engines.row_variation import PREFILLS, row_variation
from dpray.engines.vllm.engine import LockstepRun, VllmEngine
from dpray.engines.vllm.model import (
    INVARIANT_ATTENTION,
    invariant_attention,
    take_invariant_kernels,
)
from dpray.extras import Late
from dpray.mechanisms.randomness import named_key
from dpray.methods.private_prediction.mechanism import PrivateToken
from tests.engines.tensor_parallel import SIZES, tokens_of_two_ranks
from tests.engines.test_conformance import MAX_TOKENS, decode, make_group

if TYPE_CHECKING:
    from dpray.engines.vllm import lockstep
else:  # it imports vLLM, and each process of the suite imports this file
    lockstep = Late("dpray.engines.vllm.lockstep")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_installed")]


def processor(engine: Any) -> lockstep.LockstepProcessor:
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    found: lockstep.LockstepProcessor = worker._lockstep_processor()
    return found


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of private rows of every draw."""
    seen: list[int] = []
    original = lockstep.LockstepProcessor._select

    def counted(self: lockstep.LockstepProcessor, group: Any, *logits: Any) -> Any:
        seen.append(len(group.indices) - 1)
        return original(self, group, *logits)

    monkeypatch.setattr(lockstep.LockstepProcessor, "_select", counted)
    return seen


def scheduler(engine: Any) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


@pytest.mark.parametrize("lost", [[], [1]])
def test_rows_get_their_groups_token_wherever_they_are_in_the_batch(lost: list[int]) -> None:
    """vLLM moves rows into the places of others that have ended."""
    from dpray.engines.vllm.first_runner import FirstRunnerProcessor

    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False))
    sizes, V = {"a": 4, "b": 1, "c": 3}, 97
    rows = [(name, row) for name, size in sizes.items() for row in range(size)]
    logits = torch.randn(len(rows), V, generator=torch.Generator().manual_seed(1)) * 3
    token = PrivateToken(3, 9, "dclip", 2.0, 1.0, 1.0)

    def tokens(order: list[int]) -> dict[tuple[str, int], int]:
        made = FirstRunnerProcessor(config, torch.device("cpu"), False)
        made.unfinished_prefill = np.zeros(len(rows), dtype=bool)
        for index, place in enumerate(order):
            name, row = rows[place]
            ticket = {"group": name, "row": row, "size": sizes[name], "eos": 0}
            if row == sizes[name] - 1:
                spec = token.selector(named_key("5a" * 32, name))
                ticket |= {"factory": spec.factory, "arguments": spec.arguments}
                ticket |= {"prompt": [1], "stop": False}
            params = SimpleNamespace(extra_args={"dpray": ticket}, stop_token_ids=[], max_tokens=9)
            found = made._join(params, [])
            assert found is not None
            made._members[index] = found
        made._locate(made._members)
        forced = made.apply(logits[order].clone()).argmax(-1).tolist()
        return {rows[place]: token for place, token in zip(order, forced, strict=True)}

    expected = tokens([place for place in range(len(rows)) if place not in lost])
    assert len({expected["c", row] for row in range(3)}) == 1
    shuffled = [5, 0, 7, 3, 2, 4, 6, 1]
    assert tokens([place for place in shuffled if place not in lost]) == expected
    assert (expected["a", 0] == 0) == bool(lost)  # a group that is not whole is ended


def test_a_row_that_is_lost_on_the_way_in_is_never_sampled(
    vllm_engine: Any, draws: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    add, rows = vllm_engine.add, []

    def lossy(request: str, ids: Any, params: Any) -> None:
        ticket = params.extra_args["dpray"]
        if ticket["row"] == 2 and 2 not in rows:
            rows.append(2)
            ticket["row"] = 1  # row 2 is missing, row 1 is there twice
        else:
            rows.append(ticket["row"])
        add(request, ids, params)

    def warmed(run: LockstepRun, running: Any) -> None:
        run.ready.append(running)

    monkeypatch.setattr(LockstepRun, "_warm", warmed)
    monkeypatch.setattr(vllm_engine, "add", lossy)
    result = decode(vllm_engine, make_group(vllm_engine, "a", 5))["a"]
    assert rows == [*range(6)] * 2, "the group was refused, and came whole the second time"
    assert draws == [5] * MAX_TOKENS, "and only then drew"
    assert result.state["calls"] == MAX_TOKENS


@pytest.mark.parametrize("victim", [0, 5], ids=["private", "public"])
def test_a_row_lost_in_the_middle_ends_the_group(
    vllm_engine: Any, draws: list[int], monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    step, steps = vllm_engine.step, []

    def lossy() -> Any:
        steps.append(1)
        if len(steps) == 5:
            request = scheduler(vllm_engine).running[victim]
            vllm_engine.llm.llm_engine.abort_request([request.request_id], internal=True)
        return step()

    monkeypatch.setattr(vllm_engine, "step", lossy)
    with pytest.raises(EngineError, match="lost a row of a group"):
        decode(vllm_engine, make_group(vllm_engine, "a", 5))
    assert draws == [5] * 4


@pytest.mark.parametrize("returns", [True, False])
def test_a_preempted_row(
    vllm_engine: Any, draws: list[int], monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    """Back in the same step, with its history computed again, it is a row like the others; kept out
    for a step, it ends the group."""
    group = make_group(vllm_engine, "a", 5)
    undisturbed = decode(vllm_engine, group)["a"]
    step, steps, core = vllm_engine.step, [], scheduler(vllm_engine)

    def preempting() -> Any:
        steps.append(1)
        if len(steps) == 4:
            core._preempt_request(core.running.pop(), 0.0)
            if not returns:
                monkeypatch.setattr(core, "max_num_active_reqs", 5)
        return step()

    draws.clear()
    monkeypatch.setattr(vllm_engine, "step", preempting)
    if returns:
        assert decode(vllm_engine, group)["a"].token_ids == undisturbed.token_ids
    else:
        with pytest.raises(EngineError, match="not whole at token 3"):
            decode(vllm_engine, group)
        assert draws == [5] * 3


def test_prompts_over_several_steps_are_never_sampled(
    vllm_engine: Any, draws: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler takes less in a step than the engine believes: rows are prefilled in part, or
    enter one by one."""
    monkeypatch.setattr(scheduler(vllm_engine), "max_num_scheduled_tokens", 40)
    group = make_group(vllm_engine, "long", 9, words=(60, 60))
    with pytest.raises(EngineError, match=r"not whole at token 0.*max_num_batched_tokens"):
        decode(vllm_engine, group)
    assert draws == []
    monkeypatch.undo()


def test_a_row_prefilled_in_part_is_seen(
    vllm_engine: Any, draws: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are in the batch, but the last one's prompt is not through."""
    group = make_group(vllm_engine, "partial", 3, words=(8, 8))
    lengths = [len(p) for p in (*group.private_prompts, group.public_prompt)]
    # Nothing is cached: a fresh group id made these prompts. All but the last two tokens fit.
    monkeypatch.setattr(scheduler(vllm_engine), "max_num_scheduled_tokens", sum(lengths) - 2)
    seen: list[bool] = []
    original = lockstep.LockstepProcessor._is_whole

    def whole(self: lockstep.LockstepProcessor, one: Any) -> bool:
        all_here = one.complete
        seen.append(all_here and bool(self.unfinished_prefill[one.indices].any()))
        return original(self, one)

    monkeypatch.setattr(lockstep.LockstepProcessor, "_is_whole", whole)
    with pytest.raises(EngineError, match="not whole at token 0"):
        decode(vllm_engine, group)
    assert seen[0] and draws == []


def test_what_comes_from_the_prefix_cache_is_tested_and_moves_no_bit(
    vllm_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other records decide what the cache contains."""
    manager = scheduler(vllm_engine).kv_cache_manager
    look_up, cached = manager.get_computed_blocks, []

    def spied(request: Any) -> Any:
        found = look_up(request)
        cached.append(found[1])
        return found

    monkeypatch.setattr(manager, "get_computed_blocks", spied)
    vllm_engine.llm.reset_prefix_cache()
    assert row_variation(vllm_engine, 8) == 0.0
    assert cached[0] == 0 and max(cached) >= max(vllm_engine.block_sizes)


def test_a_start_decodes_a_long_row_while_prompts_are_computed(
    vllm_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention takes its tile from the longest query of a pass, and some have it change."""
    schedule, beside, rows = scheduler(vllm_engine).schedule, set(), set()

    def spied(*arguments: Any) -> Any:
        found = schedule(*arguments)
        queries = sorted(found.num_scheduled_tokens.values())
        rows.add(len(queries))
        if queries[:1] == [1]:
            beside.add(queries[-1])
        return found

    monkeypatch.setattr(scheduler(vllm_engine), "schedule", spied)
    vllm_engine.llm.reset_prefix_cache()  # other tests have computed these prompts
    row_variation(vllm_engine, 8)
    assert beside >= set(PREFILLS[1:-1])  # the model has 256 positions
    assert {1, 3, 9, 16} <= rows  # an empty batch, one with a prompt beside, one and eight groups


def test_a_large_group_warms_the_prefix_cache_first(
    vllm_engine: Any, draws: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 tokens a step: 12 prompts of about 120 tokens need several, yet enter together."""
    monkeypatch.setattr(scheduler(vllm_engine), "max_num_scheduled_tokens", 400)
    monkeypatch.setattr(vllm_engine, "max_step_tokens", 400)
    first, second = (make_group(vllm_engine, name, 11, words=(90, 100)) for name in ("x", "y"))
    assert sum(map(len, first.private_prompts)) > 1000
    results = decode(vllm_engine, first, second)
    assert draws == [11] * (2 * MAX_TOKENS)
    monkeypatch.undo()
    assert decode(vllm_engine, first)["x"].token_ids == results["x"].token_ids


def test_rows_with_other_tokens_are_an_error(
    vllm_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forced token does not reach one row: seen in the next step, nothing more is drawn."""
    original = lockstep.LockstepProcessor.force

    def leaking(self: lockstep.LockstepProcessor, logits: Any) -> Any:
        row = logits[0].clone()
        forced = original(self, logits)
        if self._present and self._present[0].tokens[-1:] != [int(row.argmax())]:
            forced[0] = row
        return forced

    monkeypatch.setattr(lockstep.LockstepProcessor, "force", leaking)
    with pytest.raises(EngineError, match=r"not whole at token [1-9]"):
        decode(vllm_engine, make_group(vllm_engine, "a", 5))
    with pytest.raises(EngineError, match=r"not whole at token [1-9]"):
        decode(vllm_engine, make_group(vllm_engine, "a", 5, max_tokens=1))


def test_groups_run_side_by_side(vllm_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    together: list[int] = []
    original = lockstep.LockstepProcessor.force

    def counting(self: lockstep.LockstepProcessor, logits: Any) -> Any:
        together.append(len({id(group) for group in self._present}))
        return original(self, logits)

    monkeypatch.setattr(lockstep.LockstepProcessor, "force", counting)
    pulled: list[str] = []

    def source() -> Iterator[Any]:
        for name in "abcdef":
            pulled.append(name)
            yield make_group(vllm_engine, name, 7)

    texts = vllm_engine.decode_lockstep(source())
    next(texts)
    assert len(pulled) == 4, "one more than run is pulled, not all"
    assert len(list(texts)) == 5
    assert max(together) == 3  # 8 rows each of 24


def test_a_split_model_without_invariant_kernels_cannot_cut_candidates(model_folder: str) -> None:
    with pytest.raises(EngineError, match=r"method\.candidates.*tensor_parallel_size"):
        VllmEngine(
            EngineConfig(model=model_folder, tensor_parallel_size=2),
            private_rows=True,
            public_alone=True,
        )


@pytest.mark.parametrize(
    ("cuda", "capability", "taken"), [(True, 90, True), (True, 75, False), (False, 90, False)]
)
def test_invariant_kernels_are_taken_where_the_device_has_them(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, capability: int, taken: bool
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")  # put back after the test
    platform = SimpleNamespace(
        is_cuda=lambda: cuda, has_device_capability=lambda least: capability >= least
    )
    vllm = SimpleNamespace(platforms=SimpleNamespace(current_platform=platform))
    assert take_invariant_kernels(vllm) is taken
    assert os.environ["VLLM_BATCH_INVARIANT"] == ("1" if taken else "0")


@dataclass
class Loads:
    """Stands in for an NVIDIA GPU with vLLM on it: what it was asked for, and what a rank says."""

    attention: str = "FLASH_ATTN 2"
    invariant: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def engine(
        self, model: str, dtype: Any = "bfloat16", rows: int = 512, **ways: bool
    ) -> VllmEngine:
        loads = self

        class OnGpu(VllmEngine):
            def _load(self, vllm: Any, model: str, block_size: int, options: Any) -> Any:
                loads.options = options
                rank = {"attention": [loads.attention], "invariant": loads.invariant}
                rank |= {"block_sizes": [16], "blocks": 100}
                return SimpleNamespace(collective_rpc=lambda *_, **__: [rank])

        return OnGpu(EngineConfig(model=model, dtype=dtype, max_num_seqs=rows), **ways)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch, vllm_installed: None) -> None:
    import vllm.platforms

    hopper = SimpleNamespace(
        is_cuda=lambda: True,
        is_cpu=lambda: False,
        has_device_capability=lambda least: True,
        get_device_total_memory=lambda: 80 * GIB,
    )
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")  # put back after the test
    monkeypatch.setattr(vllm.platforms, "current_platform", hopper)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("ways", "dtype", "taken"),
    [
        ({"private_rows": True, "public_alone": True}, "float32", True),
        ({"private_rows": True, "public_alone": False}, "float32", False),
        ({"private_rows": True, "public_alone": False}, "bfloat16", True),
        ({"private_rows": False, "public_alone": False}, "bfloat16", False),
    ],
)
def test_invariant_kernels_are_taken_only_where_a_bit_decides_or_rounding_would_be_refused(
    model_folder: str, ways: dict[str, bool], dtype: str, taken: bool
) -> None:
    loads = Loads(attention="FLASH_ATTN 2" if taken else "FLASH_ATTN 3", invariant=taken)
    engine = loads.engine(model_folder, dtype, **ways)
    assert os.environ["VLLM_BATCH_INVARIANT"] == str(int(taken))
    # This machine's vLLM has no FlashAttention.
    assert loads.options.get("attention_config") == ({"backend": "TRITON_ATTN"} if taken else None)
    assert engine.attention == [loads.attention] and engine.shares_public_pass


@pytest.mark.usefixtures("on_hopper")
def test_the_kv_cache_leaves_room_for_the_choice_of_tokens(model_folder: str) -> None:
    """vLLM fills what its own trial leaves of the GPU, and our choice of tokens is not in it."""
    loads = Loads(attention="TRITON_ATTN")
    engine = loads.engine(model_folder, private_rows=True, public_alone=True)
    kept = choice_bytes(engine.max_rows, engine.model_config.vocab_size)
    assert loads.options["gpu_memory_utilization"] == 0.9 - kept / (80 * GIB)
    loads.engine(model_folder, private_rows=False, public_alone=False)
    assert loads.options["gpu_memory_utilization"] == 0.9
    with pytest.raises(EngineError, match=r"^engine\.max_num_seqs: .* GiB, .*; lower it$"):
        loads.engine(model_folder, rows=10**8, private_rows=True, public_alone=True)


@pytest.mark.parametrize(("version", "taken"), [(2, "FLASH_ATTN 2"), (3, "TRITON_ATTN")])
def test_flashattention_2_is_asked_for_where_a_build_has_it(
    monkeypatch: pytest.MonkeyPatch, vllm_installed: None, version: int, taken: str
) -> None:
    """By keys that this vLLM knows: it would start with attention of its own choice otherwise."""
    from vllm.config import AttentionConfig

    build = SimpleNamespace(is_fa_version_supported=lambda asked: asked == version)
    package = "vllm.vllm_flash_attn"  # a build for CPUs refuses to import it
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(flash_attn_interface=build))
    monkeypatch.setitem(sys.modules, f"{package}.flash_attn_interface", build)
    asked: dict[str, Any] = invariant_attention()
    config = AttentionConfig(**asked)
    name = f"FLASH_ATTN {config.flash_attn_version}" if config.backend is None else asked["backend"]
    assert name == taken and taken in INVARIANT_ATTENTION


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("attention", ["FLASH_ATTN 3", "FLASHINFER"])
def test_attention_that_is_not_invariant_is_refused(model_folder: str, attention: str) -> None:
    ways = {"private_rows": True, "public_alone": True}
    for name in ("FLASH_ATTN 2", "TRITON_ATTN"):
        Loads(attention=name).engine(model_folder, **ways)
    with pytest.raises(EngineError, match=rf"attention by {attention} moves .* transformers$"):
        Loads(attention=attention).engine(model_folder, **ways)
    with pytest.raises(EngineError, match="begin a new process"):
        Loads(invariant=False).engine(model_folder, **ways)


def test_a_loaded_model_says_what_computes_its_attention(vllm_engine: Any) -> None:
    from dpray.engines.vllm.lockstep import attention_names, is_invariant

    assert vllm_engine.attention == ["CPU_ATTN"]
    assert not is_invariant()
    runner = vllm_engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    layers = runner.vllm_config.compilation_config.static_forward_context
    [impl] = {layer.impl for layer in list(layers.values())[:1]}
    impl.vllm_flash_attn_version = 3  # as FlashAttention's has it
    assert attention_names(runner.vllm_config) == ["CPU_ATTN", "CPU_ATTN 3"]
    del impl.vllm_flash_attn_version


def test_nothing_stays_behind_in_the_workers(vllm_engine: Any) -> None:
    decode(vllm_engine, make_group(vllm_engine, "a", 3), make_group(vllm_engine, "b", 3))
    assert processor(vllm_engine).groups == {}
    assert vllm_engine.is_idle


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers want a core each")
def test_two_ranks_draw_the_same_token(model_folder: str, transformers_engine: Any) -> None:
    """Every rank of the last stage builds the selector and draws; the engine compares what they
    drew. The first of two stages draws nothing, and has no token to report."""
    one_thread = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
    groups = [make_group(transformers_engine, str(i), size, seed=i) for i, size in enumerate(SIZES)]
    expected = decode(transformers_engine, *groups)
    for found, after_a_death in tokens_of_two_ranks(model_folder, (2, 1), (1, 2), **one_thread):
        assert found == {name: list(result.token_ids) for name, result in expected.items()}
        assert after_a_death == DeviceLost.__name__, "a worker that is dead may be repeated"
