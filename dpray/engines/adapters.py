"""A folder with LoRA adapters, such as DP-SGD releases, is a model like any other: it is merged
into the model that it belongs to, once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from dpray.engines.model_cache import made_once
from dpray.io.files import sha256_of
from dpray.types import InputError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def has_adapters(folder: Path) -> bool:
    """Return whether the folder holds adapters of a language model. A folder of
    sentence-transformers may hold some, too, which that package loads itself."""
    return (folder / CONFIG).is_file() and not (folder / "modules.json").is_file()


def tuned_without_noise(model: str) -> bool:
    """Return whether the folder is a model that DP-SGD released in a run that was not private."""
    try:
        report = json.loads((Path(model).expanduser() / "privacy_report.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(report, dict) and report.get("not_private") is True


def base_of(folder: Path, key: str) -> str:
    """Return the name or folder of the model that the adapters belong to.

    Raises InputError, which names `key`, where the folder does not say.
    """
    try:
        base = json.loads((folder / CONFIG).read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise InputError(f"{key}: {folder / CONFIG} names no model that the adapters belong to")
    return base


def merged_folder(folder: Path, base: str, key: str, cache: Path | None = None) -> Path:
    """Return the folder of the merged model, in the user's cache: float32, as a merge in 16 bits
    would round the adapters away. `base` is a folder or a hub's name.

    Raises InputError, which names `key`, where the adapters do not fit the model.
    """
    if not (folder / WEIGHTS).is_file():
        raise InputError(f"{key}: {folder} has adapters without {WEIGHTS}")
    name = f"merged-{identity(folder, base)}"
    return made_once(name, lambda made: merge(folder, base, key, made), cache)


def identity(folder: Path, base: str) -> str:
    """Return a digest of the adapters, byte for byte, and of the name of their model; of a folder
    also of its files' sizes and times."""
    parts = [sha256_of(folder / CONFIG), sha256_of(folder / WEIGHTS), base]
    if Path(base).is_dir():
        found = sorted(path for path in Path(base).iterdir() if path.is_file())
        stats = [(path.name, path.stat()) for path in found]
        parts += [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def merge(folder: Path, base: str, key: str, into: Path) -> None:
    """Write the merged model to `into`, with the adapters' tokenizer, or else the model's."""
    from peft import PeftModel
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
        tokenizer: Any = AutoTokenizer.from_pretrained(folder if has_tokenizer else base)
        merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"{key}: the adapters in {folder} cannot be merged into {base} ({type(error).__name__})"
        ) from None
    merged.save_pretrained(into)
    tokenizer.save_pretrained(into)
