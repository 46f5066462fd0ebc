"""A prompt template puts the same words around a private text and around its public placeholder.

A template is a YAML file with Jinja expressions; `templates/*.yaml` are packaged, a user's own is
named by its path. Keys: `user` (the request), `prefix` (the beginning of the answer), `placeholder`
(what stands in a private text's place in the public prompt), `stop` (strings that end a text),
`private` (optional: makes the text from a row's columns), `output` (optional: makes the released
text from `{{ completion }}`). Variables: `text`, `label`, `examples` (public texts of the wanted
form, the same in all prompts of a batch), `terms` (after DP-KPS or topics in a chain: a sequence of
terms, the same in all prompts of a batch; else empty), and in `private` the row's columns.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jinja2

from dpray.io.few_shot import FewShot
from dpray.io.sandbox import SecurityError, compiled, rendered
from dpray.io.template_file import Fault, TemplateFile, faults_named, packaged
from dpray.types import InputError, Prompt

PACKAGE = "dpray.methods.private_prediction"

TEXTS = ("user", "prefix", "placeholder", "private", "output")


@dataclass(frozen=True)
class PromptTemplate:
    """Holds one template; the module describes it. Rendering with the same words for private and
    public prompts keeps the two at the same point of the text."""

    user: str
    prefix: str = ""
    placeholder: str = ""
    stop: tuple[str, ...] = ()
    private: str | None = None
    output: str = "{{ completion }}"
    name: str = field(default="", compare=False)
    few_shot: FewShot = field(default_factory=FewShot, compare=False)
    sequences: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict, compare=False)
    terms: tuple[str, ...] = field(default=(), compare=False)

    def of_batch(self, label: str, batch: str) -> PromptTemplate:
        """Return the template of a batch, with one of its label's `sequences` as `terms`, the same
        one every time for the same batch."""
        sequences = self.sequences.get(label)
        if not sequences:
            return self
        return replace(self, terms=tuple(random.Random(f"terms {batch}").choice(sequences)))

    def showing(self, sequences: Mapping[str, Sequence[Sequence[str]]]) -> PromptTemplate:
        """Return the template with sequences of terms for its batches. Raises InputError where a
        prompt is the same without them."""
        shown = replace(self, sequences=sequences)
        for label in sequences:
            both = zip(shown.of_batch(label, "")._both(()), self._both(()), strict=True)
            if any(one == other for one, other in both):
                raise InputError(
                    f"method.template: {self.name}: shows no `terms`, which the method before it "
                    "hands on"
                )
        return shown

    def examples(self, label: str, batch: str) -> list[str]:
        """Draw the public texts that the prompts of a batch show, the same every time for the same
        batch."""
        if not (shown := self.few_shot.shown):
            return []
        return random.Random(batch).sample(self.few_shot.of_label(label), shown)

    def private_prompt(self, text: str, label: str, examples: Sequence[str] = ()) -> Prompt:
        """Make the prompt with a private text. Raises InputError that, unlike the template's own
        error, quotes no word of it."""
        try:
            return self._prompt(text, label, examples)
        except Exception as error:
            kind = type(error).__name__
            raise InputError(f"method.template: {self.name}: fails on a text ({kind})") from None

    def public_prompt(self, label: str, examples: Sequence[str] = ()) -> Prompt:
        """Make the prompt with the placeholder, which holds no private text."""
        placeholder = self._render("placeholder", label=label, examples=examples)
        return self._prompt(placeholder, label, examples)

    def text_of(self, row: dict[str, Any]) -> str:
        """Make the private text from a row's columns, where the template has `private`.

        Raises KeyError where a column is missing (JSON cannot hold what is undefined either), and
        whatever else the template ends in.
        """
        try:
            return rendered(self.private or "", row)
        except (jinja2.UndefinedError, TypeError) as error:
            raise KeyError(str(error)) from None

    def released(self, completion: str) -> str:
        """Make the text that is released from what was decoded. Raises InputError where the
        template fails on it: what was paid for is kept, and waits for a better template."""
        try:
            return self._render("output", completion=completion).strip()
        except Exception as error:
            kind = type(error).__name__
            raise InputError(
                f"method.template: {self.name}: `output` fails on a text that was decoded ({kind})"
            ) from None

    def _prompt(self, text: str, label: str, examples: Sequence[str]) -> Prompt:
        variables = {"text": text, "label": label, "examples": list(examples)}
        return Prompt(self._render("user", **variables), self._render("prefix", **variables))

    def _render(self, part: str, **variables: Any) -> str:
        return rendered(getattr(self, part), {"terms": list(self.terms)} | variables)

    def _both(self, examples: Sequence[str]) -> tuple[Prompt, Prompt]:
        """Make a prompt with a text and the public one."""
        return self._prompt("a text", "label", examples), self.public_prompt("label", examples)

    def try_out(self) -> None:
        """Render the parts that public words can be put into, with any number of examples that may
        be shown, and compile the others, which take a row or a completion: that finds what is not
        in the language."""
        without, *shown = (self._both(["example"] * n) for n in range(self.few_shot.shown + 1))
        if shown and any(one == other for one, other in zip(shown[-1], without, strict=True)):
            raise Fault("shows no `examples`, which method.few_shot gives")
        compiled(self.private or "")
        compiled(self.output)
        try:
            self._render("output", completion="a text")
        except SecurityError:
            raise
        except Exception:
            return  # it may ask for JSON


def load_template(name_or_path: str, few_shot: FewShot | None = None) -> PromptTemplate:
    """Load a packaged template by its name, or a YAML file. Raises InputError saying what is
    wrong."""
    with faults_named(name_or_path):
        file = TemplateFile.read(name_or_path, packaged(PACKAGE), {*TEXTS, "stop"}, "user")
        stop = file.words("stop", stripped=False)
        texts: dict[str, Any] = {**file.texts(*TEXTS)}
        shown = few_shot or FewShot()
        template = PromptTemplate(**texts, stop=stop, name=name_or_path, few_shot=shown)
        template.try_out()
    return template
