"""Plans of private prediction: what they refuse before a charge, and what they say of rounding."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from dpray.config.config import Config, EngineConfig
from dpray.engines.kv_cache import choice_bytes
from dpray.engines.text import TextCodec
from dpray.engines.vllm.model import DEFAULT_CONTEXT, context_of
from dpray.methods.config import load_config, parse_config
from dpray.methods.private_prediction.plan import PrivatePredictionPlan
from dpray.methods.private_prediction.prompts import load_template
from dpray.methods.registry import make_plan
from dpray.types import InputError

Settings = Callable[..., dict[str, Any]]
Plans = Callable[..., PrivatePredictionPlan]
Configs = Callable[..., Config]

ROOT = Path(__file__).resolve().parents[3]
ELSEWHERE = {"kind": "vllm", "model": "owner/name"}
CONTEXT = 256


@pytest.fixture
def config(settings: Settings) -> Configs:
    return lambda **changes: parse_config(settings(**changes))


@pytest.fixture
def plan(config: Configs) -> Plans:
    return lambda **changes: make_plan(config(**changes))


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_the_model_computes_in_float32_unless_told_otherwise_and_sixteen_bits_are_warned_of(
    plan: Plans, dtype: str | None
) -> None:
    made = plan(method__max_tokens=1, **({"engine__dtype": dtype} if dtype else {}))
    summary, used = made.summary(), dtype or "float32"
    assert made.config.engine.dtype == summary["method"]["model_dtype"] == used
    assert used in made.lines()["model"]
    assert [w.split(":")[0] for w in summary["warnings"]] == [f"engine.dtype {dtype}"] * bool(dtype)


def test_a_clip_bound_that_exact_sums_have_no_room_for_is_refused(config: Configs) -> None:
    assert config(method__clip_bound=1000.0).method.clip_bound == 1000.0
    with pytest.raises(InputError, match=r"^method\.clip_bound"):
        config(method__clip_bound=1001.0)


def test_a_batch_of_any_size_is_planned_and_one_that_does_not_fit_is_warned_of(plan: Plans) -> None:
    """No run is refused for the size of its batches: what does not fit is decoded in parts."""
    vllm = {"engine__kind": "vllm", "engine__max_num_seqs": 512}
    fits = plan(method__batch_size=400, data__public_size=8000, **vllm)
    assert fits.usual_rows == 400 + 5 * 20 + 1
    assert fits.memory is not None and fits.memory.parts(fits.usual_rows) == 1
    assert fits.summary()["memory"]["parts"] == 1 and "decoded whole" in fits.lines()["memory"]
    few = plan(method__batch_size=400, data__public_size=8000, engine__kind="vllm",
               engine__max_num_seqs=100)  # fmt: skip
    assert few.summary()["memory"]["rows_at_once"] == 100
    assert "in 6 parts" in few.lines()["memory"]
    [warning] = [w for w in few.summary()["warnings"] if w.startswith("method.batch_size")]
    assert "slow" in warning and "engine.max_num_seqs" in warning
    # One disjoint batch of all 4,000 records of a label, and not of 400.
    large = plan(method__batches="disjoint", method__batch_size=3000, data__public_size=8000)
    assert large.usual_rows > 4000


def test_the_memory_of_a_row_is_a_public_number(plan: Plans) -> None:
    """The prompt's own words, a text of `max_prompt_tokens`, and what is drawn; at most the
    context."""
    short, longer = (plan(method__max_prompt_tokens=n, method__max_tokens=8) for n in (20, 30))
    assert short.memory is not None and longer.memory is not None
    assert longer.memory.row_tokens == short.memory.row_tokens + 10
    assert "up to 20 tokens of each" in short.lines()["texts read"]
    cut = plan(method__max_prompt_tokens=10_000, method__max_tokens=8)
    assert cut.memory is not None and cut.memory.row_tokens == CONTEXT
    # 2 layers of 2 heads of 32, a key and a value, 4 bytes each.
    assert short.memory.token_bytes == 2 * 2 * 2 * 32 * 4
    rows = 1000 * 2**20 // (short.memory.row_tokens * 1024)
    tight = plan(
        method__max_prompt_tokens=20, method__max_tokens=8, engine__kv_cache_gib=1000 / 1024
    )
    assert tight.memory is not None and tight.memory.rows_at_once == rows


def test_auto_takes_the_largest_batches_that_the_machine_holds(plan: Plans) -> None:
    asked = {"method__batch_size": "auto", "data__public_size": 4000, "engine__kind": "vllm"}
    on_gpu = asked | {"engine__gpu_memory_gib": 80}
    assert plan(**on_gpu).settings.batch_size == 127
    # 63 records want 63 + 5 sqrt(63) + 1 = 104 rows.
    assert plan(**on_gpu, engine__max_num_seqs=103).settings.batch_size == 31
    assert plan(**on_gpu, engine__max_num_seqs=104).settings.batch_size == 63
    if not torch.cuda.is_available():
        assert plan(**asked).settings.batch_size == 31
    assert plan(**asked, engine__max_num_seqs=1).settings.batch_size == 1
    elsewhere = ELSEWHERE | {"gpu_memory_gib": 80}
    assert plan(**(asked | {"engine": elsewhere})).settings.batch_size == 127


def test_a_larger_model_on_a_gpu_is_planned_by_its_configuration_alone(
    plan: Plans, tmp_path: Path, model_folder: str
) -> None:
    """A Llama of 1.7 billion parameters on 80 GB: no weights are here."""
    for file in Path(model_folder).iterdir():
        if "safetensors" not in file.name:
            shutil.copy(file, tmp_path)
    made = json.loads((tmp_path / "config.json").read_text())
    made |= {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "head_dim": 64,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 49152,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(made))
    engine = {"kind": "vllm", "model": str(tmp_path), "dtype": "bfloat16"}
    large = plan(
        engine=engine | {"gpu_memory_gib": 80}, method__batch_size=127, data__public_size=4000
    )
    memory = large.summary()["memory"]
    assert memory["kv_cache_bytes_per_token"] == 2 * 24 * 2048 * 2  # 0.2 MB
    chosen = choice_bytes(large.config.engine.max_num_seqs, made["vocab_size"])
    weights = 0.9 * 80 * 2**30 - memory["kv_cache_bytes"] - chosen
    assert weights == pytest.approx(2 * 1.71e9, rel=0.02)
    assert memory["parts"] == 1 and "on one GPU" in large.lines()["memory"]
    small = plan(
        engine=engine | {"gpu_memory_gib": 8}, method__batch_size=127, data__public_size=4000
    )
    assert small.summary()["memory"]["parts"] > 1


@pytest.mark.parametrize("wide", ["private", "public"])
def test_texts_that_do_not_fit_after_the_prompt_are_refused(
    plan: Plans, tmp_path: Path, model_folder: str, wide: str
) -> None:
    """Only the second label's prompt is the longest: every label counts."""
    template: dict[str, Any] = {"labels": {"b": "cough and fever"}}
    if wide == "private":
        template |= {"user": "{text} {label}", "public": "x"}
    else:
        template |= {"user": "{text}", "placeholder": "{label}"}
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


