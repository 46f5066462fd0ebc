"""`write_card` describes a release for those who get it: a dataset card, which Hugging Face's
`datasets` and hub read, Croissant metadata, and a sheet for the questions of NIST SP 800-226.

All three are made of files that may be released: the privacy report, the synthetic records and
their table. `share` uploads them to a hub of data sets, and nothing that is private.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import DatasetCardData

from dpray.evaluation.personal_data import LIMITS, find_patterns, matches_in_words
from dpray.extras import is_installed
from dpray.io.columns import cut_share
from dpray.io.files import sha256_of, write_durably
from dpray.io.hub import PUSH, check_dataset_name, upload_dataset
from dpray.io.languages import code_of
from dpray.io.records import read_rows
from dpray.mechanisms.term_matcher import count_words
from dpray.report.answers import Answers, answers_of
from dpray.report.page import PAGE, templates, write_report
from dpray.runs.folder import MODEL, RECORDS, TABLES
from dpray.runs.privacy_report import REPORT, PrivacyReport, read_report
from dpray.types import InputError, did_you_mean, valid_unicode

HUB = """
afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0
cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0
cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0
cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0 cdla-sharing-1.0
creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 gemma gfdl
gpl gpl-2.0 gpl-3.0 isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 lppl-1.3c mit mpl-2.0 ms-pl ncsa
odbl odc-by ofl-1.1 openrail openrail++ osl-3.0 other pddl postgresql unknown unlicense wtfpl zlib
"""
LICENSES = HUB.split()
"""The licences that a hub of data sets knows."""

SPDX = {
    **{f"{name}-1.0": name for name in ("c-uda", "odbl", "odc-by", "pddl")},
    "lgpllr": "lgpl-lr",
}
"""Identifiers of SPDX that the hub shortens. It writes all others in small letters, and the GPLs
without what SPDX says of later versions."""


def hub_license(given: str) -> str:
    """Return the hub's name of a licence, or raise InputError that names near ones."""
    plain = re.sub(r"[\s_]+", "-", given.strip().lower())
    short = re.sub(r"-only$|-or-later$|(?<=\d)\+$", "", plain)
    found = SPDX.get(short, short)
    if found in LICENSES:
        return found
    begun = [name for name in LICENSES if plain and name.startswith(plain)]
    near = f" (one of {', '.join(begun)}?)" if begun else did_you_mean(plain, LICENSES)
    raise InputError(f"--license: the hub has no licence of this name{near}; `other` is any other")


CARD, CROISSANT, SHEET = "README.md", "croissant.json", "nist_sp_800_226.html"

TABLE_ROWS, TABLE = TABLES

FIELDS = {
    "text": "the synthetic text",
    "label": "the label that the text was made for",
    "control": "the values of the control columns that the text was made for",
    "terms": "the terms that the text was made of, or for",
    "batch": "the batch of private records that the text was drawn with",
    "finish_reason": "`stop` if the text ended by itself, or by the public prompt alone; `length` "
    "if it was cut or closed",
    "tokens": "the number of tokens that were drawn for the text",
    "iteration": "the iteration in which the text was made",
}
"""The fields that a synthetic record may have."""

CROISSANT_TYPES = (
    (pa.types.is_boolean, "sc:Boolean"),
    (pa.types.is_integer, "sc:Integer"),
    (pa.types.is_floating, "sc:Float"),
    (pa.types.is_date, "sc:Date"),
    (pa.types.is_string, "sc:Text"),
)
"""Croissant's names of Arrow's types."""

CROISSANT_TERMS = """
citeAs column equivalentProperty extract field fileProperty fileObject fileSet format includes
isLiveDataset jsonPath key md5 parentField path recordSet references regex repeated replace
samplingRate separator source subField transform
"""

CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "conformsTo": "dct:conformsTo",
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    **{key: {"@id": f"cr:{key}", "@type": "@json"} for key in ("data", "examples")},
    **{key: f"cr:{key}" for key in CROISSANT_TERMS.split()},
}
"""The context of Croissant 1.0, which every file of metadata begins with."""

OF_MODEL = tuple(
    f"{MODEL}/*{ending}" for ending in (".safetensors", ".json", ".jinja", ".model", ".txt")
)
"""Patterns of the files that `save_pretrained` writes of a model and its tokenizer. Of the files
that fit, those are uploaded that the report names."""

