"""Groups side by side, in passes of fixed shape: the tokens of groups one at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.clip.modeling_clip import CLIPVisionModel

from benchmarks.bench_selection import Counted
from dpray.config.sections import EngineConfig
from dpray.engines.base import Engine, LockstepGroup, LockstepResult, SelectorSpec
from dpray.engines.finite_rows import highest
from dpray.engines.fixed_pass import Compute, FixedPass, as_graph
from dpray.engines.lanes import lanes_for
from dpray.engines.one_token import ONE_TOKEN, attend
from dpray.engines.passes import load_model
from dpray.engines.transformers import TransformersEngine
from dpray.mechanisms.randomness import named_key
from dpray.methods.private_prediction.mechanism import PrivateToken
from tests.engines.test_conformance import MAX_TOKENS, decode, make_group

ROWS, TOKENS, LANES = 9, 64, 3


class Recorded:
    """Stands in for CUDA graphs: repeats a computation, and sees to it that its tensors stay."""

    def __init__(self) -> None:
        self.passes: dict[FixedPass, set[tuple[int, ...]]] = {}
        self.replays: dict[FixedPass, int] = {}

    def __call__(self, compute: Compute) -> Compute:
        one: Any = compute.__self__  # type: ignore[attr-defined]
        compute()
        self.passes[one], self.replays[one] = {addresses(one)}, 0

        def replay() -> None:
            compute()
            self.passes[one].add(addresses(one))
            self.replays[one] += 1

        return replay


def addresses(one: FixedPass) -> tuple[int, ...]:
    kept = [each for pair in one.cache.kept for each in pair]
    return tuple(each.data_ptr() for each in (one.inputs, one.logits, *kept))


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture(scope="module")
def lanes_engine(model_folder: str, recorded: Recorded) -> Iterator[Any]:
    config = EngineConfig(model=model_folder)
    engine = TransformersEngine(
        config, device="cpu", max_rows=5, group=(ROWS, TOKENS), lanes=LANES, capture=recorded
    )
    yield engine
    engine.close()


def drawn(engine: Engine, name: str, rows: int, **more: Any) -> LockstepGroup:
    """Return a group whose tokens private prediction draws, with coins of its own."""
    token = PrivateToken(
        8, 10_000, "dclip", 3.0, 1.0, 1.0, candidates="top_k_plus", k=40, threshold=0.9, noise=0.05
    )
    arguments = {"mechanism": asdict(token), "key": named_key("ab" * 32, name)}
    spec = SelectorSpec("tests.engines.token_selectors:Adder", arguments)
    return replace(make_group(engine, name, rows, **more), selector=spec)


def test_the_tokens_are_those_of_one_group_at_a_time(
    lanes_engine: Any, transformers_engine: Any
) -> None:
    """Also of one with more rows than a lane, of longer ones, and of a longer public one."""
    groups = [drawn(transformers_engine, f"{n}", n, words=(1, 20)) for n in (3, 8, 1, 20, 8, 0, 5)]
    groups.insert(1, drawn(transformers_engine, "long", 4, words=(40, 80)))
    public = make_group(transformers_engine, "", 1, words=(60, 60)).private_prompts[0]
    groups.insert(2, replace(drawn(transformers_engine, "none", 0), public_prompt=public))
    groups.append(drawn(transformers_engine, "short", 6, max_tokens=2))
    groups = [replace(each, group_id=f"{i}") for i, each in enumerate(groups)]
    assert not lanes_engine._lanes.holds(groups[2])
    alone, beside = decode(transformers_engine, *groups), decode(lanes_engine, *groups)
    for each in groups:
        one, other = alone[each.group_id], beside[each.group_id]
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert one.state | {"parts": 0} == other.state | {"parts": 0}
    parts = {name: found.state["parts"][0] for name, found in beside.items()}
    assert parts["1"] == [4, 0] and parts["2"] == [0] and parts["3"] == [8]
    assert parts["5"] == [5, 5, 2, 8] and parts["7"] == [0]


def test_the_texts_that_follow(lanes_engine: Any, transformers_engine: Any) -> None:
    """Lanes take texts of the same rows and of others; a longer public row has no lane."""

    def texts(engine: Engine) -> dict[str, list[tuple[int, ...]]]:
        found: dict[str, list[tuple[int, ...]]] = {}

        def following(result: LockstepResult) -> LockstepGroup | None:
            name = result.group_id
            found.setdefault(name, []).append(result.token_ids)
            number = len(found[name])
            rows = first[name] if number == 1 else drawn(engine, f"{name}!", 3, words=(1, 10))
            if name == "1" and number == 3:
                public = make_group(engine, "", 1, words=(60, 60)).private_prompts[0]
                rows = replace(rows, public_prompt=public)
            key = drawn(engine, f"{name} {number}", 0).selector
            return replace(rows, group_id=name, selector=key) if number < 4 else None

        first = {str(n): drawn(engine, str(n), n) for n in (7, 1, 11, 3)}
        list(engine.decode_lockstep(first.values(), following))
        return found

    assert texts(lanes_engine) == texts(transformers_engine)


def test_a_pass_repeats_one_computation_on_tensors_that_stay(
    lanes_engine: Any, recorded: Recorded
) -> None:
    """Whatever private rows there are: a CUDA graph has the shapes and addresses of its capture."""
    lanes = lanes_engine._lanes
    for sizes in ((0, 0, 0), (8, 1, 5), (3, 0, 20)):
        before = dict(recorded.replays)
        decode(lanes_engine, *(drawn(lanes_engine, f"{i}", n) for i, n in enumerate(sizes)))
        made = {one: recorded.replays[one] - before[one] for one in before}
        assert made[lanes.private] == made[lanes.public] == MAX_TOKENS
    assert {len(seen) for seen in recorded.passes.values()} == {1}
    assert lanes.private.inputs.shape == (3, 3 * (ROWS - 1))
    assert lanes.public.inputs.shape == (3, 3)


def public_bits(engine: Engine, name: str, *groups: LockstepGroup) -> list[str]:
    script = [100 + i for i in range(MAX_TOKENS)]
    keeper = SelectorSpec("tests.engines.token_selectors:PublicKeeper", {"script": script})
    found = decode(engine, *(replace(each, selector=keeper) for each in groups))[name]
    digests: list[str] = found.state["digests"]
    return digests


def test_neither_private_rows_nor_lanes_change_a_bit_of_public_logits(lanes_engine: Any) -> None:
    def group(name: str, rows: int, **more: Any) -> LockstepGroup:
        return make_group(lanes_engine, name, rows, **more)

    alone = public_bits(lanes_engine, "a", group("a", 0))
    assert len(set(alone)) == MAX_TOKENS
    for rows, words in ((1, (3, 30)), (8, (3, 30)), (8, (1, 2)), (20, (20, 40))):
        assert public_bits(lanes_engine, "a", group("a", rows, words=words)) == alone
    others = [group(f"{n}", n, max_tokens=n) for n in (3, 8, 1, 5)]
    for place in range(5):
        beside = [*others[:place], group("a", 4), *others[place:]]
        assert public_bits(lanes_engine, "a", *beside) == alone


@pytest.mark.parametrize("moved_by", ["nothing", "place", "others", "long others", "no graph"])
def test_public_rows_share_a_pass_only_if_no_bit_depends_on_it(
    moved_by: str, model_folder: str
) -> None:
    """By its place, by the others or their lengths; and in a graph, where no number is a shape."""
    capture = (lambda each: each) if moved_by == "no graph" else Recorded()
    model = load_model(model_folder, "float32", torch.device("cpu"))
    forward = model.forward

    def moving(**inputs: Any) -> Any:
        found, mask = forward(**inputs), inputs["attention_mask"]
        if mask.ndim == 4 and len(mask) > 1:
            lengths = mask.sum((1, 2, 3))
            one_bit = 2.0**-20 * found.logits[0].abs().max()
            if moved_by == "place":
                found.logits[-1] += one_bit
            elif moved_by == "others":
                found.logits += one_bit * (lengths[0] < lengths[1:]).any()
            elif moved_by == "long others":
                found.logits[lengths < 60] += one_bit * (lengths.max() > 60)
        return found

    model.forward = moving
    lanes = lanes_for(model, LANES, 3, TOKENS, capture)
    assert lanes is not None
    assert lanes.public.inputs.shape[1] == (LANES if moved_by == "nothing" else 1)


SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
    "sliding_window": None, "initializer_range": 0.15,
}  # fmt: skip


def test_public_rows_of_a_mixture_of_experts_share_no_pass() -> None:
    """A grouped product runs in a graph: the rows that an expert gets are numbers on the device."""
    torch.manual_seed(0)
    config = MixtralConfig(**SMALL, num_local_experts=4)
    lanes = lanes_for(MixtralForCausalLM(config).eval(), LANES, 3, TOKENS, Recorded())
    assert lanes is not None and lanes.public.inputs.shape[1] == 1


def test_no_row_that_is_tried_exceeds_the_positions_of_the_model() -> None:
    """A GPU that is asked for an embedding that there is not computes nothing any more."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=2, n_positions=60)
    lanes = lanes_for(GPT2LMHeadModel(config).eval(), LANES, 3, TOKENS, Recorded())
    assert lanes is not None and lanes.public.inputs.shape[1] == LANES


