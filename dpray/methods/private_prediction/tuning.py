"""`tune_clip` proposes a clip bound, a temperature and a batch size from public texts of the same
kind as the private ones. It opens no private data and costs no epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np

from dpray.config.config import Config
from dpray.engines.base import EngineError
from dpray.io.formats import Piece
from dpray.io.public_files import public_files
from dpray.mechanisms.labels import common_shares
from dpray.methods.private_prediction.gains import Gains, measure, sampled
from dpray.methods.private_prediction.plan import (
    choose_batches,
    make_plan,
    resolve_memory,
    template_of,
)
from dpray.methods.private_prediction.prompts import PromptTemplate
from dpray.methods.private_prediction.resolved import PrivatePredictionPlan, private_token
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.types import DprayError, InputError, OnProgress, Progress
from dpray.workers.rows import read_records

OPTION = "--tune-clip"

CLIP_BOUNDS = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0)
TEMPERATURES = (0.5, 0.7, 1.0, 1.5, 2.0)
BATCH_SIZES = (16, 32, 64, 128, 256, 512)

MOST_ROWS = 32
"""The rows of the measurement; more of them raise the gain only slowly."""

MOST_HELD_OUT = 32
"""So many public texts are measured in all, or one of each label, if that is more: each takes as
long as a text of a run."""

BatchKind = Literal["poisson", "disjoint"]
Option = tuple[BatchKind, list[int]]


@dataclass(frozen=True)
class Setting:
    """Holds one clip bound and temperature with its `gain` in nats a token. `standard_error` is
    that of the gain, and `standard_error_below_best` that of what it is below the best one; None
    where one text was measured. `texts` is the number that epsilon affords with this `batches` and
    `batch_size`; all three are None where a better or a cheaper setting made the question idle."""

    clip: str
    clip_bound: float
    temperature: float
    gain: float
    standard_error: float | None = None
    standard_error_below_best: float | None = None
    batches: BatchKind | None = None
    batch_size: int | None = None
    texts: int | None = None

    @property
    def price(self) -> float:
        """Return c / tau: what a token costs goes with it, at every batch size."""
        return self.clip_bound / self.temperature

    @property
    def above_noise(self) -> bool:
        """Return whether the gain is more than two standard errors above 0."""
        return self.standard_error is not None and self.gain > 2 * self.standard_error

    @property
    def affordable(self) -> int:
        return self.texts or 0

    @property
    def keys(self) -> dict[str, str | float | int]:
        values = asdict(self)
        names = ("batches", "batch_size", "clip", "clip_bound", "temperature")
        return {f"method.{name}": values[name] for name in names}


def tune_clip(
    config: Config, file: str, on_progress: OnProgress = lambda progress: None
) -> dict[str, Any]:
    """Return the gains of the grid of clip bounds and temperatures, best first, and the settings to
    take: those of the largest gain that afford the wanted number of texts, else those that come
    nearest, else (where no setting gains anything) none. `above_noise` is whether their gain is
    more than two standard errors above 0.

    The gain is the mean log-probability, in nats a token, of public texts that the private prompts
    do not hold, less that under the public prompt alone; the private prompts hold other public
    texts of the same label. `file` has the columns of the configuration. The model runs by
    transformers, whatever `engine.kind`. The public gate and the sparse vector are left aside.

    Raises InputError for another method, for the private data's own file, and for a file that
    lacks texts of a label; DprayError where the model fails.
    """
    settings = config.method
    if not isinstance(settings, PrivatePredictionSettings):
        raise InputError(f"{OPTION}: for method.name private_prediction, not {settings.name}")
    template = template_of(config, settings)
    texts = public_texts(config, template, file)
    settings, _ = resolve_memory(config, settings, template)
    wanted = settings.texts or settings.max_records
    asked = wanted is not None
    if wanted is None:
        wanted = make_plan(config, settings).whole_texts
    options = batch_options(config, settings, template, wanted)
    try:
        grid, counts = _measure(config, settings, template, texts, on_progress)
    except EngineError as error:
        raise DprayError(f"{OPTION}: {error}") from None
    found, proposal = propose(config, settings, template, grid, options, wanted, on_progress)
    return {
        "file": file,
        **counts,
        "wanted_texts": wanted,
        "wanted_from_plan": not asked,
        "affords": proposal is not None and proposal.affordable >= wanted,
        "above_noise": proposal is not None and proposal.above_noise,
        "settings": None if proposal is None else proposal.keys,
        "gains": [asdict(setting) for setting in found],
    }


def public_texts(config: Config, template: PromptTemplate, file: str) -> dict[str, list[str]]:
    """Return the different public texts of each label that has a share."""
    data = config.data.of_public_files()
    files = public_files(file, OPTION, data.path)
    text_of = template.text_of if template.record else None
    found: dict[str, dict[str, None]] = {
        label: {} for label, share in data.proportions.items() if share > 0
    }
    try:
        for each in files:
            for _, record in read_records(Piece(each), data, text_of):
                found.get(record.label or "", {})[record.text.strip()] = None
    except InputError as error:
        raise InputError(f"{OPTION}: {error}") from None
    for label, texts in found.items():
        if len(texts) < 2:
            of = f" of the label {label}" if label else ""
            raise InputError(f"{OPTION}: {file} has {len(texts)} texts{of}; 2 or more are needed")
    return {label: list(texts) for label, texts in found.items()}


def _measure(
    config: Config,
    settings: PrivatePredictionSettings,
    template: PromptTemplate,
    texts: dict[str, list[str]],
    on_progress: OnProgress,
) -> tuple[list[Setting], dict[str, int]]:
    """Return the settings, best first, and the numbers of rows, texts and tokens."""
    # Imported late: a wrong file should not have to wait for torch.
    from dpray.engines.transformers import TransformersEngine

    rows, held_out = divided(
        min(map(len, texts.values())), len(texts), settings.expected_batch_size
    )
    total = held_out * len(texts)
    on_progress(Progress("public texts", 0, total))
    dtype = "float32" if config.engine.dtype == "auto" else config.engine.dtype
    engine = TransformersEngine(config.engine.model_copy(update={"dtype": dtype}))
    measured = settings.model_copy(update={"batch_size": rows})
    clips = sorted({*CLIP_BOUNDS, settings.clip_bound})
    taus = sorted({*TEMPERATURES, settings.temperature})
    with closing(engine):
        gains = measure(
            engine,
            private_token(config, measured, settings.max_tokens),
            template,
            sampled(texts, rows, held_out),
            (settings.max_prompt_tokens, settings.max_tokens),
            clips,
            taus,
            lambda done: on_progress(Progress("public texts", done, total)),
        )
    if not gains.lengths.size:
        raise InputError(f"{OPTION}: no held-out text has a token")
    grid = best_first(gains, settings.clip, list(product(clips, taus)))
    return grid, {"rows": rows, "texts": len(gains.lengths), "tokens": gains.tokens}


def divided(fewest: int, labels: int, batch_size: int) -> tuple[int, int]:
    """Return how many of a label's texts are rows, and how many are held out, where the rarest of
    the labels has `fewest`: half of them, at most, are rows, and as many as may be are measured."""
    rows = min(MOST_ROWS, batch_size, fewest // 2)
    return rows, min(fewest - rows, max(1, MOST_HELD_OUT // labels))


def best_first(gains: Gains, clip: str, settings: Sequence[tuple[float, float]]) -> list[Setting]:
    """Return the settings (clip bound and temperature) with their gains, the largest first."""
    means_G = gains.means_G
    order = [int(place) for place in np.argsort(-means_G, kind="stable")]
    return [
        Setting(clip, *settings[i], float(means_G[i]), gains.error(i), gains.error(i, order[0]))
        for i in order
    ]


def batch_options(
    config: Config, settings: PrivatePredictionSettings, template: PromptTemplate, wanted: int
) -> list[Option]:
    """Return each kind of batches that may be chosen, with the sizes, ascending, that the engine
    holds and every label has records for. Sizes below the measured number of rows, which
    gain less than was measured, are left out. Raises InputError where no size is left."""
    data = config.data
    smallest = data.public_size * min(common_shares(data.proportions).values())
    least = min(MOST_ROWS, settings.expected_batch_size)
    sizes = sorted(
        s
        for s in {*BATCH_SIZES, settings.expected_batch_size}
        if least <= s <= max(least, smallest)
    )
    kinds: tuple[BatchKind, ...] = ("poisson", "disjoint")
    options: list[Option] = []
    for kind in kinds:
        if settings.batches not in (kind, "auto"):
            continue
        if kind == "disjoint" and settings.for_poisson_only:
            continue
        fitting = []
        for s in sizes:
            chosen = settings.model_copy(update={"batches": kind, "batch_size": s})
            texts = wanted if kind == "poisson" else None
            plan = PrivatePredictionPlan(config, data.proportions, chosen, 1, template, texts)
            if config.engine.kind != "vllm" or plan.usual_rows <= config.engine.max_num_seqs:
                fitting.append(s)
        if fitting:
            options.append((kind, fitting))
    if not options:
        raise InputError(f"method.batch_size: no batches of {least} records or more fit the engine")
    return options


def propose(
    config: Config,
    settings: PrivatePredictionSettings,
    template: PromptTemplate,
    grid: Sequence[Setting],
    options: Sequence[Option],
    wanted: int,
    on_progress: OnProgress = lambda progress: None,
) -> tuple[list[Setting], Setting | None]:
    """Return the grid with the texts that were counted, and the best setting that affords the
    wanted number, with the smallest batches that do: they cost the fewest prompts.

    `grid` is sorted, best first. A setting that is as dear as one that failed is not counted, so
    few are; larger batches afford more, so the largest decide.
    """
    found, dearest = list(grid), math.inf
    for place, setting in enumerate(grid):
        if setting.gain <= 0:
            break
        if setting.price >= dearest:
            continue
        pair = f"c {setting.clip_bound:g}, tau {setting.temperature:g}"
        on_progress(Progress("counting texts", place, len(grid), pair))
        count = partial(_counted, config, settings, template, setting)
        found[place] = _smallest(count, options, wanted)
        if found[place].affordable >= wanted:
            return found, found[place]
        dearest = setting.price
    counted = [setting for setting in found if setting.texts is not None]
    return found, max(counted, key=lambda setting: setting.affordable, default=None)


def _smallest(
    count: Callable[[BatchKind, int], Setting], options: Sequence[Option], wanted: int
) -> Setting:
    """Return the setting with the smallest batches that afford the wanted number of texts, or,
    where the largest of no kind do, with those that afford the most."""
    largest = []
    for kind, sizes in options:
        largest.append(count(kind, sizes[-1]))
        if largest[-1].affordable >= wanted:
            smaller = (count(kind, s) for s in sizes[:-1])
            return next((each for each in smaller if each.affordable >= wanted), largest[-1])
    return max(largest, key=lambda setting: setting.affordable)


def _counted(
    config: Config,
    settings: PrivatePredictionSettings,
    template: PromptTemplate,
    setting: Setting,
    batches: BatchKind,
    batch_size: int,
) -> Setting:
    """Return the setting with these batches and the number of texts that epsilon affords."""
    setting = replace(setting, batches=batches, batch_size=batch_size)
    changes = {
        "batches": batches,
        "batch_size": batch_size,
        "clip_bound": setting.clip_bound,
        "temperature": setting.temperature,
        "texts": None,
        "max_records": None,
    }
    try:
        plan = choose_batches(config, settings.model_copy(update=changes), template)
    except InputError:  # not one text
        return replace(setting, texts=0)
    within = plan.cost.epsilon <= config.privacy.epsilon
    return replace(setting, texts=plan.whole_texts if within else 0)
