"""Runs in this process with a real model: what is charged, kept, repeated and released."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import WorkerCrashedError

from dpray.config.config import Config, EngineConfig
from dpray.ledger.ledger import Ledger
from dpray.methods import registry as methods
from dpray.methods.config import parse_config
from dpray.methods.private_prediction import release as run_module
from dpray.methods.private_prediction.plan import PrivatePredictionPlan
from dpray.runs import runner, session
from dpray.runs.folder import CONFIG
from dpray.runs.privacy_report import NOT_COVERED
from dpray.runs.session import LOSSES
from dpray.types import Budget, InputError, LedgerError, Resumable
from dpray.workers.failures import REPEATED_AFTER

Settings = Callable[..., dict[str, Any]]


KEPT: list[Any] = []
"""The real engine, loaded once for all runs of this file."""


class Kept:
    """The kept engine stands behind this one, which a run may close."""

    def __init__(self, section: EngineConfig, **_: Any) -> None:
        self.section = section

    def __getattr__(self, name: str) -> Any:
        return getattr(KEPT[0], name)

    def close(self) -> None: ...


def release(run: Config, build: Any = Kept) -> dict[str, Any]:
    return methods.run(run, build=build)


@pytest.fixture(scope="module", autouse=True)
def one_engine(engine: Any) -> Iterator[None]:
    KEPT.append(engine)
    yield
    KEPT.pop()


@pytest.fixture
def config(settings: Settings) -> Callable[..., Config]:
    return lambda **changes: parse_config(settings(**changes))


@pytest.fixture
def lose_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lose the machine after some tasks of every execution, with the next task's batches begun."""

    def arm(tasks: int, times: int = 1) -> None:
        left, decode = [times], run_module.decode

        def losing(*arguments: Any) -> Iterator[Any]:
            for number, outcomes in enumerate(decode(*arguments)):
                if number == tasks and left[0] > 0:
                    left[0] -= 1
                    raise WorkerCrashedError
                yield outcomes

        monkeypatch.setattr(run_module, "decode", losing)

    return arm


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()]


def ledger_of(config: Config) -> Ledger:
    return Ledger.open(config.privacy.ledger)


def assert_once(config: Config, report: dict[str, Any]) -> None:
    """Every record stands once, from a batch the ledger has published once."""
    ledger, run = ledger_of(config), report["ledger"]["reservation"]
    published = [batch for batch, _ in ledger.published(run)]
    assert len(published) == len(set(published)) == report["batches"]["published"]
    records = lines(Path(config.output.path) / "synthetic.jsonl")
    assert {record["batch"] for record in records} <= set(published)
    assert len(records) == report["records"] > 0
    assert ledger.verify() == []


