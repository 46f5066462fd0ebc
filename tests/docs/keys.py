"""The tables of keys in docs/, from the settings themselves.

`python -m tests.docs.keys` writes them into the pages; `test_methods.py` says whether that is due.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dpray.methods.config import First, RunConfig, Second

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))

_TABLE = re.compile(r"(<!-- keys: (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def sections() -> dict[str, type[BaseModel]]:
    """Return the sections of a configuration by name, the methods' by `method.name`, or by their
    name in `methods`."""
    found = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    of_chains = [method for link in (First, Second) for method in get_args(get_args(link)[0])]
    methods = dict.fromkeys((*get_args(found.pop("method")), *of_chains))
    by_name = {get_args(m.model_fields["name"].annotation)[0]: m for m in methods}
    return {**by_name, **found}  # type: ignore[dict-item]


def with_tables(page: str) -> str:
    """Return the page with every table between its marks as the settings have it."""
    return _TABLE.sub(lambda mark: f"{mark[1]}{table(sections()[mark[2]])}", page)


def table(section: type[BaseModel]) -> str:
    rows = [
        f"| `{name}` | {_default(field)} | {_meaning(field)} |"
        for name, field in section.model_fields.items()
        if name != "name"
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows, ""])


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "(required)"
    value: Any = list(field.default) if isinstance(field.default, tuple) else field.default
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n")
    return f"`{text.strip()}`"


def _meaning(field: FieldInfo) -> str:
    words = ", ".join(_choices(field.annotation) + _keys(field.annotation))
    return "; ".join(part for part in (words, field.description) if part)


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [f"`{choice}`" for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _keys(annotation: Any) -> list[str]:
    """Return the keys of a section within a section, with what they mean."""
    parts = [part for part in get_args(annotation) if isinstance(part, type)]
    return [
        f"`{name}` ({field.description})"
        for part in parts
        if issubclass(part, BaseModel)
        for name, field in part.model_fields.items()
    ]


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
