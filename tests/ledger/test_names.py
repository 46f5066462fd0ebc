"""Names of data sets and the files charged to them: one set of records has one budget."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import sqlalchemy as sa

from dpray.ledger.ledger import Ledger
from dpray.ledger.store import parse_url
from dpray.types import Budget, BudgetRefused, InputError, LedgerError
from tests.ledger import charges
from tests.ledger.charges import BUDGET, STATED_FOR

FILES = [hashlib.sha256(text).digest() for text in (b"one", b"two")]


@pytest.fixture
def ledger(url: str) -> Ledger:
    ledger = Ledger.create_or_open(url)
    ledger.create_dataset("Clinic notes", BUDGET, *STATED_FOR)
    return ledger


def reserve(ledger: Ledger, dataset: str, key: str, files: list[bytes] | None = None) -> None:
    charges.reserve(ledger, key, dataset, Budget(0.5, 1e-7), files or [])


def test_case_and_blanks_make_no_other_data_set(ledger: Ledger):
    spellings = ["clinic notes", " Clinic  notes ", "CLINIC NOTES"]
    for number, spelling in enumerate(spellings[:2]):
        ledger.create_dataset(spelling, BUDGET, *STATED_FOR)
        reserve(ledger, spelling, f"run-{number}")
        assert ledger.account(spelling).dataset == "Clinic notes"
    with pytest.raises(BudgetRefused, match="'Clinic notes'"):
        reserve(ledger, spellings[2], "run-2")
    with pytest.raises(InputError, match="'Clinic notes' has another budget"):
        ledger.create_dataset(spellings[2], Budget(9.0, 1e-6), *STATED_FOR)
    # The same charge again, in another spelling, is the same charge.
    reserve(ledger, spellings[2], "run-0")
    assert ledger.names() == ["Clinic notes"]
    assert ledger.verify() == []


@pytest.mark.parametrize("name", ["", " ", "x" * 201, "ärzte", "[b]", "a/b", "a\tb", "a\u00a0b"])
def test_a_new_name_is_plain(ledger: Ledger, name: str):
    with pytest.raises(InputError, match="name of a data set has 1 to 200"):
        ledger.create_dataset(name, BUDGET, *STATED_FOR)
    assert ledger.names() == ["Clinic notes"]


def test_a_new_name_is_kept_without_needless_blanks(ledger: Ledger):
    ledger.create_dataset("  A-1_b.c  D ", BUDGET, *STATED_FOR)
    assert ledger.names() == ["A-1_b.c D", "Clinic notes"]


def test_a_file_is_charged_to_one_data_set_only(ledger: Ledger):
    ledger.create_dataset("other", BUDGET, *STATED_FOR)
    reserve(ledger, "clinic notes", "run-1", FILES[:1])
    before = list(ledger.export())
    with pytest.raises(InputError, match="knows this data, or a file of it, as 'Clinic notes'"):
        reserve(ledger, "other", "run-2", FILES[::-1])
    assert list(ledger.export()) == before, "nothing is charged, and nothing bound"
    # Its own data set may have any number of files, and the same ones again.
    reserve(ledger, "Clinic notes", "run-3", FILES)
    reserve(ledger, "Clinic notes", "run-3", FILES)
    assert [row["kind"] for row in ledger.export()].count("data") == 2
    reserve(ledger, "other", "run-4", [hashlib.sha256(b"three").digest()])
    assert ledger.verify() == []


def test_a_refused_charge_binds_nothing(ledger: Ledger):
    ledger.create_dataset("other", BUDGET, *STATED_FOR)
    for key in ("run-1", "run-2"):
        reserve(ledger, "Clinic notes", key)
    with pytest.raises(BudgetRefused):
        reserve(ledger, "Clinic notes", "run-3", FILES)
    reserve(ledger, "other", "run-4", FILES)


def test_the_digests_are_keyed_and_the_key_is_in_no_answer(url: str, tmp_path: Path):
    """An export does not tell whether the ledger knows some file."""
    ledger = Ledger.create_or_open(url)
    ledger.create_dataset("notes", BUDGET, *STATED_FOR)
    reserve(ledger, "notes", "run-1", FILES)
    other = Ledger.create_or_open(f"sqlite:///{tmp_path}/other.db")
    other.create_dataset("notes", BUDGET, *STATED_FOR)
    reserve(other, "notes", "run-1", FILES)
    digests = [
        {row["key"] for row in each.export() if row["kind"] == "data"} for each in (ledger, other)
    ]
    plain = {digest.hex() for digest in FILES} | {hashlib.sha256(f).hexdigest() for f in FILES}
    assert len(digests[0] | digests[1] | plain) == 8
    engine = sa.create_engine(parse_url(url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        [key] = connection.exec_driver_sql("SELECT data_key FROM dpray_secret").scalars()
        assert len(bytes.fromhex(key)) == 32
        answers = json.dumps([list(ledger.export()), ledger.show(), str(ledger)])
        assert key not in answers
        connection.exec_driver_sql("DELETE FROM dpray_secret")
    with pytest.raises(LedgerError, match="lost its key"):
        reserve(ledger, "notes", "run-2", FILES)
    engine.dispose()