def test_a_model_that_is_not_here_is_not_measured_and_of_a_long_context_vllm_takes_a_part(
    plan: Plans,
) -> None:
    assert plan(engine=ELSEWHERE, method__max_tokens=1000).memory is None
    codec: Any = SimpleNamespace(context_length=10 * DEFAULT_CONTEXT)
    kinds = ({"kind": "vllm"}, {"kind": "vllm", "max_model_len": 9}, {"kind": "transformers"})
    found = [context_of(EngineConfig(model="m", **kind), codec) for kind in kinds]  # type: ignore[arg-type]
    assert found == [DEFAULT_CONTEXT, codec.context_length, codec.context_length]


@pytest.mark.parametrize(("most", "records", "texts"), [(5, 5, 5), (12, 12, 12), (13, 13, 24)])
def test_max_records_is_the_most(plan: Plans, most: int, records: int, texts: int) -> None:
    made = plan(method__max_records=most, method__max_tokens=1, privacy__epsilon=200.0)
    assert made.batches.num_batches == 12
    assert made.expected_records == made.summary()["records"] == records
    assert made.summary()["llm_calls"] == texts * (5 + 1)
    assert made.lines()["records"] == f"at most {most}"


SHIPPED = sorted(
    str(path.relative_to(ROOT))
    for folder in ("experiments", "dpray/demo")  # jobs: tests/cluster/test_files.py
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


def poisson(settings: Settings, **changes: Any) -> PrivatePredictionPlan:
    made = {"method__batches": "poisson", "data__public_size": 4000, "method__batch_size": 64}
    plan = make_plan(parse_config(settings(**(made | changes))))
    assert isinstance(plan, PrivatePredictionPlan)
    return plan


def test_max_records_is_a_maximum_and_texts_are_what_is_asked_for(settings: Settings) -> None:
    few = poisson(settings, method__max_records=24)
    assert few.texts == few.expected_records == 24
    # A short text leaves its tokens to no other one: a Poisson batch has one text.
    assert few.lines()["records"] == "at most 24"
    most = poisson(settings, method__max_records=10**8, privacy__epsilon=0.5)
    assert most.texts is not None and 24 < most.texts < 10**8
    assert 0.49 < most.cost.epsilon <= 0.5
    with pytest.raises(InputError, match=r"^method\.texts: 100000000 texts cost eps"):
        poisson(settings, method__texts=10**8, privacy__epsilon=0.5)


def test_a_plan_that_makes_too_few_texts_names_one_key_that_pays_for_all(
    settings: Settings,
) -> None:
    usual = {"method__batches": "auto", "method__clip_bound": 3.0, "method__temperature": 0.8,
             "method__batch_size": 31, "method__max_tokens": 64, "data__public_size": 3000,
             "privacy__epsilon": 4.0}  # fmt: skip

    def warning(**changes: Any) -> tuple[PrivatePredictionPlan, list[str]]:
        plan = poisson(settings, **(usual | changes))
        return plan, [w for w in plan.summary()["warnings"] if "epsilon pays for" in w]

    def key_of(said: str) -> tuple[str, int]:
        [(key, value)] = re.findall(r"method\.(\w+)=(\d+) pays for all", said)
        return key, int(value)

    few, none = warning(method__max_records=None)
    assert none == []
    wanted = int(1.4 * few.whole_texts)
    _, [said] = warning(method__max_records=wanted)
    assert f"of {wanted} texts epsilon pays for {few.whole_texts} of" in said
    key, value = key_of(said)
    assert key == "batch_size"
    better, none = warning(method__max_records=wanted, method__batch_size=value)
    assert none == [] and better.expected_records == wanted
    # No batch is larger than the records of its label: shorter texts are the next best.
    small = {"data__public_size": 62, "method__max_records": 2}
    _, [said] = warning(**small)
    key, value = key_of(said)
    assert key == "max_tokens"
    assert warning(**small, method__max_tokens=value)[1] == []
    assert "raise privacy.epsilon" in warning(**small | {"method__max_records": 10**9})[1][0]
    # Without any text fewer are no remedy; one record of each unit may be.
    none_at_all = {"privacy__epsilon": 0.3, "method__batches": "disjoint"}
    plan, [said] = warning(**small | none_at_all)
    assert plan.whole_texts == 0 and said.endswith("raise privacy.epsilon")
    units = {
        "data__unit": "who", "data__max_records_per_unit": 12, "privacy__epsilon": 8.0,
    }  # fmt: skip
    plan, [said] = warning(**small | units)
    assert plan.whole_texts == 0 and said.endswith("data.max_records_per_unit=1 pays for all")


SHORT = {
    "method__batch_size": 10, "method__clip": "dclip", "method__clip_bound": 3.0,
    "method__temperature": 0.8, "method__max_tokens": 32, "method__max_records": 3,
    "data__public_size": 700, "privacy__epsilon": 1.0, "data__label": None, "data__labels": [],
}  # fmt: skip
"""Epsilon pays for one private token of each batch."""


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (
            {},
            r"^privacy\.epsilon: 1 pays for 1 private token a batch, .*batch_size=\d+ pays",
        ),
        ({"method__private_tokens": 1}, r"^method\.private_tokens: 1 a batch, .* set it to null$"),
        ({"method__batches": "poisson", "method__private_tokens": 1}, r"^method\.private_tokens: "),
    ],
)
def test_a_run_whose_batches_have_no_room_for_a_text_is_refused(
    plan: Plans, changes: dict[str, Any], key: str
) -> None:
    made = plan(**SHORT | changes)
    assert made.private_tokens == 1
    with pytest.raises(InputError, match=key):
        made.warnings_before_charge()
    assert plan(**SHORT | changes | {"method__max_tokens": 1}).warnings_before_charge() == []


