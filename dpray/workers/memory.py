"""The memory that Ray reserves for an actor, so that a machine holds no more of them than fit:
`runtime.memory_per_actor`, or the sum of what the actor loads and computes, by public sizes.

Those are the files of the model and their precision, its vocabulary and context, the parameters of
the method, and `data.public_size`. No record, no file of records and no number of rows has a part
in it. A hub is asked for the sizes of a model that is not on this machine. If it does not tell, and
for a model in a bucket, only the libraries are counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from types import SimpleNamespace

from dpray.config.config import Config, EngineConfig
from dpray.engines.embedder import embedder_at_hand
from dpray.engines.kv_cache import BYTES, DEFAULT_BYTES, GIB, bytes_per_token
from dpray.engines.model_path import is_at_hand, is_hub_name, weights_at_hand, with_bases
from dpray.io.files import read_json
from dpray.io.hub import files_of_model
from dpray.types import InputError, Json, ReadOnlyJson

PROCESS, LIBRARIES = GIB // 4, GIB * 3 // 4
"""The bytes of a worker without a model, and of one with a model's libraries and no model yet."""

STEP = GIB // 8
"""Reservations are rounded up to a multiple of this."""

PASS_ROWS = 256
"""The most rows of a pass of transformers."""

LOGITS = 4
"""The logits of a step, and what choosing tokens makes of them on a CPU: the rows of a group at
once, cut to what a schema allows, and without the rows that are not finite."""

BLOCK_ROWS, ROW_BYTES = 32_768, 4096
"""The rows of a block that `dpray.workers.gathering` makes, and the bytes that are counted for
each."""

WEIGHTS = (".safetensors", ".bin")
"""The files of a model's weights, first the format that is loaded if both are there."""

PASSES = 4
"""A training holds its logits, their gradients and what these are computed from."""


class Role(Enum):
    ENGINE = auto()
    """Has the language model."""
    VOTER = auto()
    """Has the embedder, and a shard of the records."""
    COUNTER = auto()
    """Has a shard of the records, and no model."""
    RANK = auto()
    """Trains the language model."""


def reserved(config: Config, role: Role) -> float:
    """Return the bytes that Ray reserves for an actor."""
    if (asked := config.runtime.memory_per_actor) is not None:
        return asked * GIB
    return math.ceil(_SIZES[role](config) / STEP) * float(STEP)


def lacks_size(config: Config) -> bool:
    """Return whether nothing is reserved for the language model, because neither this machine nor
    a hub tells its size."""
    is_asked = config.engine.is_local and config.runtime.memory_per_actor is None
    return is_asked and not _Model.of(config.engine).weights


def _engine(config: Config) -> int:
    engine, model = config.engine, _Model.of(config.engine)
    rows = min(config.data.public_size, BLOCK_ROWS) * ROW_BYTES
    if config.runtime.gpus_per_actor:
        return LIBRARIES + model.largest_file + rows
    weights = model.weights * BYTES.get(engine.dtype, 4) // model.width
    logits = LOGITS * 4 * model.number("vocab_size") * min(engine.max_num_seqs, PASS_ROWS)
    return LIBRARIES + weights + logits + _cache(engine, model) + rows


def _cache(engine: EngineConfig, model: _Model) -> int:
    """Return the bytes of the KV cache on a CPU. vLLM takes all of it when it starts."""
    if engine.kind == "vllm" or engine.kv_cache_gib is not None:
        return DEFAULT_BYTES if engine.kv_cache_gib is None else int(engine.kv_cache_gib * GIB)
    context = engine.max_model_len or model.number("max_position_embeddings")
    return min(DEFAULT_BYTES, PASS_ROWS * context * model.token_bytes(engine.dtype))


def _voter(config: Config) -> int:
    """Two copies of the embedder, and the vectors of its share of the records, which are twice
    there while they are put together."""
    model = _Model()
    with suppress(InputError):  # such as adapters of an embedder, which no engine would take
        model = _Model.found(embedder_at_hand(config.embedder.model), config.embedder.model)
    records = -(-config.data.public_size // config.runtime.actors)
    return LIBRARIES + 2 * model.weights + 2 * 4 * model.number("hidden_size") * records


def _counter(config: Config) -> int:
    return PROCESS + max(method.shard_bytes for method in config.method.each)


def _rank(config: Config) -> int:
    model = _Model.of(config.engine)
    if config.runtime.gpus_per_actor:
        return LIBRARIES + model.largest_file
    copies, tokens = max(method.training_size for method in config.method.each)
    numbers = copies * model.weights // model.width + PASSES * tokens * model.number("vocab_size")
    return LIBRARIES + 4 * numbers  # all in float32


_SIZES = {Role.ENGINE: _engine, Role.VOTER: _voter, Role.COUNTER: _counter, Role.RANK: _rank}


@dataclass(frozen=True)
class _Model:
    """The sizes of a model: the bytes of its `weights` and of the largest of their files, the bytes
    of a number in them, and what its configuration says."""

    weights: int = 0
    largest_file: int = 0
    config: ReadOnlyJson = field(default_factory=dict)

    @classmethod
    def of(cls, engine: EngineConfig) -> _Model:
        with suppress(InputError):
            name = "" if is_at_hand(engine.model) else with_bases(engine.model)[-1]
            return cls.found(weights_at_hand(engine.model), name)
        return cls()

    @classmethod
    def found(cls, folder: Path | None, name: str) -> _Model:
        """Return the sizes of the model in this folder, of that with this name on a hub, or of
        none."""
        if folder is None:
            on_hub = files_of_model(name) if is_hub_name(name) else None
            return cls._of_files(*on_hub) if on_hub else cls()
        sizes: dict[str, int] = {}
        read: Json = {}
        with suppress(OSError):  # the engine says what is wrong
            files = [path for path in folder.iterdir() if path.suffix in WEIGHTS]
            sizes = {path.name: path.stat().st_size for path in files}
        with suppress(InputError):
            read = read_json(folder / "config.json")
        return cls._of_files(sizes, read)

    @classmethod
    def _of_files(cls, sizes: Mapping[str, int], read: ReadOnlyJson) -> _Model:
        """The same weights may be there in two formats, of which one is loaded."""
        names = [name for name in sizes if "/" not in name]
        of_kind = ([sizes[name] for name in names if name.endswith(kind)] for kind in WEIGHTS)
        weights = next(filter(None, of_kind), [])
        text = read.get("text_config")
        config = {**read, **(text if isinstance(text, dict) else {})}
        return cls(sum(weights), max(weights, default=0), config)

    @property
    def width(self) -> int:
        kept_in = self.config.get("dtype") or self.config.get("torch_dtype")
        return BYTES.get(str(kept_in), 4)

    def token_bytes(self, dtype: str) -> int:
        numbers = {name: x for name, x in self.config.items() if isinstance(x, int) and x > 0}
        with suppress(AttributeError):
            return bytes_per_token(SimpleNamespace(**numbers), dtype)
        return 0

    def number(self, name: str) -> int:
        """Return a number of the configuration, 0 without one."""
        found = self.config.get(name)
        return found if isinstance(found, int) and found > 0 else 0
