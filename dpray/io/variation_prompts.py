"""Prompt templates of Aug-PE: how a random text and a variation of a text are asked for.

A template is a YAML file with Jinja expressions; `templates/aug_pe/*.yaml` are packaged, a user's
own is named by its path. Keys: `random`, `paraphrase`, `fill_in_the_blanks` (the requests; `random`
and the configured one of the other two are needed), `prefix` (the beginning of the answer),
`styles` and `keywords` (of which one is drawn for each prompt), `demonstrations` (each with
`label`, `blanks` and `text`), `refusals` (beginnings of an answer that is none) and `stop` (strings
that end one).

Lists may stand in a file of their own, `{file: path}` with one entry a line, relative to the
template. `keywords` may also map labels to lists: a label takes the longest key that it begins
with, so that "" stands for all others. Variables: `task` (the request's key), `label`, `keyword`,
`style`, `text` (the parent, with "_" for its blanks), `words` (how many are asked for, or none),
`demonstrations` (each with its number of `words`); what a request does not have is empty.

Everything in a template is public; a demonstration must not be a private text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np
import yaml

from dpray.io.prompts import compiled
from dpray.types import InputError, Prompt

Variation = Literal["paraphrase", "fill_in_the_blanks"]
REQUESTS = ("random", "paraphrase", "fill_in_the_blanks")
KEYS = {*REQUESTS, "prefix", "styles", "keywords", "demonstrations", "refusals", "stop"}
DEMONSTRATION_KEYS = {"label", "blanks", "text"}


@dataclass(frozen=True)
class VariationPrompts:
    """One template; see the module's text. `keywords` is by beginnings of labels, and of
    `demonstrations` there are as many as the configuration asks for."""

    requests: Mapping[str, str]
    prefix: str = ""
    styles: tuple[str, ...] = ()
    keywords: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    demonstrations: tuple[Mapping[str, Any], ...] = ()
    refusals: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()

    def random(self, label: str, rng: np.random.Generator) -> Prompt:
        """Asks for a text of the label, with a random one of its keywords."""
        return self._prompt("random", label=label, keyword=_one_of(self.keywords_of(label), rng))

    def variation(
        self, kind: Variation, label: str, text: str, words: int | None, rng: np.random.Generator
    ) -> Prompt:
        """Asks for a variation of `text` in a random style; of `words` words where it is a number.
        For "fill_in_the_blanks" the blanks are in `text` already."""
        style = _one_of(self.styles, rng)
        return self._prompt(kind, label=label, text=text, words=words, style=style)

    def refused(self, answer: str) -> bool:
        """Whether the answer is empty or begins like a refusal; case and quotes do not matter."""
        begins = _plain(answer.strip())
        return not begins or begins.startswith(self._refusals)

    def keywords_of(self, label: str) -> tuple[str, ...]:
        """The label's keywords; none where the template has none at all. Raises KeyError where it
        has some for other labels only."""
        if not self.keywords:
            return ()
        keys = [key for key in self.keywords if label.startswith(key)]
        if not keys:
            raise KeyError(label)
        return self.keywords[max(keys, key=len)]

    @cached_property
    def _refusals(self) -> tuple[str, ...]:
        return tuple(map(_plain, self.refusals))

    def _prompt(self, task: str, **variables: Any) -> Prompt:
        nothing = {"keyword": "", "style": "", "text": "", "words": None}
        known = nothing | {"task": task, "demonstrations": self.demonstrations} | variables
        user, prefix = compiled(self.requests[task]), compiled(self.prefix)
        return Prompt(user.render(known), prefix.render(known))


def _plain(text: str) -> str:
    return text.replace("’", "'").casefold()


def _one_of(choices: tuple[str, ...], rng: np.random.Generator) -> str:
    """One of the choices, each as likely; "" where there are none."""
    return choices[int(rng.integers(len(choices)))] if choices else ""


def packaged_variation_templates() -> list[str]:
    """Names of the Aug-PE templates that dpray brings."""
    return sorted(path.stem for path in _packaged_folder().glob("*.yaml"))


def _packaged_folder() -> Path:
    return Path(str(resources.files("dpray.io"))) / "templates" / "aug_pe"


def load_variation_prompts(
    name_or_path: str,
    variation: Variation = "paraphrase",
    demonstrations: int = 0,
    labels: Iterable[str] = ("",),
) -> VariationPrompts:
    """A packaged template by its name, or a YAML file, with its first `demonstrations` ones.

    Raises InputError saying what is wrong with the template, for the public `labels` too.
    """
    if name_or_path in packaged_variation_templates():
        path = _packaged_folder() / f"{name_or_path}.yaml"
    else:
        path = Path(name_or_path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        names = ", ".join(packaged_variation_templates())
        raise InputError(
            f"method.template: no file {name_or_path}, and no packaged template ({names})"
        ) from None
    except yaml.YAMLError as error:
        raise _wrong(name_or_path, str(error).splitlines()[0]) from None
    try:
        prompts = _parsed(values, path.parent, variation, demonstrations)
        _try_out(prompts, variation, labels)
    except jinja2.TemplateError as error:
        raise _wrong(name_or_path, str(error).splitlines()[0]) from None
    except _Fault as fault:
        raise _wrong(name_or_path, str(fault)) from None
    return prompts


class _Fault(Exception):
    """What is wrong with a template, in one line."""


def _wrong(name: str, reason: str) -> InputError:
    return InputError(f"method.template: {name}: {reason}")


def _parsed(
    values: Any, folder: Path, variation: Variation, demonstrations: int
) -> VariationPrompts:
    if not isinstance(values, dict):
        raise _Fault("not a YAML file of `key: value` lines")
    if unknown := [str(key) for key in values if key not in KEYS]:
        raise _Fault(f"there is no key {min(unknown)}")
    for key in ("random", variation):
        if key not in values:
            raise _Fault(f"the key `{key}` is needed")
    for key in (*REQUESTS, "prefix"):
        if not isinstance(values.get(key, ""), str):
            raise _Fault(f"{key}: has to be a text")
    return VariationPrompts(
        requests={key: values[key] for key in REQUESTS if key in values},
        prefix=values.get("prefix", ""),
        styles=_words("styles", values.get("styles"), folder),
        keywords=_keywords(values.get("keywords"), folder),
        demonstrations=_demonstrations(values.get("demonstrations"), demonstrations),
        refusals=_words("refusals", values.get("refusals"), folder),
        stop=_words("stop", values.get("stop"), folder, stripped=False),
    )


def _words(key: str, value: Any, folder: Path, *, stripped: bool = True) -> tuple[str, ...]:
    """A list of texts, or the lines of a file."""
    if isinstance(value, dict) and set(value) == {"file"}:
        try:
            value = (folder / str(value["file"])).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            raise _Fault(f"{key}: no file {value['file']}") from None
        value = [line for line in value if line.strip()]
    if value is None:
        return ()
    if not isinstance(value, list) or not value:
        raise _Fault(f"{key}: has to be a list, or {{file: path}} with one entry a line")
    words = tuple(str(word).strip() if stripped else str(word) for word in value)
    if not all(words):
        raise _Fault(f"{key}: an entry is empty")
    return words


def _keywords(value: Any, folder: Path) -> dict[str, tuple[str, ...]]:
    if isinstance(value, dict) and not (set(value) == {"file"} and isinstance(value["file"], str)):
        return {
            str(label): _words(f"keywords.{label}", of_label, folder)
            for label, of_label in value.items()
        }
    words = _words("keywords", value, folder)
    return {"": words} if words else {}


def _demonstrations(value: Any, wanted: int) -> tuple[dict[str, Any], ...]:
    """The first `wanted` of them, each with its number of words."""
    given = [] if value is None else value
    if not isinstance(given, list):
        raise _Fault("demonstrations: has to be a list")
    for shown in given:
        if not isinstance(shown, dict) or set(shown) != DEMONSTRATION_KEYS:
            keys = ", ".join(sorted(DEMONSTRATION_KEYS))
            raise _Fault(f"demonstrations: each has the keys {keys}")
    if wanted > len(given):
        raise _Fault(f"method.demonstrations asks for {wanted}, and there are {len(given)}")
    return tuple(shown | {"words": len(str(shown["text"]).split())} for shown in given[:wanted])


def _try_out(prompts: VariationPrompts, variation: Variation, labels: Iterable[str]) -> None:
    """Renders what a run will render, so that a fault shows before anything is paid for."""
    rng = np.random.default_rng(0)
    for label in labels:
        try:
            prompts.keywords_of(label)
        except KeyError:
            raise _Fault(f'keywords: none for the label {label!r} (key "": all others)') from None
        prompts.random(label, rng)
        for words in (None, 7):
            text = "a text" if words is None else "a _"
            if text not in prompts.variation(variation, label, text, words, rng).user:
                raise _Fault(f"{variation}: does not hold {{{{ text }}}}")
