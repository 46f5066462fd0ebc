"""Chains run from data to release: one charge, one folder, and a run that goes on anywhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import Composed, SelfComposed
from dpray.accounting.events import PoissonSubsampledGaussian
from dpray.config.config import Config
from dpray.ledger.ledger import Ledger
from dpray.methods.registry import make_plan
from dpray.report.card import SHEET, write_card
from dpray.report.page import write_report
from dpray.runs.folder import ROOM
from dpray.runs.session import FAILURES
from dpray.types import InputError, LedgerUnavailable, Resumable, RunFailed
from dpray.workers.shards import Voters
from tests.methods.chain.conftest import OF_LABEL, PUBLIC, WORDS, Watched, write_public
from tests.workers.outcomes import lines, open_budget

Make = Callable[..., Config]


def starts(run: Config) -> Counter[str]:
    """How often each unit was begun, and that all of it is one charge."""
    ledger = Ledger.open(run.privacy.ledger)
    account = ledger.account("notes")
    assert account is not None
    found = Counter(unit for unit, _ in ledger.started(_key(run)))
    assert len(account.charges) == 1 and ledger.verify() == []
    ledger.close()
    return found


def _key(run: Config) -> str:
    made: dict[str, Any] = json.loads((Path(run.output.path) / "run.json").read_text())
    return str(made["run_id"])


def words_in(prompt: str) -> set[str]:
    return {word for word in WORDS if word in prompt}


@pytest.mark.parametrize(
    ("first", "units"), [("dp_kps", ("vocabulary", "density")), ("topics", ("topics",))]
)
def test_private_terms_are_in_the_prompts_of_random_texts(
    config: Make, watched: Watched, first: str, units: tuple[str, ...]
) -> None:
    run = config(first, "aug_pe")
    report = watched.run(run)
    assert 0.999 * 30 < report["epsilon"] <= 30
    votes = ("votes-0001", "votes-0002")
    assert starts(run) == dict.fromkeys((*units, *votes), 1)
    asked = [prompt for prompt in watched.generated if "contains these words" in prompt]
    assert len(asked) >= 8
    for prompt in asked:
        label = prompt.split("kind: ")[1][0]
        assert words_in(prompt) <= OF_LABEL[label]  # epsilon is large
    assert not any("Marlowe" in prompt for prompt in watched.generated)
    files = [path for path in Path(run.output.path).rglob("*") if path.is_file()]
    assert not any(b"Marlowe" in path.read_bytes() for path in files)
    assert Counter(record["label"] for record in lines(run)) == {"a": 2, "b": 2}
    assert report["records"] == 4 and report["calls"]["calls"] == len(watched.generated)
    assert "label_mix" in report["sampling"] and "sequences" in report["first"]["sampling"]
    assert report["noise_multiplier"] == report["method"]["methods"][1]["noise_multiplier"]
    assert len(report["iterations"]) == 2
    assert {progress.activity.split(":")[0] for progress in watched.said} >= {
        f"1-{first}",
        "2-aug_pe",
    }
    assert all("30.000 (charged)" in p.detail for p in watched.said if "eps" in p.detail)
    page = write_report(Path(run.output.path), public=True)[0].read_text()
    assert f"{first.replace('_', ' ')}, then aug pe" in page
    of_first = "vocabulary" if first == "dp_kps" else "public"
    write_card(Path(run.output.path), "chain", "unknown")
    for text in (page, Path(run.output.path, SHEET).read_text()):
        assert report["first"]["public_inputs"][of_first] in unescape(text)
        assert report["first"]["noise_source"] in unescape(text)
    assert str(Path(run.data.path).parent) not in json.dumps(report)
    assert not [path for path in files if path.name == ROOM]


def test_measured_labels_are_counted_once_for_both_methods(config: Make, watched: Watched) -> None:
    measured = {"data__label_proportions": "measured", "privacy__epsilon_labels": 0.5}
    run = config("topics", "aug_pe", **measured)
    watched.stop_at = "2-aug_pe: iteration 1"
    with pytest.raises(Resumable):
        watched.run(run)
    report = watched.run(run)
    assert set(starts(run)) == {"labels", "topics", "votes-0001", "votes-0002"}
    assert set(starts(run).values()) == {1}
    assert report["sampling"]["label_mix_source"] == "measured by a histogram with noise"
    names = [mechanism["name"] for mechanism in report["mechanisms"]]
    assert len(names) == 3  # the labels, the topics and the votes
    parts = Path(run.output.path) / "private" / "parts"
    labels = json.loads((parts / "labels.json").read_text())
    assert report["sampling"]["label_mix"] == labels["proportions"]


def test_what_the_first_method_released_without_a_run_is_not_charged_again(
    config: Make, watched: Watched
) -> None:
    run = config("dp_kps", "aug_pe")
    watched.stop_at = "1-dp_kps: densities"
    with pytest.raises(Resumable):
        watched.run(run)
    (Path(run.output.path) / "run.json").rename(Path(run.output.path).parent / "kept.json")
    with pytest.raises(InputError, match=r"output of a run whose run.json is gone"):
        watched.run(run)
    with closing(Ledger.open(run.privacy.ledger)) as ledger:
        account = ledger.account("notes")
        assert account is not None and len(account.charges) == 1


def test_a_failure_that_the_first_method_noted_ends_the_chain(
    config: Make, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the ledger gives no answer, `publish_once` notes what failed in the run's folder."""
    run = config("topics", "aug_pe")

    def fails(*_: Any) -> None:
        raise ValueError

    def unavailable(*_: Any) -> None:
        raise LedgerUnavailable("the ledger gives no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Voters, "count", fails)
        patch.setattr(Ledger, "fail", unavailable)
        with pytest.raises(Resumable):
            watched.run(run)
    # As a crash leaves it before the whole run notes it, too.
    (Path(run.output.path) / "private" / FAILURES).unlink()
    with pytest.raises(RunFailed, match="topics failed with ValueError"):
        watched.run(run)
    assert starts(run)["topics"] == 1


@pytest.mark.parametrize(
    ("first", "stop_at"),
    [
        ("dp_kps", "1-dp_kps: densities"),
        ("dp_kps", "2-aug_pe: iteration 2 of 2: votes"),
    ],
)
def test_an_interrupted_chain_draws_nothing_again(
    config: Make, watched: Watched, first: str, stop_at: str
) -> None:
    run, parts = config(first, "aug_pe"), {}
    watched.stop_at = stop_at
    with pytest.raises(Resumable, match="the same command goes on"):
        watched.run(run)
    folder = Path(run.output.path) / "private"
    parts = {path: path.read_bytes() for path in folder.rglob("parts/*")}
    before = list(watched.generated)
    report = watched.run(run)
    assert set(starts(run).values()) == {1}
    assert all(path.read_bytes() == content for path, content in parts.items())
    # No text that was paid for was asked for again.
    assert report["calls"]["calls"] == len(watched.generated)
    assert watched.generated[: len(before)] == before
    assert watched.run(run) == report


def test_topics_that_were_cut_off_in_the_count_are_counted_once_more_at_no_charge(
    config: Make, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config("topics", "aug_pe")

    def cut_off(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dpray.methods.topics.release.noisy_votes", cut_off)
        with pytest.raises(Resumable):
            watched.run(run)
    watched.stop_at = "2-aug_pe: embedding rec"
    with pytest.raises(Resumable):
        watched.run(run)
    other = dict.fromkeys("abc", "now, other words")
    write_public(Path(run.output.path).parent / "public.jsonl", other)
    with pytest.raises(InputError, match=r"other files of methods\.0\.public"):
        watched.run(run)
    # Where their digest is not known, other public texts do not change what is published.
    monkeypatch.setattr("dpray.runs.runner.changed_files", lambda before, now: [])
    watched.said.clear()
    report = watched.run(run)
    assert not any(progress.activity.startswith("1-topics") for progress in watched.said)
    assert starts(run)["topics"] == 2  # both attempts of the one charge
    assert starts(run)["votes-0001"] == 1
    asked = [prompt for prompt in watched.generated if "contains these words" in prompt]
    assert asked and all(words_in(prompt) for prompt in asked)
    counts = {tuple(topic["words"]): topic["counts"] for topic in report["first"]["topics"]}
    assert counts.keys() == {
        tuple(sorted(words.replace(",", "").split())) for words in PUBLIC.values()
    }
    # Every record is in one count, and the noise is small.
    assert sum(sum(of_topic.values()) for of_topic in counts.values()) == pytest.approx(200, abs=20)


def test_every_count_of_topics_has_noise(config: Make, watched: Watched) -> None:
    """Six counts of 200 records, with noise of deviation 10,000: the largest is below 1,000 once in
    a million runs, and two pairs are equal as seldom."""
    report = watched.run(config("topics", "aug_pe", topics__noise_multiplier=1e4))
    counts = [count for topic in report["first"]["topics"] for count in topic["counts"].values()]
    assert len(set(counts)) >= 5 and 1000 < max(map(abs, counts)) < 80_000


def test_terms_are_in_the_private_and_public_prompts_of_a_batch(
    config: Make, watched: Watched
) -> None:
    run = config("dp_kps", "private_prediction")
    watched.stop_at = "2-private_prediction: batches"
    with pytest.raises(Resumable, match="the same command goes on"):
        watched.run(run)
    report = watched.run(run)
    assert 0 <= report["batches"].pop("without_text") < 6
    assert report["batches"] == {
        "total": 6, "published": 6, "repeated": 0, "failed": 0, "missing": 0,
    }  # fmt: skip
    asked = [prompt for prompt in watched.encoded if "contains these words" in prompt]
    private = [prompt for prompt in asked if "Marlowe" in prompt]
    public = [prompt for prompt in asked if "<text of the kind" in prompt]
    # One for each batch; before them two for each label, to find the longest: twice in the trial
    # before the charge, and where batches are decoded.
    assert private and len(public) == 6 + 3 * 2 * len(OF_LABEL)

    def terms(prompts: list[str]) -> set[str]:
        return {prompt.split("these words: ")[1] for prompt in prompts}

    assert terms(private) <= terms(public)
    assert len(lines(run)) == report["records"] <= 6
    private = Path(run.output.path) / "private"
    assert not [*private.rglob("batches.key"), *private.rglob("embeddings")]
    assert set(starts(run).values()) == {1}
    assert watched.options and not any(each["public_alone"] for each in watched.options)


def test_a_tuned_model_is_asked_with_private_terms_and_lost_steps_are_charged(
    config: Make, watched: Watched
) -> None:
    """Interrupted after the third of four steps, a chain resumes after the second: the two that are
    made again are charged then."""
    # So many texts do not all show one sequence of their label by chance.
    keys = {"spare_steps": 0, "noise_multiplier": 1.5, "records": 24}
    run = config("dp_kps", "dp_sgd", **{f"dp_sgd__{key}": value for key, value in keys.items()})
    ledger = open_budget(run)
    watched.stop_at_step = 3
    with pytest.raises(Resumable, match="from the last checkpoint: the steps after it, 2 at most"):
        watched.run(run)
    report = watched.run(run)
    assert report["steps"] == {"planned": 4, "repeated": 2, "charged": 6}
    kps = make_plan(run).first  # type: ignore[attr-defined]
    steps = SelfComposed(PoissonSubsampledGaussian(0.05, 1.5), 6)
    whole = Composed((kps.method_event, steps))
    assert report["epsilon"] == cost(whole, run.privacy.delta).epsilon

    account = ledger.account("notes")
    assert account is not None and ledger.verify() == []
    assert [charge.event.terms()[steps.event] for charge in account.charges] == [4, 2]
    assert account.spent.epsilon >= report["epsilon"]
    ledger.close()

    assert len(watched.generated) >= 24  # an empty text is asked for once more
    for prompt in watched.generated:
        kind, terms = prompt.removesuffix("\n").split(" | Terms: ")
        assert set(terms.split(", ")) <= OF_LABEL[kind.removeprefix("label: ")]
    assert len(set(watched.generated)) > 2  # several sequences of a label
    assert (Path(run.output.path) / "model" / "adapter_model.safetensors").is_file()
    assert watched.run(run) == report


KINDS = {
    "dp_sgd__control_columns": {"label": "label", "kind": "kind"},
    "dp_sgd__control_values": {"kind": {"x": 0.5, "y": 0.5}},
}


def test_a_bad_value_of_a_control_column_is_found_before_anything_is_drawn(
    config: Make, watched: Watched
) -> None:
    run = config("dp_kps", "dp_sgd", **KINDS)
    data = Path(run.data.path)
    rows = [json.loads(line) | {"kind": "x"} for line in data.read_text().splitlines()]
    rows[150]["kind"] = "oops"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=r"row 151: the value of column 'kind'"):
        watched.run(run)
    rows[150]["kind"] = "y"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    watched.run(run)
    assert Counter(record["control"]["kind"] for record in lines(run)) == {"x": 2, "y": 2}


def test_attributes_are_measured_once_for_the_chain(config: Make, watched: Watched) -> None:
    """The first method has no use for them, and the second one writes for what was measured."""
    run = config(
        "dp_kps", "aug_pe", data__label_proportions="measured", privacy__epsilon_attributes=8.0,
        data__attributes={"kind": ["x", "other"]}, privacy__epsilon=60.0,
    )  # fmt: skip
    data = Path(run.data.path)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows = [row | {"kind": "x" if row["label"] == "a" else row["text"]} for row in rows]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = watched.run(run)
    gaussian = [each for each in report["mechanisms"] if each["name"] == "discrete_gaussian"]
    assert [each["count"] for each in gaussian].count(1) == 1 and report["epsilon"] <= 60
    found = {(record["label"], record["kind"]) for record in lines(run)}
    assert found == {("a", "x"), ("b", "other")}


def test_a_chain_that_began_takes_other_keys_of_its_texts_alone(
    config: Make, watched: Watched
) -> None:
    watched.stop_at = "2-aug_pe: iteration 2"
    with pytest.raises(Resumable):
        watched.run(config("dp_kps", "aug_pe"))
    for fixed in ({"dp_kps__temperature": 0.5}, {"aug_pe__variations": 3}):
        with pytest.raises(InputError, match=r"another configuration \(other now: \w+"):
            watched.run(config("dp_kps", "aug_pe", **fixed))
    with pytest.raises(InputError, match=r"output.path: .* holds a run of another plan"):
        watched.run(config("dp_kps", "aug_pe", privacy__shares=[0.4, 0.6]))
    report = watched.run(config("dp_kps", "aug_pe", aug_pe__temperature=0.5))
    assert "method.temperature: " in report["sampling"]["changed_during_the_run"]
