"""The audit of a configuration: what is audited, members, and canaries in a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import PoissonSubsampledDraws
from dpray.config.config import Config
from dpray.evaluation import canaries
from dpray.evaluation.audit import audit
from dpray.ledger.ledger import Ledger
from dpray.mechanisms.monte_carlo import audit_target
from dpray.methods import registry
from dpray.methods.config import parse_config
from dpray.methods.registry import make_plan
from dpray.types import Budget, DprayError, InputError, Progress, Resumable
from tests.methods.aug_pe.test_release import BagOfWords

pytestmark = pytest.mark.usefixtures("one_thread")

Settings = Callable[..., dict[str, Any]]

SGD = {
    "name": "dp_sgd", "epochs": 1, "batch_size": 10, "micro_batch_size": 8, "max_length": 24,
    "lora_rank": 2, "learning_rate": 0.01, "records": 6, "noise_multiplier": 0.8,
}  # fmt: skip
WORDS = {
    "name": "dp_kps", "vocabulary": "words.txt", "epsilon_vocabulary": 20.0,
    "epsilon_kde": 20.0, "records": 10, "sequence_length": 3,
}  # fmt: skip


def no_run(config: Config, on_progress: Any) -> None:
    raise AssertionError("nothing should run")


def no_draw(progress: Progress) -> None:
    raise AssertionError("nothing should be drawn")


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ({"name": "aug_pe", "records": 4, "iterations": 3},
         ["vote histogram", "vote histogram, 3 iterations"]),
        (WORDS, ["vocabulary histogram", "densities of a class",
          "vocabulary histogram and densities of a class"]),
        (WORDS | {"estimator": "rff", "features": 4, "bandwidth": 1.0},
         ["vocabulary histogram", "densities of a class",
          "vocabulary histogram and densities of a class"]),
        (SGD, ["DP-SGD, 6 steps"]),
    ],
)  # fmt: skip
def test_a_plan_names_the_mechanisms_that_it_charges(
    settings: Settings,
    method: dict[str, Any],
    names: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("cough\nfever\n")
    plan = make_plan(parse_config(settings() | {"method": method}))
    found = list(plan.audit_targets())
    assert [target.name for target in found] == names
    charged = plan.dp_event.terms()
    assert all(event in charged for target in found for event in target.event.terms())


def test_all_bounds_hold_together(settings: Settings) -> None:
    """Each has an equal share of what the confidence leaves."""
    config = parse_config(settings(method={"name": "aug_pe", "records": 4, "iterations": 3}))
    targets, delta = list(make_plan(config).audit_targets()), config.privacy.delta
    found = audit(config, run=no_run, trials=200, confidence=0.9)["mechanisms"]
    assert len(targets) == 2
    assert [each["most"] for each in found] == [
        target.most(200, delta, 0.1 / 2) for target in targets
    ]


def test_the_sparse_vector_is_audited_where_it_is_on(settings: Settings) -> None:
    tree = settings(method__sparse_vector={"threshold": 0.5, "noise": 0.4})
    found = list(make_plan(parse_config(tree)).audit_targets())
    assert found[-1].name.startswith("sparse vector")
    assert found[-1].event.pure_epsilon() == pytest.approx(2 / 5 / 0.4)


POISSON = {
    "batches": "poisson", "batch_size": 5, "max_tokens": 4, "max_records": 8, "clip_bound": 1.0,
    "name": "private_prediction",
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ({}, {}),
        ({"clip": "dclip"}, {"unit": "who", "max_records_per_unit": 2}),
        ({}, {"label": None, "labels": []}),
    ],
)
def test_whole_runs_with_poisson_batches_are_audited_at_what_they_cost(
    settings: Settings, method: dict[str, Any], data: dict[str, Any]
) -> None:
    """A plan of four batches of each label is its own small run, where units have one label."""
    changes = {f"data__{key}": value for key, value in data.items()}
    if "label" in data:
        method = method | {"max_records": method.get("max_records", 8) // 2}
    tree = settings(method=POISSON | method, privacy__epsilon=1e3, **changes)
    plan = make_plan(parse_config(tree))
    tokens, _, alone, copied, *of_two_labels = plan.audit_targets()
    assert tokens.name == "private token"
    assert alone.name == copied.name == "runs of 4 Poisson batch(es), 4 token(s) each"
    assert "4 others with the same records" in copied.inputs and "others" not in alone.inputs
    if "unit" not in data:
        assert alone.event == copied.event == plan.dp_event
    assert len(of_two_labels) == ("unit" in data)
    for runs in of_two_labels:
        # Two of the batches of each label are a run of four, as is a plan of two a label.
        assert runs.name == alone.name and "2 row(s) of 2 labels" in runs.inputs
        halved = {"max_records": method.get("max_records", 8) // 2}
        smaller = settings(method=POISSON | method | halved, privacy__epsilon=1e3, **changes)
        assert runs.event == make_plan(parse_config(smaller)).dp_event
    for runs in (alone, copied, *of_two_labels):
        assert audit_target(runs, 200, 1e-5, 0.01).holds


def test_a_small_run_has_few_batches_of_few_tokens(settings: Settings) -> None:
    method = POISSON | {"max_tokens": 30, "max_records": 100}
    plan = make_plan(parse_config(settings(method=method, privacy__epsilon=1e3)))
    target = list(plan.audit_targets())[-1]
    assert target.name == "runs of 4 Poisson batch(es), 4 token(s) each"
    assert target.event == SelfComposed(PoissonSubsampledDraws(5 / 30, 0.2, 4), 4)


def test_members_are_told_from_others_by_the_finished_run(
    settings: Settings, tmp_path: Path
) -> None:
    """The release holds the members' texts. Errors are raised before the draws."""
    config = parse_config(settings())
    files = {}
    for name, word in (("members", "in"), ("others", "out"), ("synthetic", "in")):
        folder = tmp_path / ("out" if name == "synthetic" else "records")
        folder.mkdir(exist_ok=True)
        files[name] = folder / f"{name}.jsonl"
        rows = [{"text": f"{word} {i} {i * i} Marlowe b c d"} for i in range(100)]
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {
        "members": str(files["members"]), "non_members": str(files["others"]),
        "run": no_run, "load_embedder": BagOfWords,
    }  # fmt: skip
    found = audit(config, trials=200, **given)["membership"]
    assert found["scores"]["nearest_cosine"]["auc"] == 1.0
    del given["load_embedder"]
    nowhere = parse_config(settings(embedder={"model": "/no/model"}))
    with pytest.raises(InputError, match=r"embedder\.model: no such folder: /no/model"):
        audit(nowhere, on_progress=no_draw, **given)
    with pytest.raises(InputError, match="members: no such file"):
        audit(config, on_progress=no_draw, **(given | {"members": "no.jsonl"}))
    with pytest.raises(InputError, match="members and non-members: give both, or neither"):
        audit(config, on_progress=no_draw, **(given | {"members": None}))
    files["others"].write_text('{"text": "one"}\n')
    with pytest.raises(InputError, match="non-members: too few records"):
        audit(config, on_progress=no_draw, **given)
    files["synthetic"].unlink()
    with pytest.raises(InputError, match=r"output\.path"):
        audit(config, on_progress=no_draw, **given)