@pytest.mark.parametrize("batches", ["disjoint", "poisson"])
def test_a_run_whose_batches_may_end_before_a_text_says_so_before_its_charge(
    plan: Plans, batches: str
) -> None:
    two = SHORT | {"privacy__epsilon": 3.0, "method__private_tokens": 2}
    few = plan(**two, method__batches=batches)
    [warning] = few.warnings_before_charge()
    assert few.may_give_none and warning in few.summary()["warnings"]
    assert "after 2" in warning
    gate = {"method__public_gate": {"probability": 0.9}}
    enough = plan(**SHORT | {"privacy__epsilon": 50.0}, method__batches=batches)
    assert enough.warnings_before_charge() == []
    gated = plan(**SHORT, **gate, method__batches=batches, method__private_tokens=1)
    assert len(gated.warnings_before_charge()) == (batches == "disjoint")


@pytest.mark.parametrize("kind", ["disjoint", "poisson"])
def test_fewer_texts_than_labels_leave_a_label_without_one(settings: Settings, kind: str) -> None:
    def said(most: int) -> list[str]:
        plan = poisson(settings, method__batches=kind, method__max_records=most)
        return [w for w in plan.summary()["warnings"] if "no text" in w]

    expected = "method.max_records: 1 for 2 labels: some of them get no text; 2 cost the same"
    assert said(1) == [expected]
    assert said(2) == []


