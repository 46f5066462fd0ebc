"""Tensors are written to a safetensors file one after the other: together they may be more than
what a process can hold."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from dpray.io.files import sync


def write_tensors(
    path: Path,
    shapes: Mapping[str, torch.Size],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Write float32 tensors of these names and shapes, which come in this order, durably: a file of
    this name is whole."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * shape.numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), (given, tensor) in zip(shapes.items(), tensors, strict=True):
            if (given, tensor.shape, tensor.dtype) != (name, shape, torch.float32):
                raise ValueError(f"{given} is not the float32 tensor {name} of shape {shape}")
            file.write(tensor.contiguous().numpy().data)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)
