"""The keys of topics, a first method of a chain: it measures the public topics of the private
records."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dpray.config.sections import Count, MethodSettings, NotNegative, Positive


class TopicsSettings(MethodSettings):
    name: Literal["topics"]
    public: str = Field(
        description="a file of PUBLIC records with the columns data.text and data.label, whose "
        "texts are clustered into topics"
    )
    topics: Count = Field(
        50, description="T, clusters of the public texts, the same ones for all labels"
    )
    words: Count = Field(6, description="words that name a topic; they are its sequence of terms")
    noise_multiplier: Positive | None = Field(
        None,
        description="standard deviation of the histogram's noise over its sensitivity; null: from "
        "epsilon",
    )
    threshold: NotNegative = Field(
        2.0,
        description="H, in standard deviations of the noise: a lower count is 0",
    )
    records: Count = Field(1000, description="sequences for the second method, of all labels")

    @property
    def uses_embedder(self) -> bool:
        return True
