"""A prompt template of DP-KPS asks for a text with a sequence of terms. docs/configuration.md
describes its keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dpray.io.public_files import FewShot
from dpray.io.template_file import About, Template, TextKey, read_template
from dpray.types import Prompt

PACKAGE = "dpray.methods.dp_kps"

KIND = ("document_type", "label")
TEXTS = {
    "user": TextKey(("terms", *KIND, "examples"), needed=("terms",)),
    "prefix": TextKey(("terms", *KIND)),
    "example": TextKey(("example", *KIND), needed=("example",), default="{example}\n\n"),
}


@dataclass(frozen=True)
class KeyphrasePrompts:
    """A template, the type of the texts to write, and the public texts that prompts show."""

    template: Template
    document_type: str
    few_shot: FewShot = field(default_factory=FewShot)

    def prompt(
        self,
        terms: Sequence[str],
        label: str,
        rng: np.random.Generator,
        *,
        name_label: bool,
        attributes: Mapping[str, str] | None = None,
    ) -> Prompt:
        """Make the prompt for a sequence of the class `label`; with `name_label` it names the
        class. `rng` draws the examples. Without `attributes` it has the longest."""
        render = (self.template if not attributes else self.template.saying(attributes)).render
        kind = {"document_type": self.document_type, "label": label if name_label else ""}
        shown, texts = self.few_shot.shown, self.few_shot.of_label(label)
        drawn = [texts[i] for i in rng.choice(len(texts), shown, replace=False)] if shown else []
        examples = "".join(render("example", example=example, **kind) for example in drawn)
        known = kind | {"terms": ", ".join(dict.fromkeys(terms))}
        return Prompt(render("user", examples=examples, **known), render("prefix", **known))


def load_keyphrase_prompts(
    name_or_path: str,
    document_type: str,
    few_shot: FewShot | None = None,
    about: About = About(),
) -> KeyphrasePrompts:
    """Load a packaged template by its name, or a YAML file. Raises InputError if it is wrong."""
    template = read_template(name_or_path, PACKAGE, TEXTS, "user", about=about)
    template.check_attributes("user")
    return KeyphrasePrompts(template, document_type, few_shot or FewShot())