@pytest.mark.parametrize("fault", ["none", "error", "other attention"])
def test_only_the_text_of_a_model_of_several_parts_attends_otherwise(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as there are lanes. What sees images may have no such attention."""
    monkeypatch.setattr(CLIPVisionModel, "_supports_sdpa", False)
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    torch.manual_seed(0)
    text = {"model_type": "mistral", **SMALL}
    config = LlavaConfig(text_config=text, vision_config=vision)  # type: ignore[arg-type]
    model: Any = LlavaForConditionalGeneration(config).eval()
    found = {"": "sdpa", "text_config": "sdpa", "vision_config": "eager"}
    if fault == "other attention":
        found["text_config"] = "eager"
        model.set_attn_implementation(found)

    def fails(compute: Compute) -> Compute:
        raise RuntimeError

    lanes = lanes_for(model, 2, 3, 64, fails if fault == "error" else lambda each: each)
    assert (lanes is None) == (fault != "none")
    if lanes is not None:
        found |= {"": ONE_TOKEN, "text_config": ONE_TOKEN}
    parts = (config if not key else getattr(config, key) for key in found)
    assert [part._attn_implementation for part in parts] == list(found.values())


@pytest.mark.parametrize("fault", [False, True])
def test_public_and_private_passes_wait_for_what_was_before_and_are_waited_for(
    fault: bool, lanes_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On streams of their own; also if a pass fails half-way."""
    events: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            events.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        events.append(f"on {stream.name}")
        yield

    def step(name: str) -> Any:
        def stepped(places: object) -> None:
            events.append(name)
            if fault and name == "public":
                raise RuntimeError("no memory")

        return stepped

    lanes = copy.copy(lanes_engine._lanes)
    lanes._beside = Stream("side")
    lanes.private, lanes.public = (
        SimpleNamespace(tokens={}, positions={}, step=step(name)) for name in ("private", "public")
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    with pytest.raises(RuntimeError, match="no memory") if fault else nullcontext():
        lanes.step({})
    passes = ["private", "on side", "public"]
    assert events == ["side waits for main", *passes, "main waits for side"]


def test_heads_that_share_keys_attend_without_copies_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 6, 1, 8)
    key, value = torch.randn(2, 3, 2, 40, 8)
    mask = torch.rand(3, 1, 1, 40) < 0.5
    module: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    for other in (None, torch.rand(3, 6, 1, 40) < 0.5):  # none, and one of each head's own
        given = (module, query, key, value, other)
        assert torch.equal(attend(*given)[0], sdpa_attention_forward(*given)[0])
    bias = torch.randn(1, 6, 1, 40)  # of each head's own, as of relative positions
    given = (module, query, key, value, mask)
    with_bias = [each(*given, position_bias=bias)[0] for each in (attend, sdpa_attention_forward)]
    assert torch.equal(*with_bias)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    attended: list[Any] = []

    def note(*given: Any, **options: Any) -> torch.Tensor:
        attended.extend(given[1:])
        return scaled_dot_product_attention(*given, **options)

    monkeypatch.setattr("dpray.engines.one_token.scaled_dot_product_attention", note)
    found, _ = attend(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, expected)
    assert attended[0] is key and attended[1] is value


@torch.inference_mode()
def fill(cache: torch.Tensor) -> None:
    cache.fill_(torch.nan)


def test_nothing_of_a_row_is_left_for_the_next_one(lanes_engine: Any) -> None:
    """Not a NaN, which a masked column would pass on."""
    group = drawn(lanes_engine, "a", 5)
    first = decode(lanes_engine, group)["a"].token_ids
    again = iter([group])
    lanes = lanes_engine._lanes
    for one in (lanes.private, lanes.public):
        for each in (kept for pair in one.cache.kept for kept in pair):
            fill(each)
    lanes._prompts.clear()
    assert decode(lanes_engine, group)["a"].token_ids == first

    def following(result: LockstepResult) -> LockstepGroup | None:
        for pair in lanes.private.cache.kept:
            for each in pair:
                fill(each[:5, :, 60:])  # as after a token that the model overflows at
        return next(again, None)

    texts = list(lanes_engine.decode_lockstep([group], following))
    assert [text.token_ids for text in texts] == [first, first]


def test_no_pass_waits_for_the_device(lanes_engine: Any) -> None:
    """Tensors of torch's device "meta" have no numbers: what needs one fails there."""
    model = copy.deepcopy(lanes_engine._model).to("meta")
    layers = [SimpleNamespace(keys=each.to("meta"), values=each.to("meta"))
              for each, _ in lanes_engine._lanes.private.cache.kept]  # fmt: skip
    mask = torch.ones(1, 1, device="meta")
    like: Any = SimpleNamespace(cache=SimpleNamespace(layers=layers), mask=mask)
    for places, width in ((24, 24), (3, 1)):
        with torch.inference_mode(), Counted() as counted:
            one = FixedPass(model, like, places, width, 64, lambda compute: compute)
            one.step([0])
            highest(one.logits)
        assert counted.waits == 0 < counted.operations


def test_lanes_are_forecast_by_public_numbers(model_folder: str) -> None:
    """Their caches and logits are within three quarters of the room, and taken from it."""
    section = EngineConfig(model=model_folder, kv_cache_gib=0.004)
    options: dict[str, Any] = {"device": "cpu", "group": (9, 60), "capture": lambda each: each}
    whole = TransformersEngine(section, **options)
    engine = TransformersEngine(section, lanes=16, **options)
    lanes = engine._lanes
    assert whole._lanes is None and lanes is not None
    kept = [
        each for one in (lanes.private, lanes.public) for pair in one.cache.kept for each in pair
    ]
    taken, room = sum(each.nbytes for each in kept), whole._cache_bytes
    assert lanes.columns == 64 and 1 < lanes.count < 16
    assert taken == lanes.count * 9 * 64 * engine._bytes_per_token
    assert taken <= 0.75 * room < taken + 9 * 64 * engine._bytes_per_token
    assert engine._cache_bytes == room - taken
    assert engine.rows_at_once(60) == 9 and engine.rows_at_once(65) < whole.rows_at_once(65)
    assert TransformersEngine(section, lanes=16, device="cpu", group=(80, 60))._lanes is None


def test_prompts_have_the_room_next_to_the_lanes(model_folder: str) -> None:
    """However long the private ones are: a pass over all rows of a lane could need more memory."""
    section = EngineConfig(model=model_folder, kv_cache_gib=0.004)
    engine = TransformersEngine(
        section, device="cpu", group=(40, 64), lanes=16, capture=lambda each: each
    )
    assert engine._lanes is not None
    sizes: list[tuple[int, ...]] = []

    def note(model: Any, given: Any, named: dict[str, Any]) -> None:
        sizes.append(named["input_ids"].shape)

    engine._model.register_forward_pre_hook(note, with_kwargs=True)
    decode(engine, make_group(engine, "a", 39, words=(5, 15)))
    of_prompts = [rows * columns for rows, columns in sizes if columns > 1]
    assert len(of_prompts) > 2
    assert max(of_prompts) * engine._bytes_per_token <= engine._cache_bytes


@pytest.mark.parametrize("fault", ["none", "window", "mask", "positions", "attention", "error"])
def test_a_model_that_lanes_would_compute_otherwise_has_none(fault: str, tmp_path: Path) -> None:
    config = MistralConfig(**SMALL | {"sliding_window": 4 if fault == "window" else None})
    torch.manual_seed(0)
    model: Any = MistralForCausalLM(config).eval()
    forward = model.forward

    def faulty(**inputs: Any) -> Any:
        if inputs["input_ids"].shape[1] == 1 and inputs["attention_mask"].ndim == 4:
            if fault == "mask":
                inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
            elif fault == "positions":
                inputs["position_ids"] = inputs["position_ids"] * 0
            elif fault == "error":
                raise ValueError("a mask of two dimensions is wanted")
        return forward(**inputs)

    model.forward = faulty
    if fault == "attention":
        model.set_attn_implementation("eager")
    found = lanes_for(model, 2, 3, 64, lambda each: each)
    assert (found is not None) == (fault == "none")
    attention = {"none": ONE_TOKEN, "attention": "eager"}.get(fault, "sdpa")
    assert config._attn_implementation == attention


@pytest.mark.parametrize("waits", [False, True])
def test_a_computation_is_captured_after_it_was_warmed_up(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stream of its own, as torch's notes on CUDA graphs say, and not if it would wait."""
    events: list[str] = []

    class Device:
        mode = 0

        def wait_stream(self, stream: object) -> None:
            events.append("wait")

        @contextmanager
        def entered(self, name: str) -> Iterator[None]:
            events.append(name)
            yield
            events.append(f"{name} ends")

        def set_mode(self, mode: Any) -> None:
            self.mode = mode

        def replay(self) -> None:
            events.append("replay")

    def compute() -> None:
        if device.mode == "error" and waits:
            raise RuntimeError("called a synchronizing CUDA operation")
        events.append(f"compute {device.mode}")

    device = Device()
    for name, fake in {
        "Stream": lambda: device, "current_stream": lambda: device, "CUDAGraph": lambda: device,
        "stream": lambda one: one.entered("side"),
        "graph": lambda one, stream: one.entered("capture"),
        "get_sync_debug_mode": lambda: device.mode, "set_sync_debug_mode": device.set_mode,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    repeated = as_graph(compute)
    assert device.mode == 0
    if waits:
        assert repeated is compute and "capture" not in events
        return
    warm = ["wait", "side", *["compute error"] * 3, "side ends", "wait"]
    assert events == [*warm, "capture", "compute 0", "capture ends"]
    repeated()
    assert events[-1] == "replay"
