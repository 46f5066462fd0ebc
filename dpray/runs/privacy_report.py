"""`privacy_report.json` as a typed model: the guarantee of a finished run, and how it came about.

    report = read_report(Path("out/run/privacy_report.json"))
    report.epsilon, report.mechanisms[0].cost.epsilon_alone

A plan states the same `Guarantee` before the run. A method contributes a `MethodPart`. A key that
is not set is not in the file, so files of older releases are read, too; keys that this release does
not know are left out. docs/privacy_report.schema.json is the schema of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from dpray.io.files import read_json
from dpray.types import InputError, Json

REPORT = "privacy_report.json"

NOT_COVERED = (
    "the public inputs: the model, the templates, the label set, the public size, all parameters",
    "what the model's own training data reveals",
    "running time, memory use and network traffic of the run",
    "that a run stopped, how many batches were repeated or failed, and after which losses: a loss "
    "that is repeated is taken to say nothing of the data",
    "that a process was ended for want of memory, by Ray or by the system's kernel: it is repeated "
    "like a lost machine, no output depends on it, and how often it happened is told",
    "other releases of the same data that were not charged to this ledger",
    "facts that hold for many units: a unit's part in them is hidden, the facts are not",
    "everything in the folder private/, which is not for release",
)


class ReportObject(BaseModel):
    """An object of the report."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    def to_json(self) -> Json:
        """Return the keys that are set, as JSON has them."""
        return self.model_dump(mode="json", exclude_unset=True)


class Person(ReportObject):
    """The guarantee of a person with several records, if each record is a unit."""

    records: int
    epsilon: float
    delta: float


class Accountant(ReportObject):
    name: str
    version: str
    bound: str = Field(description="the bound on the total that was the smallest")


class MechanismCost(ReportObject):
    epsilon_alone: float = Field(description="the epsilon of this mechanism without the others")
    delta: float
    bound: str
    zcdp_rho: float | None = Field(description="null for one without a finite rho")


class Mechanism(ReportObject):
    name: str
    parameters: Mapping[str, object]
    count: int = Field(description="the number of times that the mechanism is charged")
    cost: MechanismCost


class Guarantee(ReportObject):
    """The keys that `plan --json` and the report share. A run without noise has no epsilon."""

    epsilon: float | None = Field(ge=0, allow_inf_nan=False)
    delta: float | None = Field(ge=0, allow_inf_nan=False)
    neighboring_relation: str
    privacy_unit: str
    contribution_bound: int = Field(description="the most records of one unit that count")
    persons: Sequence[Person] | None = Field(None, description="since 0.2.0")
    accountant: Accountant | None
    mechanisms: Sequence[Mechanism]
    not_private: bool

    @field_validator("not_private")
    @classmethod
    def _has_a_cost(cls, not_private: bool, info: ValidationInfo) -> bool:
        stated = [info.data.get(key, 0) for key in ("epsilon", "delta", "accountant")]
        if not not_private and None in stated:
            raise ValueError("a private run has an epsilon, a delta and an accountant")
        return not_private


class Repeats(ReportObject):
    count: int = Field(description="the number of units of work that began more than once")
    lost_starts: Mapping[str, int] = Field({}, description="lost starts by their cause")
    only_after: Sequence[str]


class BudgetPart(ReportObject):
    epsilon: float
    delta: float


class LedgerEntry(ReportObject):
    """The data set's budget, and the entry that closes the run."""

    url_kind: str
    made_by_this_run: bool | None = None
    budget_by_this_run: bool | None = None
    dataset: str
    reservation: str
    sequence: int | None = Field(None, ge=0, lt=2**63)
    head: str | None = None
    budget: BudgetPart
    spent: BudgetPart
    left: BudgetPart


class BatchCounts(ReportObject):
    total: int
    published: int
    repeated: int
    failed: int
    missing: int | None = None
    without_text: int | None = Field(None, description="the published batches that gave no text")


