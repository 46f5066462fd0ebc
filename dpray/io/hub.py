"""A hub of models and data sets is asked once, with a deadline, whether it has one: the libraries
that load them ask a hub that does not answer again and again, for minutes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from dpray.types import InputError

PATIENCE = 8.0
"""Seconds in which the hub has to answer."""


REFUSALS = {
    "GatedRepoError": "gives it only to those who accepted its terms (HF_TOKEN)",
    "RepositoryNotFoundError": "has none of this name, or hides it (HF_TOKEN)",
    "HFValidationError": "has none of this name",
    "OfflineModeIsEnabled": "is not asked (HF_HUB_OFFLINE)",
}
"""The meanings of the errors of `huggingface_hub`."""


@cache
def find_on_hub(
    name: str,
    key: str,
    *,
    endpoint: str | None = None,
    downloads: Path | None = None,
    patience: float = PATIENCE,
) -> str:
    """Return `name` if the hub has a model of this name. If it has none, or does not answer within
    `patience` seconds, return the folder of a copy that was downloaded before. A process asks once
    for each name.

    Raises InputError that names `key` if there is no copy either.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    endpoint = endpoint or constants.ENDPOINT
    if (refusal := _refusal(name, "model", endpoint, patience)) is None:
        return name
    try:
        return snapshot_download(name, cache_dir=downloads, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        instead = "give a local folder"
        if key == "engine.model":
            instead += ", or smollm2, whose weights come with a package"
        raise InputError(
            f"{key}: {name} is not on this machine, and the hub {endpoint} {refusal}; {instead}"
        ) from None


@cache
def check_dataset(path: str, endpoint: str | None = None, patience: float = PATIENCE) -> None:
    """Raise InputError if the hub does not have the data set of `hf://name#split`, or does not
    answer within `patience` seconds."""
    from huggingface_hub import constants

    endpoint = endpoint or constants.ENDPOINT
    name = path.removeprefix("hf://").partition("#")[0]
    if (refusal := _refusal(name, "dataset", endpoint, patience)) is not None:
        raise InputError(f"{path}: the hub {endpoint} {refusal}; download it, and give its folder")


def _refusal(name: str, kind: str, endpoint: str, patience: float) -> str | None:
    """Look up one file. Return None if the hub has the model or data set, or else the reason."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    file = "config.json" if kind == "model" else "README.md"
    try:
        url = hf_hub_url(name, file, repo_type=kind, endpoint=endpoint)
        get_hf_file_metadata(url, timeout=patience, endpoint=endpoint)
    except errors.RemoteEntryNotFoundError:
        return None  # it has the model without this file; loading it says what is missing
    except Exception as error:
        response = getattr(error, "response", None)
        other = "cannot be reached" if response is None else f"answers with {response.status_code}"
        return REFUSALS.get(type(error).__name__, other)
    return None