RELEASED = (RECORDS, *TABLES, REPORT, PAGE, CARD, CROISSANT, SHEET, *OF_MODEL)
"""Patterns of the files that are uploaded. Nothing else in a run's folder ever is."""


@dataclass(frozen=True)
class PublicRelease:
    """The public files of a finished run."""

    folder: Path
    report: PrivacyReport
    name: str
    license: str

    @staticmethod
    def of(folder: Path, name: str | None, license: str) -> PublicRelease:
        """Raises InputError if the folder is not that of a finished run, or if the run was not
        private."""
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder")
        report = read_report(folder / REPORT)
        if report.not_private:
            raise InputError(
                f"{folder}: this run is not private, and nothing of it may be released"
            )
        known = folder.name if report.ledger is None else report.ledger.dataset
        return PublicRelease(folder, report, name or known, license)

    @property
    def has_table(self) -> bool:
        return (self.folder / TABLE).exists()

    @property
    def has_model(self) -> bool:
        return has_model(self.folder)

    @property
    def language(self) -> str | None:
        """Return the words of data.language."""
        found = self.report.public_inputs.get("language")
        return found if isinstance(found, str) else None

    @cached_property
    def answers(self) -> Answers:
        return answers_of(self.report)

    @cached_property
    def rows(self) -> list[dict[str, object]]:
        return [row for _, row in read_rows(str(self.folder / RECORDS))]


def has_model(run_dir: Path) -> bool:
    """Return whether the folder `model` is of this release, by its report; it may be another's."""
    reports = [run_dir / folder / REPORT for folder in (MODEL, "")]
    if not all(path.is_file() for path in reports):
        return False
    of_model, of_release = (path.read_bytes() for path in reports)
    return of_model == of_release


def license_there(run_dir: Path) -> str:
    """Return the licence on the card that is there, `unknown` without one."""
    card = run_dir / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    found = re.search(r"^license: ([\w.+-]+)$", text.partition("\n---\n")[0], re.MULTILINE)
    return found[1] if found else "unknown"


def write_card(run_dir: Path, name: str | None, license: str | None) -> list[Path]:
    """Write the card, the metadata and the sheet into the run's folder; return their paths. `name`
    is the data set's, or null for the one in the ledger; `license` is one for `hub_license`, or
    null for the one on the card that is there.

    Raises InputError as `PublicRelease.of` and `hub_license` do, and for a README.md that somebody
    else wrote."""
    card = run_dir / CARD
    stated = license_there(run_dir) if license is None else hub_license(license)
    release = PublicRelease.of(run_dir, name, stated)
    if card.exists() and "\n- dpray\n" not in card.read_text(encoding="utf-8", errors="replace"):
        raise InputError(f"{card}: this file is not from dpray card; move it first")
    contents = {
        CARD: dataset_card(release),
        CROISSANT: json.dumps(croissant(release), indent=2, ensure_ascii=False) + "\n",
        SHEET: privacy_sheet(release),
    }
    for file, content in contents.items():
        write_durably(run_dir / file, valid_unicode(content))
    return [run_dir / file for file in contents]


def privacy_sheet(release: PublicRelease) -> str:
    """Return the sheet for the questions of NIST SP 800-226 as one HTML page."""
    template = templates().get_template("nist.html.j2")
    return template.render(answers=release.answers, name=release.name)


def dataset_card(release: PublicRelease) -> str:
    """Return Markdown with the header that the hub and `datasets.load_dataset` read."""
    configs = [{"config_name": "records", "data_files": RECORDS, "default": True}]
    if release.has_table:
        # `datasets` reads all configurations of a folder by one builder, here that of JSON.
        configs.append({"config_name": "table", "data_files": TABLE_ROWS})
    header = DatasetCardData(
        pretty_name=release.name,
        language=code[:2] if (code := code_of(release.language)) else None,
        license=release.license,
        annotations_creators=["machine-generated"],
        task_categories=["text-generation"],
        tags=["synthetic", "differential-privacy", "dpray"],
        configs=configs,
    )
    counts, words = _figures_of(release.rows)
    names = dict.fromkeys(name for row in release.rows for name in row)
    matches = None
    if is_installed("phonenumbers"):
        found = find_patterns((str(row["text"]) for row in release.rows), release.language)
        matches = "{} ({} texts)".format(*matches_in_words(found))
    return (
        templates()
        .get_template("card.md.j2")
        .render(
            header=header.to_yaml(),
            release=release,
            answers=release.answers,
            fields={name: FIELDS.get(name, "a value of the record") for name in names},
            counts=counts,
            words=words,
            cut=cut_share(release.rows),
            matches=matches,
            limits=LIMITS,
            table=TABLE,
        )
    )


