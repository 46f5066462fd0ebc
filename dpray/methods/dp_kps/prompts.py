"""A prompt template of DP-KPS asks for a text with a sequence of terms.

A template is a YAML file with Jinja expressions; `templates/dp_kps/*.yaml` are packaged, a user's
own is named by its path. Keys: `user` (the request), `prefix` (the beginning of the answer), `stop`
(strings that end a text), `refusals` (beginnings of an answer that counts as a refusal). Variables:
`document_type`, `terms` (a list), `label` (empty unless the configuration says that it is public),
`examples` (public texts of the wanted form).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpray.io.sandbox import rendered
from dpray.io.template_file import TemplateFile, faults_named, is_refusal, packaged
from dpray.types import Prompt

PACKAGE = "dpray.methods.dp_kps"

KEYS = {"user", "prefix", "stop", "refusals"}


@dataclass(frozen=True)
class KeyphrasePrompts:
    """Holds one template; the module describes it."""

    user: str
    document_type: str
    examples: tuple[str, ...] = ()
    prefix: str = ""
    stop: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()

    def prompt(self, terms: Sequence[str], label: str) -> Prompt:
        known: dict[str, Any] = {"document_type": self.document_type, "examples": self.examples}
        known |= {"terms": list(terms), "label": label}
        return Prompt(rendered(self.user, known), rendered(self.prefix, known))

    def refused(self, answer: str) -> bool:
        """Return whether the answer is empty or begins like one of the template's refusals."""
        return is_refusal(answer, self.refusals)


def load_keyphrase_prompts(
    name_or_path: str, document_type: str, examples: Sequence[str] = ()
) -> KeyphrasePrompts:
    """Load a packaged template by its name, or a YAML file. Raises InputError saying what is
    wrong."""
    with faults_named(name_or_path):
        file = TemplateFile.read(name_or_path, packaged(PACKAGE), KEYS, "user")
        prompts = KeyphrasePrompts(
            **file.texts("user", "prefix"),
            document_type=document_type,
            examples=tuple(examples),
            stop=file.words("stop", stripped=False),
            refusals=file.words("refusals"),
        )
        prompts.prompt(["term"], "label")
    return prompts
