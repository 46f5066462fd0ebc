"""`AugPeSettings` are the keys of `method` for Aug-PE (Xie et al. 2024). The paper's values for its
three data sets stand in the packaged templates `yelp`, `openreview` and `pubmed`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dpray.config.sections import Count, MethodSettings, Positive


class AugPeSettings(MethodSettings):
    name: Literal["aug_pe"]
    can_run_without_noise: ClassVar[bool] = True
    records: Count = Field(2000, description="n_syn, texts to make, split over the labels")
    iterations: Count = Field(10, description="T, votes of the private records")
    variations: Count = Field(
        7,
        description="L, texts that are voted on for each text that is kept: itself and L - 1 new "
        "variations; 1: one variation in its place (the original PE)",
    )
    lookahead: int = Field(
        0, ge=0, description="K, variations whose mean stands for a text; 0: its own embedding"
    )
    selection: Literal["rank", "probability"] = Field(
        "rank", description="the most voted texts, or draws by votes (the original PE)"
    )
    noise_multiplier: Positive | None = Field(
        None, description="sigma over the votes' sensitivity; null: from epsilon"
    )
    variation: Literal["paraphrase", "fill_in_the_blanks"] = Field(
        "paraphrase", description="blanks want a model that follows instructions"
    )
    template: str = Field("texts", description="a packaged template's name, or a YAML file")
    terms: str | None = Field(
        None,
        description="a file of PUBLIC sequences, columns `terms` and `label`, such as a release of "
        "dp_kps: the request for a random text shows one of its label; null: none",
    )
    mask_probability: float = Field(
        0.5, ge=0, le=1, description="p, of a word's becoming a blank; also widens the lengths"
    )
    temperature: float = Field(1.2, ge=0, allow_inf_nan=False, description="of the language model")
    top_p: float = Field(1.0, gt=0, le=1, description="of the language model; 1: off")
    max_tokens: Count = Field(256, description="the longest text")
    word_var: float | None = Field(
        60.0,
        ge=0,
        allow_inf_nan=False,
        description="the words asked for vary by mask_probability * word_var around the parent's; "
        "null: no number of words is asked for, and every answer may have max_tokens",
    )
    tokens_per_word: Positive = Field(
        2.0, description="an answer's most tokens for each word that is asked for"
    )
    min_words: Count = Field(25, description="the fewest words that are asked for")
    max_retries: int = Field(
        2, ge=0, description="how often an empty or refused answer is asked for again"
    )
