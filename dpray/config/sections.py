"""The sections that all methods share: privacy, engine, embedder, runtime, output.

Every section is frozen, refuses unknown keys, and takes only numbers for numbers.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Literal, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dpray.io.bucket import BUCKETS
from dpray.io.files import NOT_IN_URLS, holds_secret, names_cloud
from dpray.io.languages import DEFAULT_EMBEDDER
from dpray.io.table_schema import read_schema_file
from dpray.types import DATASET_NAME, DATASET_RULE, did_you_mean

LARGEST_EPSILON, SMALLEST_EPSILON = 1e6, 1e-3
"""The bounds square an epsilon, and find the noise of a small one by a grid as fine as it is
small."""

LARGEST, SMALLEST = 10**9, 1e-9
"""Bounds of all numbers: no key is of use beyond them, and a plan would overflow or never end."""

# `method.schema` takes the place of a deprecated method of pydantic's, which nothing here calls.
warnings.filterwarnings("ignore", 'Field name "schema"', UserWarning)

Positive = Annotated[float, Field(ge=SMALLEST, le=LARGEST)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST)]


class Section(BaseModel):
    """A part of the configuration. Numbers are finite, unless their field sets `allow_inf_nan`.
    Booleans and texts are refused as numbers: pydantic would take `true` for 1 and "inf" for
    infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_numbers(cls, values: object) -> object:
        for name, value in values.items() if isinstance(values, dict) else ():
            kinds = _kinds(cls.model_fields[name].annotation) if name in cls.model_fields else set()
            refused = {bool, str} - kinds if kinds & {int, float} else ()
            if any(type(leaf) in refused for leaf in _leaves(value)):
                raise ValueError(f"{name}: not a number in decimal digits, such as 4, 0.5 or 1e-6")
        return values


class MethodSettings(Section):
    """The keys of `method`. `dpray.methods.config` lists the settings of all methods."""

    name: str
    engines: ClassVar[frozenset[str]] = frozenset({"vllm", "transformers", "openai"})
    """The kinds of engines that the method can use."""
    can_run_without_noise: ClassVar[bool] = False
    actors_share_gpus: ClassVar[bool] = True
    call_keys: ClassVar[frozenset[str]] = frozenset()
    """The keys that only shape calls of a language model which reads no record, with their
    section's name: post-processing of what was published, so they may change during a run."""
    calls_after: ClassVar[str | None] = None
    """The mechanism after which that is so; None: it always is."""

    @property
    def training_size(self) -> tuple[int, int]:
        """Return the numbers that a training holds for each weight, and the tokens of a
        micro-batch; zeros for a method without one."""
        return 0, 0

    @property
    def shard_bytes(self) -> int:
        """Return the bytes of public data that a shard of the records holds."""
        return 0

    @property
    def uses_embedder(self) -> bool:
        """Return whether the method embeds texts or terms."""
        return False

    @property
    def each(self) -> Sequence[MethodSettings]:
        """Return the settings of each of the run's methods; a chain has several."""
        return (self,)


class TextSettings(MethodSettings):
    """The keys of all methods that write texts."""

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """Named values of the method's keys. `paper` is the paper's own setting (docs/papers.md)."""

    # Left out of what a run keeps and releases: the keys that it sets are there.
    preset: str | None = Field(
        None,
        exclude=True,
        description="a named set of keys: paper, the paper's own, or another one of "
        "docs/papers.md; a key that is given, too, keeps its value; null: none",
    )
    schema: dict[str, object] | None = Field(  # type: ignore[assignment]
        None,
        description="the form of all texts, which is public: a JSON Schema, {regex: ...}, "
        "{choices: [...]}, {lark: ...}, or a .json or .lark file; null: none, and for data.turns "
        "that of conversations",
    )

    @model_validator(mode="before")
    @classmethod
    def _preset_sets_keys(cls, values: object) -> object:
        """Put the preset's keys below those that are given."""
        name = values.get("preset") if isinstance(values, dict) else None
        if not isinstance(values, dict) or not isinstance(name, str):
            return values
        if name not in cls.presets:
            known = ", ".join(cls.presets)
            raise ValueError(
                f"preset: there is none of this name{did_you_mean(name, cls.presets)}; "
                f"one of {known}, or null"
            )
        return _over(cls.presets[name], values)

    @property
    def preset_keys(self) -> dict[str, object]:
        """Return the keys whose values are the preset's, {} without a preset."""
        return _common(self.presets.get(self.preset or "", {}), self.model_dump())

    @field_validator("schema", mode="before")
    @classmethod
    def _schema_is_read(cls, schema: object) -> object:
        """Put the content of a file in place of its name: run.json has it, and no worker needs the
        file."""
        return read_schema_file(schema) if isinstance(schema, str) else schema


