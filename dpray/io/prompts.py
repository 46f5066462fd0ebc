"""Prompt templates: the same words around a private text and around its public placeholder.

A template is a YAML file with Jinja expressions; `templates/*.yaml` are packaged, a user's own is
named by its path. Keys: `user` (the request), `prefix` (the beginning of the answer), `placeholder`
(what stands in a private text's place in the public prompt), `stop` (strings that end a text),
`private` (optional: makes the text from a row's columns), `output` (optional: makes the released
text from `{{ completion }}`). Variables: `text`, `label`, and in `private` the row's columns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml

from dpray.types import InputError, Prompt

KEYS = {"user", "prefix", "placeholder", "stop", "private", "output"}


@lru_cache(maxsize=64)
def compiled(source: str) -> jinja2.Template:
    """Kept apart from `PromptTemplate`, which travels to workers: a compiled template cannot."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    environment.filters["json"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    return environment.from_string(source)


@dataclass(frozen=True)
class PromptTemplate:
    """One template; see the module's text. Rendering with the same words for private and public
    prompts keeps the two at the same point of the text."""

    user: str
    prefix: str = ""
    placeholder: str = ""
    stop: tuple[str, ...] = ()
    private: str | None = None
    output: str = "{{ completion }}"
    name: str = field(default="", compare=False)

    def private_prompt(self, text: str, label: str) -> Prompt:
        variables = {"text": text, "label": label}
        return Prompt(self._render("user", **variables), self._render("prefix", **variables))

    def public_prompt(self, label: str) -> Prompt:
        """The prompt with the placeholder: holds no private text."""
        return self.private_prompt(self._render("placeholder", label=label), label)

    def text_of(self, row: dict[str, Any]) -> str:
        """The private text made from a row's columns, where the template has `private`.

        Raises KeyError where a column is missing (JSON cannot hold what is undefined either).
        """
        try:
            return compiled(self.private or "").render(row)
        except (jinja2.UndefinedError, TypeError) as error:
            raise KeyError(str(error)) from None

    def released(self, completion: str) -> str:
        """The text that is released, from what was decoded."""
        return self._render("output", completion=completion).strip()

    def _render(self, part: str, **variables: str) -> str:
        return compiled(getattr(self, part)).render(variables)


def packaged_templates() -> list[str]:
    """Names of the templates that dpray brings."""
    folder = resources.files("dpray.io") / "templates"
    return sorted(
        p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml")
    )


def load_template(name_or_path: str) -> PromptTemplate:
    """A packaged template by its name, or a YAML file. Raises InputError saying what is wrong."""
    if name_or_path in packaged_templates():
        folder = resources.files("dpray.io") / "templates"
        source = (folder / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    else:
        try:
            source = Path(name_or_path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            names = ", ".join(packaged_templates())
            raise InputError(
                f"method.template: no file {name_or_path}, and no packaged template ({names})"
            ) from None
    try:
        values = yaml.safe_load(source)
        if not isinstance(values, dict) or "user" not in values:
            raise InputError(f"method.template: {name_or_path} has to have the key `user`")
        if unknown := set(values) - KEYS:
            raise InputError(f"method.template: {name_or_path} has no key {sorted(unknown)[0]}")
        values["stop"] = tuple(values.get("stop", ()))
        template = PromptTemplate(**values, name=name_or_path)
        template.public_prompt("label")
    except (yaml.YAMLError, jinja2.TemplateError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"method.template: {name_or_path}: {reason}") from None
    return template
