"""The tests of every engine with logits; they run on vLLM and on transformers."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dpray.config.sections import EngineConfig
from dpray.engines.base import (
    Completion,
    Engine,
    EngineError,
    LockstepGroup,
    LockstepResult,
    Prompt,
    Sampling,
    SelectorFailed,
    SelectorSpec,
)
from dpray.engines.schema.schema import Schema
from dpray.engines.transformers import TransformersEngine
from dpray.mechanisms.randomness import named_key
from dpray.methods.private_prediction.algorithm import Batch, PrivatePrediction
from dpray.methods.private_prediction.mechanism import PrivateToken
from tests.engines.schemas import FILM
from tests.engines.tiny_model import sentence

MAX_TOKENS = 12


def make_group(
    engine: Engine,
    group_id: str,
    rows: int,
    *,
    max_tokens: int = MAX_TOKENS,
    stop: tuple[str, ...] = (),
    words: tuple[int, int] = (3, 30),
    seed: int = 0,
    **selector: Any,
) -> LockstepGroup:
    rng = random.Random(f"{group_id}-{rows}")
    private = tuple(
        engine.encode(Prompt(sentence(rng, rng.randint(*words)), "Text:")) for _ in range(rows)
    )
    public = engine.encode(Prompt("a text about anything", "Text:"))
    spec = SelectorSpec("tests.engines.token_selectors:MeanSampler", {"seed": seed, **selector})
    return LockstepGroup(group_id, private, public, spec, max_tokens, stop)


def decode(engine: Engine, *groups: LockstepGroup) -> dict[str, LockstepResult]:
    results: dict[str, LockstepResult] = {}
    for result in engine.decode_lockstep(groups):
        assert result.group_id not in results
        results[result.group_id] = result
    assert results.keys() == {group.group_id for group in groups}
    return results


@pytest.mark.parametrize("rows", [7, 0])
def test_selectors_are_called_once_for_every_position(engine: Engine, rows: int) -> None:
    result = decode(engine, make_group(engine, "a", rows))["a"]
    assert result.finish_reason == "length" and result.text
    assert len(result.token_ids) == result.state["calls"] == MAX_TOKENS
    assert result.state["rows"] == [rows] * MAX_TOKENS
    assert result.state["dtypes"] == ["torch.float32"]


def test_rows_come_in_the_order_of_the_prompts(engine: Engine) -> None:
    group = make_group(engine, "order", 6)
    forward = decode(engine, group)["order"].state["first_row"][0]
    spec = group.selector
    backward = LockstepGroup(
        "order", group.private_prompts[::-1], group.public_prompt, spec, MAX_TOKENS
    )
    assert abs(decode(engine, backward)["order"].state["first_row"][0] - forward) > 1e-3


def test_private_rows_change_no_bit_of_the_public_logits(engine: Engine) -> None:
    """Adding one row, or many long ones, may not move a token into the candidates or out."""
    script = [100 + i for i in range(MAX_TOKENS)]
    public = engine.encode(Prompt("a text about anything", "Text:"))
    keeper = SelectorSpec("tests.engines.token_selectors:PublicKeeper", {"script": script})
    states = []
    for rows, words in [(0, (3, 30)), (6, (3, 30)), (7, (3, 30)), (19, (3, 3)), (12, (40, 60))]:
        private = make_group(engine, f"beside-{rows}", rows, words=words).private_prompts
        group = LockstepGroup("a", private, public, keeper, MAX_TOKENS)
        states.append(decode(engine, group)["a"].state)
    assert len(states[0]["digests"]) == MAX_TOKENS
    assert all(state == states[0] for state in states[1:])


def test_no_shape_of_a_public_pass_depends_on_private_rows(transformers_engine: Any) -> None:
    """Every public row goes through by itself: a kernel is chosen by the shape of its pass, which
    is its rows, its new tokens, and the keys that these look at."""
    seen: list[tuple[int, ...]] = []

    def note(model: Any, args: Any, inputs: dict[str, Any]) -> None:
        seen.append((*inputs["input_ids"].shape, inputs["attention_mask"].shape[1]))

    hook = transformers_engine._model.register_forward_pre_hook(note, with_kwargs=True)
    public = make_group(transformers_engine, "a", 0)
    length = len(public.public_prompt)
    alone = [(1, length, length), *((1, 1, length + i) for i in range(1, MAX_TOKENS))]
    for rows, words in [(0, (3, 30)), (4, (3, 30)), (4, (40, 60)), (12, (3, 3))]:
        seen.clear()
        private = make_group(transformers_engine, "a", rows, words=words).private_prompts
        decode(transformers_engine, replace(public, private_prompts=private))
        # At most 5 rows go through at a time, here always more than one.
        assert [shape for shape in seen if shape[0] == 1] == alone
        assert sum(shape[0] > 1 for shape in seen) == -(-rows // 5) * MAX_TOKENS
    hook.remove()


@pytest.mark.slow
def test_public_logits_are_those_of_a_pass_by_itself(
    vllm_engine: Engine, transformers_engine: Engine
) -> None:
    """Both engines give the same bits, because the same pass computes them."""
    keeper = SelectorSpec(
        "tests.engines.token_selectors:PublicKeeper", {"script": [7] * MAX_TOKENS}
    )
    found = []
    for engine in (vllm_engine, transformers_engine):
        group = replace(make_group(engine, "a", 5), selector=keeper)
        found.append(decode(engine, group)["a"].state["digests"])
    assert len(set(found[0])) == MAX_TOKENS
    assert found[0] == found[1]


def test_an_exhausted_selector_stops_the_text(engine: Engine) -> None:
    results = decode(
        engine, make_group(engine, "a", 5, limit=4), make_group(engine, "none", 5, limit=0)
    )
    assert results["a"].finish_reason == results["none"].finish_reason == "exhausted"
    assert len(results["a"].token_ids) == 4
    assert (results["none"].token_ids, results["none"].text) == ((), "")


def test_eos_ends_the_text_and_is_not_shown(engine: Engine) -> None:
    result = decode(engine, make_group(engine, "a", 5, script=[100, 101, 2]))["a"]
    assert result.finish_reason == "stop"
    assert result.token_ids == (100, 101, 2)
    assert "</s>" not in result.text
    assert result.text


@pytest.mark.parametrize("stop", ["and fev", "fever"], ids=["in the midst", "in the last token"])
def test_a_stop_string_ends_the_text_before_it(engine: Engine, stop: str) -> None:
    script = list(engine.encode(Prompt("", "cough and fever"))[3:])
    asked = {"script": script, "stop": (stop, "zzz"), "max_tokens": len(script)}
    result = decode(engine, make_group(engine, "a", 5, **asked))["a"]
    assert result.finish_reason == "stop" and stop not in result.text
    assert result.state["calls"] == len(result.token_ids) <= len(script)


def test_groups_of_different_sizes_side_by_side_with_their_next_texts(engine: Engine) -> None:
    sizes = {"a": 3, "b": 11, "c": 0, "d": 19, "e": 1}
    results: list[LockstepResult] = []
    left = dict.fromkeys(sizes, 3)

    def following(result: LockstepResult) -> LockstepGroup | None:
        results.append(result)
        left[result.group_id] -= 1
        text = len(results)
        limit = 2 + text % 7  # texts of different lengths, so that the groups get out of step
        group_id = result.group_id
        if not left[group_id]:
            return None
        return make_group(engine, group_id, sizes[group_id], limit=limit, seed=text)

    groups = (make_group(engine, name, size, limit=4 + size % 5) for name, size in sizes.items())
    list(engine.decode_lockstep(groups, following))
    assert set(left.values()) == {0}
    assert len(results) == 15
    for result in results:
        assert set(result.state["rows"]) == {sizes[result.group_id]}
        assert result.state["calls"] == len(result.token_ids)


def test_the_next_text_may_have_other_prompts(engine: Engine) -> None:
    """Those of a document's next section, which are in no cache, and those of an ending, which has
    no private rows."""
    base = "the patient has a cough and a fever and a rash. "
    sizes = {"a": 4, "b": 9, "c": 0, "d": 19}

    def rows(name: str, section: int) -> int:
        return sizes[name] if section < 2 else 0

    def group(name: str, section: int) -> LockstepGroup:
        made = make_group(engine, name, rows(name, section), limit=3 + section, seed=section)
        longer = engine.encode(Prompt("", base * (1 + 3 * section)))[:-1]
        private = tuple((*longer, *prompt[-9:]) for prompt in made.private_prompts)
        return replace(made, private_prompts=private, public_prompt=(*longer, *made.public_prompt))

    found: dict[str, list[LockstepResult]] = {name: [] for name in sizes}

    def following(result: LockstepResult) -> LockstepGroup | None:
        results = found[result.group_id]
        results.append(result)
        return group(result.group_id, len(results)) if len(results) < 3 else None

    list(engine.decode_lockstep((group(name, 0) for name in sizes), following))
    for name, results in found.items():
        for section, result in enumerate(results):
            assert set(result.state["rows"]) == {rows(name, section)}
            again = decode(engine, group(name, section))[name]
            first, other = (each.state["first_row"][:1] for each in (result, again))
            assert first == pytest.approx(other, abs=1e-3)
        assert len(results) == 3


def test_the_same_text_again_from_the_cache(engine: Engine) -> None:
    results: list[LockstepResult] = []
    group = make_group(engine, "a", 9)

    def following(result: LockstepResult) -> LockstepGroup | None:
        results.append(result)
        return group if len(results) < 3 else None

    list(engine.decode_lockstep([group], following))
    assert len(results) == 3
    assert results[0].token_ids == results[1].token_ids == results[2].token_ids
    for other in results[1:]:
        assert other.state["first_row"] == pytest.approx(results[0].state["first_row"], abs=1e-4)


def test_a_failing_selector_is_an_engine_error_without_its_message(engine: Engine) -> None:
    with pytest.raises(SelectorFailed, match="ArithmeticError") as caught:
        decode(engine, make_group(engine, "a", 5, fail_at=3))
    assert "42" not in str(caught.value)
    assert len(decode(engine, make_group(engine, "b", 5))["b"].token_ids) == MAX_TOKENS


def test_a_caller_that_goes_away_leaves_the_engine_usable(engine: Engine) -> None:
    groups = [make_group(engine, "a", 5, limit=2), make_group(engine, "b", 5)]
    with closing(engine.decode_lockstep(groups)) as texts:
        assert next(texts).group_id == "a"
    assert len(decode(engine, make_group(engine, "c", 5))["c"].token_ids) == MAX_TOKENS


def test_a_prompt_longer_than_the_context_is_refused(engine: Engine) -> None:
    with pytest.raises(EngineError, match=r"context of 256.*engine\.max_model_len"):
        decode(engine, make_group(engine, "a", 2, max_tokens=250))
    with pytest.raises(EngineError, match="context of 256"):
        engine.generate([Prompt("hello")], [Sampling(max_tokens=256)])


def test_generate(engine: Engine) -> None:
    prompts = [Prompt(sentence(random.Random(i), 2 + i % 9)) for i in range(13)]
    finished: dict[int, Completion] = {}

    def on_completion(index: int, completion: Completion) -> None:
        assert index not in finished
        finished[index] = completion

    completions = engine.generate(prompts, [Sampling(max_tokens=6)] * len(prompts), on_completion)
    assert len(completions) == 13
    assert [finished[i] for i in range(13)] == completions
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.prompt_tokens == len(engine.encode(prompt))
        assert 1 <= completion.completion_tokens <= 6
    again = engine.generate(prompts, [Sampling(max_tokens=6)] * len(prompts))
    assert [c.text for c in again] != [c.text for c in completions], "the seed is a constant"
    assert engine.generate([], []) == []


def test_generate_greedily_and_with_a_stop_string(engine: Engine) -> None:
    prompts = [Prompt(sentence(random.Random(i), 5)) for i in range(6)]
    greedy = [Sampling(max_tokens=10, temperature=0)] * len(prompts)
    texts = [c.text for c in engine.generate(prompts, greedy)]
    assert texts == [c.text for c in engine.generate(prompts, greedy)]
    stop = texts[0][3:5]
    stopped = engine.generate(
        prompts, [Sampling(max_tokens=10, temperature=0, stop=(stop,))] * len(prompts)
    )
    assert stopped[0].text == texts[0].partition(stop)[0]


def test_a_model_does_not_say_how_its_tokens_are_drawn(
    engine: Engine, model_folder: str, tmp_path: Path
) -> None:
    """Such as by a penalty for words that come again, which many models' files have."""
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    own = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "num_beams": 2}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2} | own))
    other = TransformersEngine(EngineConfig(model=str(folder)), device="cpu")
    prompts = [Prompt(sentence(random.Random(i), 5)) for i in range(3)]
    greedy = [Sampling(max_tokens=20, temperature=0)] * len(prompts)
    assert other.generate(prompts, greedy) == engine.generate(prompts, greedy)