def _common(own: Mapping[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of `own` that have the same values in `values`, also those of mappings in
    both."""
    found: dict[str, object] = {}
    for key, value in own.items():
        if isinstance(value, Mapping) and isinstance(other := values[key], Mapping):
            if inner := _common(value, other):
                found[key] = inner
        elif values[key] == value:
            found[key] = value
    return found


def _over(below: Mapping[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Return `values` over those of `below`; of two mappings with one key, the keys of both."""
    both = {
        key: _over(own, value)
        for key, value in values.items()
        if isinstance(own := below.get(key), Mapping) and isinstance(value, Mapping)
    }
    return {**below, **values, **both}


def _kinds(annotation: object) -> set[object]:
    """Return the types of an annotation's values, for a mapping the types of its values."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return set(map(type, arguments))
    if origin is Annotated:
        arguments = arguments[:1]
    elif origin is dict:
        arguments = arguments[1:]
    return set().union(*map(_kinds, arguments)) if arguments else {annotation}


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


class PrivacyConfig(Section):
    epsilon: float = Field(
        gt=0,
        allow_inf_nan=True,
        description="the most this run may cost; .inf: no noise and no guarantee, for "
        "measurements, with every output stamped not_private (aug_pe, dp_sgd)",
    )
    delta: float = Field(
        ge=0,
        lt=1,
        description="0: pure differential privacy, by Laplace noise or by few draws",
    )
    # Not shown by `repr`: the URL may hold a password.
    ledger: str = Field("sqlite:///ledger.db", repr=False, description="where the budgets are kept")
    dataset: str = Field(description="the ledger's name for this data")
    shares: tuple[Positive, ...] | None = Field(
        None,
        description="chained methods: each one's share of epsilon; the shares sum to 1; null: "
        "equal. The second method also gets what joint accounting saves",
    )
    epsilon_labels: Positive = Field(
        0.1, description="the share of epsilon for data.label_proportions: measured"
    )
    epsilon_attributes: float | None = Field(
        None,
        ge=SMALLEST_EPSILON,
        le=LARGEST_EPSILON,
        description="what the histograms of data.attributes may cost by themselves, labels "
        "included; null: 0.4 of epsilon. Together with the method they cost less",
    )

    @property
    def for_attributes(self) -> float:
        """Return `epsilon_attributes`. An infinite epsilon pays as one of 10 does."""
        return self.epsilon_attributes or 0.4 * min(self.epsilon, 10.0)

    @field_validator("dataset")
    @classmethod
    def _ledger_takes_it(cls, name: str) -> str:
        if not DATASET_NAME.fullmatch(name):
            raise ValueError(DATASET_RULE)
        return name

    @field_validator("epsilon")
    @classmethod
    def _is_of_use(cls, epsilon: float) -> float:
        if LARGEST_EPSILON < epsilon < math.inf:
            raise ValueError(f"at most {LARGEST_EPSILON:g}; a larger one guarantees nothing")
        if epsilon < SMALLEST_EPSILON:
            raise ValueError(f"at least {SMALLEST_EPSILON:g}; a smaller one shows nothing")
        return epsilon


class Endpoint(Section):
    """A model that may be behind an OpenAI-compatible endpoint."""

    kind: str
    model: str = ""
    base_url: str | None = Field(None, description="the URL of an OpenAI-compatible endpoint")
    api_key: str | None = Field(None, repr=False, description="the key of that endpoint")
    max_in_flight: Count = Field(64, description="concurrent requests to that endpoint")
    attempts: Count = Field(6, description="tries of a request before the run stops for now")
    timeout: Positive = Field(120.0, description="seconds to wait for an answer of that endpoint")

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)  # a ValueError for brackets that are no address
        # A release holds its configuration.
        if "@" in parts.netloc:
            raise ValueError("a name or password has no place in it; give api_key")
        port = parts.port  # a ValueError for one that is no number
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ValueError("no URL; it begins with http:// or https://, and often ends in /v1")
        if re.search(r"\s", url) or parts.query or parts.fragment:
            raise ValueError("blanks, `?` and `#` have no place in it")
        if re.search("/(completions|embeddings|models)/*$", parts.path):
            raise ValueError("ends where the API begins, often in /v1, without the path of a call")
        return url


class EngineConfig(Endpoint):
    kind: Literal["vllm", "transformers", "openai", "none"] = Field(
        "vllm", description="none: no language model (dp_kps only: the sequences themselves)"
    )
    model: str = Field(
        "", description="a folder, one in a bucket (s3://, gs://), or a model's name on its hub"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="auto: the model's own; float32 on a CPU, and for private prediction",
    )
    max_model_len: Count | None = Field(None, description="context length; null: the model's own")
    max_num_seqs: Count = Field(512, description="most prompts decoded at once by vLLM")
    max_num_batched_tokens: Count | None = Field(
        None, description="most tokens in one step of vLLM; null: chosen by the engine"
    )
    tensor_parallel_size: Count = Field(
        1, description="GPUs of one machine that vLLM splits each layer over"
    )
    pipeline_parallel_size: Count = Field(
        1,
        description="groups of so many GPUs, on one machine or several, that vLLM splits the "
        "model's layers over",
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    gpu_memory_gib: Positive | None = Field(
        None,
        description="memory of a GPU, for plans on a machine without one; null: as on this machine",
    )
    kv_cache_gib: Positive | None = Field(
        None,
        description="KV cache on a CPU; null: enough for a batch, at least 2 and at most a quarter "
        "of the machine's memory",
    )
    api: Literal["chat", "completions"] = Field(
        "chat", description="the API of that endpoint; completions for a base model"
    )

    @property
    def is_local(self) -> bool:
        """Return whether the model runs in dpray's own processes."""
        return self.kind in ("vllm", "transformers")

    @property
    def gpus(self) -> int:
        """Return the GPUs of one copy of the model, which transformers does not split."""
        return self.tensor_parallel_size * self.pipeline_parallel_size if self.kind == "vllm" else 1

    def dtype_on(self, *, gpu: bool) -> str:
        """Return what a model computes in: "auto" is its own type on a GPU, and float32 on a CPU.
        A CPU that has no arithmetic in 16 bits (one with AVX2 alone) emulates it, 60 times slower.
        """
        return "float32" if self.dtype == "auto" and not gpu else self.dtype


ENGINE_KEYS = frozenset(f"engine.{name}" for name in EngineConfig.model_fields)
ABOUT_KEYS = frozenset({"data.about", "data.label_about", "data.language"})
"""These keys only put words into prompts."""


class EmbedderConfig(Endpoint):
    """The embedder of votes, topics and the densities of DP-KPS. An endpoint gets PUBLIC texts
    only: private ones are embedded by the run's own actors, from the model's files."""

    kind: Literal["sentence_transformers", "openai"] = Field(
        "sentence_transformers",
        description="openai: an endpoint embeds PUBLIC texts (populations, terms, topics); private "
        "texts never go there, so that votes and topics need the same model's files as well",
    )
    model: str = Field(DEFAULT_EMBEDDER, description="a folder, or a name on its hub")
    max_in_flight: Count = Field(8, description="concurrent requests to that endpoint, of 16 texts")
    served_name: str | None = Field(
        None, description="the model's name at that endpoint; null: that of embedder.model"
    )

    @property
    def shown(self) -> str:
        """Return the model, as a report names it among the public inputs."""
        return f"{self.model}, at an endpoint" if self.kind == "openai" else self.model

    @field_validator("model")
    @classmethod
    def _is_no_address(cls, model: str) -> str:
        if model.lower().startswith(("http://", "https://")):
            raise ValueError(
                "a URL; private texts go to no endpoint, so this names the model's files. An "
                "endpoint for PUBLIC texts is embedder.kind openai with embedder.base_url"
            )
        return model

    @model_validator(mode="after")
    def _endpoint_for_openai(self) -> EmbedderConfig:
        if self.kind == "openai" and self.base_url is None:
            raise ValueError("base_url: embedder.kind openai needs the endpoint's URL")
        if self.kind != "openai" and (self.base_url or self.api_key or self.served_name):
            raise ValueError(
                "kind: an endpoint is used with openai only, and for PUBLIC texts; without one, "
                "leave out base_url, api_key and served_name"
            )
        return self


class RuntimeConfig(Section):
    """The section about machines. It never changes epsilon or the distribution of the output."""

    ray_address: str | None = Field(
        None, description="null: RAY_ADDRESS or a local Ray; 'none': this process, without Ray"
    )
    actors: Count = Field(1, description="the most actors of a kind; the ranks of a training")
    min_ranks: Count | None = Field(
        None,
        description="the fewest ranks that a start of a training takes where there is no room for "
        "all; null: runtime.actors",
    )
    cpus_per_actor: NotNegative = 1.0
    gpus_per_actor: NotNegative | None = Field(
        None,
        description="null: engine.tensor_parallel_size times engine.pipeline_parallel_size for "
        "vllm, 1 for transformers, if the Ray cluster has GPUs, else 0; 0: on the CPU, even if the "
        "machine has GPUs",
    )
    memory_per_actor: NotNegative | None = Field(
        None,
        description="GiB of a machine's memory that Ray keeps for an actor and gives to no other; "
        "null: what its model and its share of the records take, by public sizes; 0: actors go "
        "where there are CPUs, and several may fill a machine's memory",
    )
    batches_per_task: Count | None = Field(
        None,
        description="batches that an actor gets at once; null: 8 disjoint or 64 Poisson ones, "
        "which are short, or fewer, so that every actor gets some",
    )
    max_attempts: Count = Field(
        3,
        description="attempts in one command after losses; a batch that was lost with this many "
        "actors is left to the next command",
    )
    wait: NotNegative = Field(
        3600.0,
        description="seconds that a run waits for room on the Ray cluster, before it is charged "
        "and when it lost its place; then the command ends with exit code 4",
    )

    @property
    def ranks(self) -> tuple[int, int]:
        """Return the fewest and the most ranks of a training."""
        return min(self.min_ranks or self.actors, self.actors), self.actors

    @property
    def uses_ray(self) -> bool:
        return self.ray_address != "none"

    @field_validator("gpus_per_actor")
    @classmethod
    def _whole_gpus(cls, gpus: float | None) -> float | None:
        if gpus is not None and gpus > 1 and gpus != int(gpus):
            raise ValueError("more than one GPU is a whole number of them")
        return gpus


class OutputConfig(Section):
    path: str = Field("out/run", min_length=1, description="the run's folder, on a local disk")
    copy_to: str | None = Field(
        None,
        description="a folder in a bucket, s3://bucket/name or gs://bucket/name, that the finished "
        "release is copied to, without `private`",
    )

    @field_validator("path")
    @classmethod
    def _is_local(cls, path: str) -> str:
        if names_cloud(path):
            raise ValueError(
                "no cloud path: a run's lock and its renames need a local file system; give a "
                "local folder, and the bucket in output.copy_to"
            )
        return path

    @field_validator("copy_to")
    @classmethod
    def _is_folder_of_bucket(cls, uri: str | None) -> str | None:
        if uri is None:
            return None
        if holds_secret(uri) or "@" in uri:
            raise ValueError(NOT_IN_URLS)
        if not uri.startswith(BUCKETS) or not PurePosixPath(urlsplit(uri).path).name:
            raise ValueError("a folder in a bucket, such as s3://bucket/name or gs://bucket/name")
        return uri.rstrip("/")
