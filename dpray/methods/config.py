"""The configuration of a run with the settings of every method, and functions that read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from dpray.config.config import Config
from dpray.config.sections import SMALLEST_EPSILON, Count, MethodSettings, TextSettings
from dpray.io.public_files import check_public
from dpray.io.settings_file import parse, read_tree
from dpray.io.table_schema import check_properties, is_grammar, json_columns_of, turns_schema
from dpray.methods.aug_pe.settings import AugPeSettings
from dpray.methods.dp_kps.settings import DpKpsSettings
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.methods.topics.settings import TopicsSettings


class AutoSettings(MethodSettings):
    """The keys of `method` for the name auto, with which `dpray plan` compares all methods."""

    name: Literal["auto"]
    engines: ClassVar[frozenset[str]] = MethodSettings.engines | {"none"}
    records: Count = Field(1000, description="synthetic records that are wanted")
    private_prediction: dict[str, object] = Field(
        {}, description="keys of private prediction to keep fixed"
    )
    aug_pe: dict[str, object] = Field({}, description="keys of Aug-PE to keep fixed")
    dp_kps: dict[str, object] = Field(
        {},
        description="keys of DP-KPS to keep fixed; without data.language its vocabulary is needed",
    )
    dp_sgd: dict[str, object] = Field({}, description="keys of DP-SGD to keep fixed")


First = Annotated[DpKpsSettings | TopicsSettings, Field(discriminator="name")]
"""The first method makes sequences of terms."""

Second = Annotated[
    PrivatePredictionSettings | AugPeSettings | DpSgdSettings, Field(discriminator="name")
]
"""The second method reads these sequences as its public `terms`."""


class ChainSettings(MethodSettings):
    """The keys of a chain: one method measures what the records are about, and a second one writes
    texts about it."""

    name: Literal["chain"]
    methods: tuple[First, Second] = Field(
        description="two sections like `method`: dp_kps or topics, and then private_prediction, "
        "aug_pe or dp_sgd"
    )

    @field_validator("methods", mode="before")
    @classmethod
    def _are_two(cls, methods: object) -> object:
        if not isinstance(methods, list | tuple) or len(methods) != 2:
            raise ValueError(
                "a chain has two methods: dp_kps or topics, and then private_prediction, aug_pe or "
                "dp_sgd; one alone stands as `method`"
            )
        return methods

    @field_validator("methods")
    @classmethod
    def _terms_are_released(cls, methods: tuple[First, Second]) -> tuple[First, Second]:
        first, second = methods
        if second.terms is not None:
            raise ValueError(f"1.terms: is what {first.name} releases")
        return methods

    @property
    def each(self) -> Sequence[MethodSettings]:
        return self.methods


class RunConfig(Config):
    method: Annotated[
        PrivatePredictionSettings
        | AugPeSettings
        | DpKpsSettings
        | DpSgdSettings
        | ChainSettings
        | AutoSettings,
        Field(discriminator="name"),
    ]

    @model_validator(mode="before")
    @classmethod
    def _schema_is_public(cls, values: object) -> object:
        """Check the files of schemas by their names: their content takes the place of these, and is
        released. Of two such validators the later one comes first, so `method` is there."""
        sections = values if isinstance(values, dict) else {}
        data, method = sections.get("data"), sections.get("method")
        if isinstance(data, dict) and isinstance(method, dict):
            private = data.get("path")
            for each in (method, *(method.get("methods") or ())):
                schema = each.get("schema") if isinstance(each, dict) else None
                if isinstance(schema, str) and isinstance(private, str):
                    check_public(schema, "method.schema", private)
        return values

    @model_validator(mode="before")
    @classmethod
    def _methods_are_a_chain(cls, values: object) -> object:
        """Read `methods: [...]`, which is short for a `method` with the name chain."""
        if not isinstance(values, dict) or "methods" not in values:
            return values
        if "method" in values:
            raise ValueError("methods: stands in place of `method`; give one of the two")
        rest = {key: value for key, value in values.items() if key != "methods"}
        return rest | {"method": {"name": "chain", "methods": values["methods"]}}

    @model_validator(mode="after")
    def _shares_are_of_a_chain(self) -> RunConfig:
        if (shares := self.privacy.shares) is None:
            return self
        if not isinstance(self.method, ChainSettings):
            raise ValueError("privacy.shares: is for chained `methods`")
        if len(shares) != 2:
            raise ValueError("privacy.shares: give one share for each of methods")
        if not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
            raise ValueError("privacy.shares: shares sum to 1")
        if min(shares) * self.privacy.epsilon < SMALLEST_EPSILON:
            raise ValueError(
                f"privacy.shares: leave a method less than epsilon {SMALLEST_EPSILON:g}"
            )
        return self

    @model_validator(mode="after")
    def _table_and_schema_agree(self) -> RunConfig:
        """Let a conversation have its schema, and a table the columns that its schema says."""
        data, method = self.data, self.method.each[-1]
        if not data.is_table or not isinstance(method, TextSettings):
            return self
        if method.schema is not None and is_grammar(method.schema):
            raise ValueError("method.schema: the records of a table take a JSON Schema")
        if data.turns is not None:
            if method.schema is not None or not self.engine.is_local:
                return self
            return self._with_schema(method, turns_schema(data.roles))
        if method.schema is None:
            return self
        check_properties(method.schema, data.text_columns)
        if data.json_columns is not None:
            return self
        columns = tuple(json_columns_of(method.schema))
        return self.model_copy(update={"data": data.model_copy(update={"json_columns": columns})})

    def _with_schema(self, method: TextSettings, schema: dict[str, object]) -> RunConfig:
        """Return the configuration with a schema for its last method, `method`."""
        changed: MethodSettings = method.model_copy(update={"schema": schema})
        if isinstance(self.method, ChainSettings):
            links = (*self.method.methods[:-1], changed)
            changed = self.method.model_copy(update={"methods": links})
        return self.model_copy(update={"method": changed})


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the configuration of a YAML file with `key.sub=value` overrides. Raises InputError with
    one line that names the key."""
    return parse_config(read_tree(path, overrides))


def parse_config(values: object) -> RunConfig:
    """Make a configuration from a plain tree. Raises InputError that names the first wrong key."""
    return parse(RunConfig, values)
