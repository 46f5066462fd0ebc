"""The private records stay in shards, which answer exactly: one in this process, or actors on Ray.

A shard's answers hold no noise: the caller adds up the answers of all shards and adds the noise
once. Every question goes to all shards, and no actor of another shard can answer for a lost one.

Claim: a shard that is lost may be replaced at no cost. Another actor loads the same blocks of rows
in the same order, and is asked what the lost one was asked. Its answers are integers, or public, so
that the sum over all shards is what it would have been; nobody saw an answer of the lost one, and
the noise is drawn once, by the caller, after all have answered. So whatever ended the lost one, the
draw is the same. Only what the short list has (`dpray.workers.failures.REPEATED_AFTER`) is
replaced.
Proof: docs/privacy.md, section 2.7.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import ObjectLostError

from dpray.config.config import Config
from dpray.config.sections import EmbedderConfig
from dpray.engines.base import Embeddings, EngineError
from dpray.engines.embedder import SentenceTransformerEmbedder
from dpray.engines.embedding_endpoint import PUBLIC_TEXTS, EmbeddingEndpoint
from dpray.engines.kept_state import stateless_pair
from dpray.io.files import owners_only, sha256_of
from dpray.mechanisms.discrete_noise import Counts
from dpray.mechanisms.votes import NearestText, VoteHistogram, count_votes
from dpray.mechanisms.votes_on_device import NearestOnDevice
from dpray.types import InputError, Resumable, in_parts
from dpray.workers.cluster import NeverRepeated
from dpray.workers.engine import hide_other_gpus, try_to_load
from dpray.workers.engine_pool import on_pool, tried_actor
from dpray.workers.failures import REPEAT, LostTooOften, find_error, kind_of, own_errors
from dpray.workers.memory import Role, reserved
from dpray.workers.placement import run_placement
from dpray.workers.rows import (
    ROW_SCHEMA,
    ROWS_AT_ONCE,
    WITH_COLUMNS,
    Row,
    RowsOf,
    check_cut_files,
    data_files,
    local_rows,
    ray_rows,
    record_rows,
    tables_of,
    without_words,
)


class Worker(Protocol):
    def load(self, rows: Sequence[Row]) -> None:
        """Take some of this worker's records."""
        ...


W = TypeVar("W", bound=Worker)
T = TypeVar("T")
R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")


