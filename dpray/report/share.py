"""`share` uploads a release to a hub of data sets, with its card and nothing that is private."""

from __future__ import annotations

from pathlib import Path

from dpray.io.files import read_json
from dpray.io.hub import PUSH, check_dataset_name, upload_dataset
from dpray.report.card import (
    CARD,
    CROISSANT,
    RECORDS,
    REPORT,
    SHEET,
    has_model,
    license_there,
    write_card,
)
from dpray.report.licenses import hub_license
from dpray.report.page import PAGE, write_report
from dpray.runs.folder import MODEL, TABLES
from dpray.types import InputError

OF_MODEL = tuple(
    f"{MODEL}/*{ending}" for ending in (".safetensors", ".json", ".jinja", ".model", ".txt")
)
"""Patterns of the files that `save_pretrained` writes of a model and its tokenizer. Of the files
that fit, those are uploaded that the report names."""

RELEASED = (RECORDS, *TABLES, REPORT, PAGE, CARD, CROISSANT, SHEET, *OF_MODEL)
"""Patterns of the files that are uploaded. Nothing else in a run's folder ever is."""


def share(
    run_dir: Path,
    repository: str,
    *,
    name: str | None = None,
    license: str | None = None,
    public: bool = False,
    endpoint: str | None = None,
) -> tuple[list[Path], str]:
    """Write the card of a release as `write_card` does, and upload the release to the hub's data
    set `repository` (`owner/name`), for its owner alone unless `public`. Return the paths of the
    card's files and the address on the hub.

    Raises InputError as `write_card` and `upload_dataset` do, for a public release without a
    licence, and for a link among the released files: what it leads to may be private.
    """
    check_dataset_name(repository)
    released_files(run_dir)  # before a file behind a link is read
    stated = license_there(run_dir) if license is None else hub_license(license)
    if public and stated == "unknown":
        raise InputError(f"--license: {PUSH} with --public needs a licence, such as cc-by-4.0")
    paths = write_card(run_dir, name, license)
    # The page that an older version of dpray left there may have private figures.
    write_report(run_dir, public=True)
    url = upload_dataset(
        run_dir,
        released_files(run_dir),
        repository,
        public=public,
        patterns=RELEASED,
        endpoint=endpoint,
    )
    return paths, url


def released_files(run_dir: Path) -> list[str]:
    """Return the files of a release by their paths in the run's folder, of its model those that the
    report names: others may have been put there. Raises InputError for a link among them."""
    found = [path for pattern in RELEASED for path in sorted(run_dir.glob(pattern))]
    for path in (run_dir / MODEL, *found):
        if path.is_symlink():
            raise InputError(f"{path}: a link is not uploaded; put the file itself there")
    of_model: set[Path] = set()
    if has_model(run_dir):
        named = read_json(run_dir / REPORT).get("model") or {}
        of_model = {run_dir / MODEL / name for name in (REPORT, *named)}
    files = (path for path in found if path.parent == run_dir or path in of_model)
    return [path.relative_to(run_dir).as_posix() for path in files if path.is_file()]
