"""`method.preset` puts a paper's keys below those that are given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from dpray.cli import run_command
from dpray.config.sections import TextSettings
from dpray.methods import registry
from dpray.methods.aug_pe.settings import AugPeSettings
from dpray.methods.config import load_config, parse_config
from dpray.methods.dp_kps.settings import DpKpsSettings
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.types import InputError
from dpray.workers import shards
from tests.engines.bag_of_words import BagOfWords
from tests.engines.kept import Kept
from tests.workers.outcomes import lines

METHODS: tuple[type[TextSettings], ...] = (
    PrivatePredictionSettings, AugPeSettings, DpKpsSettings, DpSgdSettings,
)  # fmt: skip
NAMES = [(kind, name) for kind in METHODS for name in kind.presets]

SMALL: dict[str, dict[str, Any]] = {
    "private_prediction": {"batch_size": 5, "max_tokens": 4, "max_records": 8},
    "aug_pe": {"records": 4, "iterations": 1, "max_tokens": 8, "lookahead": 0, "variations": 2},
    "dp_kps": {"vocabulary_size": 7, "features": 20, "sequence_length": 3, "records": 8},
    "dp_sgd": {"epochs": 0.1, "batch_size": 60, "max_length": 24, "records": 2},
}
"""Overrides with which a run takes a second."""

Settings = Callable[..., dict[str, Any]]


def name_of(kind: type[TextSettings]) -> str:
    return str(get_args(kind.model_fields["name"].annotation)[0])


@pytest.fixture
def tree(settings: Settings, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A configuration of a method by its preset and some keys."""
    vocabulary = tmp_path / "words.txt"
    vocabulary.write_text("".join(f"word{i}\n" for i in range(20)))

    def make(name: str, preset: str, **keys: Any) -> dict[str, Any]:
        given = {"vocabulary": str(vocabulary)} if name == "dp_kps" else {}
        engine = {"engine": {"kind": "none"}} if name == "dp_kps" else {}
        return settings(method={"name": name, "preset": preset, **given, **keys}, **engine)

    return make


@pytest.mark.parametrize(
    ("kind", "preset"), NAMES, ids=lambda each: getattr(each, "__name__", each)
)
def test_a_preset_sets_its_keys_and_a_given_key_stays(
    tree: Callable[..., dict[str, Any]], kind: type[TextSettings], preset: str
) -> None:
    name = name_of(kind)
    whole: Any = parse_config(tree(name, preset)).method
    assert whole.preset_keys == kind.presets[preset]
    assert json.loads(whole.model_dump_json()) == whole.model_dump(mode="json")
    assert "preset" not in whole.model_dump()
    # A small run's keys are the user's, and all others the preset's.
    small: Any = parse_config(tree(name, preset, **SMALL[name])).method
    of_preset = {key: kind.presets[preset][key] for key in kind.presets[preset]} | SMALL[name]
    assert {key: small.model_dump()[key] for key in of_preset} == of_preset