def test_auto_takes_what_affords_more_texts_and_says_both_numbers(settings: Settings) -> None:
    many = poisson(settings, method__batches="auto", privacy__epsilon=1.0)
    assert many.settings.batches == "poisson"
    assert many.texts_affordable["poisson"] > 5 * many.texts_affordable["disjoint"] > 0
    assert "from disjoint batches" in many.lines()["affordable texts"]
    assert many.summary()["affordable_texts"] == dict(many.texts_affordable)


def test_a_rare_label_does_not_price_the_whole_run(settings: Settings) -> None:
    """Without a share a label has no batch; with a small one it has smaller batches, and the plan
    says which."""
    s = {"method__texts": 1000, "method__batch_size": 127, "method__clip": "recentred",
         "method__clip_bound": 10.0, "method__temperature": 2.0, "method__max_tokens": 64,
         "data__label": "label", "privacy__delta": 1e-6}  # fmt: skip
    alone = poisson(settings, **s, data__labels=["a"]).cost.epsilon
    none = poisson(settings, **s, data__label_proportions={"a": 1.0, "b": 0.0})
    assert none.cost.epsilon == pytest.approx(alone, rel=1e-3)
    assert dict(none.batches.batches_per_label) == {"a": 1000, "b": 0}
    assert {none.batches.label_of(batch) for batch in none.batches.batch_ids()} == {"a"}
    rare = poisson(settings, **s, data__label_proportions={"a": 0.98, "b": 0.02})
    assert rare.cost.epsilon <= 1.02 * alone
    [warning] = [w for w in rare.summary()["warnings"] if "rare labels" in w]
    assert "b (2.6) records expected, not 127" in warning
    both = poisson(settings, **s, data__label_proportions={"a": 0.6, "b": 0.4})
    assert not [w for w in both.summary()["warnings"] if "rare labels" in w]
    assert both.batches.sampling_probabilities["b"] == 127 / 1600


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method__sparse_vector": {"threshold": 0.5, "noise": 0.2}}, r"^method\.sparse_vector: "),
        (
            {"data__label_proportions": "measured"},
            r"^method\.batches: poisson needs public data\.label_proportions",
        ),
        (
            {"privacy__epsilon": 1e-3, "method__clip_bound": 1e3},
            r"^privacy\.epsilon: 0\.001 does not pay for one Poisson",
        ),
        ({"method__batches": "disjoint", "method__texts": 5}, r"^method\.texts: for Poisson"),
    ],
)
def test_what_a_kind_of_batches_cannot_do_is_refused(
    settings: Settings, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        poisson(settings, **changes)


def test_a_gate_that_saves_nothing_is_warned_of(plan: Plans) -> None:
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