def _figures_of(rows: Sequence[dict[str, object]]) -> tuple[dict[str, int], Mapping[str, float]]:
    """Return the number of records of each label, as JSON, and quantiles of the words of texts."""
    counts: Counter[str] = Counter()
    words = []
    for row in rows:
        words.append(count_words(str(row["text"])))
        counts[json.dumps(row.get("label"), ensure_ascii=False)] += 1
    quantiles = np.quantile(words or [0], (0.1, 0.5, 0.9))
    return dict(counts.most_common()), dict(zip(("10 %", "50 %", "90 %"), quantiles, strict=True))


def croissant(release: PublicRelease) -> dict[str, object]:
    """Return the metadata in the vocabulary of Croissant 1.0 (MLCommons)."""
    files = {RECORDS: "application/jsonlines"}
    sets = [_record_set("records", RECORDS, _schema(release))]
    if release.has_table:
        files[TABLE] = "application/x-parquet"
        sets.append(
            _record_set("table", TABLE, _croissant_types(pq.read_schema(release.folder / TABLE)))
        )
    report = release.report
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "name": release.name,
        "description": f"{report.records} synthetic records, differentially private: "
        f"{release.answers.guarantee}, unit: {report.privacy_unit}.",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "license": release.license,
        "datePublished": datetime.now(UTC).date().isoformat(),
        "version": "1.0.0",
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": name,
                "name": name,
                "contentUrl": name,
                "encodingFormat": kind,
                "sha256": sha256_of(release.folder / name),
            }
            for name, kind in files.items()
        ],
        "recordSet": sets,
    }


Columns = Mapping[str, tuple[str, bool]]
"""By name: Croissant's type of a column, and whether a cell is a list of such values."""


def _record_set(name: str, file: str, columns: Columns) -> dict[str, object]:
    return {
        "@type": "cr:RecordSet",
        "@id": name,
        "name": name,
        "field": [
            {
                "@type": "cr:Field",
                "@id": f"{name}/{column}",
                "name": column,
                "dataType": kind,
                "source": {"fileObject": {"@id": file}, "extract": {"column": column}},
            }
            | ({"repeated": True} if is_list else {})
            for column, (kind, is_list) in columns.items()
        ],
    }


def _schema(release: PublicRelease) -> Columns:
    """Return the columns of the records; one with values of several types is text."""
    values: dict[str, list[object]] = {}
    for row in release.rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    found: dict[str, tuple[str, bool]] = {}
    for name, of_column in values.items():
        try:
            found |= _croissant_types(pa.schema([(name, pa.array(of_column).type)]))
        except (pa.ArrowException, UnicodeError):
            found[name] = ("sc:Text", False)
    return found


def _croissant_types(schema: pa.Schema) -> dict[str, tuple[str, bool]]:
    """Return the columns that Croissant has a type for: none with fields of their own."""
    found = {}
    for column in schema:
        is_list = pa.types.is_list(column.type)
        inner = column.type.value_type if is_list else column.type
        kind = next((kind for is_kind, kind in CROISSANT_TYPES if is_kind(inner)), None)
        if pa.types.is_null(inner):
            kind = "sc:Text"
        if kind is not None:
            found[column.name] = (kind, is_list)
    return found


def share(
    run_dir: Path,
    repository: str,
    *,
    name: str | None = None,
    license: str | None = None,
    public: bool = False,
) -> tuple[list[Path], str]:
    """Write the card of a release as `write_card` does, and upload the release to the hub's data
    set `repository` (`owner/name`), for its owner only unless `public`. Return the paths of the
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
        named = read_report(run_dir / REPORT).model or {}
        of_model = {run_dir / MODEL / name for name in (REPORT, *named)}
    files = (path for path in found if path.parent == run_dir or path in of_model)
    return [path.relative_to(run_dir).as_posix() for path in files if path.is_file()]
