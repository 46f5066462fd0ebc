"""Every number of a configuration is tried at its extremes: `dpray plan` takes it or refuses it by
its key, soon."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import dpray
from dpray.cli import run_command
from dpray.config.sections import MethodSettings, Section, _kinds
from dpray.methods.aug_pe.settings import AugPeSettings
from dpray.methods.config import AutoSettings, RunConfig
from dpray.methods.dp_kps.settings import DpKpsSettings
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.methods.topics.settings import TopicsSettings

DEMO = str(Path(dpray.__file__).parent / "demo" / "model")

EXTREMES = ("0", "-1", "-1e308", "1e-320", "1e-9", "1e308", ".inf", ".nan", str(10**9), str(10**30))

SECONDS = 20
"""The most CPU seconds of a plan; most plans take a tenth of a second."""

SECTIONS: dict[str, dict[str, Any]] = {
    "private_prediction": {"max_tokens": 16, "batch_size": 20},
    "private_prediction with all options": {
        "max_tokens": 16,
        "batch_size": 20,
        "batches": "disjoint",
        "candidates": "top_k_plus",
        "public_gate": {"probability": 0.9},
        "sparse_vector": {"threshold": 0.3, "noise": 0.2},
    },
    "aug_pe": {"records": 100, "iterations": 3},
    "dp_kps": {"records": 50, "vocabulary_size": 40},
    "dp_sgd": {"batch_size": 64, "epochs": 3.0},
    "auto": {"records": 100},
    "topics": {"topics": 4, "records": 50},
}

SETTINGS: dict[str, type[MethodSettings]] = {
    "private_prediction": PrivatePredictionSettings,
    "private_prediction with all options": PrivatePredictionSettings,
    "aug_pe": AugPeSettings,
    "dp_kps": DpKpsSettings,
    "dp_sgd": DpSgdSettings,
    "auto": AutoSettings,
    "topics": TopicsSettings,
}

NEEDED = {
    "data.max_records_per_unit": "data.unit=person",
    "privacy.epsilon_labels": "data.label_proportions=measured",
}
"""A key is of no effect, or refused, without this setting."""


def sections_of(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [found for each in get_args(annotation) for found in sections_of(each)]


def numbers(model: type[Section], place: str) -> Iterator[str]:
    """Yield the keys of a section whose values are numbers, and those of the sections in it."""
    for name, field in model.model_fields.items():
        if below := sections_of(field.annotation):
            for each in below:
                yield from numbers(each, f"{place}.{name}")
        elif _kinds(field.annotation) & {int, float}:
            yield f"{place}.{name}"


def cases() -> Iterator[tuple[str, str]]:
    for name, field in RunConfig.model_fields.items():
        if name != "method":
            for section in sections_of(field.annotation):
                yield from (("private_prediction", key) for key in numbers(section, name))
    for method, settings in SETTINGS.items():
        place = "methods.0" if method == "topics" else "method"
        yield from ((method, key) for key in numbers(settings, place))
    # What is shared is priced by each method.
    for method in ("aug_pe", "dp_kps", "dp_sgd", "topics"):
        for key in ("privacy.epsilon", "privacy.delta", "data.public_size", *NEEDED):
            yield method, key


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Write the configuration of a method; return the file's name."""
    folder = tmp_path_factory.mktemp("extremes")
    words = folder / "words.txt"
    words.write_text("".join(f"word{n}\t{100 - n}\n" for n in range(60)))
    public = folder / "public.jsonl"
    rows = ({"text": f"public text {n}", "label": "ab"[n % 2]} for n in range(60))
    public.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": "records.jsonl", "label": "label", "labels": ["a", "b"], "public_size": 4000}
    tree = {
        "data": data,
        "privacy": {"epsilon": 4.0, "delta": 1e-5, "dataset": "notes"},
        "engine": {"kind": "transformers", "model": DEMO},
        "runtime": {"ray_address": "none"},
    }

    def make(name: str) -> str:
        method = {"name": name.partition(" ")[0]} | SECTIONS[name]
        if name == "dp_kps":
            method["vocabulary"] = str(words)
        if name == "auto":
            method["dp_kps"] = {"vocabulary": str(words)}
        whole: dict[str, Any] = tree | {"method": method}
        if name == "topics":
            second = {"name": "private_prediction"} | SECTIONS["private_prediction"]
            whole = tree | {"methods": [method | {"public": str(public)}, second]}
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(whole))
        return str(file)

    return make


def value_of(key: str, number: str) -> str:
    match key:
        case "privacy.shares":
            return f"[{number}, 1.0]"
        case "data.label_proportions":
            return f"{{a: {number}, b: 1.0}}"
        case "data.labels":
            return f"[{number}, b]"
    return f"{{code: {{a: {number}}}}}" if key == "method.control_values" else number


@pytest.mark.slow
@pytest.mark.parametrize(("method", "key"), list(cases()))
def test_an_extreme_number_is_taken_or_refused_by_its_key(
    write: Any, capsys: pytest.CaptureFixture[str], method: str, key: str
) -> None:
    file = write(method)
    for number in EXTREMES:
        setting = f"{key}={value_of(key, number)}"
        began = time.process_time()
        code = run_command(["plan", file, setting, *filter(None, [NEEDED.get(key)])])
        seconds = time.process_time() - began
        err = capsys.readouterr().err
        assert code in (0, 2), (setting, err)
        assert code == 0 or re.match(r"dpray: [a-z0-9_.]+( and [a-z0-9_.]+)?: ", err), (
            setting,
            err,
        )
        assert seconds < SECONDS, (setting, seconds)
