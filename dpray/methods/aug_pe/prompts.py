"""A prompt template of Aug-PE asks for a random text and for a variation of a text.

A template is a YAML file with Jinja expressions; `templates/aug_pe/*.yaml` are packaged, a user's
own is named by its path. Keys: `random`, `paraphrase`, `fill_in_the_blanks` (the requests; `random`
and the configured one of the other two are needed), `prefix` (the beginning of the answer),
`styles` and `keywords` (of which one is drawn for each prompt), `demonstrations` (each with
`label`, `blanks` and `text`), `refusals` (beginnings of an answer that counts as a refusal) and
`stop` (strings that end one).

Lists may stand in a file of their own, as `template_file` says. `keywords` may also map labels to
lists, or to null for none: a label takes the longest key that it begins with, so that "" stands for
all others. Variables: `task` (the request's key), `label`, `keyword`, `style`, `text` (the parent,
with "_" for its blanks), `words` (how many are asked for, or None), `demonstrations` (each with its
number of `words`), `terms` (of `random` after DP-KPS or topics in a chain: a sequence of terms of
the label); what a request does not have is empty.

Everything in a template is public; a demonstration must not be a private text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np

from dpray.io.labels import label_name
from dpray.io.sandbox import rendered
from dpray.io.template_file import Fault, TemplateFile, faults_named, is_refusal, packaged
from dpray.types import InputError, Prompt

PACKAGE = "dpray.methods.aug_pe"

T = TypeVar("T")
Variation = Literal["paraphrase", "fill_in_the_blanks"]
REQUESTS = ("random", "paraphrase", "fill_in_the_blanks")
Sequences = Mapping[str, Sequence[Sequence[str]]]
KEYS = {*REQUESTS, "prefix", "styles", "keywords", "demonstrations", "refusals", "stop"}
DEMONSTRATION_KEYS = {"label", "blanks", "text"}


@dataclass(frozen=True)
class VariationPrompts:
    """Holds one template; the module describes it. `keywords` maps beginnings of labels to
    keywords; there are as many `demonstrations` as the configuration asks for."""

    requests: Mapping[str, str]
    prefix: str = ""
    styles: tuple[str, ...] = ()
    keywords: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    demonstrations: tuple[Mapping[str, Any], ...] = ()
    refusals: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    name: str = ""
    sequences: Sequences = field(default_factory=dict)

    def showing(self, sequences: Sequences) -> VariationPrompts:
        """Return the template with sequences of terms for its random texts. Raises InputError where
        a prompt is the same without them."""
        shown = replace(self, sequences=sequences)
        for label in sequences:
            one, other = (p.random(label, np.random.default_rng(0)) for p in (self, shown))
            if one == other:
                raise InputError(
                    f"method.template: {self.name}: `random` shows no `terms`, which the method "
                    "before hands on"
                )
        return shown

    def random(self, label: str, rng: np.random.Generator) -> Prompt:
        """Return the prompt for a text of the label, with a random one of its keywords, and of its
        sequences of terms."""
        keyword = _one_of(self.keywords_of(label), rng, "")
        terms = _one_of(self.sequences.get(label, ()), rng, ())
        return self._prompt("random", label=label, keyword=keyword, terms=list(terms))

    def variation(
        self, kind: Variation, label: str, text: str, words: int | None, rng: np.random.Generator
    ) -> Prompt:
        """Return the prompt for a variation of `text` in a random style; of `words` words where it
        is a number. For "fill_in_the_blanks" the blanks are in `text` already."""
        style = _one_of(self.styles, rng, "")
        return self._prompt(kind, label=label, text=text, words=words, style=style)

    def refused(self, answer: str) -> bool:
        """Return whether the answer is empty or begins like one of the template's refusals."""
        return is_refusal(answer, self.refusals)

    def keywords_of(self, label: str) -> tuple[str, ...]:
        """Return the label's keywords; none where the template has none at all. Raises KeyError
        where it has some for other labels only."""
        if not self.keywords:
            return ()
        keys = [key for key in self.keywords if label.startswith(key)]
        if not keys:
            raise KeyError(label)
        return self.keywords[max(keys, key=len)]

    def _prompt(self, task: str, **variables: Any) -> Prompt:
        nothing: dict[str, Any] = {
            "keyword": "",
            "terms": [],
            "style": "",
            "text": "",
            "words": None,
        }
        known = nothing | {"task": task, "demonstrations": self.demonstrations} | variables
        return Prompt(rendered(self.requests[task], known), rendered(self.prefix, known))


def _one_of(choices: Sequence[T], rng: np.random.Generator, nothing: T) -> T:
    """Return one of the choices, each as likely; `nothing` where there are none."""
    return choices[int(rng.integers(len(choices)))] if choices else nothing


def load_variation_prompts(
    name_or_path: str,
    variation: Variation = "paraphrase",
    demonstrations: int = 0,
    labels: Iterable[str] = ("",),
) -> VariationPrompts:
    """Load a packaged template by its name, or a YAML file, with its first `demonstrations` ones.

    Raises InputError saying what is wrong with the template, for the public `labels` too.
    """
    with faults_named(name_or_path):
        file = TemplateFile.read(name_or_path, packaged(PACKAGE), KEYS, "random", variation)
        prompts = VariationPrompts(
            requests=file.texts(*REQUESTS),
            prefix=file.texts("prefix").get("prefix", ""),
            styles=file.words("styles"),
            keywords=_keywords(file),
            demonstrations=_demonstrations(file, demonstrations),
            refusals=file.words("refusals"),
            stop=file.words("stop", stripped=False),
            name=name_or_path,
        )
        _try_out(prompts, variation, labels)
    return prompts


def _keywords(file: TemplateFile) -> dict[str, tuple[str, ...]]:
    value = file.values.get("keywords")
    if isinstance(value, dict) and not (set(value) == {"file"} and isinstance(value["file"], str)):
        return {
            label_name(label): ()
            if of_label is None
            else file.as_words(f"keywords.{label}", of_label)
            for label, of_label in value.items()
        }
    words = file.words("keywords")
    return {"": words} if words else {}


def _demonstrations(file: TemplateFile, wanted: int) -> tuple[dict[str, Any], ...]:
    """Return the first `wanted` demonstrations, each with its number of words."""
    given = file.values.get("demonstrations", [])
    if not isinstance(given, list):
        raise Fault("demonstrations: has to be a list")
    for demonstration in given:
        if not isinstance(demonstration, dict) or set(demonstration) != DEMONSTRATION_KEYS:
            keys = ", ".join(sorted(DEMONSTRATION_KEYS))
            raise Fault(f"demonstrations: each has the keys {keys}")
    if wanted > len(given):
        raise Fault(f"method.demonstrations asks for {wanted}, and there are {len(given)}")
    return tuple(each | {"words": len(str(each["text"]).split())} for each in given[:wanted])


def _try_out(prompts: VariationPrompts, variation: Variation, labels: Iterable[str]) -> None:
    """Render what a run will render, so that a fault shows before anything is paid for."""
    rng = np.random.default_rng(0)
    for label in labels:
        try:
            prompts.keywords_of(label)
        except KeyError:
            raise Fault(f'keywords: none for the label {label!r} (key "": all others)') from None
        prompts.random(label, rng)
        for words in (None, 7):
            text = "a text" if words is None else "a _"
            if text not in prompts.variation(variation, label, text, words, rng).user:
                raise Fault(f"{variation}: does not hold {{{{ text }}}}")
