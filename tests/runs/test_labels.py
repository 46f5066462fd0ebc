"""Labels keep their type and value from the data to the release."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

import dpray
from dpray.config.config import DataConfig
from dpray.io.formats import FilePart
from dpray.io.public_files import read_terms
from dpray.methods import registry as methods
from dpray.methods.config import parse_config
from dpray.types import InputError
from dpray.workers.rows import record_rows
from tests.engines.tiny_model import sentence
from tests.workers.outcomes import lines

pytestmark = pytest.mark.usefixtures("one_thread")

Settings = Callable[..., dict[str, Any]]

LABELS = [True, 0, 1.0, "", "a"]

DP_SGD = {
    "name": "dp_sgd", "epochs": 1, "batch_size": 10, "micro_batch_size": 8, "max_length": 24,
    "lora_rank": 2, "learning_rate": 0.01, "records": 10, "noise_multiplier": 0.8,
}  # fmt: skip
PREDICTION = {
    "name": "private_prediction", "batches": "disjoint", "batch_size": 5, "max_tokens": 4,
    "max_records": 50, "clip_bound": 1.0,
}  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    """The keys of data whose labels have all types there are."""
    rng, path = random.Random(1), tmp_path / "typed.jsonl"
    rows = [{"text": sentence(rng, 8), "label": label} for label in LABELS for _ in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data__path": str(path), "data__labels": LABELS}


def as_json(labels: Any) -> set[str]:
    """Labels as JSON writes them: in Python, 1.0 and True are equal."""
    return {json.dumps(label) for label in labels}


@pytest.mark.parametrize("proportions", [None, "measured"])
def test_dp_kps_releases_them(
    settings: Settings, sequences: dict[str, Any], data: dict[str, Any], proportions: str | None
) -> None:
    changes = sequences | data | {"data__label_proportions": proportions}
    changes["method"] = {**changes["method"], "records": 20}
    run = parse_config(settings(**changes))
    report = methods.run(run)
    assert as_json(record["label"] for record in lines(run)) <= as_json(LABELS)
    assert report["public_inputs"]["labels"] == LABELS
    assert set(report["sampling"]["label_mix"]) == {"true", "0", "1.0", "", "a"}
    if proportions is None:
        assert as_json(record["label"] for record in lines(run)) == as_json(LABELS)
        synthetic = dpray.SyntheticData(Path(run.output.path))
        assert as_json(synthetic.to_pandas().label) == as_json(LABELS)
        with pytest.raises(InputError, match=r"^to_ray: the labels have several types"):
            synthetic.to_ray()
        # A second command reads the labels from run.json and finds the same run.
        assert methods.run(run) == report


@pytest.mark.parametrize("method", [PREDICTION, DP_SGD], ids=lambda method: method["name"])
def test_methods_with_a_model_release_them(
    settings: Settings, data: dict[str, Any], method: dict[str, Any]
) -> None:
    run = parse_config(settings(method=method, **data))
    methods.run(run)
    released = as_json(record["label"] for record in lines(run))
    assert released <= as_json(LABELS) and len(released) > 2


def test_public_terms_go_by_the_names_of_their_labels(
    settings: Settings, data: dict[str, Any], tmp_path: Path
) -> None:
    config, file = parse_config(settings(**data)), tmp_path / "terms.jsonl"
    rows = [{"terms": ["x"], "label": label} for label in LABELS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = config.data.label_names
    assert read_terms(str(file), names, config.data.path) == {name: [["x"]] for name in names}
    file.write_text(json.dumps({"terms": ["x"], "label": "unknown"}) + "\n")
    with pytest.raises(InputError, match=r"^method\.terms: terms\.jsonl, row 1: the label is"):
        read_terms(str(file), names, config.data.path)


def labels_of(path: Path, labels: list[Any]) -> list[Any]:
    data = DataConfig(path=str(path), label="label", labels=tuple(labels), public_size=9)
    records = record_rows(FilePart(str(path)), data)
    return [data.released_label(record["label"]) for record in records]


def test_cells_of_csv_match_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f"x,{cell}\n" for cell in ("true", "0", "1.0", "")))
    assert as_json(labels_of(path, LABELS)) == as_json([True, 0, 1.0, ""])
    assert labels_of(path, ["true", "0", "1.0", ""]) == ["true", "0", "1.0", ""]


@pytest.mark.parametrize(
    ("written", "labels", "kinds"),
    [
        ("0", ["0"], "a number, and in data.labels a text"),
        ('"0"', [0], "a text, and in data.labels a number"),
        ("true", ["true"], "true or false, and in data.labels a text"),
        ('"true"', [True], "a text, and in data.labels true or false"),
    ],
)
def test_a_label_of_another_type_is_refused(
    tmp_path: Path, written: str, labels: list[Any], kinds: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "x", "label": {written}}}\n')
    with pytest.raises(InputError, match=f"^a.jsonl, row 1: the label is {kinds}$"):
        labels_of(path, labels)


@pytest.mark.parametrize(("written", "label"), [("0", 0.0), ("1.0", 1), ("1", True), ("0", False)])
def test_other_numbers_are_other_labels(tmp_path: Path, written: str, label: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "x", "label": {written}}}\n')
    with pytest.raises(InputError, match=r"row 1: the label is not one of data.labels"):
        labels_of(path, [label])


def test_parquet_has_types_too(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"text": ["x", "y"], "label": [1.0, 2.0]}), path)
    assert as_json(labels_of(path, [2.0, 1.0])) == {"1.0", "2.0"}


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, "0"], "'0' is given twice"),
        (["true", True], "'true' is given twice"),
        ([1, 1.0], "two are the same number"),
        ([10**300, 1e300, 10**400, int(1e300)], "two are the same number"),
        (["a", "a"], "'a' is given twice"),
        ([float("nan")], "a label is no infinity and not .nan"),
        ([float("inf")], "a label is no infinity and not .nan"),
        ([None], "a label is a text, a number, true or false"),
        ([["a"]], "a label is a text, a number, true or false"),
        ([{"a": 1}], "a label is a text, a number, true or false"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    settings: Settings, labels: list[Any], message: str
) -> None:
    with pytest.raises(InputError, match=f"^data.labels: {message}"):
        parse_config(settings(data__labels=labels))


def test_shares_go_by_label(settings: Settings) -> None:
    shares = {True: 0.5, 0: 0.25, "": 0.25}
    data = parse_config(settings(data__labels=[*shares], data__label_proportions=shares)).data
    assert data.proportions == {"true": 0.5, "0": 0.25, "": 0.25}
    # As run.json has them, whose keys are texts.
    again = parse_config(settings(data=json.loads(data.model_dump_json()))).data
    assert again == data and as_json(again.labels) == as_json(data.labels)
