"""The keys of `method` for private prediction (Amin et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from dpray.config.sections import LARGEST, SMALLEST, Count, Positive, Section, TextSettings
from dpray.methods.private_prediction.logits import Candidates, Clip

StopString = Annotated[str, Field(min_length=1)]

PAPER: Mapping[str, object] = {
    "batches": "disjoint", "batch_size": 255, "clip": "recentred", "clip_bound": 10.0,
    "temperature": 2.0, "candidates": "all", "public_gate": None, "sparse_vector": None,
    "public_temperature": 1.5, "longest_copy": None,
}  # fmt: skip
"""Section 5.3 and appendix E.1."""

PAIRS = ((0.3, 0.1), (0.5, 0.2), (0.7, 0.3))
"""The paper's pairs of theta and sigma for its sparse vector (appendix E.1)."""


class SparseVectorConfig(Section):
    threshold: float = Field(ge=-LARGEST, le=LARGEST, description="theta")
    noise: Positive = Field(description="sigma")


class PublicGateConfig(Section):
    probability: float = Field(
        gt=0, lt=1, description="free if the largest public probability is at least this"
    )


class PrivatePredictionSettings(TextSettings):
    name: Literal["private_prediction"]
    engines: ClassVar[frozenset[str]] = frozenset({"vllm", "transformers"})
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "paper": PAPER,
        **{
            f"paper_svt_{theta}": {**PAPER, "sparse_vector": {"threshold": theta, "noise": sigma}}
            for theta, sigma in PAIRS
        },
        # The only temperature at which the paper cuts the candidates.
        "paper_tau_2.25": {**PAPER, "temperature": 2.25, "candidates": "top_k", "k": 1024},
    }
    batches: Literal["auto", "disjoint", "poisson"] = Field(
        "auto",
        description="disjoint: the paper's, a record is in one; poisson: secret ones, a record may "
        "be in many; auto: whichever affords more texts",
    )
    batch_size: int | Literal["auto"] = Field(
        127,
        description="s, the expected number of records of a batch; auto: 127 on a GPU and 31 on a "
        "CPU, or fewer if the machine that makes the plan does not hold such a batch at once",
    )
    private_tokens: Count | None = Field(
        None,
        description="r, the most private tokens of a batch; null: what epsilon pays for "
        "(disjoint), or max_tokens, or as many of these as a schema leaves free (poisson)",
    )
    texts: Count | None = Field(
        None,
        description="poisson: the number of texts that are decoded; null: max_records, or what "
        "epsilon pays for, whichever is less",
    )
    clip: Clip = Field(
        "recentred",
        description="how the logits of a private prompt are bounded; recentred: Eq. 1, all others "
        "are in docs/privacy.md, section 2.1",
    )
    # Beyond it the sum of half a million rows would not be exact (docs/privacy.md, section 2.2).
    clip_bound: float = Field(10.0, ge=SMALLEST, le=1000.0, description="c")
    temperature: Positive = Field(2.0, description="tau")
    candidates: Candidates = Field(
        "all", description="which tokens may be drawn, by their public logits"
    )
    k: Count = Field(1024, description="for top_k and top_k_plus")
    public_gate: PublicGateConfig | None = Field(
        None, description="tokens that the public prompt is sure of are free; null: off"
    )
    sparse_vector: SparseVectorConfig | None = Field(
        None,
        description="tokens on which the private prompts agree with the public one are free; null: "
        "off",
    )
    public_temperature: Positive = Field(
        1.5, description="tau of tokens drawn from the public logits"
    )
    max_tokens: Count = Field(128, description="the longest text, in tokens")
    max_prompt_tokens: Count = Field(
        512,
        description="a private text is cut to this many tokens before it is put into its prompt: "
        "the memory of a batch is then a public number",
    )
    sections: int = Field(
        1,
        ge=1,
        le=100,
        description="the sections of a document: a private text is cut into as many, and each "
        "section of a synthetic one is written after the others from that section of the batch's "
        "records, max_tokens long at most; all are paid for",
    )
    max_records: Count | None = Field(
        None,
        description="the most records. Disjoint batches share it equally, and decoding stops when "
        "it is reached; poisson: see texts; null: what epsilon pays for",
    )
    few_shot: str | None = Field(
        None,
        description="a file of PUBLIC records, columns `text` and `label`, which all prompts of a "
        "batch show if the template has `examples`; null: none",
    )
    few_shot_examples: Count = Field(
        2,
        description="how many of them, drawn for each batch, of its label if the file has "
        "enough of it; fewer if the prompt would take more than half of the model's context",
    )
    terms: str | None = Field(
        None,
        description="a file of PUBLIC sequences, columns `terms` and `label`, such as a release of "
        "dp_kps: the prompts of a batch show one of its label; null: none",
    )
    longest_copy: Count | None = Field(
        None,
        description="the most tokens in a row that a text may share with its public prompt, "
        "examples included, or with itself; for candidates top_k and top_k_plus; null: no bound",
    )
    stop: tuple[StopString, ...] = Field(
        (),
        description="strings that end a text, in addition to those of the template; a blank line "
        "for texts of one paragraph: a small model comments on its text in the next one",
    )
    end_tokens: int = Field(
        0,
        ge=0,
        le=1000,
        description="the most tokens that the public prompt alone adds to a text that max_tokens "
        "cut in a sentence, up to the sentence's end; they are free; 0: none",
    )
    template: str = Field("texts", description="a packaged template's name, or a YAML file")

    @field_validator("batch_size", mode="before")
    @classmethod
    def _number_or_auto(cls, size: object) -> object:
        if size != "auto" and (type(size) is not int or not 1 <= size <= LARGEST):
            raise ValueError(f"a whole number from 1 to {LARGEST}, or auto")
        return size

    @model_validator(mode="after")
    def _consistent(self) -> PrivatePredictionSettings:
        if self.longest_copy is not None and self.candidates == "all":
            raise ValueError("longest_copy: is for candidates top_k and top_k_plus")
        if self.sections > 1 and self.schema is not None:
            raise ValueError("sections: a text with method.schema has one section")
        if self.end_tokens and self.schema is not None:
            raise ValueError("end_tokens: a text with method.schema ends where its form does")
        return self

    @property
    def document_tokens(self) -> int:
        """Return the most tokens of a text with all its sections."""
        return self.sections * self.max_tokens

    @property
    def expected_batch_size(self) -> int:
        """Return s, which a plan has resolved."""
        if self.batch_size == "auto":
            raise ValueError("method.batch_size is not resolved yet")
        return self.batch_size

    def texts_of_a_batch(self, private_tokens: int, batches: int) -> int:
        """Return the largest number of texts of each of `batches` disjoint batches."""
        if self.max_records is not None:
            return math.ceil(self.max_records / batches)
        # Without public tokens a text has at least one private one; public ones have to end, too.
        if self.sparse_vector is None and self.public_gate is None and self.schema is None:
            return max(1, private_tokens // self.sections)
        return math.ceil(10 * private_tokens / self.document_tokens)

    def wrong_batches(self, batches: str, measured_labels: bool) -> str:
        """Return why batches of this kind cannot have these settings, or "" if they can."""
        if batches == "disjoint" and self.texts is not None:
            return "texts: for Poisson batches; disjoint ones have max_records"
        if batches == "poisson" and self.sparse_vector is not None:
            return (
                "sparse_vector: is for disjoint batches, its answers cost too much in Poisson "
                "ones; public_gate costs nothing in either"
            )
        if batches == "poisson" and measured_labels:
            return (
                "batches: poisson needs public data.label_proportions: what they cost is fixed "
                "before the data is opened; measured ones are for disjoint batches"
            )
        return ""
