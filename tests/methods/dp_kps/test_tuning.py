"""DP-KPS chooses among candidates on the private records: what that costs, releases and hides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray import registry as methods
from dpray.config.config import Config, parse_config
from dpray.ledger.ledger import Ledger
from dpray.mechanisms.randomness import generator
from dpray.methods.dp_kps import release as dp_kps_run
from dpray.methods.dp_kps.algorithm import DpKps
from dpray.methods.dp_kps.settings import DpKpsSettings
from dpray.methods.dp_kps.tuning import Tuning, recognised
from dpray.registry import make_plan
from dpray.runs.folder import TUNING_KEY
from dpray.types import InputError, Resumable
from tests.workers.outcomes import lines

WORDS = ["fever", "cough", "rash", "itch", "sleep", "chest pain", "pain"]
TEXTS = {"a": "a fever and a cough, chest pain too", "b": "the rash and the itch, no sleep"}
BAD, GOOD = {"threshold": 1e6}, {"threshold": 0.5}
TUNED = {"candidates": [BAD, GOOD], "eta": 5.0, "gamma": 0.3}


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., Config]:
    """200 records of two classes, whose words do not overlap; under the first candidate every term
    is as likely as any other. The law of K has a mean of 12."""
    vocabulary, data = tmp_path / "words.txt", tmp_path / "kps.jsonl"
    vocabulary.write_text("\n".join(WORDS) + "\n")
    rows = [{"text": f"Marlowe has {TEXTS[c]}", "label": c} for c in "ab" for _ in range(100)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "data__path": str(data), "data__public_size": 200, "privacy__epsilon": 60.0,
        "engine": {"kind": "none"},
        "method": {
            "name": "dp_kps", "vocabulary": str(vocabulary), "vocabulary_size": 7,
            "phrases_per_record": 4, "sequence_length": 3, "records": 40, "stop_words": "keep",
            "tuning": TUNED,
        },
    }  # fmt: skip
    return lambda **changes: parse_config(settings(**tree | changes))


def test_the_best_candidate_is_released_and_nothing_of_the_others(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    """All runs draw the bad candidate once in 500 times: K is 1 with probability 0.008."""
    shown = []
    for name in ("one", "two"):
        steps: list[Any] = []
        ledger_url = f"sqlite:///{tmp_path}/{name}.db"
        run = config(output__path=str(tmp_path / name), privacy__ledger=ledger_url)
        report = methods.run(run, steps.append)
        shown.append(steps)
        folder = Path(run.output.path)
        released = json.loads((folder / "private" / "parts" / "tuning.json").read_text())
        assert set(released) == {"candidate", "noisy_score", "terms", "sums"}
        ledger = Ledger.open(run.privacy.ledger)
        published = ledger.published(report["ledger"]["reservation"])
        assert [unit for unit, _ in published] == ["tuning"]
        account = ledger.account("notes")
        assert account is not None and account.spent.epsilon == report["epsilon"]
        ledger.close()
        assert report["tuned"] == GOOD and report["tuning_cost"].startswith("charged: ")
        assert [m["name"] for m in report["mechanisms"]] == ["private_selection"]
        assert report["epsilon"] == pytest.approx(60.0, rel=1e-4)
        # Nobody needs K any more; where it was is not there.
        assert not (folder / "private" / TUNING_KEY).exists()
        mine = {"a": {"fever", "cough", "chest pain"}, "b": {"rash", "itch", "sleep"}}
        right = [term in mine[r["label"]] for r in lines(run) for term in r["terms"]]
        assert np.mean(right) > 0.9
    # The progress of two runs is the same, however many selections they made.
    assert shown[0] == shown[1]


def test_an_interrupted_tuning_draws_neither_its_number_nor_its_candidates_again(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    right = dp_kps_run.recognised

    def interrupted(method: DpKps, *arguments: Any) -> int:
        made.append([BAD["threshold"], GOOD["threshold"]].index(method.settings.threshold))
        if len(made) == 1:
            raise KeyboardInterrupt
        return right(method, *arguments)

    monkeypatch.setattr(dp_kps_run, "recognised", interrupted)
    run = config()
    with pytest.raises(Resumable):
        methods.run(run)
    key = Path(run.output.path) / "private" / TUNING_KEY
    assert key.stat().st_mode & 0o777 == 0o600
    secret = key.read_text()
    plan: Any = make_plan(run)
    drawn = plan.tuning.drawn(generator(secret))
    assert made == drawn[:1]

    # Without its coins the run cannot go on.
    key.unlink()
    with pytest.raises(InputError, match=r"tuning\.key is missing, so that nobody knows how often"):
        methods.run(run)
    key.write_text("")
    with pytest.raises(InputError, match=r"tuning\.key does not hold a key"):
        methods.run(run)
    key.write_text(secret)
    report = methods.run(run)
    assert made[1:] == drawn
    ledger = Ledger.open(run.privacy.ledger)
    account = ledger.account("notes")
    assert account is not None and len(account.charges) == 1
    assert account.spent.epsilon == report["epsilon"]
    ledger.close()


@pytest.mark.parametrize("delta", [1e-6, 0.0])
def test_all_runs_together_cost_epsilon(config: Callable[..., Config], delta: float) -> None:
    plan: Any = make_plan(config(privacy__epsilon=4.0, privacy__delta=delta))
    assert plan.cost.epsilon == pytest.approx(4.0, rel=1e-5) and plan.cost.epsilon <= 4.0
    tuning, factor = plan.tuning, plan.method.noise_factor
    assert tuning.score_scale == pytest.approx(factor / (0.2 * 4.0))
    if delta == 0:
        assert factor == pytest.approx(2 + TUNED["eta"])  # type: ignore[operator]
    else:
        assert 1.5 < factor < 2 + TUNED["eta"]  # type: ignore[operator]
    # One candidate may be cheaper than another: the worst one counts.
    different = TUNED | {"candidates": [{"phrases_per_record": 2}, {"phrases_per_record": 4}]}
    plan = make_plan(config(method__tuning=different, privacy__epsilon=4.0))
    orders = (2.0, 8.0, 32.0)
    both = plan.tuning.dp_event.event.rdp(orders)
    for candidate in plan.tuning.candidates:
        assert (candidate.dp_event.rdp(orders) < both).all()


def test_wrong_tunings_name_the_key(config: Callable[..., Config]) -> None:
    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(InputError, match=match):
            make_plan(config(**changes))

    refused(r"^method\.tuning\.candidates: ", method__tuning={"candidates": [GOOD]})
    refused(
        r"^method\.tuning\.candidates: records is not one of contrast, ",
        method__tuning={"candidates": [GOOD, {"records": 3}]},
    )
    refused(
        r"^method\.tuning\.candidates: contrast: ",
        method__tuning={"candidates": [GOOD, {"contrast": 3}]},
    )
    refused(r"^method\.tuning\.gamma: ", method__tuning=TUNED | {"gamma": 1.0})
    refused(r"^method\.tuning\.eta: ", method__tuning=TUNED | {"eta": -1.0})
    refused(r"tuning: is for estimator exact", method__estimator="rff")
    refused(r"^method\.tuning: needs data\.labels", data__labels=[], data__label=None)


record = st.tuples(
    st.lists(st.sampled_from([*WORDS, "other"]), max_size=6).map(" ".join), st.sampled_from("ab")
)


@given(
    records=st.lists(record, max_size=10),
    new=st.lists(record, min_size=1, max_size=3),
    weights=st.lists(st.floats(0, 1), min_size=14, max_size=14),
)
def test_a_unit_moves_the_score_by_its_records_at_most(
    records: list[tuple[str, str]], new: list[tuple[str, str]], weights: list[float]
) -> None:
    settings = DpKpsSettings(name="dp_kps", vocabulary="words.txt", phrases_per_record=3)
    method = DpKps(settings, ("a", "b"), len(WORDS), 0, 1.0, 1.0, records_per_unit=len(new))
    weights_N = dict(zip("ab", np.array(weights).reshape(2, 7), strict=True))
    without = recognised(method, WORDS, weights_N, records)
    assert 0 <= recognised(method, WORDS, weights_N, [*new, *records]) - without <= len(new)


def test_what_is_told_right() -> None:
    settings = DpKpsSettings(name="dp_kps", vocabulary="words.txt", phrases_per_record=2)
    method = DpKps(settings, ("a", "b"), 3, 0, 1.0, 1.0)
    weights_N = {"a": np.array([0.5, 0.0, 0.0]), "b": np.array([0.0, 0.25, 0.75])}
    records = [
        ("fever", "a"), ("rash", "b"), ("fever rash", "a"), ("fever itch", "b"), ("nothing", "a"),
        # Only the first two terms count.
        ("rash fever itch", "a"),
    ]  # fmt: skip
    assert recognised(method, ["fever", "rash", "itch"], weights_N, records) == 5


def test_the_output_with_the_highest_noisy_score_is_selected() -> None:
    settings = DpKpsSettings(name="dp_kps", vocabulary="words.txt")
    tuning = Tuning((DpKps(settings, ("a", "b"), 3, 0, 1.0, 1.0),) * 3, 1e-3, 0.0, 0.1)
    made = iter(
        [{"right": 3, "terms": "x"}, {"right": 9, "terms": "y"}, {"right": 5, "terms": "z"}]
    )
    found = tuning.selected([0, 2, 1], lambda candidate: next(made))
    assert found == {"candidate": 2, "noisy_score": 9, "terms": "y"}
    numbers = [len(tuning.drawn(generator(f"{key:064x}"))) for key in range(200)]
    assert min(numbers) == 1 and len(set(numbers)) > 5
