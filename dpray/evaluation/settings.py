"""The settings declare the keys of an evaluation, and so the options of `dpray evaluate`, once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from dpray.config.base import Count, Delimiter, Encoding, Section

IN_PROCESS = "none"


class EvaluationSettings(Section):
    """`EvaluationSettings` are the options of `dpray evaluate`; a key's description is its help."""

    real: str = Field(description="Real records: the test records, where --train is given too.")
    synthetic: str = Field(description="Synthetic records.")
    out: Path | None = Field(
        None, description="Folder for evaluation.json; RUN/private puts it into the run's report."
    )
    train: str | None = Field(
        None, description="Real records to train the ceiling on; without it --real is halved."
    )
    floor: str | None = Field(
        None, description="Labelled texts that owe nothing to private data, to train the floor."
    )
    json_schema: str | None = Field(
        None,
        alias="schema",
        description="JSON Schema that records which are JSON should fit: a file, or `film` for the "
        "film records of Amin et al. 2024.",
    )
    text: str = Field(
        "text", description="Name of the column with the text; a release may have its own, `text`."
    )
    label: str | None = Field(
        None,
        description="Name of the column with the label, which records must then have; without it, "
        "`label` where there is one. A release may have its own, `label`.",
    )
    delimiter: Delimiter = Field(
        None, description="Delimiter of the real records' CSV, as data.delimiter."
    )
    encoding: Encoding = Field(
        None, description="Encoding of the real records' text files, as data.encoding."
    )
    embedder: list[str] = Field(
        ["sentence-transformers/all-MiniLM-L6-v2"],
        min_length=1,
        description="Sentence embedding model: a name or a folder. Given several times, fidelity "
        "is their average, and the first serves the rest.",
    )
    seeds: Count = Field(5, description="Repetitions behind each mean and deviation.")
    networks: bool = Field(
        False, description="Also train 3-layer networks, without and with Deep CORAL (slower)."
    )
    encoder: str | None = Field(
        None, description="Encoder to fine-tune as a classifier too: a name or a folder (slow)."
    )
    lm: str | None = Field(
        None,
        description="Small causal language model, a name or a folder, for in-context learning and "
        "next-word accuracy (slow).",
    )
    extraction: bool = Field(
        False,
        description="Labels are phrases of their texts: --lm looks for them, nothing classifies.",
    )
    topics: Literal["kmeans", "bertopic"] = Field(
        "kmeans", description="Clustering of the embeddings; bertopic is an extra, dpray[bertopic]."
    )
    ray_address: str = Field(
        IN_PROCESS,
        description="Embed and look for near-duplicates on Ray: a cluster's address, `auto`, or "
        "`local` for a Ray of its own; `none` is this process.",
    )
    actors: Count = Field(1, description="The most actors on Ray, a CPU each.")
    gpus_per_actor: float = Field(0.0, ge=0, description="GPUs of each actor.")

    @field_validator("extraction")
    @classmethod
    def _phrases_have_a_model(cls, extraction: bool, others: ValidationInfo) -> bool:
        if extraction and others.data.get("lm") is None:
            raise ValueError("needs --lm, a causal language model")
        if extraction and (others.data.get("networks") or others.data.get("encoder")):
            raise ValueError("phrases are no classes for --networks or --encoder")
        return extraction

    @field_validator("actors", "gpus_per_actor")
    @classmethod
    def _actors_need_ray(cls, count: float, others: ValidationInfo) -> float:
        default = cls.model_fields[str(others.field_name)].default
        if count > default and others.data.get("ray_address") == IN_PROCESS:
            raise ValueError("without --ray-address there is this process only")
        return count
