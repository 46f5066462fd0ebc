"""A prompt template of Aug-PE asks for a random text and for a variation of a text. All of it is
public. docs/configuration.md describes its keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np

from dpray.io.columns import label_name
from dpray.io.template_file import About, Template, TextKey, Words, read_template
from dpray.types import Prompt

PACKAGE = "dpray.methods.aug_pe"

T = TypeVar("T")
Variation = Literal["paraphrase", "fill_in_the_blanks"]
Sequences = Mapping[str, Sequence[Sequence[str]]]

VARIED = ("text", "label", "style", "words")
SAID = ("label", "keyword", "terms")
TEXTS = {
    "random": TextKey(SAID),
    "random_system": TextKey(SAID),
    "paraphrase": TextKey((*VARIED, "opening"), needed=("text", "opening")),
    "paraphrase_system": TextKey(("label", "style", "words")),
    "fill_in_the_blanks": TextKey(VARIED, needed=("text",)),
    "fill_in_the_blanks_system": TextKey(("label", "style", "words")),
    "prefix": TextKey(("label", "keyword", "terms", "style", "words")),
}


@dataclass(frozen=True)
class Kind:
    """Texts of one label with the same attributes. `records` of them are released."""

    label: str
    attributes: Mapping[str, str]
    records: int


@dataclass(frozen=True)
class VariationPrompts:
    """A template with its styles and keywords, and public sequences of terms.

    keywords: by the beginning of a label. sequences: by label; requests for random texts show them.
    kinds: the kinds of texts by key. Without data.attributes it is empty, and keys are labels.
    """

    template: Template
    styles: tuple[str, ...] = ()
    keywords: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sequences: Sequences = field(default_factory=dict)
    kinds: Mapping[str, Kind] = field(default_factory=dict)

    def label_of(self, key: str) -> str:
        return self.kinds[key].label if key in self.kinds else key

    def showing(self, sequences: Sequences) -> VariationPrompts:
        """Return these prompts with sequences of terms for random texts. Raises InputError if the
        template does not show any."""
        if sequences:
            self.template.check_terms("random")
        return replace(self, sequences=sequences)

    def random(self, key: str, rng: np.random.Generator) -> Prompt:
        """Return the prompt for a random text, with one keyword and one sequence of its label."""
        label = self.label_of(key)
        keyword = _one_of(self.keywords_of(label), rng, "")
        terms = _one_of(self.sequences.get(label, ()), rng, ())
        return self._prompt("random", key, keyword=keyword, terms=", ".join(terms))

    def variation(
        self, kind: Variation, key: str, text: str, words: int | None, rng: np.random.Generator
    ) -> Prompt:
        """Return the prompt for a variation of `text` in a random style, with `words` words if a
        number is given. For "fill_in_the_blanks", `text` has its blanks already."""
        style = _one_of(self.styles, rng, "")
        number = "" if words is None else str(words)
        return self._prompt(kind, key, text=text, words=number, style=style)

    def keywords_of(self, label: str) -> tuple[str, ...]:
        """Return the keywords of the longest known beginning of the label."""
        keys = [key for key in self.keywords if label.startswith(key)]
        return self.keywords[max(keys, key=len)] if keys else ()

    def _prompt(self, request: str, key: str, **given: str) -> Prompt:
        values = dict.fromkeys(("keyword", "terms", "style", "text", "words"), "") | given
        values["label"] = self.label_of(key)
        parent = values["text"].split()
        values["opening"] = " ".join(parent[: len(parent) // 2 + 1])
        kind = self.kinds.get(key)
        render = (self.template if kind is None else self.template.saying(kind.attributes)).render
        system = render(f"{request}_system", **values)
        return Prompt(render(request, **values), render("prefix", **values), system)


def _one_of(choices: Sequence[T], rng: np.random.Generator, nothing: T) -> T:
    """Draw one of the choices uniformly; return `nothing` if there are none."""
    return choices[int(rng.integers(len(choices)))] if choices else nothing


def load_variation_prompts(
    name_or_path: str,
    variation: Variation = "paraphrase",
    labels: Iterable[str] = ("",),
    about: About = About(),
) -> VariationPrompts:
    """Load a packaged template by its name, or a YAML file. Raises InputError if it is wrong, or if
    it has no keywords for one of the public `labels`."""
    template = read_template(
        name_or_path,
        PACKAGE,
        TEXTS,
        "random",
        variation,
        about=about,
        styles=(Words, ()),
        keywords=(Words | dict[Any, Words | None], ()),
    )
    template.check_attributes("random", variation)
    prompts = VariationPrompts(template, template.further["styles"], _keywords(template))
    for label in labels if prompts.keywords else ():
        if not any(label.startswith(key) for key in prompts.keywords):
            raise template.fault(f'has none for the label {label!r} ("": all others)', "keywords")
    return prompts


def _keywords(template: Template) -> dict[str, tuple[str, ...]]:
    given = template.further["keywords"]
    if isinstance(given, dict):
        return {label_name(label): words or () for label, words in given.items()}
    return {"": given} if given else {}
