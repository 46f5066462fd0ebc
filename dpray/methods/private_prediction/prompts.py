"""A prompt template puts the same words around a private text and around its public placeholder,
which keeps the two prompts at the same point of a text. docs/configuration.md describes its
keys."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dpray.config.config import Config
from dpray.engines.base import Engine
from dpray.engines.schema.schema import Form
from dpray.engines.sentences import unquoted, whole_sentences
from dpray.engines.text import TextCodec
from dpray.io.public_files import FewShot, check_public, read_few_shot, read_terms
from dpray.io.template_file import About, Template, TextKey, read_template
from dpray.methods.private_prediction.sections import sections_of
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.types import InputError, Prompt

PACKAGE = "dpray.methods.private_prediction"

STAND_IN = "-"

PUBLIC_TEXTS = ("", "the weather", "a bridge")

TEXTS = {
    "user": TextKey(("text", "label", "examples", "terms", "before"), needed=("text",)),
    "placeholder": TextKey(("label", "terms")),
    "public": TextKey(("label", "examples", "terms", "before")),
    "prefix": TextKey(("label", "terms")),
    "example": TextKey(("example", "label"), needed=("example",), default="{example}\n\n"),
    "output": TextKey(("completion",), needed=("completion",), default="{completion}"),
}


@dataclass(frozen=True)
class PromptTemplate:
    """A template, with the public texts and the released terms that its prompts show. `written` is
    what there is of a document; in a plan of several `sections` `STAND_IN` stands for it. `drawn`
    are the attributes of the texts of each batch."""

    template: Template
    few_shot: FewShot = field(default_factory=FewShot, compare=False)
    sequences: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict, compare=False)
    terms: str = field(default="", compare=False)
    written: str = field(default="", compare=False)
    sections: int = 1
    drawn: Mapping[str, Mapping[str, str]] = field(default_factory=dict, compare=False)

    def of_batch(self, label: str, batch: str) -> PromptTemplate:
        """Return the template of a batch, with its attributes, and one of its label's `sequences`
        as `terms`, the same ones every time for the same batch."""
        shown, sequences = self, self.sequences.get(label)
        if batch in self.drawn:
            shown = replace(shown, template=self.template.saying(self.drawn[batch]))
        if not sequences:
            return shown
        return replace(shown, terms=", ".join(random.Random(f"terms {batch}").choice(sequences)))

    def showing(self, sequences: Mapping[str, Sequence[Sequence[str]]]) -> PromptTemplate:
        """Return the template with sequences of terms for its batches. Raises InputError if a
        prompt does not show them."""
        if sequences:
            self.template.check_terms(*_requests(self.template))
        return replace(self, sequences=sequences)

    def after(self, written: str) -> PromptTemplate:
        """Return the template of the section that comes after what is `written`."""
        return replace(self, written=written)

    @property
    def shows_before(self) -> bool:
        """Return whether the requests show the sections that are written."""
        return all(self.template.shows(key, "before") for key in _requests(self.template))

    def joined(self, sections: Sequence[tuple[str, bool]]) -> str:
        """Return a document of completions, each with whether `max_tokens` cut it."""
        whole = (whole_sentences(text) if is_cut else text for text, is_cut in sections)
        return "\n\n".join(filter(None, map(str.strip, whole)))

    def examples(self, label: str, batch: str) -> list[str]:
        """Draw the public texts that the prompts of a batch show, the same every time for the same
        batch."""
        if not (shown := self.few_shot.shown):
            return []
        return random.Random(batch).sample(self.few_shot.of_label(label), shown)

    def by_section(self, examples: Sequence[str]) -> list[list[str]]:
        """Return the examples of each section's prompts: this section of every public text."""
        cut = [sections_of(each, self.sections) for each in examples]
        return [[each[number] for each in cut] for number in range(self.sections)]

    def private_prompt(self, text: str, label: str, examples: Sequence[str] = ()) -> Prompt:
        """Make the prompt with a private text."""
        return self._prompt("user", label, examples, text=text)

    def public_prompt(self, label: str, examples: Sequence[str] = ()) -> Prompt:
        """Make the prompt without a private text."""
        if "public" in self.template.texts:
            return self._prompt("public", label, examples)
        placeholder = self.template.render("placeholder", label=label, terms=self.terms)
        return self._prompt("user", label, examples, text=placeholder)

    def released(self, completion: str, form: Form | None = None, *, is_cut: bool = False) -> str:
        """Make the text that is released from what was decoded. One that has a form is whole as it
        is; of others, blanks and quotation marks around them and the sentence in which `max_tokens`
        cut them are left out."""
        if form is None and self.template.texts["output"] == TEXTS["output"].default:
            completion = unquoted((whole_sentences(completion) if is_cut else completion).strip())
        text = self.template.render("output", completion=completion)
        return text.strip() if form is None else text

    def before(self) -> str:
        """Return what a released text begins with before its completion. Raises InputError if
        anything follows that: a schema is that of the whole text."""
        before, after = self.template.render("output", completion="\0").split("\0")
        if after:
            raise self.template.fault("has words after {completion}, with method.schema", "output")
        return before

    def _prompt(self, key: str, label: str, examples: Sequence[str], **text: str) -> Prompt:
        render = self.template.render
        shown = "".join(render("example", example=each, label=label) for each in examples)
        values = {"terms": self.terms, "before": self.written}
        user = render(key, label=label, examples=shown, **values, **text)
        return Prompt(user, render("prefix", label=label, terms=self.terms))


