"""Whole runs with secret Poisson batches: the key stays in `private/` while the run is unfinished,
and is the same in every attempt; and every batch is decoded whole."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dpray.config.config import Config, EngineConfig
from dpray.engines.base import Engine, nothing_follows
from dpray.engines.transformers import TransformersEngine
from dpray.mechanisms.batches import PoissonBatches
from dpray.mechanisms.randomness import SecretKey, new_key
from dpray.methods.config import parse_config
from dpray.methods.private_prediction.decoder import BatchDecoder
from dpray.methods.registry import make_plan, run
from dpray.runs.folder import BATCHES_KEY
from dpray.types import InputError, Progress, Resumable
from dpray.workers.gathering import BatchGathering
from tests.engines.kept import Kept

Settings = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.usefixtures("one_thread")


class Watched(Kept):
    """Builds the real engine, keeps how many rows each group had, and looks for the run's key
    whenever the run says how far it is; raises after so many batches."""

    def __init__(self, engine: Engine, config: Config, stop_after: int | None = None) -> None:
        super().__init__(engine)
        self.stop_after = stop_after
        self.path = Path(config.output.path) / "private" / BATCHES_KEY
        self.sizes: dict[str, int] = {}
        self.keys: set[str] = set()
        self.said: list[Progress] = []

    def build(self, section: EngineConfig, **_: Any) -> Any:
        return self

    def decode_lockstep(self, groups: Any, following: Any = nothing_follows) -> Any:
        def seen() -> Iterator[Any]:
            for group in groups:
                self.sizes[group.group_id] = len(group.private_prompts)
                yield group

        # A list is the device's own test, with public prompts.
        mine = groups if isinstance(groups, list) else seen()
        return self.engine.decode_lockstep(mine, following)

    def on_progress(self, progress: Progress) -> None:
        self.said.append(progress)
        if self.path.exists():
            self.keys.add(self.path.read_text())
        if self.stop_after is not None and progress.completed >= self.stop_after:
            raise RuntimeError("interrupted")

    def run(self, config: Config) -> dict[str, Any]:
        return run(config, self.on_progress, self.build)


@pytest.fixture
def config(settings: Settings) -> Config:
    """24 texts, each from a batch of its own, of 5 of a label's 30 records on average."""
    made = parse_config(settings(method__batches="poisson"))
    assert make_plan(made).batches.num_batches == 24
    return made


