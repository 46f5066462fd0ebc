"""The keys of `method` for Aug-PE (Xie et al. 2024). The packaged templates `yelp`, `openreview`
and `pubmed` have the paper's prompts for its three data sets."""

from __future__ import annotations

from collections.abc import Mapping
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

CHAT: Mapping[str, object] = {
    "records": 2000, "iterations": 10, "variations": 4, "lookahead": 0, "selection": "rank",
    "variation": "fill_in_the_blanks", "mask_probability": 0.5, "temperature": 1.2,
    "max_tokens": 1000, "word_var": 60.0, "tokens_per_word": 5.0, "min_words": 25,
}  # fmt: skip
"""Table 12's OpenReview and PubMed, for GPT-3.5. T is 10 under DP on all sets (appendix B.2.3)."""

SMALL: Mapping[str, object] = {
    "records": 2000, "iterations": 10, "variations": 7, "lookahead": 0, "selection": "rank",
    "variation": "paraphrase", "temperature": 1.2, "max_tokens": 448, "word_var": None,
}  # fmt: skip
"""Table 13's OpenReview, for models of the size of GPT-2."""


class AugPeSettings(TextSettings):
    name: Literal["aug_pe"]
    can_run_without_noise: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "paper": {
            **CHAT, "records": 5000, "variations": 1, "lookahead": 3,
            "selection": "probability", "temperature": 1.4, "max_tokens": 128, "word_var": 40.0,
            "tokens_per_word": 1.2,
        },
        "paper_openreview": CHAT,
        "paper_pubmed": CHAT,
        "paper_small": {**SMALL, "records": 5000, "temperature": 1.4, "max_tokens": 64},
        "paper_small_openreview": SMALL,
        "paper_small_pubmed": {**SMALL, "temperature": 1.0},
    }  # fmt: skip
    call_keys: ClassVar[frozenset[str]] = ENGINE_KEYS | ABOUT_KEYS | {
        "method.variation", "method.template", "method.mask_probability", "method.temperature",
        "method.top_p", "method.max_tokens", "method.word_var", "method.tokens_per_word",
        "method.min_words", "method.least_words", "method.max_retries", "method.schema",
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
    least_words: CountOrZero = Field(
        0, description="words that an answer has to have; one with fewer counts as refused"
    )
    max_retries: CountOrZero = Field(
        2, description="repetitions of a request with an empty or refused answer"
    )

    @model_validator(mode="after")
    def _votes_choose(self) -> AugPeSettings:
        """With L = 1 a population has n_syn texts, and the n_syn most voted ones are all of them:
        the budget would be spent on votes that choose nothing."""
        if self.variations == 1 and self.selection == "rank":
            raise ValueError(
                "selection: rank keeps every text if variations is 1, so the votes would choose "
                "nothing; set it to probability (the original PE), or variations to 2 or more"
            )
        return self

    @property
    def uses_embedder(self) -> bool:
        return True
