"""A prompt template puts the same words around a private text and around its public placeholder,
which keeps the two prompts at the same point of a text. docs/methods.md describes its keys."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dpray.io.public_files import FewShot
from dpray.io.template_file import Template, TextKey, read_template
from dpray.types import Prompt

PACKAGE = "dpray.methods.private_prediction"

TEXTS = {
    "user": TextKey(("text", "label", "examples", "terms"), needed=("text",)),
    "placeholder": TextKey(("label", "terms")),
    "public": TextKey(("label", "examples", "terms")),
    "prefix": TextKey(("label", "terms")),
    "example": TextKey(("example", "label"), needed=("example",), default="{example}\n\n"),
    "output": TextKey(("completion",), needed=("completion",), default="{completion}"),
}


@dataclass(frozen=True)
class PromptTemplate:
    """A template, with the public texts and the released terms that its prompts show. `record`
    maps the keys of a private text that is JSON to the row's columns."""

    template: Template
    record: Mapping[str, str] = field(default_factory=dict)
    few_shot: FewShot = field(default_factory=FewShot, compare=False)
    sequences: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict, compare=False)
    terms: str = field(default="", compare=False)

    def of_batch(self, label: str, batch: str) -> PromptTemplate:
        """Return the template of a batch, with one of its label's `sequences` as `terms`, the same
        one every time for the same batch."""
        sequences = self.sequences.get(label)
        if not sequences:
            return self
        return replace(self, terms=", ".join(random.Random(f"terms {batch}").choice(sequences)))

    def showing(self, sequences: Mapping[str, Sequence[Sequence[str]]]) -> PromptTemplate:
        """Return the template with sequences of terms for its batches. Raises InputError where a
        prompt does not show them."""
        if sequences:
            self.template.check_terms(*_requests(self.template))
        return replace(self, sequences=sequences)

    def examples(self, label: str, batch: str) -> list[str]:
        """Draw the public texts that the prompts of a batch show, the same every time for the same
        batch."""
        if not (shown := self.few_shot.shown):
            return []
        return random.Random(batch).sample(self.few_shot.of_label(label), shown)

    def private_prompt(self, text: str, label: str, examples: Sequence[str] = ()) -> Prompt:
        """Make the prompt with a private text."""
        return self._prompt("user", label, examples, text=text)

    def public_prompt(self, label: str, examples: Sequence[str] = ()) -> Prompt:
        """Make the prompt without a private text."""
        if "public" in self.template.texts:
            return self._prompt("public", label, examples)
        placeholder = self.template.render("placeholder", label=label, terms=self.terms)
        return self._prompt("user", label, examples, text=placeholder)

    def text_of(self, row: Mapping[str, Any]) -> str:
        """Make the private text of a row's columns, where the template has a `record`. Raises
        KeyError where a column is missing."""
        values = {key: row[column] for key, column in self.record.items()}
        return json.dumps(values, ensure_ascii=False, indent=2, default=str)

    def released(self, completion: str) -> str:
        """Make the text that is released from what was decoded."""
        return self.template.render("output", completion=completion).strip()

    def _prompt(self, key: str, label: str, examples: Sequence[str], **text: str) -> Prompt:
        render = self.template.render
        shown = "".join(render("example", example=each, label=label) for each in examples)
        user = render(key, label=label, examples=shown, terms=self.terms, **text)
        return Prompt(user, render("prefix", label=label, terms=self.terms))


def _requests(template: Template) -> list[str]:
    """Return the keys of the private and the public request."""
    return [key for key in ("user", "public") if key in template.texts]


def load_template(name_or_path: str, few_shot: FewShot | None = None) -> PromptTemplate:
    """Load a packaged template by its name, or a YAML file. Raises InputError saying what is
    wrong."""
    template = read_template(name_or_path, PACKAGE, TEXTS, "user", record=(dict[str, str], {}))
    for key in _requests(template):
        if few_shot is not None and few_shot.shown and not template.shows(key, "examples"):
            raise template.fault("has no {examples}, which method.few_shot gives", key)
    return PromptTemplate(template, template.further["record"], few_shot or FewShot())
