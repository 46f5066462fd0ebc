"""The keys of `method` for Aug-PE (Xie et al. 2024). The packaged templates `yelp`, `openreview`
and `pubmed` have the paper's values for its three data sets."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dpray.config.sections import (
    ABOUT_KEYS,
    ENGINE_KEYS,
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    TextSettings,
)


class AugPeSettings(TextSettings):
    name: Literal["aug_pe"]
    can_run_without_noise: ClassVar[bool] = True
    call_keys: ClassVar[frozenset[str]] = ENGINE_KEYS | ABOUT_KEYS | {
        "method.variation", "method.template", "method.mask_probability", "method.temperature",
        "method.top_p", "method.max_tokens", "method.word_var", "method.tokens_per_word",
        "method.min_words", "method.max_retries", "method.schema",
    }  # fmt: skip
    records: Count = Field(2000, description="n_syn, texts to make, split over the labels")
    iterations: int = Field(10, ge=1, le=10_000, description="T, votes of the private records")
    variations: Count = Field(
        7,
        description="L, candidates for each kept text: itself and L - 1 new variations; 1: one "
        "variation replaces it (the original PE)",
    )
    lookahead: CountOrZero = Field(
        0,
        description="K, variations whose mean embedding represents a text; 0: its own embedding",
    )
    selection: Literal["rank", "probability"] = Field(
        "rank",
        description="rank: the most voted texts; probability: draws in proportion to the votes "
        "(the original PE)",
    )
    noise_multiplier: Positive | None = Field(
        None,
        description="standard deviation of the votes' noise over their sensitivity; null: from "
        "epsilon",
    )
    variation: Literal["paraphrase", "fill_in_the_blanks"] = Field(
        "paraphrase",
        description="fill_in_the_blanks needs a model that follows instructions",
    )
    template: str = Field("texts", description="a packaged template's name, or a YAML file")
    terms: str | None = Field(
        None,
        description="a file of PUBLIC sequences of terms (columns `terms` and `label`), such as a "
        "release of dp_kps; a request for a random text shows one of its label; null: none",
    )
    mask_probability: float = Field(
        0.5,
        ge=0,
        le=1,
        description="p, the probability that a word becomes a blank; lengths vary with it, too",
    )
    temperature: NotNegative = Field(1.2, description="temperature of the language model")
    top_p: float = Field(1.0, gt=0, le=1, description="top-p of the language model; 1: off")
    max_tokens: Count = Field(256, description="the longest text")
    word_var: NotNegative | None = Field(
        60.0,
        description="the number of words asked for is normal around the parent's, with standard "
        "deviation mask_probability * word_var; null: none is asked for, and an answer may have "
        "max_tokens",
    )
    tokens_per_word: Positive = Field(
        2.0, description="most tokens of an answer for each word asked for"
    )
    min_words: Count = Field(25, description="the fewest words asked for")
    max_retries: CountOrZero = Field(
        2, description="repetitions of a request with an empty or refused answer"
    )

    @property
    def uses_embedder(self) -> bool:
        return True