def _requests(template: Template) -> list[str]:
    """Return the keys of the private and the public request."""
    return [key for key in ("user", "public") if key in template.texts]


def with_longest(
    template: PromptTemplate, values: Mapping[str, Collection[str]], codec: Engine | TextCodec
) -> PromptTemplate:
    """Return the template with the values of the attributes that take the most tokens: a batch's
    have no more, so what has room for these has room for all."""

    def tokens(value: str) -> int:
        return len(codec.encode(Prompt(value)))

    longest = {column: max(of, key=tokens) for column, of in values.items()}
    return replace(template, template=template.template.saying(longest)) if longest else template


def template_of(config: Config, settings: PrivatePredictionSettings) -> PromptTemplate:
    """Load the template, with the public texts and terms that it shows. Raises InputError for a
    wrong one."""
    few_shot = read_few_shot(settings.few_shot, settings.few_shot_examples, config.data.path)
    check_public(settings.template, "method.template", config.data.path)
    template = load_template(settings.template, few_shot, config.data.about_texts)
    if settings.sections > 1:
        if not template.shows_before:
            what = "has no {before}, which shows the sections that are written"
            raise template.template.fault(
                f"{what}; add it, or set method.sections to 1", *_requests(template.template)[-1:]
            )
        template = replace(template.after(STAND_IN), sections=settings.sections)
    return template.showing(read_terms(settings.terms, config.data.label_names, config.data.path))


def load_template(
    name_or_path: str, few_shot: FewShot | None = None, about: About = About()
) -> PromptTemplate:
    """Load a packaged template by its name, or a YAML file. Raises InputError saying what is
    wrong."""
    template = read_template(name_or_path, PACKAGE, TEXTS, "user", about=about)
    template.check_attributes(*_requests(template))
    for key in _requests(template):
        if few_shot is not None and few_shot.shown and not template.shows(key, "examples"):
            raise template.fault("has no {examples}, which method.few_shot gives", key)
    return PromptTemplate(template, few_shot or FewShot())


def shown_examples(
    engine: Engine | TextCodec, template: PromptTemplate, label: str, batch: str, room: int
) -> list[list[str]]:
    """Return the public texts that the prompts of a batch show, for each section: fewer than were
    drawn if a section's prompt would take more than half of `room` without its private text."""
    examples = template.examples(label, batch)
    while True:
        shown = template.by_section(examples)
        longest = max(len(frame(engine, template, label, each)) for each in shown)
        if not examples or 2 * longest <= room:
            return shown
        examples.pop()


def encode_private(
    engine: Engine,
    template: PromptTemplate,
    text: str,
    label: str,
    examples: Sequence[str],
    room: int,
) -> tuple[int, ...]:
    """Return a private prompt's tokens, its text cut so that they are at most `room`: a rule on
    this text only."""
    most = max(room - len(frame(engine, template, label, examples)), 0)
    while True:
        prompt = template.private_prompt(engine.truncate(text, most), label, examples)
        tokens = engine.encode(prompt)
        if len(tokens) <= room:
            return tokens
        if most == 0:
            raise InputError(
                "method.template: the prompt leaves no room in the model's context for a text "
                "of method.max_tokens"
            )
        most -= min(most, max(len(tokens) - room, 8))


def after_sections(
    engine: Engine | TextCodec,
    template: PromptTemplate,
    label: str,
    examples: Sequence[str],
    before: str,
    most: int,
) -> PromptTemplate:
    """Return the template that shows what is written of a document, its end left out if that
    takes more than `most` tokens of a prompt: a rule on public words."""
    if not before:
        return template.after("")

    def longest(shown: PromptTemplate) -> int:
        public = engine.encode(shown.public_prompt(label, examples))
        return max(len(frame(engine, shown, label, examples)), len(public))

    room, left = longest(template.after(STAND_IN)) + most, most
    while True:
        shown = template.after(before := engine.truncate(before, left))
        if not before or (beyond := longest(shown) - room) <= 0:
            return shown
        left = max(left - beyond, 0)


def check_shown(engine: Engine, template: PromptTemplate, label: str, room: int) -> None:
    """Raise InputError if a private text does not reach the model: public words in its place, whole
    and cut to nothing, have to make different prompts."""
    for examples in shown_examples(engine, template, label, "", room):
        prompts = {
            encode_private(engine, template, text, label, examples, room) for text in PUBLIC_TEXTS
        }
        if len(prompts) < len(PUBLIC_TEXTS):
            raise InputError(
                f"engine.max_model_len: the prompt leaves no room for a private text in the {room} "
                "tokens that method.max_tokens leaves of the context, or the model's tokenizer "
                "does not tell one text from another"
            )


def frame(
    engine: Engine | TextCodec, template: PromptTemplate, label: str, examples: Sequence[str]
) -> tuple[int, ...]:
    """Return a private prompt's tokens without its text."""
    return engine.encode(template.private_prompt("", label, examples))
