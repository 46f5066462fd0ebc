"""Damaged and hostile files of a model's folder: one plain error, no code that runs."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from dpray.engines.base import EngineError
from dpray.engines.model_path import resolve_model
from dpray.engines.passes import load_model
from dpray.engines.text import TextCodec
from dpray.types import InputError
from tests.engines.test_adapters import renamed, with_adapters

BRACKETS = b"[" * 100_000


def tensors(content: bytes, **changes: Any) -> bytes:
    """Return a safetensors file whose first tensor has another header."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    first, second, *_ = (name for name in header if name != "__metadata__")
    if changes.pop("overlap", False):
        changes["data_offsets"] = header[second]["data_offsets"]
    header[first] |= changes
    written = json.dumps(header).encode()
    return struct.pack("<Q", len(written)) + written + content[8 + length :]


PICKLE = b"\x80\x04cos\nsystem\n(S'touch ran'\ntR."

WEIGHTS = {
    "a header of 2^63 bytes": lambda whole: struct.pack("<Q", 2**63) + whole[8:],
    "a header of 2^40 bytes": lambda whole: struct.pack("<Q", 2**40) + whole[8:],
    "overlapping places": lambda whole: tensors(whole, overlap=True),
    "a place beyond the end": lambda whole: tensors(whole, data_offsets=[0, 2**60]),
    "a place that ends first": lambda whole: tensors(whole, data_offsets=[900, 0]),
    "a shape of 2^80": lambda whole: tensors(whole, shape=[2**40, 2**40]),
    "an unknown type": lambda whole: tensors(whole, dtype="X9"),
    "brackets": lambda whole: struct.pack("<Q", len(BRACKETS)) + BRACKETS,
    "half a file": lambda whole: whole[: len(whole) // 2],
    "nothing": lambda whole: b"",
    "a pickle": lambda whole: PICKLE,
}


def refused(load: Any, folder: Path) -> None:
    why = (
        r"cannot (load|read) ?.*\(\w+\)$|holds weights in another shape than its configuration says"
    )
    with pytest.raises((EngineError, InputError), match=why) as error:
        load(str(folder))
    assert str(error.value).isprintable() and len(str(error.value)) < 500


def a_model(folder: str) -> Any:
    return load_model(folder, "float32", torch.device("cpu"))


def a_codec(folder: str) -> TextCodec:
    return TextCodec(folder, None)


@pytest.fixture
def folder(tmp_path: Path, model_folder: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(model_folder, tmp_path / "model")


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(folder: Path, name: str) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(WEIGHTS[name](file.read_bytes()))
    refused(a_model, folder)
    assert not Path("ran").exists()


WHOLE: dict[str, bytes] = {
    "brackets": BRACKETS,
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "no UTF-8": b"\xff\xfe\0",
    "a pickle": PICKLE,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "10^12 words": {"vocab_size": 10**12},
    "a negative size": {"vocab_size": -5},
    "no width": {"hidden_size": 0},
    "a word for a number": {"hidden_size": "x"},
    "a path for a type": {"model_type": "../../x"},
    "a function for a function": {"hidden_act": "__import__"},
}


@pytest.mark.parametrize("content", WHOLE.values(), ids=WHOLE)
def test_no_configuration_and_no_tokenizer(folder: Path, content: bytes) -> None:
    for name, loads in {"config.json": [a_model, a_codec], "tokenizer.json": [a_codec]}.items():
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        for load in loads:
            refused(load, folder)
        (folder / name).write_bytes(whole)
    a_codec(str(folder))
    assert not Path("ran").exists()


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_that_is_no_models(folder: Path, changes: dict[str, Any]) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    refused(a_model, folder)


TOKENIZERS: dict[str, dict[str, Any]] = {
    "an unknown kind": {"model": {"type": "X"}},
    "a wrong pattern": {
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False,
        }
    },
    "a negative word": {"model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}},
    "a word of 2^70": {"model": {"type": "WordLevel", "vocab": {"a": 2**70}, "unk_token": "a"}},
}  # fmt: skip


@pytest.mark.parametrize("changes", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_tokenizer_that_is_none(folder: Path, changes: dict[str, Any]) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(values | changes))
    refused(a_codec, folder)


@pytest.mark.parametrize("base", ["../../../../../../etc", "../../secret", "/etc/passwd"])
def test_adapters_that_name_another_place(model_folder: str, tmp_path: Path, base: str) -> None:
    """They may name any folder as their model: one without a model is refused, and not shown."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text('{"Marlowe": 1}')
    adapters = renamed(with_adapters(model_folder, tmp_path / "a" / "adapters"), base)
    with pytest.raises(InputError, match=r"^engine\.model: ") as error:
        resolve_model(str(adapters))
    assert str(error.value).isprintable() and "Marlowe" not in str(error.value)
