"""The release's order and number: from public numbers, whatever was decoded first."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dpray.config.sections import RuntimeConfig
from dpray.ledger.ledger import NullLedger
from dpray.methods.config import parse_config
from dpray.methods.private_prediction.release import (
    Totals,
    external_sort,
    next_batches,
    records,
    task_size,
)
from dpray.methods.registry import make_plan
from dpray.runs.folder import ReleaseFolder
from dpray.runs.session import Session
from dpray.workers.engine import build_engine

Settings = Callable[..., dict[str, Any]]

BATCHES = 12
Release = Callable[..., list[dict[str, Any]]]


def outcome(batch: str, texts: int = 2) -> dict[str, Any]:
    examples = [[f"text {n} of {batch}", "stop", 3] for n in range(texts)]
    return {
        "batch": batch,
        "examples": examples,
        "private_tokens": 1,
        "tokens": 3 * texts,
        "row_variation": 0.0,
    }


@pytest.fixture
def release(settings: Settings, tmp_path: Path) -> Release:
    """The release of outcomes that were published in parts of three, in the order given."""

    def make(outcomes: list[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
        config = parse_config(settings(output__path=str(tmp_path / "out"), **changes))
        plan = make_plan(config)
        assert plan.batches.num_batches == BATCHES
        with closing(ReleaseFolder(config.output.path)) as folder:
            session = Session(
                plan, folder, NullLedger(), "run", "0" * 32, lambda progress: None, build_engine
            )
            for start in range(0, len(outcomes), 3):
                name = f"{start:08d}.jsonl"
                folder.stage(name, outcomes[start : start + 3])
                folder.move_to_parts(name)
            folder.assemble(records(session))
            return [json.loads(line) for line in folder.synthetic.open()]

    return make


def in_turn() -> list[str]:
    return [f"{label}/{number}" for number in range(BATCHES // 2) for label in range(2)]


@pytest.mark.parametrize("most", [None, 17])
def test_what_was_decoded_first_does_not_show(release: Release, most: int | None) -> None:
    batches = in_turn()
    first = release([outcome(batch) for batch in batches], method__max_records=most)
    random.Random(0).shuffle(batches)
    assert release([outcome(batch) for batch in batches], method__max_records=most) == first
    expected = [f"text {n} of {batch}" for n in range(2) for batch in in_turn()]
    assert [record["text"] for record in first] == expected[:most]


def test_an_empty_text_takes_no_place(release: Release) -> None:
    outcomes = [outcome(batch) for batch in in_turn()]
    outcomes[0]["examples"][0][0] = "  "
    outcomes[1]["examples"] = []
    records = release(outcomes, method__max_records=12)
    assert [record["text"] for record in records] == [
        "text 1 of 0/0", *(f"text 0 of {batch}" for batch in in_turn()[2:]), "text 1 of 0/1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("runtime", "disjoint", "batches", "size"),
    [
        ({}, True, 1000, 8),
        ({}, False, 1000, 64),
        ({"actors": 4}, False, 90, 23),
        ({"actors": 9}, False, 8, 1),
        ({"batches_per_task": 3, "actors": 4}, False, 4, 3),
    ],
)
def test_short_batches_come_in_large_tasks_and_every_actor_gets_some(
    runtime: dict[str, int], disjoint: bool, batches: int, size: int
) -> None:
    assert task_size(RuntimeConfig(**runtime), disjoint, batches) == size  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("most", "batches", "records", "following"),
    [
        (5, 0, 0, 5),
        (5, 5, 2, 6),  # 3 records are missing, at 3 / 6 of a record a batch
        (5, 5, 4, 2),  # 1 is missing, at 5 / 6
        (5, 5, 5, 0),
        (None, 0, 0, BATCHES),
        (None, BATCHES, 0, 0),
    ],
)
def test_as_many_batches_are_next_as_the_missing_records_ask_for(
    settings: Settings, most: int | None, batches: int, records: int, following: int
) -> None:
    plan, done = make_plan(parse_config(settings(method__max_records=most))), in_turn()[:batches]
    decoded = Totals(records=dict.fromkeys(done[:records], 1))
    assert next_batches(plan, done, decoded) == in_turn()[batches:][:following]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([[], [], []], "3 of 3 batches gave no text: all 2 private tokens of a batch were drawn"),
        (
            [["fine"], [" "], ["\n"]],
            "2 of 3 batches gave no text: the model ended the text at once",
        ),
        ([["fine"], [], []], "2 of 3 batches gave no text: all 2 private tokens"),
        ([["fine"], ["fine"], []], ""),
        ([[], []], ""),
    ],
)
def test_batches_without_a_text_are_warned_of(
    settings: Settings, given: list[list[str]], why: str
) -> None:
    plan = make_plan(parse_config(settings(method__private_tokens=2)))
    decoded = Totals()
    for batch, texts in zip(in_turn(), given, strict=False):
        examples = [[text, "stop", 1] for text in texts]
        decoded.add(plan, outcome(batch) | {"examples": examples})
    warning = decoded.warning(plan)
    assert warning.startswith(why) and bool(warning) is bool(why)
    assert decoded.without_text == sum(not "".join(texts).strip() for texts in given)
    if "private tokens" in warning:
        assert "a batch may end before its first text, after 2; " in warning


@pytest.mark.parametrize("texts", [0, 1, 2])
def test_a_run_that_was_cut_off_decodes_the_batches_that_it_would_have_decoded(
    settings: Settings, texts: int
) -> None:
    """Short texts are done first: which batches are done when a run is cut off follows from the
    draws, and may not decide which of the others are left out."""
    plan = make_plan(parse_config(settings(method__max_records=5)))
    rng = random.Random(texts)
    counts = {batch: texts and rng.randrange(texts + 1) for batch in in_turn()}

    def decoded_in_all(cuts: int) -> set[str]:
        done: set[str] = set()
        while batches := next_batches(plan, done, Totals(records={b: counts[b] for b in done})):
            cuts, size = cuts - 1, rng.randrange(len(batches)) if cuts > 0 else len(batches)
            done |= set(rng.sample(batches, size))
        return done

    whole = decoded_in_all(0)
    assert len(whole) >= 5
    assert all(decoded_in_all(cuts) == whole for cuts in range(1, 6) for _ in range(20))


def test_poisson_batches_are_decoded_label_by_label(settings: Settings) -> None:
    plan = make_plan(parse_config(settings(method__batches="poisson", method__max_records=None)))
    batches = list(plan.batches.batch_ids())
    done, waiting = batches[:3], batches[3:]
    following = next_batches(plan, done, Totals())
    assert sorted(following) == sorted(waiting) != waiting
    labels = [plan.batches.label_of(batch) for batch in following]
    assert labels == sorted(labels)


def test_records_come_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sorted in no folder of the run, and no file is left."""
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    records = [(place, {"text": f"\ud83d café {place}"}) for place in range(100)]
    mixed = random.Random(0).sample(records, len(records))
    assert list(external_sort(mixed)) == [record for _, record in records]
    assert not [*tmp_path.iterdir()]


def test_the_records_are_not_held() -> None:
    """They are 6 MB."""
    records = ((7919 * place % 3_001, {"text": "x" * 2_000}) for place in range(3_001))
    tracemalloc.start()
    try:
        count = sum(1 for _ in external_sort(records))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert count == 3_001
