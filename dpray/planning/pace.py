"""`bench` measures how long a plan takes on this machine, by short runs on public records,
and `known_pace` finds what it measured."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from signal import SIGTERM, signal
from tempfile import TemporaryDirectory, TemporaryFile
from threading import current_thread, main_thread
from time import monotonic
from typing import Any, Self

from platformdirs import user_cache_path

from dpray.config.config import Config, parse_config
from dpray.io.files import check_writable, read_json, write_durably
from dpray.io.yaml_text import dump_yaml
from dpray.planning.stage import draw, plain, public_records, staged, write_stage
from dpray.registry import make_plan
from dpray.runs.plan import Plan
from dpray.types import DprayError, InputError, OnProgress, Progress

RECORDS = 2000
"""The larger runs have so many records, or as many as the plan has, if these are fewer; and at
least so many that the batches of all runs are as large as the plan's."""

TEXTS = 8
"""The shorter runs make so many texts, or two of each label, if these are more; the longest one
three times as many."""

EPSILON = 100.0
"""A run of few records has to be affordable: its noise is smaller, and takes as long."""

SIZES = ("records", "max_records", "texts", "private_tokens", "noise_multiplier")
"""These keys of a method, its sizes and noise, do not change its pace."""

Run = Callable[[Path], tuple[float, float]]
"""It executes the configuration in a file, and returns the seconds and the GiB that it took."""


@dataclass(frozen=True)
class Pace:
    """Holds the seconds that a run takes on a machine: `start` whatever its size, `per_record` for
    each private record and `per_text` for each text that it makes. `memory_gib` is the main memory
    of the largest process but for Ray's workers, and `measured` the day."""

    start: float
    per_record: float
    per_text: float
    memory_gib: float
    measured: str

    @classmethod
    def fitted(cls, seconds: Mapping[tuple[int, int], float], memory_gib: float) -> Self:
        """Fit the seconds of three runs, by their numbers of records and texts: (N, n), (N, 3n) and
        (N / 2, n). What comes out below 0, by chance, is 0."""
        (many, few), (_, texts), (half, _) = seconds
        base = seconds[many, few]
        per_text = max(seconds[many, texts] - base, 0.0) / (texts - few)
        per_record = max(base - seconds[half, few], 0.0) / (many - half)
        start = max(base - few * per_text - many * per_record, 0.0)
        return cls(start, per_record, per_text, memory_gib, date.today().isoformat())

    def summary(self, plan: Plan, rate: float | None = None) -> dict[str, Any]:
        """Return what `dpray plan --json` says of the time that the plan's run takes, and of its
        price where an hour costs `rate`."""
        seconds = self.seconds(plan)
        return {
            "seconds": seconds,
            "price": None if rate is None else rate * seconds / 3600,
            "memory_gib": self.memory_gib,
            "measured": self.measured,
        }

    def seconds(self, plan: Plan) -> float:
        """Return the seconds that the plan's run takes."""
        texts = plan.summary()["records"]
        return self.start + self.per_record * plan.config.data.public_size + self.per_text * texts


def _run(file: Path) -> tuple[float, float]:
    """Execute `dpray run` in a process of its own, whose start and memory count, too."""
    command = [sys.executable, "-m", "dpray", "run", str(file), "--json"]
    began = monotonic()
    with TemporaryFile("w+") as err:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err)
        try:
            _, status, used = os.wait4(child.pid, 0)
        except BaseException:
            child.terminate()
            child.wait()
            raise
        code = child.returncode = os.waitstatus_to_exitcode(status)
        err.seek(0)
        said = err.read().strip().splitlines()[-1:] or [f"exit code {code}"]
    if code < 0:
        raise DprayError(f"a run on public records was killed by signal {-code}")
    if code != 0:
        kind = InputError if code == InputError.exit_code else DprayError
        raise kind(f"a run on public records failed: {said[0].removeprefix('dpray: ')}")
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return monotonic() - began, used.ru_maxrss / unit


