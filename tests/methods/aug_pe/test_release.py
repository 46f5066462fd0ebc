"""Aug-PE runs in this process with a real model: what is charged, kept, resumed and released."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dpray.config.config import Config
from dpray.engines.base import Completion, EngineError
from dpray.ledger.ledger import Ledger
from dpray.methods import registry as methods
from dpray.methods.aug_pe import release
from dpray.methods.config import parse_config
from dpray.types import InputError, Resumable
from dpray.workers import shards
from dpray.workers.shards import Voters
from tests.engines.bag_of_words import BagOfWords
from tests.engines.kept import Kept
from tests.workers.outcomes import lines

Settings = Callable[..., dict[str, Any]]
Configs = Callable[..., Config]


class Asked(Kept):
    """Counts the prompts that reach the real engine, and breaks it on demand."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.prompts: list[str] = []
        self.left = 10**9

    def generate(self, prompts: Any, sampling: Any, on_completion: Any = None) -> Any:
        if len(prompts) > self.left:
            self.engine.generate(prompts[: self.left], sampling[: self.left], on_completion)
            raise EngineError("the endpoint answered with HTTP status 500")
        self.left -= len(prompts)
        self.prompts += [prompt.user for prompt in prompts]
        return self.engine.generate(prompts, sampling, on_completion)

    def run(self, config: Config, on_progress: Any = lambda progress: None) -> dict[str, Any]:
        return methods.run(config, on_progress, build=lambda section: self)