def test_a_run_from_data_to_release(
    config: Callable[..., Config], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = config()
    report = release(run)
    folder = Path(run.output.path)
    none = dict.fromkeys(("repeated", "failed", "missing"), 0)
    drawn = {"without_text": report["batches"]["without_text"]}
    assert report["batches"] == {"total": 12, "published": 12} | none | drawn
    assert report["epsilon"] <= run.privacy.epsilon
    assert report == json.loads((folder / "privacy_report.json").read_text())
    assert_once(run, report)
    assert {r["label"] for r in lines(folder / "synthetic.jsonl")} == {"a", "b"}
    assert ledger_of(run).account("notes").spent == Budget(report["epsilon"], report["delta"])
    # A finished run is not run again.
    before = (folder / "synthetic.jsonl").read_bytes()
    assert release(run) == report
    assert (folder / "synthetic.jsonl").read_bytes() == before
    # Private text is in the data alone.
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "records.jsonl":
            assert b"Marlowe" not in path.read_bytes(), path.name
    out = capfd.readouterr()
    assert "Marlowe" not in out.out + out.err


@pytest.mark.parametrize(("asked", "used"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_the_engine_is_built_in_float32_or_the_report_says_so(
    config: Callable[..., Config], asked: str, used: str
) -> None:
    built = []

    def building(section: EngineConfig, **_: Any) -> Kept:
        built.append(section.dtype)
        return Kept(section)

    report = release(config(engine__dtype=asked, method__max_records=12), building)
    assert built == [used] == [report["method"]["model_dtype"]]
    assert set(NOT_COVERED) <= set(report["not_covered"])
    said = [line for line in report["not_covered"] if line not in NOT_COVERED]
    # The tiny model's rows move with their neighbours, and how far was measured where it ran.
    moved = report["numerics"]["row_variation"]
    assert report["numerics"]["dtype"] == used
    assert 0.0 < moved < (1e-4 if used == "float32" else 1.0)
    assert said == [line for line in said if f"moved by up to {moved:.1e}" in line and used in line]
    assert len(said) == 1


def test_rows_that_round_by_more_than_their_batch_allows_are_refused(
    config: Callable[..., Config],
) -> None:
    small = {"method__clip_bound": 1e-5, "method__temperature": 1e-5}
    run = config(**small, method__max_records=12)
    with pytest.raises(InputError, match=r"float32: all rows of a batch .*; nothing was charged"):
        release(run)


def test_every_batch_runs_though_most_are_empty(config: Callable[..., Config]) -> None:
    run = config(data__public_size=400, method__max_records=80)
    report = release(run)
    assert report["batches"]["published"] == report["batches"]["total"] == 80 > 60


def test_lost_batches_are_repeated_at_no_further_cost(
    config: Callable[..., Config], lose_after: Callable[..., None]
) -> None:
    run = config()
    lose_after(1)
    report = release(run)
    assert [report["batches"][key] for key in ("published", "repeated")] == [12, 4]
    lost_starts = {"the loss of a machine or of a process": 4}
    only_after = list(REPEATED_AFTER)
    assert report["repeats"] == {
        "count": 4, "lost_starts": lost_starts, "only_after": only_after
    }  # fmt: skip
    assert_once(run, report)
    assert ledger_of(run).account("notes").spent.epsilon == report["epsilon"]


def test_a_run_that_keeps_losing_goes_on_and_a_loss_without_a_note_was_an_interruption(
    config: Callable[..., Config], lose_after: Callable[..., None]
) -> None:
    run = config()
    lose_after(0, times=3)
    with pytest.raises(Resumable, match="3 times"):
        release(run)
    noted = Path(run.output.path) / "private" / LOSSES
    assert "Marlowe" not in noted.read_text()
    noted.unlink()
    report = release(run)
    assert report["repeats"]["lost_starts"] == {"an interruption of the run": 3 * 4}
    assert_once(run, report)


def test_a_run_that_began_with_other_weights_does_not_go_on(
    config: Callable[..., Config],
    lose_after: Callable[..., None],
    model_folder: str,
    tmp_path: Path,
) -> None:
    """The folder has the same name, and other files; the report would name those for all texts."""
    model = shutil.copytree(model_folder, tmp_path / "model")
    run = config(engine__model=str(model), runtime__max_attempts=1)
    lose_after(1)
    with pytest.raises(Resumable):
        release(run)
    away = model.rename(tmp_path / "away")  # as for a driver without the model of its workers
    lose_after(0)
    with pytest.raises(Resumable):
        release(run)
    away.rename(model)
    (model / "more.json").write_text("{}")
    with pytest.raises(
        InputError, match=r"^output\.path: .* began with other files of engine\.model"
    ):
        release(run)
    (model / "more.json").unlink()
    assert release(run)["batches"]["missing"] == 0


@pytest.mark.parametrize("committed", [True, False])
def test_staged_output_is_kept_if_it_was_committed_and_destroyed_if_not(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    run = config()

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if committed:
            patch.setattr(runner.ReleaseFolder, "move_to_parts", crash)
        else:
            patch.setattr(Ledger, "publish", crash)
        with pytest.raises(Resumable):
            release(run)
    [staged] = (Path(run.output.path) / "private/staging").iterdir()
    drawn = [example for line in lines(staged) for example in line["examples"]]
    plan = methods.make_plan(run)
    assert isinstance(plan, PrivatePredictionPlan)
    texts = {plan.template.released(x, is_cut=why == "length") for x, why, _ in drawn} - {""}
    report = release(run)
    assert not staged.exists() and report["batches"]["missing"] == 0
    assert report["batches"]["repeated"] == (0 if committed else 4)
    if committed:
        released = {r["text"] for r in lines(Path(run.output.path) / "synthetic.jsonl")}
        assert texts <= released
    assert_once(run, report)


def test_an_altered_or_deleted_ledger_is_refused_not_made_anew(
    config: Callable[..., Config], lose_after: Callable[..., None], tmp_path: Path
) -> None:
    run = config(runtime__max_attempts=1)
    lose_after(1)
    with pytest.raises(Resumable):
        release(run)
    edit = "UPDATE dpray_entries SET payload = {} WHERE kind = 'reserve'"
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        for change in ("payload || ' '", "rtrim(payload)"):
            database.execute(edit.format(change))
            database.commit()
            if "||" in change:
                with pytest.raises(LedgerError, match="are not as they were written"):
                    release(run)
    for path in tmp_path.glob("ledger.db*"):
        path.unlink()
    with pytest.raises((InputError, LedgerError)) as refused:
        release(run)
    assert "ledger" in str(refused.value)
    other = Ledger.create_or_open(run.privacy.ledger)
    other.create_dataset("notes", Budget(1000.0, 1e-3), "record", "add_or_remove_one")
    with pytest.raises(InputError, match="does not hold this run's charge"):
        release(run)


def test_two_runs_of_one_folder_do_not_mix(config: Callable[..., Config]) -> None:
    run = config()
    with (
        closing(runner.ReleaseFolder(run.output.path)),
        pytest.raises(InputError, match="another run"),
    ):
        release(run)


def test_a_units_records_are_bounded(config: Callable[..., Config], records_file: Path) -> None:
    rows = [json.loads(line) for line in records_file.read_text().splitlines()]
    records_file.write_text(
        "".join(json.dumps(r | {"who": i % 6}) + "\n" for i, r in enumerate(rows))
    )
    one = config(data__unit="who", data__max_records_per_unit=1, method__private_tokens=4)
    two = config(data__unit="who", data__max_records_per_unit=2, method__private_tokens=4)
    rho = [
        c.summary()["mechanisms"][0]["cost"]["zcdp_rho"] for c in map(methods.make_plan, (one, two))
    ]
    assert rho[1] == pytest.approx(4 * rho[0])
    report = release(two)
    assert report["privacy_unit"] == "all records with the same 'who'"
    assert report["contribution_bound"] == 2


def test_an_overlong_text_is_cut_by_a_rule_on_itself(
    config: Callable[..., Config], records_file: Path
) -> None:
    with open(records_file, "a") as file:
        file.write(json.dumps({"text": "Marlowe went on and on " * 8000, "label": "a"}) + "\n")
    run = config()
    report = release(run)
    assert report["batches"]["published"] == 12
    assert_once(run, report)


def test_measured_label_proportions_are_charged_and_used_once(
    config: Callable[..., Config], records_file: Path
) -> None:
    kept = [line for line in records_file.read_text().splitlines() if '"a"' in line]
    other = [line for line in records_file.read_text().splitlines() if '"b"' in line]
    records_file.write_text("\n".join([*kept, *other[:6]]) + "\n")
    run = config(data__label_proportions="measured", privacy__epsilon_labels=5.0)
    report = release(run)
    names = [mechanism["name"] for mechanism in report["mechanisms"]]
    assert "discrete_laplace" in names and report["epsilon"] <= run.privacy.epsilon
    shares = report["sampling"]["label_mix"]
    assert shares["a"] > 0.7 and sum(shares.values()) == pytest.approx(1)
    assert report["sampling"]["label_mix_source"].startswith("measured")
    units = [unit for unit, _ in ledger_of(run).published(report["ledger"]["reservation"])]
    assert units.count("labels") == 1
    assert len(units) == report["batches"]["total"] + 1
    per_label = Counter(unit.split("/")[0] for unit in units if "/" in unit)
    assert per_label["0"] > per_label["1"] >= 1


def test_a_measured_label_histogram_is_not_drawn_twice(
    config: Callable[..., Config], lose_after: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is lost after the histogram was published: the run goes on with that one."""
    drawn: list[dict[str, Any]] = []
    measure = session.noisy_labels

    def counting(*arguments: Any) -> dict[str, Any]:
        drawn.append(measure(*arguments))
        return drawn[-1]

    monkeypatch.setattr(session, "noisy_labels", counting)
    lose_after(1)
    run = config(data__label_proportions="measured", privacy__epsilon_labels=5.0)
    report = release(run)
    assert len(drawn) == 1
    assert report["sampling"]["label_mix"] == drawn[0]["proportions"]
    assert report["batches"]["repeated"] > 0


def test_labels_that_cost_all_of_epsilon_are_refused(settings: Settings) -> None:
    with pytest.raises(InputError, match=r"privacy\.epsilon_labels"):
        parse_config(settings(data__label_proportions="measured", privacy__epsilon_labels=50.0))


def test_a_finished_run_is_shown_without_its_data_and_its_model(
    settings: Settings, tmp_path: Path
) -> None:
    """No bucket is looked at: at this address none answers, and the run would not be shown."""
    report = release(parse_config(settings()))
    in_bucket = "s3://models/tiny?endpoint_override=127.0.0.1:1"
    for path in (tmp_path / "out" / "run.json", tmp_path / "out" / "private" / CONFIG):
        kept = json.loads(path.read_text())
        shown = kept.get("config", kept)
        shown["engine"]["model"] = f"{in_bucket}#0123456789abcdef"
        path.write_text(json.dumps(kept))
    Path(settings()["data"]["path"]).unlink()
    assert methods.run(parse_config(settings(engine__model=in_bucket))) == report
    other = parse_config(settings(engine__model=f"{in_bucket}#fedcba9876543210"))
    with pytest.raises(InputError, match=r"began with another configuration .*engine\.model"):
        methods.run(other)
