"""A hub of models and data sets is asked once, with a deadline, whether it has one: the libraries
that load them ask a hub that does not answer again and again, for minutes. `upload_dataset` puts
files there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import huggingface_hub
from huggingface_hub import constants

from dpray.extras import Late
from dpray.io.files import read_json
from dpray.types import InputError, Json

errors = Late("huggingface_hub.errors")
"""They import an HTTP client, and the hub is asked for few models."""

PATIENCE = 8.0
"""Seconds in which the hub has to answer."""


REFUSALS = {
    "GatedRepoError": "gives it only to those who accepted its terms (HF_TOKEN)",
    "RepositoryNotFoundError": "has none of this name, or hides it (HF_TOKEN)",
    "HFValidationError": "has none of this name",
    "OfflineModeIsEnabled": "is not asked (HF_HUB_OFFLINE)",
}
"""The meanings of the errors of `huggingface_hub`."""

_OWNER_AND_NAME = re.compile(r"(?!.*(?:--|\.\.))\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)

PUSH = "--push-to-hub"

UPLOAD_REFUSALS = {
    400: "does not take this name, or the licence: --license is a name such as cc-by-4.0",
    401: "does not know the token; set HF_TOKEN",
    403: "does not let the owner of the token write there",
    404: "has no owner of this name, or hides it from the owner of the token",
    409: "has it already, and hides it from the owner of the token",
}
"""The meanings of a hub's answers to an upload, by status. `huggingface_hub`'s own messages may
hold a request with its token, and are not shown."""


@cache
def find_on_hub(name: str, key: str) -> str:
    """Return `name` if the hub has a model of this name. If it has none, or does not answer within
    `PATIENCE` seconds, return the folder of a copy that was downloaded before. A process asks once
    for each name.

    Raises InputError that names `key` if there is no copy either.
    """
    if (refusal := _refusal(name, "model")) is None:
        return name
    try:
        return huggingface_hub.snapshot_download(name, local_files_only=True)
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        instead = "give a local folder"
        if key == "engine.model":
            instead += ", or smollm2, whose weights come with a package"
        raise InputError(
            f"{key}: {name} is not on this machine, and the hub {_shown(constants.ENDPOINT)} "
            f"{refusal}; {instead}"
        ) from None


@cache
def files_of_model(name: str) -> tuple[dict[str, int], Json] | None:
    """Return the sizes of the files of a hub's model, by name, and its config.json, without the
    weights. None if the hub does not tell within `PATIENCE` seconds. A process asks once for each
    name."""
    try:
        api = huggingface_hub.HfApi(constants.ENDPOINT)
        found = api.model_info(name, files_metadata=True, timeout=PATIENCE).siblings or ()
        with TemporaryDirectory() as folder:  # in the cache it would pass for a model's copy
            file = api.hf_hub_download(name, "config.json", local_dir=folder, etag_timeout=PATIENCE)
            return {each.rfilename: each.size or 0 for each in found}, read_json(Path(file))
    except Exception:  # whatever it is: the engine, which loads the model, says so
        return None


@cache
def check_dataset(path: str) -> None:
    """Raise InputError if the hub does not have the data set of `hf://name#split`, or does not
    answer within `PATIENCE` seconds."""
    name = path.removeprefix("hf://").partition("#")[0]
    if (refusal := _refusal(name, "dataset")) is not None:
        raise InputError(
            f"{path}: the hub {_shown(constants.ENDPOINT)} {refusal}; download it, and give its "
            "folder"
        )


def _shown(endpoint: str) -> str:
    """Return a hub's address without the user and the password that it may have."""
    return re.sub(r"//[^/]*@", "//", endpoint)


def _refusal(name: str, kind: str) -> str | None:
    """Look up one file. Return None if the hub has the model or data set, or else the reason."""
    file = "config.json" if kind == "model" else "README.md"
    try:
        url = huggingface_hub.hf_hub_url(name, file, repo_type=kind)
        huggingface_hub.get_hf_file_metadata(url, timeout=PATIENCE)
    except errors.RemoteEntryNotFoundError:
        return None  # it has the model without this file; loading it says what is missing
    except Exception as error:
        response = getattr(error, "response", None)
        other = "cannot be reached" if response is None else f"answers with {response.status_code}"
        return REFUSALS.get(type(error).__name__, other)
    return None


def check_dataset_name(name: str) -> None:
    """Raise InputError if `name` is not `OWNER/NAME` as hubs write it. The message does not repeat
    it: it may be a token, given in the wrong place."""
    if not _OWNER_AND_NAME.fullmatch(name):
        raise InputError(
            f"{PUSH}: give OWNER/NAME, each of at most 96 letters a to z, digits, '-', '_' and '.'"
        )


def upload_dataset(
    folder: Path,
    files: Sequence[str],
    name: str,
    *,
    public: bool,
    patterns: Sequence[str],
) -> str:
    """Upload `files` of a folder to a hub's data set `name` (`owner/name`) in one commit, and
    return its address. A new data set is for its owner only, unless `public`. Of the files there,
    those that fit `patterns` and are not in `files` are removed: they are of an earlier upload.

    The token is that of `huggingface_hub`: HF_TOKEN, or the one of `hf auth login`.

    Raises InputError if there is no token or the hub refuses it; if the hub does not answer within
    `PATIENCE` seconds; and for a data set that is there and is not as `public` says, or has a
    README.md of somebody else.
    """
    endpoint = constants.ENDPOINT
    try:
        if (token := huggingface_hub.get_token()) is None:
            raise InputError(f"{PUSH}: there is no token; set HF_TOKEN, or call hf auth login")
        api = huggingface_hub.HfApi(endpoint, token=token)
        there = _files_there(api, name, public)
        old = [each for each in there if any(fnmatchcase(each, fits) for fits in patterns)]
        api.create_commit(
            name,
            [
                *(huggingface_hub.CommitOperationDelete(each) for each in old if each not in files),
                *(
                    huggingface_hub.CommitOperationAdd(each, folder.absolute() / each)
                    for each in files
                ),
            ],
            commit_message="Release of dpray",
            repo_type="dataset",
        )
    except InputError:
        raise
    except Exception as error:
        reason = _upload_refusal(error)
        raise InputError(f"{PUSH}: the hub {_shown(endpoint)} {reason}") from None
    return f"{_shown(endpoint)}/datasets/{name}"


def _files_there(api: huggingface_hub.HfApi, name: str, public: bool) -> list[str]:
    """Return the names of the files of a hub's data set, which is made if it is not there."""
    try:
        found = api.dataset_info(name, timeout=PATIENCE)
    except errors.RepositoryNotFoundError:
        api.create_repo(name, repo_type="dataset", private=not public)
        return []
    if bool(found.private) is public:
        there, instead = ("private", "without") if public else ("public", "with")
        raise InputError(
            f"{PUSH}: {name} is there already and {there}: change that on the hub, or call this "
            f"{instead} --public"
        )
    files = [each.rfilename for each in found.siblings or ()]
    if "README.md" in files and "dpray" not in (found.tags or ()):
        raise InputError(f"{PUSH}: {name} has a README.md that is not from dpray card")
    return files


def _upload_refusal(error: Exception) -> str:
    """Return the reason why an upload failed, without the words of the error."""
    for each in (error, error.__cause__):
        if (response := getattr(each, "response", None)) is not None:
            status = response.status_code
            return UPLOAD_REFUSALS.get(status, f"answers with {status}")
    name = type(error).__name__
    return REFUSALS.get(name, f"cannot be reached, or the upload broke off ({name})")
