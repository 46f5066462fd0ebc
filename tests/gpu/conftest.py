"""The figures that these tests measure are printed with the name of the GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def gpu() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.cuda.get_device_name()


@pytest.fixture
def show(capfd: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print a line that is seen although the test passes."""

    def line(text: str) -> None:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        with capfd.disabled():
            print(f"\n{name}: {text}")

    return line
