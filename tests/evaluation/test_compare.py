"""All methods side by side, from public numbers alone, and the one that is recommended."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import dpray
from dpray.accounting import accountant, bounded_range, events
from dpray.accounting.event import Event
from dpray.cli import run_command
from dpray.engines import text
from dpray.engines.text import TextCodec
from dpray.evaluation.compare import METHODS, Chosen, answer, compare
from dpray.methods.config import parse_config
from dpray.methods.registry import make_plan
from dpray.types import InputError

LABELS = [f"label {number}" for number in range(12)]
COUNTS = {f"word{rank}": 2**12 // (rank + 1) for rank in range(400)}


@pytest.fixture
def tree(auto_settings: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return partial(auto_settings, COUNTS, 40)


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The plans whose privacy loss distributions are composed."""
    events: list[Event] = []

    def counted(event: Event) -> Any:
        events.append(event)
        return compose(event)

    compose = accountant._composed_pld.__wrapped__
    monkeypatch.setattr(accountant, "_composed_pld", counted)
    accountant.cost.cache_clear()
    return events


@pytest.mark.parametrize(
    ("most", "most_parallel", "changed"),
    [
        (75, 0, {"privacy__epsilon": 0.1}),
        (75, 8, {"data__labels": LABELS, "data__max_records_per_unit": 12, "data__unit": "who"}),
    ],
    ids=["no signal is enough", "a person with many labels"],
)
def test_a_comparison_composes_few_distributions_and_reads_the_tokenizer_once(
    tree: Callable[..., dict[str, Any]],
    composed: list[Event],
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    most_parallel: int,
    changed: dict[str, Any],
) -> None:
    read: list[str] = []
    begin = TextCodec.__init__

    def counted(self: TextCodec, model: str, max_model_len: int | None) -> None:
        read.append(model)
        begin(self, model, max_model_len)

    monkeypatch.setattr(TextCodec, "__init__", counted)
    text._codec_of_folder.cache_clear()
    compare(parse_config(tree(**changed)))
    assert len(composed) <= most
    assert len([event for event in composed if event.heaviest_part() != event]) <= most_parallel
    assert len(read) <= 1