def holding(folder: Path, secret: bytes) -> list[str]:
    """Return the files that hold the secret, by their names."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and secret in path.read_bytes()
    )


def sizes_by_key(plan: Any, key: str) -> dict[str, int]:
    """Return the number of the 60 records that the key brings into each batch."""
    joined = Counter(
        batch
        for number in range(60)
        for batch in plan.batches.joined(key, "ab"[number % 2], f"file 0, row {number}")
    )
    return {batch: joined[batch] for batch in plan.batches.batch_ids()}


def forms(key: str) -> list[bytes]:
    return [key.encode(), key.upper().encode(), bytes.fromhex(key)]


def test_a_resumed_run_has_the_same_batches_and_their_key_never_leaves_private(
    config: Config, engine: Engine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = Watched(engine, config, stop_after=8)
    with pytest.raises(Resumable):
        first.run(config)
    (key,) = first.keys
    assert first.path.stat().st_mode & 0o077 == 0
    found = {name for form in forms(key) for name in holding(tmp_path, form)}
    assert found == {f"out/private/{BATCHES_KEY}"}
    second = Watched(engine, config)
    report = second.run(config)
    assert report["batches"]["published"] == 24
    # The second attempt has the batches of the first one.
    assert first.keys == second.keys and not second.path.exists()
    sizes = first.sizes | second.sizes
    assert sizes == sizes_by_key(make_plan(config), key) and len(set(sizes.values())) > 1
    assert [name for form in forms(key) for name in holding(tmp_path, form)] == []
    # Outside of `private` there is no text of a record and no place of one.
    assert holding(tmp_path, b"Marlowe") == ["records.jsonl"]
    places = [f"file 0, row {number}".encode() for number in range(60)]
    assert not any(holding(tmp_path, place) for place in places)
    written = capfd.readouterr()
    said = f"{written.out}{written.err}{first.said}{second.said}{report}"
    assert key not in said.lower() and "Marlowe" not in said


def test_no_batch_is_cut_however_many_records_there_are(
    settings: Settings, model_folder: str, tmp_path: Path
) -> None:
    """60 records where 8 are expected, and a KV cache that holds 6 rows: every unit that joined is
    in its batch, which is decoded in parts."""
    made = parse_config(
        settings(
            method__batches="poisson", method__batch_size=2, method__texts=6,
            method__max_tokens=4, data__public_size=8, privacy__epsilon=1e3,
        )
    )  # fmt: skip
    plan = make_plan(made)
    small = TransformersEngine(EngineConfig(model=model_folder, kv_cache_gib=0.0004), max_rows=4)
    assert plan.memory is not None and small.rows_at_once(plan.memory.row_tokens) < 6
    with closing(small):
        watched = Watched(small, made)
        report = watched.run(made)
    (key,) = watched.keys
    assert watched.sizes == sizes_by_key(plan, key)
    assert max(watched.sizes.values()) > 10
    assert report["batches"]["published"] == 6


def test_a_resumed_run_keeps_the_batch_size_that_auto_was(
    settings: Settings, engine: Engine
) -> None:
    """Its charge is for that size; with less memory, or on another machine, auto is another."""
    asked: dict[str, Any] = {"method__batches": "poisson", "method__batch_size": "auto",
                             "privacy__epsilon": 1e4}  # fmt: skip
    made = parse_config(settings(**asked))
    first = Watched(engine, made, stop_after=1)
    with pytest.raises(Resumable):
        first.run(made)
    less = parse_config(settings(**asked, engine__kv_cache_gib=0.001))
    sizes = [make_plan(each).settings.batch_size for each in (made, less)]  # type: ignore[attr-defined]
    assert sizes[1] < sizes[0]
    assert Watched(engine, less).run(less)["batches"]["failed"] == 0


def test_a_run_that_was_cut_off_when_it_was_finished_leaves_no_key_behind(
    config: Config, engine: Engine
) -> None:
    """It is finished once run.json says so, and its work is removed after."""
    first = Watched(engine, config)
    report = first.run(config)
    (key,) = first.keys
    part = Path(config.output.path) / "private/parts/0.jsonl"
    for path in (first.path, part):
        path.write_text(key)
    assert Watched(engine, config).run(config) == report
    assert not first.path.exists() and not part.exists()


def test_every_run_has_a_key_of_its_own_whatever_lies_there(
    settings: Settings, engine: Engine, tmp_path: Path
) -> None:
    """A copied folder without its run.json and its outputs is that of another run, whose batches
    may not have the units of the first one's."""
    keys: list[str] = []
    for name in ("one", "two"):
        ledger, out = f"sqlite:///{tmp_path}/{name}.db", str(tmp_path / name)
        asked = settings(method__batches="poisson", output__path=out, privacy__ledger=ledger)
        made = parse_config(asked)
        watched = Watched(engine, made, stop_after=1)
        watched.path.parent.mkdir(parents=True)
        watched.path.write_text("".join(keys))
        with pytest.raises(Resumable):
            watched.run(made)
        keys.append(watched.path.read_text())
        assert watched.sizes.items() <= sizes_by_key(make_plan(made), keys[-1]).items()
    assert keys[0] != keys[1] and all(len(bytes.fromhex(key)) == 32 for key in keys)


def test_a_run_that_lost_its_key_is_refused(config: Config, engine: Engine) -> None:
    first = Watched(engine, config, stop_after=8)
    with pytest.raises(Resumable):
        first.run(config)
    kept = first.path.read_text()
    first.path.unlink()
    second = Watched(engine, config)
    with pytest.raises(InputError, match=r"output\.path: .*batches\.key is missing"):
        second.run(config)
    assert second.sizes == {} and not first.path.exists()
    for lost in ("", kept[:-1], "g" * 64):
        first.path.write_text(lost)
        with pytest.raises(InputError, match=r"output\.path: .*batches\.key does not hold a key"):
            second.run(config)
    first.path.write_text(kept + "\n")
    assert second.run(config)["batches"]["published"] == 24


def test_no_repr_of_what_is_sent_to_workers_shows_the_key() -> None:
    key = SecretKey(new_key())
    made = PoissonBatches({"": 3}, {"": 0.5})
    for sent in (
        BatchGathering(made, key, 1),
        partial(BatchDecoder, "plan", key),
        [key],
        {"k": key},
    ):
        assert str(key) not in repr(sent)
    assert pickle.loads(pickle.dumps(key)) == key
