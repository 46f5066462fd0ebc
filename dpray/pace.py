"""`bench` measures how long a plan takes on this machine, by three short runs on public records,
and `known_pace` finds what it measured."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, Self

import yaml
from platformdirs import user_cache_path

from dpray.config.config import Config, parse_config
from dpray.io.files import read_json, write_durably
from dpray.registry import make_plan
from dpray.runs.plan import Plan
from dpray.stage import draw, plain, public_records, staged, write_stage
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

Run = Callable[[Path], float]
"""It executes the configuration in a file, and returns the seconds that it took."""


@dataclass(frozen=True)
class Pace:
    """Holds the seconds that a run takes on a machine: `start` whatever its size, `per_record` for
    each private record and `per_text` for each text that it makes. `memory_gib` is what the largest
    process took, and `measured` the day."""

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


def _run(file: Path) -> float:
    """Execute `dpray run` in a process of its own, whose start and memory count, too."""
    command = [sys.executable, "-m", "dpray", "run", str(file), "--json"]
    began = monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise DprayError(f"a run on public records failed: {said[0]}")
    return monotonic() - began


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
    many = max(min(records, config.data.public_size), 2 * plan.fewest_records)
    few = max(texts, 2 * len(config.data.labels))
    rows = [row for _, row in public_records(config, public)]
    if not rows:
        raise InputError(f"--public: {public} has no records")
    sizes = [(many, few), (many, 3 * few), (many // 2, few)]
    beside = Path(config.output.path).absolute().parent
    beside.mkdir(parents=True, exist_ok=True)
    seconds = {}
    with TemporaryDirectory(prefix="bench-", dir=beside) as folder:
        files = [_config_file(plan, rows, size, Path(folder)) for size in sizes]
        for done, (size, file) in enumerate(zip(sizes, files, strict=True)):
            on_progress(Progress("runs", done, len(sizes), f"{size[0]} records, {size[1]} texts"))
            seconds[size] = run(file)
    # Of processes that have ended, in KiB.
    pace = Pace.fitted(seconds, getrusage(RUSAGE_CHILDREN).ru_maxrss / 2**20)
    _keep(config, pace, cache)
    return pace


def _config_file(
    plan: Plan, rows: list[dict[str, Any]], size: tuple[int, int], folder: Path
) -> Path:
    """Write the configuration of a run of so many records and texts, and its records."""
    config = plan.config
    records, texts = size
    name = f"{records}-{texts}"
    stage = write_stage(draw(rows, records, config.data.unit), folder, f"{name}.jsonl")
    method = plain(config)["method"] | plan.of_size(texts)
    tree = staged(config, method, stage, folder / name)
    tree["data"] |= {"public_size": records}
    tree["privacy"] |= {"epsilon": max(EPSILON, config.privacy.epsilon)}
    try:
        make_plan(parse_config(tree))
    except InputError as error:
        raise InputError(f"--records: a run of {records} has no plan: {error}") from None
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
    return file


def known_pace(config: Config, cache: Path | None = None) -> Pace | None:
    """Return what `bench` measured for this method, model and cluster; None where it has not."""
    kept = _kept(cache).get(_key(config))
    return None if kept is None else Pace(**kept)


def _keep(config: Config, pace: Pace, cache: Path | None) -> None:
    file = _file(cache)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_durably(file, json.dumps(_kept(cache) | {_key(config): asdict(pace)}, indent=1))


def _kept(cache: Path | None) -> dict[str, dict[str, Any]]:
    try:
        kept: dict[str, dict[str, Any]] = read_json(_file(cache))
    except InputError:
        return {}  # it can be measured again
    return kept


def _file(cache: Path | None) -> Path:
    return (cache or user_cache_path("dpray")) / "bench.json"


def _key(config: Config) -> str:
    """Return a name for what a pace depends on: method, model, embedder, cluster and machine."""
    tree = config.model_dump(mode="json")
    method = {key: value for key, value in tree["method"].items() if key not in SIZES}
    parts = [method, *(tree[name] for name in ("engine", "embedder", "runtime")), platform.node()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
