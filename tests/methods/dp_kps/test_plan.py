"""DP-KPS's plans: never more than `privacy.epsilon`, by the ledger's exact sum."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from dpray.accounting.events import NEIGHBORING_RELATION
from dpray.accounting.ledger import Ledger
from dpray.config.config import Config, parse_config
from dpray.methods.dp_kps.plan import DpKpsPlan, read_vocabulary
from dpray.registry import make_plan
from dpray.types import Budget, InputError

DELTA = 1e-5
LABELS = Decimal("0.1")
EPSILONS = [Decimal(hundredths) / 100 for hundredths in range(20, 1001, 5)]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    """Ten terms a record, so that a unit's sensitivity is 10; no data is there to be opened."""
    words, template = tmp_path / "words.txt", tmp_path / "own.yaml"
    words.write_text("fever\ncough\n")
    template.write_text("user: '{{ terms }}'\n")

    def make(epsilon: Decimal, shares: str | None, **method: Any) -> Config:
        return parse_config(
            {
                "data": {
                    "path": "nowhere.jsonl", "label": "label", "labels": ["a", "b"],
                    "public_size": 60, "label_proportions": shares,
                },
                "privacy": {
                    "epsilon": float(epsilon), "epsilon_labels": float(LABELS), "delta": DELTA,
                    "dataset": "notes",
                },
                "method": {
                    "name": "dp_kps", "vocabulary": str(words), "stop_words": "keep",
                    "template": str(template), **method,
                },
                "engine": {"kind": "none"},
            }
        )  # fmt: skip

    return make


def given(epsilon: Decimal, shares: str | None, keys: str) -> dict[str, float]:
    """Two-digit numbers for the keys that are given, which together use up epsilon."""
    left = epsilon - (LABELS if shares else 0)
    vocabulary = (left / 3).quantize(Decimal("0.01"))
    values = {"epsilon_vocabulary": vocabulary, "epsilon_kde": left - vocabulary}
    return {f"epsilon_{key}": float(values[f"epsilon_{key}"]) for key in keys.split()}


def exact_sum(plan: DpKpsPlan) -> Decimal:
    """As the ledger adds: on the decimals that are written."""
    return sum((Decimal(repr(plan.charge(c).epsilon)) for c in plan.charges), Decimal(0))


def check(plan: DpKpsPlan, epsilon: Decimal, slack: Decimal) -> None:
    exact = exact_sum(plan)
    assert epsilon - slack <= exact <= Decimal(repr(plan.cost.epsilon)) <= epsilon


@pytest.mark.parametrize("shares", [None, "measured"])
@pytest.mark.parametrize(
    ("ensemble", "keys"),
    [
        (None, ""),
        (None, "vocabulary"),
        (None, "kde"),
        (None, "vocabulary kde"),
        ("linear", ""),
        ("linear", "vocabulary kde"),
    ],
)
def test_no_laplace_plan_is_over_epsilon(
    config: Callable[..., Config], ensemble: str | None, keys: str, shares: str | None
) -> None:
    """All 197 epsilons from 0.2 to 10 in steps of 0.05; exact, or the ensemble's estimators."""
    rff = {"estimator": "rff", "sampling": "iterative", "ensemble": ensemble}
    for epsilon in EPSILONS:
        method = (rff if ensemble else {}) | given(epsilon, shares, keys)
        check(make_plan(config(epsilon, shares, **method)), epsilon, Decimal("1e-13"))


@pytest.mark.parametrize("shares", [None, "measured"])
@pytest.mark.parametrize("keys", ["", "vocabulary kde"])
def test_no_gaussian_plan_is_over_epsilon(
    config: Callable[..., Config], keys: str, shares: str | None
) -> None:
    """Calibrated to a relative 1e-6, on the safe side."""
    for epsilon in EPSILONS[3::48]:
        method = {"estimator": "rff", "noise": "gaussian"} | given(epsilon, shares, keys)
        check(make_plan(config(epsilon, shares, **method)), epsilon, epsilon / 10**5)


