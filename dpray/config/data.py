"""The section `data`: where the private records are, and how a row becomes a text and a label.

Everything in it is public, and nothing here opens a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    StringConstraints,
    field_validator,
    model_validator,
)

from dpray.config.sections import Count, CountOrZero, Section
from dpray.io.after import after, is_after
from dpray.io.columns import check_labels, label_name, text_of
from dpray.io.formats import ENDINGS, FileFormat, Where, known_encoding, one_sign
from dpray.io.languages import language_name
from dpray.io.table import cells_of, object_text, turns_of, turns_text
from dpray.io.template_file import About

Label = StrictBool | StrictInt | StrictFloat | StrictStr


def as_name(column: object) -> object:
    """Return a column's name: a text also if YAML reads it as a number, as `0`."""
    return str(column) if type(column) is int else column


Column = Annotated[str, BeforeValidator(as_name)]
Delimiter = Annotated[str | None, AfterValidator(one_sign)]
Encoding = Annotated[str | None, AfterValidator(known_encoding)]
Line = Annotated[str, StringConstraints(min_length=1, max_length=300, pattern=r"^[^\r\n]+$")]
Quote = Annotated[str, BeforeValidator(lambda sign: "" if sign is None else sign)]
"""`data.quote=` is null in YAML, and no sign."""


RELEASED = (
    "text", "label", "control", "terms", "batch", "finish_reason", "tokens", "iteration",
    "not_private",
)  # fmt: skip
"""The fields that a released record may have next to its attributes."""

MOST_CELLS = 200_000
"""The most combinations of values of the label and the attributes: one table has their shares."""


