"""Canaries: rank and exposure by hand; secrets that differ."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpray.evaluation.canaries import REPETITIONS, SECRETS, look_alikes, make_canaries, ranked
from dpray.mechanisms.randomness import generator, new_key
from dpray.report.pictures import canaries_svg
from tests.integration.processes import wait_for


@pytest.mark.parametrize(("loss", "rank"), [(0.5, 1.0), (2.5, 3.0), (3.0, 4.0), (9.0, 6.0)])
def test_rank_counts_those_of_lower_loss_and_ties_by_half(loss: float, rank: float) -> None:
    found = ranked([loss, 1.0, 2.0, 3.0, 3.0, 5.0])
    looks = found.pop("look_alikes")
    assert found.pop("perplexity") == pytest.approx(math.exp(loss))
    assert found == {"rank": rank, "candidates": 6, "exposure": math.log2(6 / rank)}
    assert len(looks) == 21 and looks == sorted(looks)
    assert looks[0] == pytest.approx(math.e) and looks[10] == pytest.approx(math.exp(3))


def test_losses_of_a_ruined_model_have_perplexities_that_json_holds() -> None:
    found = ranked([math.nan, 1.0, 2e4, math.nan, math.inf])
    assert found["rank"] == 3.5
    numbers = [found["perplexity"], *found["look_alikes"]]
    assert max(json.loads(json.dumps(numbers, allow_nan=False))) == numbers[0] == math.exp(700)
    svg = canaries_svg([found | {"kind": kind, "repetitions": 1} for kind in ("name", "plate")])
    assert "nan" not in svg and "inf" not in svg


def test_one_of_every_kind_for_each_number_of_repetitions() -> None:
    canaries = make_canaries()
    assert [c.repetitions for c in canaries] == [n for n in REPETITIONS for _ in SECRETS]
    assert len({c.secret for c in canaries}) == len(canaries)
    assert all(c.text.count(c.secret) == 1 for c in canaries)


@pytest.mark.parametrize("kind", SECRETS, ids=lambda kind: kind.name)
def test_look_alikes_differ_from_the_canary_in_the_secret_only(kind: object) -> None:
    rng = generator(new_key())
    canary = next(c for c in make_canaries() if c.kind is kind)
    texts = look_alikes(canary, 2000, rng)
    before, after = canary.kind.sentence.split("{}")
    assert len(set(texts)) == 2000 and canary.text not in texts
    assert all(text.startswith(before) and text.endswith(after) for text in texts)


HELD = """
import sys, time
from pathlib import Path
from dpray.evaluation.canaries import make_canaries, try_canaries
from dpray.methods.config import load_config
from dpray.methods.registry import make_plan, released_losses

def run(config, on_progress):
    token = Path(config.output.path) / "private" / "tokens"
    token.mkdir(parents=True)
    (token / "shard").write_text("Marlowe")
    Path(sys.argv[2]).write_text(Path(config.data.path).read_text())
    time.sleep(600)

plan = make_plan(load_config(sys.argv[1], []))
try_canaries(plan, make_canaries(), 1, run, released_losses)
"""


def test_an_audit_that_is_killed_leaves_no_copy_of_the_records(
    settings: Callable[..., Any],
    sequences: dict[str, Any],
    config_file: Callable[..., str],
    records_file: Path,
    tmp_path: Path,
) -> None:
    temporary, seen = tmp_path / "temporary", tmp_path / "seen"
    temporary.mkdir()
    audit = subprocess.Popen(
        [sys.executable, "-c", HELD, config_file(**sequences), str(seen)],
        env=os.environ | {"TMPDIR": str(temporary)},
        start_new_session=True,
    )
    wait_for(lambda: seen.exists() and bool(seen.read_text()), audit)
    assert seen.read_text().startswith(records_file.read_text()[:20])
    [folder] = temporary.glob("dpray-audit-*")
    copies = [path for path in folder.rglob("*.jsonl") if not path.is_symlink()]
    assert copies == [], "a power cut would leave them"
    os.killpg(audit.pid, signal.SIGKILL)
    audit.wait()
    assert not (folder / "records.jsonl").exists()
    wait_for(lambda: not folder.exists())
