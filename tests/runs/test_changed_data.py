"""Files that change while a run goes on: every reading of them has to read what was hashed before
the charge. A record that changes between two readings could be in two disjoint batches."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpray.config.config import Config, DataConfig
from dpray.engines.base import DeviceLost, nothing_follows
from dpray.io.file_list import file_digests
from dpray.ledger.ledger import Ledger
from dpray.methods import registry
from dpray.methods.config import parse_config
from dpray.types import InputError, OnProgress, Progress
from dpray.workers import shards
from dpray.workers.rows import data_files, local_rows, record_rows
from tests.engines.bag_of_words import BagOfWords
from tests.engines.kept import Kept

Texts = list[str]


def as_json(texts: Texts) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def zipped(path: Path, texts: Texts) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.jsonl", as_json(texts))


def csv_of(texts: Texts) -> str:
    return "text\n" + "".join(f'"{text}"\n' for text in texts)


KINDS: dict[str, Callable[[Path, Texts], Any]] = {
    "jsonl": lambda path, texts: path.write_bytes(as_json(texts)),
    "json": lambda path, texts: path.write_text(json.dumps([{"text": text} for text in texts])),
    "csv": lambda path, texts: path.write_text(csv_of(texts)),
    "jsonl.gz": lambda path, texts: path.write_bytes(gzip.compress(as_json(texts))),
    "zip": zipped,
    "parquet": lambda path, texts: pa.parquet.write_table(pa.table({"text": texts}), path),
    "arrow": lambda path, texts: pa.feather.write_feather(pa.table({"text": texts}), path),
}


def hashed(path: Path) -> DataConfig:
    return DataConfig(path=str(path), public_size=9).hashed(file_digests(str(path)))


def read(data: DataConfig) -> Texts:
    return [row["text"] for row in local_rows(data, partial(record_rows, data=data))]


@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.lists(st.text("abc", min_size=1), min_size=1), st.lists(st.text("abc", min_size=1)))
def test_a_reading_reads_what_was_hashed(
    tmp_path: Path, kind: str, before: Texts, after: Texts
) -> None:
    folder = tmp_path / kind
    folder.mkdir(exist_ok=True)
    KINDS[kind](folder / f"1.{kind}", ["other"])
    KINDS[kind](folder / f"2.{kind}", before)
    data = hashed(folder)
    assert read(data) == ["other", *before]
    KINDS[kind](folder / f"2.{kind}", after)
    if before == after and kind in ("jsonl", "json", "csv"):  # others hold the time
        assert read(data) == ["other", *before]
    elif before != after:
        with pytest.raises(InputError, match=rf"^data\.path: 2\.{kind} has changed since the run"):
            read(data)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    KINDS["jsonl"](path, ["a", "b"])
    data = hashed(path)
    [part] = data_files(data)
    rows = record_rows(part, data)
    assert next(rows)["text"] == "a"
    KINDS["jsonl"](path, ["c", "b"])
    assert next(rows)["text"] == "b"
    with pytest.raises(InputError, match=r"notes\.jsonl has changed"):
        next(rows)


@pytest.mark.parametrize("broken", [b"", b"Marlowe", b'{"texts": "Marlowe"}\n'])
def test_that_a_file_has_changed_tells_more_than_what_is_wrong_with_it_now(
    tmp_path: Path, broken: bytes
) -> None:
    path = tmp_path / "notes.jsonl"
    KINDS["jsonl"](path, ["a"])
    data = hashed(path)
    path.write_bytes(broken)
    with pytest.raises(InputError, match=r"notes\.jsonl has changed"):
        read(data)


def test_files_that_come_or_go_are_told(tmp_path: Path) -> None:
    for name in ("1", "2"):
        KINDS["jsonl"](tmp_path / f"{name}.jsonl", [name])
    data = hashed(tmp_path)
    KINDS["jsonl"](tmp_path / "3.jsonl", ["3"])
    with pytest.raises(InputError, match=r"^data\.path: names 3 files, and the run began with 2"):
        read(data)
    (tmp_path / "1.jsonl").unlink()
    with pytest.raises(InputError, match=r"2\.jsonl has changed"):
        read(data)


# Runs

A_TEXT_A_BATCH = {"method__max_records": 12}
MEASURED = A_TEXT_A_BATCH | {"data__label_proportions": "measured"}
ROUNDS = {"method__max_records": 5, "runtime__batches_per_task": 2}
PE = {"name": "aug_pe", "records": 4, "iterations": 2, "variations": 2, "max_tokens": 4,
      "word_var": None}  # fmt: skip
SGD = {"name": "dp_sgd", "epochs": 0.2, "batch_size": 10, "micro_batch_size": 8, "max_length": 16,
       "lora_rank": 2, "records": 4}  # fmt: skip


class Faulty(Kept):
    """The device is lost once, when a text is finished; or texts are empty, so that a run without
    enough records has another round."""

    def __init__(self, engine: Any, loses: bool) -> None:
        super().__init__(engine)
        self.loses = loses

    def build(self, *_: Any, **__: Any) -> Any:
        return self

    def decode_lockstep(self, groups: Any, following: Any = nothing_follows) -> Any:
        def heard(result: Any) -> Any:
            return following(
                result if self.loses else replace(result, text="", finish_reason="stop")
            )

        for number, result in enumerate(self.engine.decode_lockstep(groups, heard)):
            if self.loses and not isinstance(groups, list) and number == 1:
                self.loses = False
                raise DeviceLost("the GPU is gone")
            yield result


def when(activity: str, time: int, do: Callable[[], Any]) -> OnProgress:
    """Call `do` when a run says for the nth time that it begins an activity."""
    left = [time]

    def on_progress(progress: Progress) -> None:
        if progress.activity == activity:
            left[0] -= 1
            if left[0] == 0:
                do()

    return on_progress


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("changes", "activity", "time", "loses"),
    [
        pytest.param(None, "vocabulary", 1, False, id="before the first pass"),
        pytest.param(None, "densities", 1, False, id="between two passes of dp_kps"),
        pytest.param(MEASURED, "sorting records into batches", 1, False, id="after the labels"),
        pytest.param(
            A_TEXT_A_BATCH, "sorting records into batches", 2, True, id="between two attempts"
        ),
        pytest.param(
            {"method__batches": "poisson"}, "sorting records into batches", 2, True, id="poisson"
        ),
        pytest.param(ROUNDS, "sorting records into batches", 2, False, id="between two rounds"),
        pytest.param({"method": PE}, "embedding records", 1, False, id="aug_pe"),
        pytest.param({"method": SGD}, "encoding records", 1, False, id="dp_sgd"),
    ],
)
def test_a_run_reads_what_was_hashed_in_every_pass(
    settings: Callable[..., dict[str, Any]],
    sequences: dict[str, Any],
    engine: Any,
    records_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any] | None,
    activity: str,
    time: int,
    loses: bool,
) -> None:
    monkeypatch.setattr(shards, "SentenceTransformerEmbedder", BagOfWords)
    config = parse_config(settings(**(sequences if changes is None else changes)))
    faulty, before = Faulty(engine, loses), records_file.read_text()
    after = before.replace("Marlowe 7", "Marlowe seven")
    edit = when(activity, time, lambda: records_file.write_text(after))
    run = partial(registry.run, config, build=faulty.build)
    with pytest.raises(InputError, match=r"records\.jsonl has changed since the run") as ended:
        run(edit)
    assert "Marlowe" not in str(ended.value) and "cannot be finished" not in str(ended.value)
    if starts := starts_of(config):
        with pytest.raises(InputError, match="the records have changed since the run"):
            run()
    assert starts_of(config) == starts, "nothing is drawn from other records"
    records_file.write_text(before)
    assert run()["records"] >= 0


def starts_of(config: Config) -> int:
    ledger = Ledger.open(config.privacy.ledger)
    found = [row["kind"] for row in ledger.export()].count("begin")
    ledger.close()
    return found