def test_canaries_run_on_a_copy_of_the_records_and_nothing_is_left(
    settings: Settings, tmp_path: Path
) -> None:
    """The run that is given releases its input."""
    config = parse_config(settings())
    before = {path.name for path in tmp_path.iterdir()}
    copies: list[Config] = []

    def release_the_records(copy: Config, on_progress: Any) -> None:
        copies.append(copy)
        out = Path(copy.output.path)
        out.mkdir()
        (out / "synthetic.jsonl").write_bytes(Path(copy.data.path).read_bytes())

    found = audit(config, run=release_the_records, trials=200, canaries=True)["canaries"]
    assert [s["leaks"] for s in found["secrets"]] == [s["repetitions"] for s in found["secrets"]]
    assert "rank" not in found["secrets"][0] and "nothing was charged" in found["ledger"]
    (copy,) = copies
    assert copy.privacy.ledger != config.privacy.ledger and not Path(copy.data.path).exists()
    assert {path.name for path in tmp_path.iterdir()} == before


def test_canaries_of_a_run_that_does_not_finish_start_anew(settings: Settings) -> None:
    def unfinished(config: Config, on_progress: Any) -> None:
        raise Resumable("interrupted; the same command goes on from there")

    method = {key: value for key, value in SGD.items() if key != "noise_multiplier"}
    config = parse_config(settings(method=method, privacy__epsilon=float("inf")))
    with pytest.raises(DprayError, match="starts again") as error:
        audit(config, run=unfinished, canaries=True)
    assert "goes on" not in str(error.value)


def test_without_a_place_for_canaries_nothing_is_drawn(settings: Settings) -> None:
    config = parse_config(settings(data__text=["text", "note"]))
    with pytest.raises(InputError, match=r"data\.text: canaries need one column"):
        audit(config, run=no_run, canaries=True, on_progress=no_draw)
    config = parse_config(settings())
    with pytest.raises(InputError, match="candidates: 0"):
        audit(config, run=no_run, canaries=True, candidates=0, on_progress=no_draw)


def made(repetitions: int) -> list[canaries.Canary]:
    found = canaries.make_canaries()
    return [canary for canary in found if canary.repetitions == repetitions]


@pytest.mark.slow
def test_canaries_of_a_fine_tuned_model_are_ranked_and_cost_nothing(settings: Settings) -> None:
    tree = settings(method=SGD | {"records": 2, "epochs": 0.4})
    ledger = Ledger.create_or_open(tree["privacy"]["ledger"])
    ledger.create_dataset("notes", Budget(100, 1e-3), "record", "add_or_remove_one")
    plan = make_plan(parse_config(tree))
    secrets = canaries.try_canaries(plan, made(1), 20, registry.run, registry.released_losses)
    assert len(secrets) == len(canaries.SECRETS)
    assert all(1 <= s["rank"] <= 21 and s["candidates"] == 21 for s in secrets)
    assert all(s["leaks"] == 0 for s in secrets)
    account = ledger.account("notes")
    assert account is not None and account.spent.epsilon == 0


def test_a_secret_that_the_release_keeps_is_found(settings: Settings, tmp_path: Path) -> None:
    """DP-KPS with a public vocabulary that holds the secret, and far too little noise."""
    known = [canary for canary in made(100) if canary.kind.name == "name"]
    (tmp_path / "words.txt").write_text(f"{known[0].secret}\ncough\nfever\n")
    method = WORDS | {"vocabulary": str(tmp_path / "words.txt")}
    plan = make_plan(parse_config(settings(method=method, engine__kind="none")))
    (secret,) = canaries.try_canaries(plan, known, 10, registry.run, registry.released_losses)
    assert secret["kind"] == "name" and secret["leaks"] > 0 and "rank" not in secret
