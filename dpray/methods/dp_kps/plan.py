"""`make_plan` makes the frozen plan of DP-KPS from a configuration."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from dpray.accounting.accountant import Cost, cost
from dpray.accounting.composition import BasicComposition, Charge
from dpray.accounting.events import Event
from dpray.auditing.target import Target
from dpray.config.config import Config
from dpray.io.records import list_files, read_rows
from dpray.methods.dp_kps.algorithm import DpKps
from dpray.methods.dp_kps.prompts import KeyphrasePrompts, load_keyphrase_prompts
from dpray.methods.dp_kps.settings import DpKpsSettings
from dpray.runs.plan import Plan
from dpray.types import Budget, InputError


@dataclass(frozen=True)
class DpKpsPlan(Plan):
    """Holds the plan of DP-KPS. `method.dimension` is 0 until the embedder is loaded: the cost does
    not depend on it."""

    settings: DpKpsSettings
    method: DpKps
    prompts: KeyphrasePrompts

    @property
    def charges(self) -> dict[str, Event]:
        """Return one charge for each pass over the private records."""
        charges = {"vocabulary": self.method.vocabulary.dp_event, "kde": self.method.kde_event}
        if (histogram := self.label_histogram) is not None:
            charges = {"labels": histogram.dp_event} | charges
        return charges

    @property
    def label_charge(self) -> str:
        return "labels"

    def charge(self, name: str) -> Budget:
        """Return the charge's cost, a pure epsilon wherever the noise is Laplace's."""
        gaussian = name == "kde" and self.settings.noise == "gaussian"
        price = cost(self.charges[name], self.config.privacy.delta if gaussian else 0.0)
        return Budget(price.epsilon, price.delta)

    @cached_property
    def cost(self) -> Cost:
        """Return the sum of the charges, eps_voc + eps_kde in the paper. It is exact, as in the
        ledger, and rounded up at the end: a budget of this size holds them."""
        *others, last = (Charge(event, self.charge(name)) for name, event in self.charges.items())
        privacy = self.config.privacy
        total = BasicComposition(Budget(privacy.epsilon, privacy.delta)).spent([*others, last])
        while BasicComposition(total).would_exceed(others, last):
            total = replace(total, epsilon=math.nextafter(total.epsilon, math.inf))
        return Cost(total.epsilon, total.delta, "basic")

    def audit_targets(self) -> Iterator[Target]:
        from dpray.methods.dp_kps.audit import targets

        return targets(self.method)

    @property
    def makes_texts(self) -> bool:
        return self.config.engine.kind != "none"

    def method_summary(self) -> dict[str, Any]:
        settings = self.settings
        resolved = settings.model_dump(exclude={"epsilon_vocabulary", "epsilon_kde"})
        return {
            "method": resolved
            | {
                "bandwidth": self.settings.kernel_bandwidth,
                "epsilon_vocabulary": self.method.epsilon_vocabulary,
                "epsilon_kde": self.method.epsilon_kde,
            },
            "records": settings.records,
            "llm_calls": settings.records if self.makes_texts else 0,
            "most_completion_tokens": settings.records * settings.max_tokens * self.makes_texts,
            "warnings": [],
        }

    def lines(self) -> dict[str, str]:
        method, settings = self.method, self.settings
        calls = f"{settings.records:,}" if self.makes_texts else "none: the sequences themselves"
        return {
            "vocabulary": f"{method.terms:,} of {method.public_terms:,} terms, "
            f"eps {method.epsilon_vocabulary:g}",
            "densities": f"{settings.estimator}, {settings.sampling}, eps {method.epsilon_kde:g}",
            "records": f"{settings.records:,}, {settings.sequence_length} terms each",
            "LLM calls": calls,
        }


def make_plan(config: Config, settings: DpKpsSettings) -> DpKpsPlan:
    """Resolve everything that is null; reads the public vocabulary. Raises InputError where the
    keys together cost more than `privacy.epsilon`; the plan never does."""
    privacy = config.privacy
    labels = privacy.epsilon_labels if config.data.label_proportions == "measured" else 0.0
    epsilon_vocabulary, epsilon_kde = settings.epsilons(privacy.epsilon, labels)
    method = DpKps(
        settings=settings,
        labels=tuple(config.data.labels) or ("",),
        public_terms=len(read_vocabulary(settings.vocabulary, settings.stop_words)),
        dimension=0,
        epsilon_vocabulary=epsilon_vocabulary,
        epsilon_kde=epsilon_kde,
        delta=privacy.delta,
        records_per_unit=config.data.max_records_per_unit,
    )
    prompts = load_keyphrase_prompts(settings.template, settings.document_type, _examples(settings))
    plan = DpKpsPlan(config, config.data.proportions, settings, method, prompts)
    try:
        _ = method.kde
    except ValueError as error:
        raise InputError(f"method.features: {error}") from None
    while plan.cost.epsilon > privacy.epsilon:  # by the last digits of what was rounded
        method = replace(method, epsilon_kde=math.nextafter(method.epsilon_kde, 0.0))
        plan = replace(plan, method=method)
    return plan


def _examples(settings: DpKpsSettings) -> list[str]:
    """Return the first texts of the public few-shot file."""
    if settings.few_shot is None:
        return []
    files = list_files(settings.few_shot, "method.few_shot")
    rows = chain.from_iterable(map(read_rows, files))
    texts = []
    for where, row in islice(rows, settings.few_shot_examples):
        if not isinstance(row.get("text"), str):
            raise InputError(f"method.few_shot: {where}: no text in column 'text'")
        texts.append(row["text"])
    return texts


def read_vocabulary(path: str | Path, stop_words: str = "keep") -> list[str]:
    """Return the terms of a UTF-8 file, one per line, in the file's order.

    What follows a tab is left out (so is a column of counts), and so are blank lines, and terms
    that equal an earlier one but for case. `stop_words` "english" leaves out scikit-learn's list of
    318 English function words. Raises InputError that names the key and the line.
    """
    terms: dict[str, str] = {}
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise InputError(
                        f"method.vocabulary: {path}, line {number}: the bytes are not valid UTF-8"
                    ) from None
                term = " ".join(text.split("\t", 1)[0].split())
                if term:
                    terms.setdefault(unicodedata.normalize("NFC", term.casefold()), term)
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise InputError(f"method.vocabulary: {path}: {reason}") from None
    if stop_words == "english":
        # Imported late: it takes a second.
        from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

        for word in ENGLISH_STOP_WORDS:
            terms.pop(word, None)
    if not terms:
        raise InputError(f"method.vocabulary: {path}: there is no term in the file")
    return list(terms.values())
