"""Models that are made of other files are kept whole, once, and for their owner alone."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dpray.engines.model_cache import made_once


def test_what_fails_leaves_no_folder(tmp_path: Path) -> None:
    def stopped(folder: Path) -> None:
        (folder / "model.safetensors").touch()
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        made_once("model", stopped, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


def test_of_several_one_makes_it_and_nobody_sees_a_part(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        print("saved")
        (folder / "config.json").touch()
        time.sleep(0.2)
        (folder / "weights").touch()

    def ask(_: int) -> set[str]:
        return {path.name for path in made_once("model", make, tmp_path).iterdir()}

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [{"config.json", "weights"}] * 4
    assert len(made) == 1
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o700
    out, err = capfd.readouterr()
    assert out == "" and "saved" in err