@pytest.fixture
def asked(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked(engine)
    monkeypatch.setattr(shards, "SentenceTransformerEmbedder", BagOfWords)
    return asked


@pytest.fixture
def config(settings: Settings) -> Configs:
    method = {
        "name": "aug_pe", "records": 7, "iterations": 3, "variations": 3, "max_tokens": 8,
        "word_var": None,
    }  # fmt: skip
    return lambda **changes: parse_config(settings(method=method, **changes))


def test_a_run_from_data_to_release(
    config: Configs, asked: Asked, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Private text reaches neither the model nor a file."""
    run = config()
    report = asked.run(run)
    assert report["epsilon"] <= run.privacy.epsilon
    assert report["epsilon"] > 0.99 * run.privacy.epsilon  # calibrated, not merely valid
    assert [m["name"] for m in report["mechanisms"]] == ["discrete_gaussian"]
    assert report["mechanisms"][0]["count"] == 3
    records = lines(run)
    assert len(records) == report["records"] == 7
    assert {r["label"] for r in records} == {"a", "b"}
    # Empty answers are asked again, so there may be more calls than planned, and never fewer.
    assert report["calls"]["calls"] == len(asked.prompts) >= report["llm_calls"] == 7 * (3 + 2 * 2)
    assert [row["iteration"] for row in report["iterations"]] == [1, 2, 3]
    assert all(row["kept"] == 7 for row in report["iterations"])
    ledger = Ledger.open(run.privacy.ledger)
    units = [unit for unit, _ in ledger.published(report["ledger"]["reservation"])]
    assert sorted(units) == ["votes-0001", "votes-0002", "votes-0003"]
    assert ledger.verify() == []
    ledger.close()
    assert "Marlowe" not in "".join([*asked.prompts, *capfd.readouterr()])
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "records.jsonl":
            assert b"Marlowe" not in path.read_bytes(), path.name


def test_a_run_that_was_cut_off_goes_on_with_the_same_noise_and_charge(
    config: Configs, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off inside the second vote, and in the calls after it."""
    run = config()
    vote = release.noisy_votes
    counted: list[int] = []

    def cut_off(*arguments: Any) -> Any:
        counted.append(1)
        if len(counted) == 2:
            raise KeyboardInterrupt
        return vote(*arguments)

    monkeypatch.setattr(release, "noisy_votes", cut_off)
    with pytest.raises(Resumable):
        asked.run(run)
    made = json.loads((Path(run.output.path) / "run.json").read_text())
    asked.left = 4
    with pytest.raises(Resumable, match=r"status 500"):
        asked.run(run)
    asked.left = 10**9
    report = asked.run(run)
    # Interrupted, second, third: the first vote was not counted again.
    assert len(counted) == 4
    assert len(asked.prompts) + 4 == report["calls"]["calls"], "a call was paid for twice"
    assert made["charges"][""]["event"] == report["mechanisms"][0]["parameters"] | {
        "type": "discrete_gaussian"
    }
    ledger = Ledger.open(run.privacy.ledger)
    account = ledger.account("notes")
    assert account is not None and len(account.charges) == 1
    ledger.close()


class Counted(BagOfWords):
    """Counts the private texts that it embeds."""

    private = 0

    def embed(self, texts: Any, batch_size: int = 32) -> Any:
        Counted.private += sum("Marlowe" in text for text in texts)
        return super().embed(texts, batch_size)


class OtherModel(Counted):
    def embed(self, texts: Any, batch_size: int = 32) -> Any:
        return -super().embed(texts, batch_size)


def test_the_next_attempt_embeds_no_record_that_is_kept_and_unaltered(
    config: Configs, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, vote = config(), release.noisy_votes
    monkeypatch.setattr(shards, "ROWS_AT_ONCE", 25)
    monkeypatch.setattr(Counted, "private", 0)
    private = Path(run.output.path) / "private"

    def attempt(embedder: type[Counted], cut_off: bool = True) -> tuple[Any, int]:
        """Return the exact counts of the attempt's first vote, and how many texts it embedded."""
        exact: list[Any] = []

        def votes(voters: Any, mechanism: Any, candidates_ND: Any) -> Any:
            exact.append(voters.each(Voters.count, candidates_ND))
            if cut_off:
                raise KeyboardInterrupt
            return vote(voters, mechanism, candidates_ND)

        monkeypatch.setattr(release, "noisy_votes", votes)
        monkeypatch.setattr(shards, "SentenceTransformerEmbedder", embedder)
        before = Counted.private
        if cut_off:
            with pytest.raises(Resumable):
                asked.run(run)
        else:
            asked.run(run)
        [counts] = exact[0]
        return {name: found.tolist() for name, found in counts.items()}, Counted.private - before

    first, texts = attempt(Counted)
    assert texts == 60
    [folder] = (private / "embeddings").iterdir()
    files = sorted(folder.iterdir())
    assert len(files) == 3 and folder.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert attempt(Counted) == (first, 0)
    files[0].write_bytes(files[1].read_bytes())
    files[1].write_bytes(files[1].read_bytes()[:-1])
    again, texts = attempt(Counted)
    assert again == first and texts in (35, 50), "two of three blocks of 25, 25 and 10"
    assert attempt(OtherModel)[1] == 60, "another model's embeddings are not these"
    assert attempt(Counted, cut_off=False) == (first, 0)
    assert not (private / "embeddings").exists()


def test_what_writes_the_texts_may_change_between_two_votes(config: Configs, asked: Asked) -> None:
    """A vote is charged for any population, so whoever chooses the next one's model or prompts
    computes on what was published."""
    run = config()
    asked.left = 7 * 3 + 1
    with pytest.raises(Resumable, match="HTTP status 500"):
        asked.run(run)
    asked.left = 10**9
    first = Path(run.output.path) / "private" / "parts" / "votes-0001.json"
    before = first.read_bytes()
    for fixed in ({"method__variations": 2}, {"embedder": {"model": "another"}}):
        with pytest.raises(InputError, match="another configuration"):
            asked.run(config(**fixed))
    report = asked.run(config(method__temperature=0.7, engine__dtype="float32"))
    assert first.read_bytes() == before and report["records"] == 7
    changed = report["sampling"]["changed_during_the_run"]
    assert changed.startswith("engine.dtype, method.temperature: ")
    with closing(Ledger.open(run.privacy.ledger)) as ledger:
        assert ledger.account("notes").spent.epsilon == report["epsilon"]  # type: ignore[union-attr]
        assert sum(1 for _ in ledger.started(report["ledger"]["reservation"])) == 3


class Silent(Asked):
    """A model that writes nothing but refusals once it was tried."""

    def generate(self, prompts: Any, sampling: Any, on_completion: Any = None) -> Any:
        refusals = [Completion("I'm sorry, but I cannot.", 1, 1)] * len(prompts)
        for number, refusal in enumerate(refusals):
            on_completion(number, refusal)
        return refusals


def test_a_model_that_refuses_everything_can_be_replaced(config: Configs, asked: Asked) -> None:
    with pytest.raises(Resumable, match=r"answered none .*label 'a'.*the run is charged"):
        Silent(asked.engine).run(config())
    assert asked.run(config(engine__dtype="float32"))["records"] == 7


def test_a_run_without_noise_is_stamped_and_charges_nothing(config: Configs, asked: Asked) -> None:
    run = config(privacy__epsilon=float("inf"))
    report = asked.run(run)
    assert report["not_private"] is True and report["epsilon"] is None
    assert report["sampling"]["votes"].endswith("all counts get no noise")
    assert all(record["not_private"] is True for record in lines(run))
    assert "ledger" not in report
    assert not (Path(run.output.path).parent / "ledger.db").exists()
    with pytest.raises(InputError, match=r"method\.noise_multiplier"):
        methods.make_plan(config(privacy__epsilon=float("inf"), method__noise_multiplier=1.0))


def test_a_unit_of_more_records_gets_more_noise(config: Configs) -> None:
    one = methods.make_plan(config(privacy__epsilon=2.0))
    unit = {"data__unit": "text", "data__max_records_per_unit": 2}
    two = methods.make_plan(config(privacy__epsilon=2.0, **unit))
    assert two.votes.noise_std == pytest.approx(2 * one.votes.noise_std, rel=1e-3)  # type: ignore[attr-defined]
    assert two.cost.epsilon <= 2


def test_the_label_mix_is_measured_and_charged(
    config: Configs, asked: Asked, records_file: Path
) -> None:
    rows = records_file.read_text().splitlines()
    few = [row for row in rows if '"b"' in row][:3]
    records_file.write_text("\n".join([row for row in rows if '"a"' in row] + few) + "\n")
    run = config(data__label_proportions="measured", privacy__epsilon_labels=8.0)
    report = asked.run(run)
    assert {m["name"] for m in report["mechanisms"]} == {"discrete_gaussian", "discrete_laplace"}
    assert report["epsilon"] <= run.privacy.epsilon
    made = [record["label"] for record in lines(run)]
    assert made.count("a") > made.count("b")
