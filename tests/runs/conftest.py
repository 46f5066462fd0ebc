"""Fixtures for runs by DP-KPS, which runs two mechanisms and needs no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpray.config.config import Config
from dpray.methods import registry as methods
from dpray.methods.config import parse_config
from dpray.methods.dp_kps import release as dp_kps_run
from dpray.types import Resumable
from tests.integration.processes import small_disk_at


@pytest.fixture
def config(
    settings: Callable[..., dict[str, Any]], sequences: dict[str, Any], url: str
) -> Callable[..., Config]:
    """Make the configuration of a run with changes, on each of the databases."""
    fixed = sequences | {"privacy__ledger": url}
    return lambda **changes: parse_config(settings(**fixed | changes))


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stop a run when it comes to what `dp_kps_run.name` does; do `also` before."""

    def arm(run: Config, name: str, also: Callable[[], Any] = lambda: None) -> None:
        def stop(*_: Any, **__: Any) -> None:
            also()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(dp_kps_run, name, stop)
            with pytest.raises(Resumable):
                methods.run(run)

    return arm


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_at(tmp_path / "disk", "1m") as mounted:
        if not mounted:
            pytest.skip("this process may not mount a small disk")
        yield tmp_path / "disk"
