"""Canaries through a whole run: inserted into a copy of the records, and looked for in the release.

The run has a folder and a ledger of its own, both gone afterwards: it costs the data set's budget
nothing, so nothing that comes of it may be released.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from dpray import registry as methods
from dpray.audit.canaries import Canary, exposure, leaks, look_alikes, make_canaries, rank
from dpray.config.config import Config
from dpray.io.records import list_files, read_rows
from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.dp_sgd.release import MODEL
from dpray.methods.dp_sgd.released_model import ReleasedModel
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.methods.private_prediction.prompts import load_template
from dpray.types import DprayError, InputError, OnProgress, Progress, Resumable

Values = dict[str, str]
"""Columns of a canary's rows beside its text."""


def try_canaries(
    config: Config, candidates: int, on_progress: OnProgress = lambda progress: None
) -> list[dict[str, Any]]:
    """One entry for each canary: its kind and repetitions, in how many released texts its secret
    stands (`leaks`), and, where the model is released, the secret's rank among `candidates`
    look-alikes and itself and its exposure. Private: computed from a run that nothing paid for.

    A canary that is repeated is as many records, and as many units. Raises InputError where the
    configuration leaves no place for them, DprayError where the run does not finish.
    """
    if candidates < 1:
        raise InputError(f"candidates: {candidates} is no number of look-alikes")
    method = config.method
    if method.name == "private_prediction" and load_template(method.template).private is not None:
        raise InputError("method.template: makes the texts from columns: no place for canaries")
    rng = generator(new_key())
    planted = [(canary, _values(config, rng)) for canary in make_canaries(rng)]
    with TemporaryDirectory(prefix="dpray-audit-") as name:
        folder = Path(name)
        _write_with_canaries(config, planted, folder / "records.jsonl")
        copy = _throwaway(config, folder)
        try:
            methods.run(copy, on_progress)
        except Resumable:
            # What could be gone on from is in the folder, which goes too.
            raise DprayError(
                "canaries: their run did not finish, and nothing of it is kept: the same command "
                "starts anew"
            ) from None
        texts = [row["text"] for _, row in read_rows(str(folder / "run" / "synthetic.jsonl"))]
        found = [
            {
                "kind": canary.kind.name,
                "repetitions": canary.repetitions,
                "leaks": leaks(canary.secret, texts),
            }
            for canary, _ in planted
        ]
        if isinstance(config.method, DpSgdSettings):
            model = ReleasedModel(copy, folder / "run" / MODEL)
            for number, (canary, values) in enumerate(planted):
                on_progress(Progress("look-alikes", number, len(planted)))
                others = look_alikes(canary, candidates, rng)
                own, *losses = model.losses([canary.text, *others], values)
                found[number] |= _ranked(own, np.array(losses))
    return found


def _ranked(own: float, losses: npt.NDArray[np.float64]) -> dict[str, Any]:
    place, candidates = rank(own, losses), len(losses) + 1
    return {"rank": place, "candidates": candidates, "exposure": exposure(place, candidates)}


def _throwaway(config: Config, folder: Path) -> Config:
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"path": str(folder / "records.jsonl")}),
            "privacy": config.privacy.model_copy(
                update={"ledger": f"sqlite:///{folder}/ledger.db"}
            ),
            "output": config.output.model_copy(update={"path": str(folder / "run")}),
        }
    )


def _values(config: Config, rng: np.random.Generator) -> Values:
    """A label and control values, each as likely as any other."""
    data, method = config.data, config.method
    columns: dict[str, Sequence[str]] = {data.label: data.labels} if data.label else {}
    if isinstance(method, DpSgdSettings):
        columns |= {name: tuple(shares) for name, shares in method.control_values.items()}
    return {name: values[int(rng.integers(len(values)))] for name, values in columns.items()}


def _write_with_canaries(
    config: Config, planted: Sequence[tuple[Canary, Values]], path: Path
) -> None:
    """The records in their order, then the canaries; a canary's other columns are a record's."""
    row: dict[str, Any] = {}
    with open(path, "w", encoding="utf-8") as file:
        for source in list_files(config.data.path):
            for _, row in read_rows(source):
                file.write(json.dumps(row, default=str) + "\n")
        for canary_row in _rows(config, planted):
            file.write(json.dumps(row | canary_row, default=str) + "\n")


def _rows(config: Config, planted: Sequence[tuple[Canary, Values]]) -> Iterator[dict[str, Any]]:
    data = config.data
    for number, (canary, values) in enumerate(planted):
        for repetition in range(canary.repetitions):
            unit = {} if data.unit is None else {data.unit: f"canary-{number}-{repetition}"}
            yield {data.text: canary.text} | values | unit