class Shards(Generic[W]):
    """Workers, `worker(config, *arguments)` for each shard, that each hold a part of the records.
    On Ray a shard is an actor of `runtime.cpus_per_actor` CPUs and `gpus` GPUs; there are
    `runtime.actors`, or as many as the cluster has room for.

        voters = Shards(config, Voters)
        counts = voters.each(Voters.count, candidates_ND)

    A lost actor is replaced, `runtime.max_attempts` times a shard. Raises InputError for bad rows,
    LostTooOften after that, Resumable if there is no room for another actor in `runtime.wait`
    seconds, InputError or EngineError for a worker that cannot be made.
    """

    def __init__(
        self,
        config: Config,
        worker: Callable[[Config, *Arguments], W],
        *arguments: *Arguments,
        gpus: float = 0.0,
    ) -> None:
        self._shards: list[_Shard] = []
        self._local: W | None = None
        if not config.runtime.uses_ray:
            self._local = worker(config, *arguments)
            rows = local_rows(config.data, _rows_of(config))
            for part in in_parts(rows, ROWS_AT_ONCE):
                self._local.load(part)
            return
        # Read before the actors start, which may take every CPU there is.
        blocks = _blocks(config)
        role = Role.VOTER if worker is Voters else Role.COUNTER
        actor = NeverRepeated(ShardActor, config, gpus, role)
        # Even if some get no block: the batches of public work may not depend on how many records
        # there are.
        runtime, shared = config.runtime, [ray.put(argument) for argument in arguments]
        size = runtime.cpus_per_actor, gpus, reserved(config, role)
        places = run_placement().shards(runtime.actors, *size)
        self._shards = [
            _Shard(
                partial(actor.remote, config, worker, *shared, place=place),
                blocks[number :: len(places)],
                config,
            )
            for number, place in enumerate(places)
        ]
        _answers(self._shards)

    def each(self, method: Callable[[W, *Arguments], R], *arguments: *Arguments) -> list[R]:
        """Return each worker's answer to the same arguments, in the order of the shards."""
        if self._local is not None:
            return [method(self._local, *arguments)]
        shared = [ray.put(argument) for argument in arguments]
        for shard in self._shards:
            shard.ask(method, *shared)
        return _answers(self._shards)

    def scatter(self, method: Callable[[W, Sequence[T]], R], items: Sequence[T]) -> list[R]:
        """Apply the workers' method to parts of `items`, and return the answers in order: public
        work is distributed over the same actors."""
        if self._local is not None:
            return [method(self._local, items)]
        size = -(-len(items) // len(self._shards)) or 1
        starts = range(0, len(items), size)
        for shard, start in zip(self._shards, starts, strict=False):
            shard.ask(method, items[start : start + size])
        return _answers(self._shards[: len(starts)])

    def close(self) -> None:
        for shard in self._shards:
            ray.kill(shard.actor)
        run_placement().give_back_shards()
        self._shards, self._local = [], None


class _Shard:
    """One shard on Ray. `start` starts its actor, which loads the `blocks`."""

    def __init__(self, start: Callable[[], Any], blocks: Sequence[object], config: Config) -> None:
        self._start, self._blocks, self._runtime = start, blocks, config.runtime
        self._losses = 0
        self._question: tuple[object, ...] = ()
        self._begin()

    def _begin(self) -> None:
        """Start an actor, and ask it the question."""
        self.actor = self._start()
        self._ready = self.actor.__ray_ready__.remote()
        self._calls = [self.actor.load.remote(block) for block in self._blocks]
        if self._question:
            self._calls.append(self.actor.call.remote(*self._question))

    def ask(self, method: Callable[..., object], *arguments: object) -> None:
        self._question = (method, *arguments)
        self._calls = [self.actor.call.remote(*self._question)]

    def answer(self) -> Any:
        """Return the answer to the question, None once all is loaded, or the reason why there is no
        worker."""
        if self._losses and not ray.wait([self._ready], timeout=self._runtime.wait)[0]:
            raise Resumable(
                "the cluster has no room: a shard was lost, and another one waited for "
                f"{self._runtime.wait:g} s (runtime.wait); make room, or wait longer"
            )
        with own_errors():
            answers = [None, *ray.get(self._calls)]
        return next((each for each in answers if isinstance(each, Exception)), answers[-1])

    def replace(self, lost: Exception) -> None:
        """Begin again with another actor. Raises the error if the table repeats nothing after it,
        or if rows were lost, which the next attempt reads again."""
        if kind_of(lost).drawing is not REPEAT or find_error(lost, ObjectLostError) is not None:
            raise lost
        self._losses += 1
        if self._losses > self._runtime.max_attempts:
            raise LostTooOften(lost) from lost
        ray.kill(self.actor)
        self._begin()


def _answers(shards: Sequence[_Shard]) -> list[Any]:
    """Return the answers in the order of the shards. Those that replace lost ones load at the same
    time, and are waited for last."""
    answers: dict[_Shard, Any] = {}
    waiting = deque(shards)
    while waiting:
        shard = waiting.popleft()
        try:
            answers[shard] = answer = shard.answer()
        except Exception as error:
            shard.replace(error)
            waiting.append(shard)
            continue
        if isinstance(answer, Exception):
            raise answer
    return [answers[shard] for shard in shards]


class ShardActor:
    """Delegates to its worker. If that cannot be made, every answer is the reason."""

    def __init__(self, config: Config, worker: Callable[..., Worker], *arguments: object) -> None:
        hide_other_gpus()
        self._worker = try_to_load(lambda: worker(config, *arguments))

    def load(self, block: pa.Table) -> Exception | None:
        """Have the worker load the rows. Return the reason if there is no worker."""
        if isinstance(self._worker, Exception):
            return self._worker
        with without_words():
            self._worker.load(block.to_pylist())
        return None

    def call(self, method: Callable[..., R], *arguments: object) -> R | Exception:
        if isinstance(self._worker, Exception):
            return self._worker
        with without_words():
            return method(self._worker, *arguments)


def _rows_of(config: Config) -> RowsOf:
    """Return the reader of a part's rows, with the label's and the attributes' columns if there
    are attributes."""
    columns = config.data.public_values if config.data.attributes else None
    return partial(record_rows, data=config.data, column_values=columns)


def _blocks(config: Config) -> list[object]:
    """Return references to blocks of rows."""
    run_placement().make_room(for_shards=True)
    with own_errors():
        schema = WITH_COLUMNS if config.data.attributes else ROW_SCHEMA
        rows = ray_rows(config, _rows_of(config), partial(tables_of, schema=schema), schema)
        if config.runtime.actors > 1:
            rows = rows.repartition(target_num_rows_per_block=ROWS_AT_ONCE)
        blocks: list[object] = rows.to_arrow_refs()
        check_cut_files(data_files(config.data))
    return blocks


# Votes


class Voters:
    """One shard of the private records, embedded once. Its counts are exact and private:
    `noisy_votes` adds the noise to the sum of all shards.

    Claim: a record's embedding depends on that record only, and public ones on public texts only:
    they come from a copy of the model that never reads a private text. Both copies were tried for a
    state that they keep. Raises InputError or EngineError for a model that cannot be used.

    `folder` is where the embeddings of each block are kept for another actor or attempt, if this
    machine sees it. A file is named by its SHA-256, by its texts and by the model's embedding of
    public texts, so it holds what this model makes of these texts.
    """

    def __init__(self, config: Config, folder: str = "") -> None:
        self._embedder, self._of_public = stateless_pair(
            SentenceTransformerEmbedder, config.embedder.model
        )
        self._parts: defaultdict[str, list[Embeddings]] = defaultdict(list)
        # A worker keeps nothing on a disk that it does not share with the driver.
        self._folder = Path(folder) if folder and Path(folder).is_dir() else None
        self._model = b"" if self._folder is None else self._of_public.embed(PUBLIC_TEXTS).tobytes()

    def load(self, rows: Sequence[Row]) -> None:
        vectors_ND = self._kept([row["text"] for row in rows])
        of_label: defaultdict[str, list[int]] = defaultdict(list)
        for number, row in enumerate(rows):
            of_label[row["label"]].append(number)
        for label, numbers in of_label.items():
            self._parts[label].append(vectors_ND[numbers])

    def _kept(self, texts: Sequence[str]) -> Embeddings:
        """Return the embeddings of these private texts, which an earlier actor or attempt may have
        left in the folder. A file that does not hold what was written is not used."""
        if self._folder is None or not texts:
            return self._embed_privately(texts)
        name = hashlib.sha256(self._model)
        for text in texts:
            name.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        for path in self._folder.glob(f"{name.hexdigest()}-*.npy"):
            if path.stem.endswith(sha256_of(path)):
                kept_ND: Embeddings = np.load(path)
                return kept_ND
        vectors_ND = self._embed_privately(texts)
        part = self._folder / f"{uuid4().hex}.part"
        with suppress(OSError):  # such as a full disk: the embeddings are here
            with open(part, "wb", opener=owners_only) as file:
                np.save(file, vectors_ND)
            part.rename(self._folder / f"{name.hexdigest()}-{sha256_of(part)}.npy")
        part.unlink(missing_ok=True)
        return vectors_ND

    def _embed_privately(self, texts: Sequence[str]) -> Embeddings:
        # One text at a time: in a batch, its embedding's last bits would depend on the other
        # records, and a record's vote may depend on that record only.
        return self._embedder.embed(texts, batch_size=1)

    def embed(self, texts: Sequence[str]) -> Embeddings:
        """Embed public texts, which may share a batch."""
        return self._of_public.embed(texts)

    def count(self, candidates_ND: Mapping[str, Embeddings]) -> dict[str, Counts]:
        """Count the votes for each label's candidates by the records of that label, shape (N,)
        each."""
        counts, search_of = {}, _search_on(self._of_public.device)
        for label, of_label_ND in candidates_ND.items():
            mine = self._parts.get(label, [])
            private_MD = np.concatenate(mine) if mine else np.zeros((0, of_label_ND.shape[1]), "f4")
            self._parts[label] = [private_MD]
            counts[label] = count_votes(private_MD, of_label_ND, search_of)
        return counts


def _search_on(device: str) -> Callable[[Embeddings], NearestText] | None:
    """Return the search on a voter's GPU; None without one."""
    if not device.startswith("cuda"):
        return None
    return partial(NearestOnDevice, device=device)


def voters_gpus(config: Config) -> float:
    """Return the GPUs of a voter on Ray. Engines, if there are any, get them: they work more."""
    return 0.0 if on_pool(config) else config.runtime.gpus_per_actor or 0.0


def check_voters(config: Config, gpus: float = 0.0) -> None:
    """Load and try a run's embedder where its voters will run, before the charge: one that cannot
    be used should cost nothing. Raises InputError that says why, Resumable if actors are lost again
    and again."""
    try:
        local_ND = _local_vectors(config, gpus)
    except EngineError as error:
        raise InputError(str(error)) from None
    if config.embedder.kind == "openai":
        EmbeddingEndpoint(config.embedder).check(local_ND)


def _local_vectors(config: Config, gpus: float) -> Embeddings:
    """Return a voter's embeddings of `PUBLIC_TEXTS`."""
    if not config.runtime.uses_ray:
        return Voters(config).embed(PUBLIC_TEXTS)

    def ask(actor: Any) -> Embeddings:
        with own_errors():
            found: Embeddings | Exception
            found = ray.get(actor.call.remote(Voters.embed, PUBLIC_TEXTS))
        if isinstance(found, Exception):
            raise found
        return found

    actor_class = NeverRepeated(ShardActor, config, gpus, Role.VOTER)
    start = partial(actor_class.remote, config, Voters)
    actor, vectors_ND = tried_actor(
        config, "embedder", lambda: start(place=run_placement().shard()), ask
    )
    ray.kill(actor)
    return vectors_ND


def embedded(voters: Shards[Voters], texts: Sequence[str], embedder: EmbedderConfig) -> Embeddings:
    """Embed public texts, at an endpoint or shared out among all shards; shape (N, D) for N
    texts."""
    if embedder.kind == "openai":
        local_ND = np.concatenate(voters.scatter(Voters.embed, PUBLIC_TEXTS))
        return EmbeddingEndpoint(embedder).embed(texts, local_ND)
    vectors_ND: Embeddings = np.concatenate(voters.scatter(Voters.embed, texts))
    return vectors_ND


def noisy_votes(
    voters: Shards[Voters],
    mechanism: VoteHistogram | None,
    candidates_ND: Mapping[str, Embeddings],
) -> dict[str, Counts]:
    """Hold one vote: return the noisy votes for each label's candidates, shape (N,) each. Without a
    `mechanism` they have no noise and are not private.

    A record votes in its own label only, so all labels together are one application of the
    mechanism."""
    shards = voters.each(Voters.count, dict(candidates_ND))
    exact: dict[str, Counts] = {
        label: np.add.reduce([counts[label] for counts in shards], dtype=np.int64)
        for label in candidates_ND
    }
    if mechanism is None:
        return exact
    return {label: mechanism(exact_N) for label, exact_N in exact.items()}
