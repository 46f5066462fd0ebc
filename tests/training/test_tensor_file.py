"""A file that is written tensor by tensor is read by safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dpray.training.journal import write_tensors

TENSORS = {"weights/b": torch.arange(6.0).view(2, 3).T, "a": torch.tensor(7.0), "0": torch.ones(5)}
SHAPES = {name: tensor.shape for name, tensor in TENSORS.items()}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    write_tensors(path, SHAPES, iter(TENSORS.items()), {"steps": "3"})
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"steps": "3"} and set(file.keys()) == set(TENSORS)
        assert all((file.get_tensor(name) == tensor).all() for name, tensor in TENSORS.items())
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "given",
    [
        {name: TENSORS[name] for name in ("a", "weights/b", "0")},
        {"weights/b": TENSORS["weights/b"]},
        TENSORS | {"a": torch.tensor(7)},
        TENSORS | {"0": torch.ones(4)},
    ],
    ids=["another order", "too few", "another type", "another shape"],
)
def test_other_tensors_make_no_file(given: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    with pytest.raises(ValueError):
        write_tensors(path, SHAPES, iter(given.items()), {})
    assert not path.exists()
