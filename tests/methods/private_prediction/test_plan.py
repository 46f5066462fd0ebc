"""Plans of private prediction: what they refuse before a charge, and what they say of rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpray.config.config import Config, load_config, parse_config
from dpray.engines.text import TextCodec
from dpray.methods.private_prediction import plan as plan_module
from dpray.methods.private_prediction.prompts import load_template
from dpray.methods.private_prediction.resolved import PrivatePredictionPlan
from dpray.registry import make_plan
from dpray.types import InputError

ROOT = Path(__file__).resolve().parents[3]
ELSEWHERE = {"kind": "vllm", "model": "owner/name"}
CONTEXT = 256


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]]) -> Callable[..., Config]:
    return lambda **changes: parse_config(settings(**changes))


@pytest.fixture
def plan(config: Callable[..., Config]) -> Callable[..., PrivatePredictionPlan]:
    return lambda **changes: make_plan(config(**changes))


def test_the_model_computes_in_float32_unless_told_otherwise(
    plan: Callable[..., PrivatePredictionPlan],
) -> None:
    made = plan(method__max_tokens=1)
    assert made.config.engine.dtype == "float32"
    summary = made.summary()
    assert summary["method"]["model_dtype"] == "float32" and summary["warnings"] == []
    assert "float32" in made.lines()["model"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_warned_of(plan: Callable[..., PrivatePredictionPlan], dtype: str) -> None:
    made = plan(engine__dtype=dtype, method__max_tokens=1)
    assert made.config.engine.dtype == dtype and dtype in made.lines()["model"]
    (warning,) = made.summary()["warnings"]
    assert warning.startswith(f"engine.dtype {dtype}: ")


def test_a_clip_bound_that_exact_sums_have_no_room_for_is_refused(
    config: Callable[..., Config],
) -> None:
    assert config(method__clip_bound=1000.0).method.clip_bound == 1000.0
    with pytest.raises(InputError, match=r"^method\.clip_bound"):
        config(method__clip_bound=1001.0)


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        # By Bernstein's inequality, L = ln 1e9 = 20.72: 401 + 4 L / 3 + 258.9
        ({"data__public_size": 8000, "method__batch_size": 400}, 688),
        # Copies apart: 401 + L / 3 + 128.9
        ({"data__public_size": 8000, "method__batch_size": 400, "method__max_copies": 1}, 537),
        # Two labels of 149 records, a batch each: 150 + 4 L / 3 + 159.6
        ({"data__public_size": 298, "method__batch_size": 100}, 338),
        # 101 + 4 L / 3 + 131.7
        (
            {
                "data__public_size": 8000,
                "method__batch_size": 100,
                "data__unit": "who",
                "data__max_records_per_unit": 4,
            },
            261,
        ),
    ],
)
def test_batches_that_vllm_cannot_hold_are_refused(
    plan: Callable[..., PrivatePredictionPlan], changes: dict[str, Any], needed: int
) -> None:
    with pytest.raises(InputError, match=rf"engine\.max_num_seqs: .* {needed} are needed"):
        plan(engine=ELSEWHERE | {"max_num_seqs": needed - 1}, **changes)
    assert plan(engine=ELSEWHERE | {"max_num_seqs": needed}, **changes).cost.epsilon <= 50
    assert plan(engine__max_num_seqs=1, **changes).cost.epsilon <= 50, "transformers needs none"


@pytest.mark.parametrize("wide", ["private", "public"])
def test_texts_that_do_not_fit_after_the_prompt_are_refused(
    plan: Callable[..., PrivatePredictionPlan], tmp_path: Path, model_folder: str, wide: str
) -> None:
    """Only the second label's prompt is the longest: every label counts."""
    template = {"user": "{{ text }} {{ label }}", "placeholder": "x"}
    if wide == "private":
        template["user"] += "{% if label == 'b' and text == '' %} cough and fever{% endif %}"
    else:
        template["placeholder"] = "{% if label == 'b' %}cough and fever{% endif %}"
    path = tmp_path / "template.yaml"
    path.write_text(yaml.safe_dump(template))
    made = load_template(str(path))
    prompt = made.public_prompt("b") if wide == "public" else made.private_prompt("", "b")
    prompt_tokens = len(TextCodec(model_folder, None).encode(prompt))
    room = CONTEXT - prompt_tokens
    fits = {"method__template": str(path), "privacy__epsilon": 1e4}
    assert plan(method__max_tokens=room, **fits).cost.epsilon <= 1e4
    with pytest.raises(InputError, match=rf"method\.max_tokens: {room + 1} and the "):
        plan(method__max_tokens=room + 1, **fits)
    with pytest.raises(InputError, match=rf"method\.max_tokens: {room} .* {CONTEXT - 1} tokens$"):
        plan(method__max_tokens=room, engine__max_model_len=CONTEXT - 1, **fits)