def test_generate_with_sampling_parameters_of_each_prompt(engine: Engine) -> None:
    prompts = [Prompt(sentence(random.Random(i), 2 + 5 * (i % 4))) for i in range(6)]
    greedy = [Sampling(max_tokens=1 + 2 * i, temperature=0) for i in range(6)]
    together = engine.generate(prompts, greedy)
    alone = [engine.generate([prompts[i]], [greedy[i]])[0] for i in range(6)]
    assert together == alone
    assert len({c.completion_tokens for c in together}) >= 3
    with pytest.raises(ValueError, match="shorter"):
        engine.generate(prompts, greedy[:2])


def test_short_and_long_prompts_that_fit_the_context_one_by_one(engine: Engine) -> None:
    """Neither may be computed beyond the context because it is generated beside the other."""
    long = Prompt(" ".join(["cough"] * 240))
    short = Prompt("hello")
    free = engine.context_length - len(engine.encode(long))
    assert 0 < free < 20
    samplings = [Sampling(max_tokens=free, temperature=0), Sampling(max_tokens=20, temperature=0)]
    together = engine.generate([long, short], samplings)
    assert together[0] == engine.generate([long], [samplings[0]])[0]
    assert together[1] == engine.generate([short], [samplings[1]])[0]


def test_an_error_in_on_completion_leaves_the_engine_usable(engine: Engine) -> None:
    def on_completion(index: int, completion: Completion) -> None:
        raise KeyError("caller")

    prompts = [Prompt("hello"), Prompt("cough")]
    with pytest.raises(KeyError):
        engine.generate(prompts, [Sampling(max_tokens=3)] * len(prompts), on_completion)
    assert len(engine.generate(prompts, [Sampling(max_tokens=3)] * len(prompts))) == 2