@pytest.mark.parametrize(
    ("kind", "preset"), NAMES, ids=lambda each: getattr(each, "__name__", each)
)
def test_a_plan_shows_what_the_preset_set(
    tree: Callable[..., dict[str, Any]],
    kind: type[TextSettings],
    preset: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, file = name_of(kind), tmp_path / "preset.json"
    file.write_text(json.dumps(tree(name, preset, **SMALL[name])))  # JSON is YAML
    assert run_command(["plan", str(file), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["presets"][name]
    kept = {k: v for k, v in kind.presets[preset].items() if SMALL[name].get(k, v) == v}
    assert shown == {"preset": preset, "keys": kept}
    assert run_command(["plan", str(file)]) == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"preset {preset} of {name}: {next(iter(kept))}: " in words


def test_a_part_of_a_preset_s_section_is_overridden_by_itself(
    tree: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "preset.json"
    file.write_text(json.dumps(tree("private_prediction", "paper_svt_0.5")))
    method: Any = load_config(file, ["method.sparse_vector.threshold=0.9"]).method
    assert method.sparse_vector.model_dump() == {"threshold": 0.9, "noise": 0.2}
    assert method.preset_keys["sparse_vector"] == {"noise": 0.2}
    assert method.preset_keys["clip_bound"] == 10
    assert load_config(file, ["method.sparse_vector=null"]).method.sparse_vector is None  # type: ignore[union-attr]
    assert load_config(file, ["method.preset=paper"]).method.sparse_vector is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("aug_pe", {"preset": "papers"}, "method.preset: there is none of this name (did you mean "
         "'paper'?); one of paper, paper_openreview, paper_pubmed, paper_small"),
        ("dp_kps", {"preset": 3}, "method.preset: not a text"),
        ("dp_kps", {"estimator": "exact"}, "method.sampling: iterative is for estimator rff; "
         "sampling is the preset's (paper): give method.sampling too, or another preset"),
        ("private_prediction", {"clip": "none"}, "method.clip: "),
    ],
)  # fmt: skip
def test_an_unknown_preset_and_a_contradiction_name_the_key_and_the_remedy(
    tree: Callable[..., dict[str, Any]], name: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as wrong:
        parse_config(tree(name, **{"preset": "paper"} | keys))
    assert str(wrong.value).startswith(message)
    assert ("the preset's" in str(wrong.value)) is ("the preset's" in message)


def test_a_plan_names_the_preset_s_key_that_does_not_fit(
    tree: Callable[..., dict[str, Any]],
) -> None:
    for name, preset, keys, message in (
        (
            "private_prediction",
            "paper_svt_0.5",
            {"batches": "poisson"},
            r"sparse_vector: is for dis",
        ),
        ("private_prediction", "paper", {"texts": 9}, r"texts: for Poisson batches; disjoint ones"),
        ("dp_sgd", "paper", {}, r"batch_size: 4096 is more than data\.public_size 60"),
    ):
        with pytest.raises(InputError, match=rf"^method\.{message}"):
            registry.make_plan(parse_config(tree(name, preset, **keys)))


def test_a_preset_in_a_chain_and_one_of_a_method_without_any(settings: Settings) -> None:
    first = {"name": "dp_kps", "vocabulary": "words.txt", "preset": "paper"}
    tree = {key: value for key, value in settings().items() if key != "method"}
    chain: Any = parse_config(tree | {"methods": [first, {"name": "aug_pe"}]}).method
    assert chain.methods[0].estimator == "rff"
    with pytest.raises(
        InputError, match=r"methods\.0\.sampling: .*\(paper\): give methods\.0\.sam"
    ):
        parse_config(tree | {"methods": [first | {"estimator": "exact"}, {"name": "aug_pe"}]})
    with pytest.raises(InputError, match=r"method\.preset: there is no such key"):
        parse_config(tree | {"method": {"name": "auto", "preset": "paper"}})


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", METHODS)
def test_a_small_run_of_a_preset(
    tree: Callable[..., dict[str, Any]],
    kind: type[TextSettings],
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run keeps the resolved keys: it goes on by them, whatever names them."""
    monkeypatch.setattr(shards, "SentenceTransformerEmbedder", BagOfWords)
    name, preset = name_of(kind), "paper"
    if name == "dp_kps":
        monkeypatch.setattr("dpray.methods.dp_kps.plan.SentenceTransformerEmbedder", BagOfWords)
    config = parse_config(tree(name, preset, **SMALL[name]))
    build: Any = {"build": lambda section: Kept(engine)} if name == "aug_pe" else {}
    report = registry.run(config, **build)
    assert report["records"] == len(lines(config)) > 0
    assert 0 < report["epsilon"] <= config.privacy.epsilon

    run = json.loads((Path(config.output.path) / "run.json").read_text())
    kept = run["config"]["method"]
    assert "preset" not in kept
    dumped = config.method.model_dump(mode="json")
    of_preset = {key: dumped[key] for key in kind.presets[preset]}
    assert {key: kept[key] for key in of_preset} == of_preset
    # The same keys without the preset's name are the same run.
    spelled = tree(name, preset)
    spelled["method"] = dumped
    assert registry.run(parse_config(spelled), **build) == report