@pytest.mark.slow
def test_a_comparison_with_all_keys_free_is_little_work(
    tree: Callable[..., dict[str, Any]], composed: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts that take the time of a plan, for persons of five records: distributions that are
    composed, steps of the recursion over draws, and orders of subsampled Gaussians."""
    changed = {"data__unit": "who", "data__max_records_per_unit": 5, "data__public_size": 20000}
    steps, orders = [], []
    one_more, library_rdp = bounded_range._Grid._one_more, events._library_rdp.__wrapped__

    def counted_step(self: Any, V: Any) -> Any:
        steps.append(self)
        return one_more(self, V)

    @functools.lru_cache(maxsize=256)
    def counted_orders(event: Any, asked: tuple[float, ...]) -> Any:
        orders.extend(asked)
        return library_rdp(event, asked)

    monkeypatch.setattr(bounded_range._Grid, "_one_more", counted_step)
    monkeypatch.setattr(events, "_library_rdp", counted_orders)
    for kept in (bounded_range._grid, bounded_range._composed_parts, events._worse_rdp):
        kept.cache_clear()
    asked = tree(**changed, privacy__epsilon=4.0)
    asked["method"] |= {"records": 1000, "private_prediction": {}}
    compare(parse_config(asked))
    assert len(composed) <= 106
    assert len(steps) <= 2900
    assert len(orders) <= 1400


@pytest.fixture
def ask(tree: Callable[..., dict[str, Any]]) -> Callable[..., Chosen]:
    """One method's answer, with keys of its own."""

    def asked(name: str, records: int = 40, size: int = 4000, **keys: Any) -> Chosen:
        config = parse_config(tree(data__public_size=size))
        if name == "dp_kps":
            keys = getattr(config.method, name) | keys
        return answer(config, {"name": name} | keys, records)

    return asked


@pytest.mark.slow
def test_every_method_answers_and_the_first_above_its_noise_is_recommended(
    tree: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, made = tmp_path / "auto.yaml", tmp_path / "made.yaml"
    file.write_text(yaml.safe_dump(tree()))
    assert run_command(["plan", str(file), "--write", str(made), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["methods"]) == list(METHODS) and found["records_wanted"] == 40
    for method in found["methods"].values():
        assert method["feasible"] and method["reasons"]
        assert 0 < method["plan"]["epsilon"] <= 4.0 and method["plan"]["records"] == 40
        signal = method["signal"]
        assert signal["is_enough"] == (signal["value"] >= signal["enough"])
    enough = [name for name in METHODS if found["methods"][name]["signal"]["is_enough"]]
    assert found["recommended"] == enough[0]

    # The configuration that it writes has the plan that it showed.
    written = dpray.load(made)
    assert written.method.name == found["recommended"]
    plan = make_plan(written).summary()
    assert plan == found["methods"][written.method.name]["plan"]
    assert yaml.safe_load(made.read_text())["data"] == yaml.safe_load(file.read_text())["data"]
    assert run_command(["plan", str(file), "--write", str(made)]) == 2
    assert "--write: " in capsys.readouterr().err


def test_a_weak_signal_is_not_enough_and_more_records_make_it_stronger(
    ask: Callable[..., Chosen],
) -> None:
    for name, keys in (("aug_pe", {}), ("dp_kps", {"vocabulary_size": 100})):
        assert not ask(name, records=400, size=100, **keys).is_enough
        assert ask(name, records=400, size=100_000, **keys).is_enough


def test_an_epsilon_that_pays_for_no_text_says_so(ask: Callable[..., Chosen]) -> None:
    keys = {"batches": "poisson", "max_tokens": 64, "clip_bound": 10.0, "batch_size": 16}
    poor = ask("private_prediction", records=1, size=50, **keys)
    assert poor.choice is None and poor.why_not is not None
    assert poor.why_not.startswith("privacy.epsilon: 4 does not pay for one Poisson batch")


def test_a_chain_is_not_compared(tree: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    made = tree()
    method = made.pop("method")
    made["methods"] = [{"name": "dp_kps"} | method["dp_kps"], {"name": "aug_pe"}]
    with pytest.raises(InputError, match=r"^methods: only single methods are compared"):
        compare(parse_config(made))


def test_a_signal_says_what_epsilon_pays_for_and_not_what_was_wanted(
    ask: Callable[..., Chosen],
) -> None:
    keys = {"max_tokens": 4, "clip_bound": 1.0, "batch_size": 40}
    values = []
    for batches in ("poisson", "disjoint", "auto"):
        choice = ask("private_prediction", batches=batches, **keys).choice
        assert choice is not None and choice.signal is not None
        values.append(choice.signal.value)
    assert min(values) > 40 and max(values) == values[-1]


def test_keys_that_are_set_stay(ask: Callable[..., Chosen]) -> None:
    for name, keys in (
        ("private_prediction", {"max_tokens": 4, "clip_bound": 7.0, "batch_size": 40}),
        ("aug_pe", {"iterations": 3, "variations": 5}),
        ("dp_sgd", {"epochs": 3.0, "batch_size": 100, "max_length": 16}),
        ("dp_kps", {"phrases_per_record": 4}),
    ):
        choice = ask(name, **keys).choice
        assert choice is not None
        assert {key: getattr(choice.plan.settings, key) for key in keys} == keys
        assert name == "dp_kps" or choice.reasons[0].endswith(": as they are set")


def test_a_method_that_the_engine_does_not_fit_says_why(
    tree: Callable[..., dict[str, Any]],
) -> None:
    engine = {"kind": "openai", "model": "m", "base_url": "http://127.0.0.1:1/v1"}
    config = parse_config(tree(engine=engine))
    for name in ("private_prediction", "dp_sgd"):
        refused = answer(config, {"name": name}, 40)
        assert refused.choice is None
        assert "engine.kind" in str(refused.why_not)
    lost = answer(config, {"name": "dp_kps"}, 40)
    assert lost.choice is None and "method.dp_kps.vocabulary" in str(lost.why_not)


def test_a_vocabulary_without_counts_has_no_signal(
    ask: Callable[..., Chosen], tmp_path: Path
) -> None:
    words = tmp_path / "plain.txt"
    words.write_text("".join(f"word{n}\n" for n in range(50)))
    found = ask("dp_kps", vocabulary=str(words))
    assert found.choice is not None and found.choice.signal is None and found.is_enough


def test_wrong_keys_are_errors_and_name_the_key(
    tree: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    method = {"name": "auto", "aug_pe": {"iteration": 3}}
    with pytest.raises(InputError, match=r"^method\.aug_pe\.iteration: there is no such key"):
        compare(parse_config(tree(method=method)))
    with pytest.raises(InputError, match=r"^method\.aug_pe\.name: there is no such key"):
        compare(parse_config(tree(method={"name": "auto", "aug_pe": {"name": "dp_sgd"}})))
    with pytest.raises(InputError, match=r"^privacy\.epsilon: infinity adds no noise"):
        compare(parse_config(tree(method={"name": "aug_pe"}, privacy__epsilon=float("inf"))))
    file = tmp_path / "auto.yaml"
    file.write_text(yaml.safe_dump(tree()))
    for command in ("run", "audit"):
        assert run_command([command, str(file)]) == 2
        assert "method.name: auto is for `dpray plan`" in capsys.readouterr().err
    file.write_text(yaml.safe_dump(tree(method={"name": "aug_pe"})))
    assert run_command(["plan", str(file), "--write", str(tmp_path / "new")]) == 2
    assert "--write: is for --compare" in capsys.readouterr().err
    assert not (tmp_path / "ledger.db").exists()


@pytest.mark.parametrize("name", ["aug_pe", "dp_kps", "dp_sgd"])
def test_a_plan_warns_of_a_signal_below_its_noise(
    tree: Callable[..., dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    def plan(*settings: str) -> str:
        assert run_command(["plan", str(tmp_path / "c.yaml"), *settings]) == 0
        said = capsys.readouterr()
        return " ".join((said.out + said.err).split())

    auto = tree()
    method = {"name": name, "records": 40} | auto["method"].get(name, {})
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(auto | {"method": method}))
    sizes = ["method.batch_size=100"] if name == "dp_sgd" else []
    weak = ("privacy.epsilon=0.1", "data.public_size=100", *sizes)
    config = dpray.load(tmp_path / "c.yaml", *weak)
    signal = dpray.plan(config).signal
    assert signal is not None and not signal.is_enough
    [warning] = [w for w in dpray.plan(config).summary()["warnings"] if w.startswith("signal ")]
    said = f"signal {signal.value:.3g} of the {signal.enough:g} that are worth a run"
    assert warning.startswith(said) and "--compare" in warning
    assert said in plan(*weak)
    assert "worth a run" not in plan("privacy.epsilon=50", "data.public_size=1000000", *sizes)
    if name != "dp_kps":  # the others run without noise, too, and have no signal then
        assert "worth a run" not in plan("privacy.epsilon=.inf", *weak[1:])
