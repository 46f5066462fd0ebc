"""A prompt template of DP-KPS asks for a text with a sequence of terms.

A template is a YAML file with Jinja expressions; `templates/dp_kps/*.yaml` are packaged, a user's
own is named by its path. Keys: `user` (the request), `prefix` (the beginning of the answer), `stop`
(strings that end a text), `refusals` (beginnings of an answer that counts as a refusal). Variables:
`document_type`, `terms` (a list), `label` (empty unless the configuration says that it is public),
`examples` (public texts of the wanted form, of the sequence's class where there are enough).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpray.io.few_shot import FewShot
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
    few_shot: FewShot = field(default_factory=FewShot)
    prefix: str = ""
    stop: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()

    def prompt(
        self, terms: Sequence[str], label: str, rng: np.random.Generator, *, name_label: bool
    ) -> Prompt:
        """Make the prompt for a sequence of the class `label`, which it names where it may; `rng`
        draws the examples."""
        known: dict[str, Any] = {
            "document_type": self.document_type,
            "examples": self._examples_of(label, rng),
            "terms": list(terms),
            "label": label if name_label else "",
        }
        return Prompt(rendered(self.user, known), rendered(self.prefix, known))

    def _examples_of(self, label: str, rng: np.random.Generator) -> list[str]:
        if not (shown := self.few_shot.shown):
            return []
        texts = self.few_shot.of_label(label)
        return [texts[place] for place in rng.choice(len(texts), shown, replace=False)]

    def refused(self, answer: str) -> bool:
        """Return whether the answer is empty or begins like one of the template's refusals."""
        return is_refusal(answer, self.refusals)


def load_keyphrase_prompts(
    name_or_path: str, document_type: str, few_shot: FewShot | None = None
) -> KeyphrasePrompts:
    """Load a packaged template by its name, or a YAML file. Raises InputError saying what is
    wrong."""
    with faults_named(name_or_path):
        file = TemplateFile.read(name_or_path, packaged(PACKAGE), KEYS, "user")
        prompts = KeyphrasePrompts(
            **file.texts("user", "prefix"),
            document_type=document_type,
            few_shot=few_shot or FewShot(),
            stop=file.words("stop", stripped=False),
            refusals=file.words("refusals"),
        )
        prompts.prompt(["term"], "label", np.random.default_rng(0), name_label=True)
    return prompts
