"""The keys of an evaluation, and so the options of `dpray evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from dpray.config.data import Delimiter, Encoding, Quote
from dpray.config.sections import Count, CountOrZero, Section
from dpray.io.after import is_after
from dpray.io.formats import AS_RECOGNISED
from dpray.io.languages import DEFAULT_EMBEDDER


class EvaluationSettings(Section):
    """The options of `dpray evaluate`; a key's description is its help."""

    real: str = Field(description="Real records: the test records, if --train is given too.")
    synthetic: str = Field(description="Synthetic records.")
    out: Path | None = Field(
        None, description="Folder for evaluation.json; RUN/private puts it into the run's report."
    )
    train: str | None = Field(
        None, description="Real records to train the ceiling on; without it --real is halved."
    )
    floor: str | None = Field(
        None, description="Labelled texts made without private data, to train the floor."
    )
    json_schema: str | None = Field(
        None,
        alias="schema",
        description="File with a JSON Schema that JSON records should fit.",
    )
    text: str = Field(
        "text",
        description="Column of the text, or of a table those of a record, with commas between; in "
        "a release the text may also be named `text`. By default `text`; if the real "
        "records lack it, data.text or data.turns of the run in --synthetic.",
    )
    turns: str | None = Field(
        None, description="Column of conversations, in place of --text, as data.turns."
    )
    label: str | None = Field(
        None,
        description="Column of the label, which records must then have; without this option, "
        "`label` if there is one, or data.label of the run in --synthetic. In a release it may "
        "also be named `label`.",
    )
    attributes: str | None = Field(
        None,
        description="Columns next to the text, with commas between: they, the label and their "
        "pairs are compared, in place of a table's columns. By default data.attributes of the run "
        "in --synthetic.",
    )
    after: Annotated[str | None, AfterValidator(is_after)] = Field(
        None,
        description="COLUMN > VALUE: only these real records are read, as by data.after.",
    )
    unit: str | None = Field(
        None,
        description="Column of the person in the private records (--train, else --real), as "
        "data.unit: only strings of one person are looked for. By default that of the run in "
        "--synthetic; otherwise each record is one.",
    )
    delimiter: Delimiter = Field(
        None, description="Delimiter of the real records' CSV, as data.delimiter."
    )
    quote: Quote = Field(
        AS_RECOGNISED.quote, max_length=1, description="Sign around its cells, as data.quote."
    )
    escape: str | None = Field(
        None, min_length=1, max_length=1, description="Sign before a quote, as data.escape."
    )
    skip_rows: CountOrZero = Field(
        0, le=1000, description="Lines above its header, such as titles, as data.skip_rows."
    )
    records: str | None = Field(
        None, description="Key of the real records' list in a JSON object, as data.records."
    )
    encoding: Encoding = Field(
        None, description="Encoding of the real records' text files, as data.encoding."
    )
    embedder: str = Field(
        DEFAULT_EMBEDDER,
        description="Sentence embedding model: a name or a folder.",
    )
    language: str | None = Field(
        None,
        description="Language of the texts, as data.language; by default that of the run in "
        "--synthetic. Numbers of its countries count as personal data.",
    )
    seeds: Count = Field(5, description="Repetitions behind each mean and deviation.")
