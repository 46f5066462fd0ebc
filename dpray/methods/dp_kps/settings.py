"""The keys of `method` for DP-KPS (Nagesh et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from dpray.config.sections import (
    ABOUT_KEYS,
    ENGINE_KEYS,
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    TextSettings,
)
from dpray.types import InputError

VOCABULARY_SHARE = Decimal("0.5")

TEXTS_FDR = 0.5
"""With it a term of a prompt is more likely real than not. On AG News it costs a classifier of the
terms nothing at eps 4, and 0.17 of 0.52 at eps 1 (docs/dp_kps.md)."""

LISTED_BYTES = 1_000_000
"""The bytes of the frequent words of a language are fewer."""


class DpKpsSettings(TextSettings):
    name: Literal["dp_kps"]
    engines: ClassVar[frozenset[str]] = TextSettings.engines | {"none"}
    # The vocabulary may be of the words of data.language.
    call_keys: ClassVar[frozenset[str]] = ENGINE_KEYS | ABOUT_KEYS - {"data.language"} | {
        "method.document_type", "method.label_in_prompt", "method.few_shot",
        "method.few_shot_examples", "method.max_tokens", "method.generation_temperature",
        "method.generation_top_p",
        "method.least_terms", "method.max_retries", "method.template", "method.schema",
    }  # fmt: skip
    calls_after: ClassVar[str | None] = "density"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "paper": {
            "stop_words": "keep", "phrases_per_record": 10, "vocabulary_size": 1000,
            "vocabulary_fdr": 1.0, "sequence_length": 10, "estimator": "rff", "bandwidth": 1.0,
            "noise": "laplace", "sampling": "iterative", "ensemble": "logarithmic", "top_m": 10,
            "temperature": 1.0, "threshold": 0.0, "contrast": 0.0, "label_in_prompt": False,
        },
    }  # fmt: skip
    vocabulary: str | None = Field(
        None,
        description="a file of public terms, one a line, or `term<tab>count`; null: the frequent "
        "words of data.language",
    )
    stop_words: Literal["language", "english", "keep"] = Field(
        "language",
        description="language: the vocabulary without the function words of data.language, of "
        "English if it is not set; english: without the English ones",
    )
    phrases_per_record: int = Field(
        3,
        ge=1,
        le=10_000,
        description="S, the first distinct terms of a record that count; the noise grows with it",
    )
    vocabulary_size: Count = Field(1000, description="N, terms of the private vocabulary")
    vocabulary_fdr: float | None = Field(
        None,
        gt=0,
        le=1,
        description="false discovery rate: the most of the N terms that may be noise; fewer terms "
        "are then kept, but sequence_length at least. 1: all N, as in the paper; null: 0.5 if a "
        "language model writes texts of them, 1 without one and in a chain",
    )
    sequence_length: Count = Field(10, description="L, terms of a sequence")
    epsilon_vocabulary: Positive | None = Field(
        None,
        description="eps_voc, the vocabulary's share; null: what epsilon_kde leaves, or half of "
        "privacy.epsilon",
    )
    epsilon_kde: Positive | None = Field(
        None,
        description="eps_kde, the densities' share; null: what epsilon_vocabulary leaves of "
        "privacy.epsilon",
    )
    estimator: Literal["rff", "exact"] = Field(
        "exact",
        description="rff: random Fourier features, as in the paper; exact: a histogram of terms",
    )
    features: Count = Field(1000, description="I, the number of random Fourier features")
    bandwidth: Positive = Field(
        1.0, description="bandwidth of the kernel of rff, exp(-d^2 / bandwidth^2)"
    )
    noise: Literal["laplace", "gaussian"] = Field(
        "laplace", description="distribution of the noise on the sums of rff"
    )
    sampling: Literal["independent", "iterative"] = Field(
        "independent", description="how the terms of a sequence are drawn; iterative needs rff"
    )
    ensemble: Literal["linear", "logarithmic"] = Field(
        "logarithmic",
        description="estimators for iterative sampling: L if linear, ceil(log2 L) if logarithmic",
    )
    top_m: Count | None = Field(None, description="draw among the m densest terms; null: all")
    temperature: Positive = Field(1.0, description="weights are densities ^ (1 / temperature)")
    threshold: NotNegative = Field(
        1.0,
        description="subtracted from each density, in standard deviations of its noise",
    )
    contrast: float = Field(
        1.0,
        ge=0,
        le=1,
        description="the part of the density of all classes that is subtracted from each class's; "
        "0: none, as in the paper",
    )
    records: Count = Field(1000, description="synthetic records of all labels")
    document_type: str = Field("text", min_length=1, description="type of text to ask for")
    label_in_prompt: bool = Field(False, description="whether the prompt names the class")
    few_shot: str | None = Field(
        None, description="a file of PUBLIC records shown in the prompt; null: none"
    )
    few_shot_examples: Count = Field(
        3,
        description="number of few_shot records in a prompt, drawn for each prompt; of its class "
        "if the file has the column `label`",
    )
    max_tokens: Count = Field(256, description="the longest text")
    generation_temperature: Positive = Field(1.0, description="temperature of the language model")
    generation_top_p: float = Field(
        1.0, gt=0, le=1, description="top-p of the language model; 1: off"
    )
    least_terms: CountOrZero = Field(
        0,
        description="terms of its sequence that a text has to hold; one with fewer counts as "
        "refused",
    )
    max_retries: CountOrZero = Field(
        2,
        description="repetitions of a request with an empty or refused answer; then it is left out",
    )
    template: str = Field("texts", description="a packaged template's name, or a YAML file")

    @model_validator(mode="after")
    def _consistent(self) -> DpKpsSettings:
        if self.estimator == "exact" and self.noise == "gaussian":
            raise ValueError("noise: gaussian is for estimator rff")
        if self.estimator == "exact" and self.sampling == "iterative":
            raise ValueError("sampling: iterative is for estimator rff")
        if self.sampling == "iterative" and self.bandwidth < 0.1:
            # exp(1 / bandwidth^2) makes up for the padding of an ensemble.
            raise ValueError("bandwidth: at least 0.1 for sampling iterative")
        if self.least_terms > self.sequence_length:
            raise ValueError("least_terms: more than sequence_length")
        return self

    @property
    def fdr(self) -> float:
        """Return the false discovery rate, which a plan has resolved."""
        return 1.0 if self.vocabulary_fdr is None else self.vocabulary_fdr

    @property
    def uses_embedder(self) -> bool:
        return self.estimator == "rff"

    @property
    def shard_bytes(self) -> int:
        # An automaton of the terms, their vectors and counts.
        if self.vocabulary is None:
            return 32 * LISTED_BYTES
        file = Path(self.vocabulary)
        return 32 * file.stat().st_size if file.is_file() else 0

    def epsilons(
        self, total: float, measured: float = 0.0, key: str = "epsilon_labels"
    ) -> tuple[float, float, float]:
        """Return eps_voc, eps_kde and the sum of all shares, in a run that may cost `total`. Of
        that, measured labels and attributes take `measured`, which `key` sets. As in the ledger,
        sums are exact in the decimals as written: 0.1 and 0.2 fit 0.3.

        Raises InputError that names the keys if one share leaves nothing for the other, or if both
        together are more than is left.
        """
        left = _written(total) - _written(measured)
        if self.epsilon_vocabulary is not None:
            vocabulary = _written(self.epsilon_vocabulary)
        elif self.epsilon_kde is not None:
            vocabulary = left - _written(self.epsilon_kde)
        else:
            vocabulary = left * VOCABULARY_SHARE
        kde = left - vocabulary if self.epsilon_kde is None else _written(self.epsilon_kde)
        if vocabulary <= 0 or kde <= 0 or vocabulary + kde > left:
            less = f" less privacy.{key} {measured:g}" if measured else ""
            raise InputError(
                "method.epsilon_vocabulary and method.epsilon_kde: both together are more than "
                f"privacy.epsilon {total:g}{less}, or one of them takes all of it"
            )
        return float(vocabulary), float(kde), float(vocabulary + kde + _written(measured))


def _written(epsilon: float) -> Decimal:
    return Decimal(str(epsilon))