def test_of_a_long_context_vllm_takes_a_part_where_none_is_given(
    plan: Callable[..., PrivatePredictionPlan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_module, "DEFAULT_CONTEXT", 100)
    changes = {"method__max_tokens": 90, "privacy__epsilon": 1e4}
    assert plan(**changes).settings.max_tokens == 90
    assert plan(engine__kind="vllm", engine__max_model_len=CONTEXT, **changes)
    with pytest.raises(InputError, match=r"method\.max_tokens: 90 .* 100 tokens$"):
        plan(engine__kind="vllm", **changes)


def test_a_model_that_is_not_here_is_not_measured(
    plan: Callable[..., PrivatePredictionPlan],
) -> None:
    assert plan(engine=ELSEWHERE, method__max_tokens=1000).config.engine.model == "owner/name"


@pytest.mark.parametrize(("most", "records", "texts"), [(5, 5, 5), (12, 12, 12), (13, 13, 24)])
def test_max_records_is_the_most(
    plan: Callable[..., PrivatePredictionPlan], most: int, records: int, texts: int
) -> None:
    made = plan(method__max_records=most, method__max_tokens=1, privacy__epsilon=200.0)
    assert made.batches.num_batches == 12
    assert made.expected_records == made.summary()["records"] == records
    assert made.summary()["llm_calls"] == texts * (5 + 1)
    assert made.lines()["records"] == f"at most {most}"


SHIPPED = sorted(
    str(path.relative_to(ROOT))
    for folder in ("jobs", "experiments", "dpray/demo")
    for path in (ROOT / folder).glob("*.yaml")
    if "name: private_prediction" in path.read_text()
)


@pytest.mark.parametrize("path", SHIPPED)
def test_every_shipped_configuration_fits_in_float32(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models are named from the repository's root, or, the demo's, from its own folder."""
    monkeypatch.chdir(ROOT / "dpray/demo" if path.startswith("dpray/demo") else ROOT)
    made = make_plan(load_config(ROOT / path))
    assert made.config.engine.dtype == "float32"


def poisson(settings: Callable[..., dict[str, Any]], **changes: Any) -> PrivatePredictionPlan:
    made = {"method__batches": "poisson", "data__public_size": 4000, "method__batch_size": 64}
    plan = make_plan(parse_config(settings(**(made | changes))))
    assert isinstance(plan, PrivatePredictionPlan)
    return plan


def test_max_records_is_a_maximum_and_texts_are_what_is_asked_for(
    settings: Callable[..., dict[str, Any]],
) -> None:
    few = poisson(settings, method__max_records=24)
    assert few.texts == few.expected_records == 24
    # A short text leaves its tokens to no other one: a Poisson batch has a fixed number of texts.
    pairs = poisson(settings, method__texts=24, method__texts_per_batch=2)
    assert pairs.lines()["records"] == few.lines()["records"] == "at most 24"
    most = poisson(settings, method__max_records=10**8, privacy__epsilon=0.5)
    assert most.texts is not None and 24 < most.texts < 10**8
    assert 0.49 < most.cost.epsilon <= 0.5
    with pytest.raises(InputError, match=r"^method\.texts: 100000000 texts cost eps"):
        poisson(settings, method__texts=10**8, privacy__epsilon=0.5)


def test_auto_takes_what_affords_more_texts_and_says_both_numbers(
    settings: Callable[..., dict[str, Any]],
) -> None:
    many = poisson(settings, method__batches="auto", privacy__epsilon=1.0)
    assert many.settings.batches == "poisson"
    assert many.texts_affordable["poisson"] > 5 * many.texts_affordable["disjoint"] > 0
    assert "from disjoint batches" in many.lines()["affordable texts"]
    assert many.summary()["affordable_texts"] == dict(many.texts_affordable)


MEASURED = {"data__label_proportions": "measured", "privacy__epsilon_labels": 0.5}


def test_measured_labels_afford_nearly_as_many_texts_as_known_ones(
    settings: Callable[..., dict[str, Any]],
) -> None:
    """The measured shares decide the number of texts, but not the charge."""
    common = {"method__max_records": None, "privacy__epsilon": 3.0, "method__clip_bound": 5.0}
    less = common | {"privacy__epsilon": 2.5}
    known, with_less = poisson(settings, **common), poisson(settings, **less)
    made = poisson(settings, method__batches="auto", **common, **MEASURED)
    assert made.settings.batches == "poisson" and made.texts_affordable["disjoint"] > 0
    assert 0.97 * 3.0 < made.cost.epsilon <= 3.0
    assert 0.8 * with_less.expected_texts < made.expected_texts < known.expected_texts
    rare = made.with_proportions({"a": 0.2, "b": 0.8})
    assert rare.dp_event == made.dp_event and rare.cost == made.cost
    assert rare.batches.num_batches < made.batches.num_batches <= made.most_batches
    assert rare.most_rows == made.most_rows
    rarest = made.allowances.allowances[-1]  # type: ignore[union-attr]
    # Noise of scale 2 takes 138 records off a count with probability 1e-30: half of 276.
    assert rarest.share == pytest.approx(2 * 2 * math.log(1e30) / 4000)
    assert any("rarer than 6.9%" in warning for warning in made.method_summary()["warnings"])


def test_few_texts_of_measured_labels_cost_less(settings: Callable[..., dict[str, Any]]) -> None:
    budget = {"privacy__epsilon": 3.0, "method__clip_bound": 5.0}
    few = poisson(settings, method__texts=3, **budget, **MEASURED)
    assert few.expected_texts == 3 and few.cost.epsilon < 2.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method__sparse_vector": {"threshold": 0.5, "noise": 0.2}}, r"^method\.sparse_vector: "),
        (
            {
                "data__label_proportions": "measured",
                "data__unit": "who",
                "data__max_records_per_unit": 2,
            },
            r"^method\.batches: poisson with data\.label_proportions measured is for one record",
        ),
        ({"privacy__epsilon": 1e-4}, r"^privacy\.epsilon: 0\.0001 does not pay for one Poisson"),
        ({"method__batches": "disjoint", "method__texts": 5}, r"^method\.texts: for Poisson"),
        (
            {"method__batches": "disjoint", "method__texts_per_batch": 2},
            r"^method\.texts_per_batch: for Poisson",
        ),
    ],
)
def test_what_a_kind_of_batches_cannot_do_is_refused(
    settings: Callable[..., dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        poisson(settings, **changes)


def test_a_gate_that_saves_nothing_is_warned_of(
    plan: Callable[..., PrivatePredictionPlan],
) -> None:
    gate = {"probability": 0.9}
    for changes, warned in (
        ({"batches": "poisson"}, True),
        ({"batches": "poisson", "private_tokens": 2}, False),
        ({"batches": "disjoint"}, False),
        ({"batches": "poisson", "public_gate": None}, False),
    ):
        asked = {"public_gate": gate, "max_records": 2} | changes
        made = plan(**{f"method__{key}": value for key, value in asked.items()})
        found = [w for w in made.summary()["warnings"] if w.startswith("method.public_gate")]
        assert len(found) == warned