@pytest.mark.slow
def test_vllm_and_transformers_choose_the_same_tokens(
    vllm_engine: Engine, transformers_engine: Engine
) -> None:
    """Same logits (float32) and same noise, so the same tokens, whatever runs beside."""
    groups = [make_group(vllm_engine, str(i), n, seed=i) for i, n in enumerate([8, 0, 5, 19, 1])]
    ours, theirs = decode(vllm_engine, *groups), decode(transformers_engine, *groups)
    for name, result in ours.items():
        assert result.token_ids == theirs[name].token_ids
        assert result.text == theirs[name].text
        expected = pytest.approx(theirs[name].state["first_row"], abs=1e-4)
        assert result.state["first_row"] == expected
    prompts = [Prompt(sentence(random.Random(i), 3 + i)) for i in range(8)]
    greedy = [Sampling(max_tokens=10, temperature=0)] * len(prompts)
    assert vllm_engine.generate(prompts, greedy) == transformers_engine.generate(prompts, greedy)


def test_generated_texts_have_the_form_of_their_schema(engine: Engine) -> None:
    most = 60
    prompts = [Prompt("a film"), Prompt("another film of this year, please"), Prompt("")]
    sampling = Sampling(most, schema=Schema("json", json.dumps(FILM)), stop=('"',))
    plain = Sampling(6)
    samplings = [sampling, sampling, plain]
    films = engine.generate(prompts, samplings)
    for film in films[:2]:
        jsonschema.validate(json.loads(film.text), FILM)
        assert film.completion_tokens <= most
    assert films[2].completion_tokens <= 6


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        (Schema("choices", '["red", "green"]'), {"red", "green"}),
        (Schema("regex", "(yes|no)!"), {"yes!", "no!"}),
        (Schema("lark", 'start: "x" "y"?'), {"x", "xy"}),
    ],
)
def test_generated_texts_of_other_schemas(engine: Engine, schema: Schema, texts: set[str]) -> None:
    found = engine.generate([Prompt("which?")] * 4, [Sampling(8, schema=schema)] * 4)
    assert {each.text for each in found} <= texts


def test_texts_are_ended_alike_by_every_engine_next_to_any_batches(
    engine: Engine, transformers_engine: Engine
) -> None:
    """An ending is decoded next to the private rows of others, and after more rows of its own than
    the engine holds."""
    token = PrivateToken(8, 24, "dclip", 3.0, 1.0, 0.7, candidates="top_k_plus", k=40)
    method = PrivatePrediction(token, 4, 6, ("a",), longest_copy=3, end_tokens=12)
    groups = [make_group(transformers_engine, f"{n}", n) for n in (3, 0, 30, 1)]
    batches = [
        Batch(x.group_id, x.private_prompts, x.public_prompt, named_key("ab" * 32, x.group_id))
        for x in groups
    ]

    def texts(engine: Engine, *batches: Batch) -> dict[str, list[Any]]:
        return {
            state.S.batch_id: [(x.text, x.token_ids, x.finish_reason) for x in state.X]
            for state in method.decode(engine, batches)
        }

    alone = [texts(transformers_engine, batch) for batch in batches]
    expected = {name: found for each in alone for name, found in each.items()}
    assert texts(engine, *batches) == expected
    ended = [x for found in expected.values() for x in found if len(x[1]) > 4]
    assert ended and all(reason == "stop" for _, _, reason in ended)
