"""A release is read as a list, a data frame, a Ray Dataset or a Dataset of Hugging Face."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dpray.extras import Late, is_installed
from dpray.io.files import read_json
from dpray.types import InputError, Json

if TYPE_CHECKING:
    import datasets
    import pandas as pd
    import pyarrow as pa
    import ray.data

    from dpray.report import card
    from dpray.workers import cluster
else:
    datasets, pd, pa, ray = Late("datasets"), Late("pandas"), Late("pyarrow"), Late("ray")
    card, cluster = Late("dpray.report.card"), Late("dpray.workers.cluster")


@dataclass(frozen=True)
class SyntheticData:
    """The release in a finished run's folder: its records and privacy report.

    synthetic = dpray.SyntheticData("out/run")
    synthetic.records[0], synthetic.report["epsilon"]
    """

    folder: Path
    report: Json = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        object.__setattr__(self, "report", read_json(self.folder / "privacy_report.json"))

    @property
    def path(self) -> Path:
        """Return the file of the records: JSON lines with `text`, `label` and public metadata."""
        return self.folder / "synthetic.jsonl"

    @property
    def records(self) -> list[Json]:
        """Return all records."""
        with open(self.path, encoding="utf-8") as lines:
            return list(map(json.loads, lines))

    def to_pandas(self) -> pd.DataFrame:
        """Return the records as a data frame."""
        return pd.DataFrame(self.records)

    def to_ray(self) -> ray.data.Dataset:
        """Return the records as a Ray Dataset; starts Ray quietly if it does not run. Raises
        InputError for labels of several types."""
        table = pa.Table.from_pylist(self._of_one_type("to_ray"))
        cluster.start_ray(None)
        return ray.data.from_arrow(table)

    def to_datasets(self) -> datasets.Dataset:
        """Return the records as a Dataset of Hugging Face. Raises InputError without `datasets`,
        and for labels of several types."""
        if not is_installed("datasets"):
            raise InputError("to_datasets: needs the package `datasets`")
        return datasets.Dataset.from_list(self._of_one_type("to_datasets"))

    def push_to_hub(
        self,
        repository: str,
        *,
        name: str | None = None,
        license: str | None = None,
        public: bool = False,
    ) -> str:
        """Write the card of the release, as `dpray card` does, and upload both to the data set
        `repository` of a hub. It is private unless `public`. Return its address.

            synthetic.push_to_hub("owner/notes", license="cc-by-4.0")

        Nothing of `private` is uploaded. The token is that of `huggingface_hub` (HF_TOKEN). Raises
        InputError if the hub refuses the upload or cannot be reached.
        """
        return card.share(self.folder, repository, name=name, license=license, public=public)[1]

    def _of_one_type(self, asked: str) -> list[dict[str, object]]:
        """Return the records for an Arrow table. Raises InputError for labels of several types,
        because Arrow would turn false into 0, or 1 into 1.0."""
        records = self.records
        if len({type(record["label"]) for record in records}) > 1:
            raise InputError(
                f"{asked}: the labels have several types, but an Arrow column has one; "
                "`to_pandas` and `records` keep them"
            )
        return records
