"""Prompt templates of DP-KPS: how a text with a sequence of terms is asked for.

A template is a YAML file with Jinja expressions; `templates/dp_kps/*.yaml` are packaged, a user's
own is named by its path. Keys: `user` (the request), `prefix` (the beginning of the answer), `stop`
(strings that end a text), `refusals` (beginnings of an answer that is none). Variables:
`document_type`, `terms` (a list), `label` (empty unless the configuration says that it is public),
`examples` (public texts of the wanted form).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml

from dpray.io.prompts import compiled
from dpray.types import InputError, Prompt

KEYS = {"user", "prefix", "stop", "refusals"}


@dataclass(frozen=True)
class KeyphrasePrompts:
    """One template; see the module's text."""

    user: str
    document_type: str
    examples: tuple[str, ...] = ()
    prefix: str = ""
    stop: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()

    def prompt(self, terms: Sequence[str], label: str) -> Prompt:
        variables: dict[str, Any] = {
            "document_type": self.document_type,
            "terms": list(terms),
            "label": label,
            "examples": self.examples,
        }
        user, prefix = (compiled(part).render(variables) for part in (self.user, self.prefix))
        return Prompt(user, prefix)

    def refused(self, answer: str) -> bool:
        """Whether a text is a refusal and not an answer."""
        return answer.casefold().startswith(tuple(text.casefold() for text in self.refusals))


def load_keyphrase_prompts(
    name_or_path: str, document_type: str, examples: Sequence[str] = ()
) -> KeyphrasePrompts:
    """A packaged template by its name, or a YAML file. Raises InputError."""
    packaged = Path(str(resources.files("dpray.io"))) / "templates" / "dp_kps"
    names = sorted(path.stem for path in packaged.glob("*.yaml"))
    path = packaged / f"{name_or_path}.yaml" if name_or_path in names else Path(name_or_path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or "user" not in values:
            raise InputError(f"method.template: {name_or_path} has to have the key `user`")
        if unknown := set(values) - KEYS:
            raise InputError(f"method.template: {name_or_path} has no key {sorted(unknown)[0]}")
        for key in ("stop", "refusals"):
            values[key] = tuple(values.get(key, ()))
        prompts = KeyphrasePrompts(**values, document_type=document_type, examples=tuple(examples))
        prompts.prompt(["term"], "label")
    except (OSError, UnicodeDecodeError):
        raise InputError(
            f"method.template: no file {name_or_path}, and no packaged template "
            f"({', '.join(names)})"
        ) from None
    except (yaml.YAMLError, jinja2.TemplateError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"method.template: {name_or_path}: {reason}") from None
    return prompts