class Tokens(ReportObject):
    total: int
    private: int = Field(description="the tokens that drew on private texts, with noise")


class Calls(ReportObject):
    """The calls of the language model in all attempts at the run."""

    calls: int
    prompt_tokens: int
    completion_tokens: int


class Steps(ReportObject):
    planned: int
    repeated: int
    charged: int


class Iteration(ReportObject):
    """The concentration of the positive noisy votes, and the lengths of the kept texts."""

    iteration: int
    population: int
    kept: int
    top_tenth_share: float | None = Field(description="0.1 if all texts get equally many votes")
    effective_texts: float | None
    words: Mapping[str, float] = Field(description="quantiles of the numbers of words")


class TopicCounts(ReportObject):
    words: Sequence[str]
    counts: Mapping[str, int] = Field(description="noisy counts by label")


class Numerics(ReportObject):
    dtype: str
    row_variation: float | None


class TableCounts(ReportObject):
    rows: int
    left_out: int


class OfMethod(ReportObject):
    """The results of methods; each has some of them."""

    batches: BatchCounts | None = None
    tokens: Tokens | None = None
    calls: Calls | None = None
    llm_calls: int | None = None
    noise_multiplier: float | Mapping[str, float | None] | None = Field(
        None, description="a chain's, by method, in files of 0.1.0"
    )
    model: Mapping[str, str] | None = Field(None, description="SHA-256 of the model's files")
    steps: Steps | None = None
    iterations: Sequence[Iteration] | None = None
    topics: Sequence[TopicCounts] | None = None
    numerics: Numerics | None = None


class MethodPart(OfMethod):
    """A method's part of the report. `sampling`, `public_inputs` and `not_covered` add to those of
    every run. `first` is the part of a chain's first method."""

    sampling: Mapping[str, object] = {}
    public_inputs: Mapping[str, object] = {}
    not_covered: Sequence[str] = ()
    noise_source: str
    first: MethodPart | None = None


class OfRun(Guarantee):
    """The keys of every run after those of its guarantee."""

    method: Mapping[str, object] = Field(description="the name and the resolved keys")
    records: int
    tuning_cost: str
    public_inputs: Mapping[str, object]
    sampling: Mapping[str, object]
    not_covered: Sequence[str]
    repeats: Repeats | None = None
    versions: Mapping[str, str]
    ledger: LedgerEntry | None = None


class PrivacyReport(OfMethod, OfRun):
    """`privacy_report.json`."""

    noise_source: str
    table: TableCounts | None = None
    first: MethodPart | None = Field(None, description="the part of a chain's first method")

    @property
    def methods(self) -> list[Mapping[str, object]]:
        """Return the method, or those of a chain."""
        of_chain = self.method.get("methods")
        return of_chain if isinstance(of_chain, list) else [self.method]

    @field_validator("method")
    @classmethod
    def _has_names(cls, method: Mapping[str, object]) -> Mapping[str, object]:
        of_chain = method.get("methods", [])
        methods = [method, *of_chain] if isinstance(of_chain, list) else []
        if not methods or not all(isinstance(each, dict) and "name" in each for each in methods):
            raise ValueError("a method has a name")
        return method


def read_report(path: Path) -> PrivacyReport:
    """Read the report of a finished run. Raises InputError as `parse_report` does."""
    return parse_report(read_json(path))


def parse_report(values: Mapping[str, object]) -> PrivacyReport:
    """Make a report from its JSON. Raises InputError that names the keys which are missing, or the
    first that is not as dpray writes it."""
    try:
        return PrivacyReport.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
    places = [".".join(map(str, each["loc"])) for each in found if each["type"] == "missing"]
    if places:
        raise InputError(f"{REPORT}: no {', '.join(places)}; give the report of a finished run")
    key = ".".join(map(str, found[0]["loc"]))
    raise InputError(f"{REPORT}: {key} is not as dpray writes it; give the report of a run")
