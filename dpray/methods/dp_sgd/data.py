"""The private records as DP-SGD's units."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path

from dpray.config.config import Config
from dpray.engines.model_path import check_model_path
from dpray.engines.text import TextCodec
from dpray.io.records import list_files
from dpray.methods.dp_sgd.algorithm import TextEncoder, Units
from dpray.methods.dp_sgd.control_codes import ControlCodes
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.runs.engine import with_absolute_model
from dpray.runs.rows import RowsOf, local_rows, record_rows
from dpray.training.clipped_loss import TrainingText


def with_absolute_paths(config: Config) -> Config:
    """For ranks, which have another working directory. What is not here is left as it is: it may be
    on their nodes."""
    data = config.data
    if "://" not in data.path:
        path = str(Path(data.path).expanduser().absolute())
        data = data.model_copy(update={"path": path})
    return config.model_copy(update={"data": data, "engine": with_absolute_model(config.engine)})


def check_rows(config: Config, codes: ControlCodes) -> None:
    """Read every record once, and keep none. Raises InputError that names the row."""
    for file in list_files(config.data.path):
        for _ in _rows_of(config, codes)(file):
            pass


def load_units(config: Config, settings: DpSgdSettings, codes: ControlCodes) -> Units:
    """Every unit's texts with their control codes as token ids, in an order that is the same on
    every rank. Without a unit column each record is a unit, its copies too.

    Raises InputError that names the row.
    """
    codec = TextCodec(check_model_path(config.engine.model), config.engine.max_model_len)
    encoder = TextEncoder(codec.ids, codec.eos_ids[0], settings.max_length, codec.start_id)
    label = config.data.label
    units: defaultdict[str, list[TrainingText]] = defaultdict(list)
    for number, row in enumerate(local_rows(config.data, _rows_of(config, codes))):
        code = codes.code(row["columns"] | ({} if label is None else {label: row["label"]}))
        unit = f"{number}" if config.data.unit is None else row["unit"]
        units[unit].append(encoder.training_text(code, row["text"]))
    return list(units.values())


def _rows_of(config: Config, codes: ControlCodes) -> RowsOf:
    """Rows with the control columns but for the label's."""
    others = {name: codes.values[name] for name in codes.names if name != config.data.label}
    return partial(record_rows, data=config.data, column_values=others)