class DataConfig(Section):
    path: str = Field(
        description=f"{ENDINGS}; a folder of them; a glob, a cloud path, hf://name; with `query`, "
        "a database"
    )
    query: str | None = Field(
        None,
        min_length=1,
        description="a SELECT whose rows are the records, if `path` is a database such as "
        "sqlite:///notes.db; a run copies them once, into its private folder",
    )
    text: Column | tuple[Column, ...] = Field(
        "text",
        description="the column of the text; `a.b` is field b of column a; several columns make a "
        "text that is a JSON object, and the release has them as a table, too",
    )
    json_columns: tuple[Column, ...] | None = Field(
        None,
        description="CSV: the columns of `text` that are parsed as JSON, such as numbers or lists; "
        "null: those whose values method.schema does not allow to be texts",
    )
    turns: Column | None = Field(
        None,
        description="the column of conversations, in place of `text`: lists of messages with a "
        "`role` and a `content`",
    )
    roles: tuple[str, ...] = Field(
        ("system", "user", "assistant"),
        min_length=1,
        description="the roles that messages of `turns` may have; public",
    )
    label: Column | None = Field(None, description="the column of the label, if there is one")
    labels: tuple[Label, ...] = Field(
        (), description="the public label set: texts, numbers, true or false, released as they are"
    )
    other_labels: Literal["refuse", "skip"] = Field(
        "refuse",
        description="refuse: a row with a label that is not in `labels` is an error in the file; "
        "skip: its row is left out",
    )
    label_proportions: dict[str, float] | Literal["measured"] | None = Field(
        None,
        description="public share of each label; null: uniform; measured: by a DP histogram that "
        "costs privacy.epsilon_labels",
    )
    attributes: dict[Column, tuple[Label, ...]] = Field(
        {},
        description="PUBLIC: the values of further columns, which texts are written for; how often "
        "they and the labels come together is measured, which costs privacy.epsilon_attributes. "
        "`other`, if it is one of them, stands for all that are not",
    )
    after: Annotated[str | None, AfterValidator(is_after)] = Field(
        None,
        description="PUBLIC: `COLUMN > VALUE`, a number or a day; other rows are left out, so that "
        "a further run reads the rows of a new quarter only",
    )
    about: Line | None = Field(
        None,
        description="PUBLIC: what the texts are, in words that go on after `Here are`, such as "
        "`questions that people ask a counsellor online`; the prompts say it",
    )
    label_about: dict[str, Line] = Field(
        {},
        description="PUBLIC: what a label means, such as {1: neoplasms}; the prompts say it in "
        "place of the label",
    )
    language: Line | None = Field(
        None,
        description="PUBLIC: the language of the texts, such as German or de; the prompts say it, "
        "and word lists and numbers of persons are those of it",
    )
    unit: Column | None = Field(
        None,
        description="column that names the privacy unit, such as a person; null: each record",
    )
    max_records_per_unit: int = Field(
        1, ge=1, le=10_000, description="most records of a privacy unit; further ones are left out"
    )
    public_size: Count = Field(description="public estimate of the number of records")
    max_characters: Count = Field(
        200_000,
        description="a longer text is cut to its first ones; the model may read still fewer",
    )
    empty: Literal["refuse", "skip"] = Field(
        "refuse",
        description="refuse: a null or blank text is an error in the file; skip: its row is left "
        "out",
    )
    delimiter: Delimiter = Field(
        None, description="CSV: between cells; null: `,`, `;`, a tab or `|`, as in the header"
    )
    skip_rows: CountOrZero = Field(
        0,
        le=1000,
        description="CSV, .xlsx: rows above the header, such as titles, that are left out",
    )
    quote: Quote = Field(
        '"', max_length=1, description='CSV: the sign around a cell; "": no sign is one'
    )
    escape: str | None = Field(
        None,
        min_length=1,
        max_length=1,
        description="CSV: the sign before a quote within a cell; null: quotes are doubled",
    )
    encoding: Encoding = Field(
        None,
        description="encoding of text files, such as cp1252; null: UTF-8, or as a byte order mark "
        "says",
    )
    records: str | None = Field(
        None,
        description="JSON: the key of the list of rows, if the file is an object; `a.b` is key b "
        "of a; .xlsx: the sheet; null: the file, or its only sheet, has the rows",
    )

    _digests: tuple[bytes, ...] | None = PrivateAttr(None)

    def copied_to(self, file: Path) -> Self:
        """Return the section of a database whose rows were copied to a file."""
        return self.model_copy(update={"path": str(file), "query": None})

    @property
    def digests(self) -> tuple[bytes, ...] | None:
        """Return the SHA-256 of each file that a run was charged for, or None before that."""
        return self._digests

    def hashed(self, digests: Iterable[bytes]) -> Self:
        """Return the section of a run whose files have these digests: every reading of them checks
        that it read these. No file can set this."""
        changed = self.model_copy()
        changed._digests = tuple(digests)
        return changed

    @field_validator("text", mode="before")
    @classmethod
    def _columns_differ(cls, text: object) -> object:
        columns = [as_name(name) for name in (text if isinstance(text, list | tuple) else [text])]
        if not columns or not all(isinstance(column, str) for column in columns):
            raise ValueError("a column, or a list of columns")
        if len(set(columns)) < len(columns):
            raise ValueError("a column is given twice")
        return text

    @field_validator("labels", mode="before")
    @classmethod
    def _labels_are_kept(cls, labels: object) -> object:
        if isinstance(labels, list | tuple):
            check_labels(labels)
        return labels

    @field_validator("attributes", mode="before")
    @classmethod
    def _attributes_are_kept(cls, attributes: object) -> object:
        for values in attributes.values() if isinstance(attributes, Mapping) else ():
            if not isinstance(values, list | tuple) or len(values) < 2:
                raise ValueError("each column has a list of two or more values")
            check_labels(values)
        return attributes

    @field_validator("label_proportions", "label_about", mode="before")
    @classmethod
    def _by_name(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        named = {label_name(label): value for label, value in values.items()}
        if len(named) < len(values):
            raise ValueError("a label is there twice")
        return named

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if self.delimiter is not None and self.delimiter in (self.quote, self.escape):
            raise ValueError("delimiter: is the sign of data.quote or data.escape too")
        if self.label is not None and not self.labels:
            raise ValueError("labels: the public label set is needed if label names a column")
        if self.label is None and self.labels:
            raise ValueError("label: the column of the labels is needed if labels are given")
        if self.unit is None and self.max_records_per_unit != 1:
            raise ValueError("max_records_per_unit: without unit every record is its own unit")
        return self

    @model_validator(mode="after")
    def _a_database_is_no_file(self) -> DataConfig:
        if self.query is not None and (of_files := self._set_for_files()):
            raise ValueError(f"query: the rows of a database take no {of_files}, a key of files")
        return self

    def _set_for_files(self) -> str | None:
        signs = ("delimiter", "skip_rows", "quote", "escape", "encoding", "records")
        fields = type(self).model_fields
        return next((key for key in signs if getattr(self, key) != fields[key].default), None)

    @model_validator(mode="after")
    def _shares_and_words_are_of_labels(self) -> DataConfig:
        if unknown := sorted(set(self.label_about) - set(self.label_names)):
            raise ValueError(f"label_about: '{unknown[0]}' is not in labels")
        if self.label_proportions == "measured":
            if not self.labels:
                raise ValueError("label_proportions: there are no labels to measure")
        elif (shares := self.label_proportions) is not None:
            if set(shares) != set(self.label_names):
                raise ValueError("label_proportions: give a share for each of labels, and no other")
            if (
                not math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6)
                or min(shares.values()) < 0
            ):
                raise ValueError("label_proportions: shares are not negative and sum to 1")
        return self

    @model_validator(mode="after")
    def _attributes_fit(self) -> DataConfig:
        if not self.attributes:
            return self
        if self.label is not None and self.label_proportions != "measured":
            raise ValueError(
                "label_proportions: are measured together with data.attributes; set it to measured"
            )
        taken = {*self.text_columns, self.label, self.unit, *RELEASED}
        if both := sorted(column for column in self.attributes if column in taken):
            raise ValueError(
                f"attributes: '{both[0]}' is another column of the records or of the release; "
                "leave it out there, or rename it"
            )
        if (cells := math.prod(map(len, self.public_values.values()))) > MOST_CELLS:
            raise ValueError(
                f"attributes: their values and the labels have {cells:,} combinations, more than "
                f"{MOST_CELLS:,}; give fewer values, with `other` for the rare ones"
            )
        return self

    @model_validator(mode="after")
    def _one_source_of_texts(self) -> DataConfig:
        if len({*self.roles}) < len(self.roles):
            raise ValueError("roles: a role is given twice")
        if self.turns is not None and self.text != "text":
            raise ValueError("turns: give data.text or data.turns, not both")
        if self.is_table and self.label in self.text_columns:
            raise ValueError(
                "label: is a column of data.text, too: a record would have it twice; leave it out "
                "there"
            )
        json_columns = {*(self.json_columns or ())}
        if json_columns and (isinstance(self.text, str) or not json_columns <= {*self.text}):
            raise ValueError("json_columns: have to be some of several columns of data.text")
        return self

    @property
    def is_table(self) -> bool:
        """Return whether a record is several columns, or a conversation: the release is then a
        table, too."""
        return self.turns is not None or not isinstance(self.text, str)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Return the columns that a text is made of."""
        if self.turns is not None:
            return (self.turns,)
        return (self.text,) if isinstance(self.text, str) else self.text

    @property
    def columns(self) -> frozenset[str]:
        """Return the columns that keys of this section name. No other is read."""
        return frozenset(self.column_keys)

    @property
    def column_keys(self) -> dict[str, str]:
        """Return the `columns`, each with a key that names it."""
        texts = "data.text" if self.turns is None else "data.turns"
        others = {
            "data.label": self.label,
            "data.unit": self.unit,
            "data.after": None if self.after is None else after(self.after).column,
        }
        return (
            dict.fromkeys(self.attributes, "data.attributes")
            | {column: key for key, column in others.items() if column is not None}
            | dict.fromkeys(self.text_columns, texts)
        )

    def text_of(self, row: Mapping[str, object], where: Where) -> str:
        """Return a row's text, "" for an empty one. Raises InputError that names the row if a
        column is missing or has the wrong type."""
        if self.turns is not None:
            return turns_text(row, self.turns, self.roles, where)
        if isinstance(self.text, str):
            return text_of(row, self.text, where)
        return object_text(row, self.text, self.json_columns or (), where)

    def columns_of(self, text: str) -> dict[str, object] | None:
        """Return the columns of a released text of a table, None if the text is not a record."""
        if self.turns is not None:
            turns = turns_of(text)
            return None if turns is None else {self.turns: turns}
        return cells_of(text, self.text_columns)

    @property
    def label_names(self) -> dict[str, Label]:
        """Return the labels by name. Until the release, a label is represented by its name."""
        return {label_name(label): label for label in self.labels}

    def released_label(self, name: str) -> Label | None:
        """Return the label with this name, as released; None for data without labels."""
        return None if self.label is None else self.label_names[name]

    @property
    def attribute_names(self) -> dict[str, dict[str, Label]]:
        """Return the values of each of `attributes` by name."""
        return {
            column: {label_name(value): value for value in values}
            for column, values in self.attributes.items()
        }

    def released_attributes(self, values: Mapping[str, str]) -> dict[str, Label]:
        """Return the values of the attributes with these names, as released."""
        return {column: of[values[column]] for column, of in self.attribute_names.items()}

    @property
    def public_values(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the values of the label and of the attributes, by column."""
        labels = {} if self.label is None else {self.label: tuple(self.label_names)}
        return labels | {column: tuple(names) for column, names in self.attribute_names.items()}

    def of_public_files(self) -> DataConfig:
        """Return the section for public records with the same columns, without units and blank
        texts."""
        return self.model_copy(
            update={
                "unit": None,
                "max_records_per_unit": 1,
                "empty": "skip",
                "after": None,
                "attributes": {},
            }
        )

    @property
    def about_texts(self) -> About:
        """Return what prompts may say about the texts and the labels, with the longest values of
        the attributes in place of those that a text is written for."""
        longest = {
            column: max(names, key=lambda name: len(name.encode()))
            for column, names in self.attribute_names.items()
        }
        return About(
            self.about or "", language_name(self.language or ""), self.label_about, longest
        )

    @property
    def format(self) -> FileFormat:
        """Return how the text files of `path` are written."""
        signs = self.delimiter, self.quote, self.escape
        return FileFormat(*signs, self.encoding, self.skip_rows, "data.", self.records)

    @property
    def proportions(self) -> dict[str, float]:
        """Return the public share of each label by name; data without labels has the one label "".
        Shares that will be measured are uniform until then."""
        if isinstance(self.label_proportions, dict):
            return self.label_proportions
        names = list(self.label_names) or [""]
        return {name: 1.0 / len(names) for name in names}
