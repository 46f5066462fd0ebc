"""Products in float32 are of float32 numbers wherever private rows are computed."""

from __future__ import annotations

from dpray.extras import torch


def without_tf32() -> None:
    """Keep all bits of the factors of float32 products, in this process. The images of NVIDIA let
    a GPU round them to 10 bits (TF32), which moves a row's logits by more than is claimed."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