@pytest.mark.parametrize(
    ("epsilon", "shares", "method"),
    [
        ("3.65", None, {}),
        ("4.2", "measured", {}),
        ("3.75", "measured", {"estimator": "rff", "sampling": "iterative"}),
        ("2.1", None, {"estimator": "rff", "noise": "gaussian"}),
        ("1.5", "measured", {"estimator": "rff", "noise": "gaussian"}),
    ],
)
def test_a_budget_of_its_size_pays_for_a_plan(
    config: Callable[..., Config],
    tmp_path: Path,
    epsilon: str,
    shares: str | None,
    method: dict[str, Any],
) -> None:
    """A budget of privacy.epsilon, and one of what the plan says that it costs: a ledger that does
    not know the data set gets the latter."""
    plan = make_plan(config(Decimal(epsilon), shares, **method))
    ledger = Ledger.create_or_open(f"sqlite:///{tmp_path}/ledger.db")
    budgets = {
        "asked": Budget(float(epsilon), DELTA),
        "planned": Budget(plan.cost.epsilon, plan.cost.delta),
    }
    for dataset, budget in budgets.items():
        ledger.create_dataset(dataset, budget, "record", NEIGHBORING_RELATION)
        for name, event in plan.charges.items():
            key, asked = f"{dataset}/{name}", plan.charge(name)
            ledger.reserve(dataset, {key: (event, asked)}, "record", NEIGHBORING_RELATION)
        account = ledger.account(dataset)
        assert account is not None and len(account.charges) == len(plan.charges)
        assert account.left.epsilon <= 1e-5 * float(epsilon)
    ledger.close()


def test_measured_labels_are_taken_off_before_the_rest_is_shared(
    config: Callable[..., Config],
) -> None:
    method = make_plan(config(Decimal("4.2"), "measured")).method
    assert (method.epsilon_vocabulary, method.epsilon_kde) == (2.05, pytest.approx(2.05, rel=1e-14))
    too_much = config(Decimal(2), "measured", epsilon_vocabulary=1.0, epsilon_kde=1.0)
    with pytest.raises(InputError, match=r"privacy\.epsilon 2 less privacy\.epsilon_labels 0\.1"):
        make_plan(too_much)


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_noise_that_is_too_large_is_refused_before_it_is_charged(
    config: Callable[..., Config], noise: str
) -> None:
    method = {"estimator": "rff", "noise": noise, "features": 10**8, "epsilon_kde": 1e-9}
    with pytest.raises(InputError, match=r"method\.features: .*too large for integer noise"):
        make_plan(config(Decimal(1), None, **method))


def written(folder: Path, data: bytes) -> Path:
    path = folder / "terms.txt"
    path.write_bytes(data)
    return path


def test_one_term_a_line_in_order(tmp_path: Path) -> None:
    path = written(tmp_path, "heart failure\r\n\n  \nÉtoile\naspirin".encode())
    assert read_vocabulary(path) == ["heart failure", "Étoile", "aspirin"]


def test_the_first_column_counts(tmp_path: Path) -> None:
    path = written(tmp_path, b"\xef\xbb\xbfthe\t121431\nnew  york\t12\textra\n")
    assert read_vocabulary(path) == ["the", "new york"]


def test_terms_that_differ_in_case_only_are_one(tmp_path: Path) -> None:
    path = written(tmp_path, "Straße\nSTRASSE\nb\ne\u0301t\u00e9\n\u00c9T\u00c9\nB".encode())
    assert read_vocabulary(path) == ["Straße", "b", "e\u0301t\u00e9"]


def test_stop_words(tmp_path: Path) -> None:
    path = written(tmp_path, b"The\nof mice\nof\nmouse\n")
    assert read_vocabulary(path, "english") == ["of mice", "mouse"]
    assert read_vocabulary(path) == ["The", "of mice", "of", "mouse"]


def test_bad_bytes_are_named_by_their_line(tmp_path: Path) -> None:
    path = written(tmp_path, b"good\n\xff\xfesecret\n")
    with pytest.raises(InputError, match=r"method\.vocabulary: .*line 2: .*UTF-8") as raised:
        read_vocabulary(path)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("data", [b"", b"\n \n", b"\tx\n", b"the\nof\n"])
def test_a_file_without_terms(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InputError, match=r"method\.vocabulary: .*no term"):
        read_vocabulary(written(tmp_path, data), "english")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"method\.vocabulary: .*No such file"):
        read_vocabulary(tmp_path / "none.txt")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"method\.vocabulary"):
        read_vocabulary(tmp_path)