@contextmanager
def _ends_in_order() -> Iterator[None]:
    """Have a request to end (SIGTERM) end the run under way, too, and remove its folder."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal(SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal(SIGTERM, before)


def bench(
    config: Config,
    public: str,
    *,
    run: Run = _run,
    cache: Path | None = None,
    records: int = RECORDS,
    texts: int = TEXTS,
    on_progress: OnProgress = lambda progress: None,
) -> Pace:
    """Measure the pace of a configuration's method, model and cluster, and keep it in the user's
    cache, where `known_pace` finds it.

    The runs lie in a temporary folder beside `output.path`, on records drawn from the file
    `public`, several times where they are fewer than `records`. Raises InputError for records that
    do not fit the configuration, for too small a `records`, and for a method that has no plan for
    so few; DprayError where a run fails.
    """
    plan = make_plan(config)
    if plan.not_private:
        raise InputError("privacy.epsilon: infinity is for measurements; bench a finite one")
    if records < 2 or texts < 1:
        raise InputError("--records, --texts: are too few to measure")
    check_writable(_file(cache), "the user's cache")
    check_writable(Path(config.output.path), "output.path")
    many = max(min(records, config.data.public_size), 2 * plan.fewest_records)
    few = max(texts, 2 * len(config.data.labels))
    rows = [row for _, row in public_records(config, public)]
    if not rows:
        raise InputError(f"--public: {public} has no records")
    # The first run is not counted: files are not in memory yet, and models not compiled.
    sizes = [(many // 2, few), (many, few), (many, 3 * few), (many // 2, few)]
    beside = Path(config.output.path).absolute().parent
    beside.mkdir(parents=True, exist_ok=True)
    took: dict[tuple[int, int], tuple[float, float]] = {}
    with _ends_in_order(), TemporaryDirectory(prefix="bench-", dir=beside) as folder:
        files = [
            _config_file(plan, rows, size, Path(folder), f"run-{number}")
            for number, size in enumerate(sizes)
        ]
        made = [(records, texts) for (records, _), (_, texts) in zip(sizes, files, strict=True)]
        if len(set(made)) < 3:
            raise InputError("--texts: are too few to measure")
        for done, (size, (file, _)) in enumerate(zip(made, files, strict=True)):
            on_progress(Progress("runs", done, len(made), f"{size[0]} records, {size[1]} texts"))
            used = run(file)
            if done > 0:
                took[size] = used
    seconds = {size: took[size][0] for size in made[1:]}
    pace = Pace.fitted(seconds, max(memory for _, memory in took.values()))
    _keep(config, pace, cache)
    return pace


def _config_file(
    plan: Plan, rows: list[dict[str, Any]], size: tuple[int, int], folder: Path, name: str
) -> tuple[Path, int]:
    """Write the configuration of a run of so many records and texts, and its records; return its
    file, and the texts that its plan has."""
    config = plan.config
    records, texts = size
    stage = write_stage(draw(rows, records, config.data.unit), folder, f"{name}.jsonl")
    method = plain(config)["method"] | plan.of_size(texts)
    tree = staged(config, method, stage, folder / name)
    tree["data"] |= {"public_size": records}
    tree["privacy"] |= {"epsilon": max(EPSILON, config.privacy.epsilon)}
    try:
        short = make_plan(parse_config(tree))
    except InputError as error:
        raise InputError(f"--records: a run of {records} has no plan: {error}") from None
    file = folder / f"{name}.yaml"
    # It may hold the key of an endpoint.
    write_durably(file, dump_yaml(tree), private=True)
    return file, int(short.summary()["records"])


def known_pace(config: Config, cache: Path | None = None) -> Pace | None:
    """Return what `bench` measured for this method, model and cluster; None where it has not."""
    try:
        pace = Pace(**_kept(cache)[_key(config)])
        figures = (pace.start, pace.per_record, pace.per_text, pace.memory_gib)
        is_whole = all(0 <= figure < math.inf for figure in figures)
    except (KeyError, TypeError):  # not measured, or by another version
        return None
    return pace if is_whole and isinstance(pace.measured, str) else None


def _keep(config: Config, pace: Pace, cache: Path | None) -> None:
    file = _file(cache)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_durably(file, json.dumps(_kept(cache) | {_key(config): asdict(pace)}, indent=1))


def _kept(cache: Path | None) -> dict[str, Any]:
    try:
        return read_json(_file(cache))
    except InputError:
        return {}  # it can be measured again


def _file(cache: Path | None) -> Path:
    return (cache or user_cache_path("dpray")) / "bench.json"


def _key(config: Config) -> str:
    """Return a name for what a pace depends on: method, model, embedder, cluster and machine."""
    tree = config.model_dump(mode="json")
    methods = tree["method"].get("methods", [tree["method"]])
    paced = [{key: value for key, value in one.items() if key not in SIZES} for one in methods]
    parts = [*paced, *(tree[name] for name in ("engine", "embedder", "runtime")), platform.node()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
