"""A release is uploaded to a real HTTP server: what arrives, what does not, and every refusal."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import dpray
from dpray.cli import run_command
from dpray.report.card import CARD, CROISSANT, SHEET, share, write_card
from dpray.types import InputError
from tests.conftest import ROOT
from tests.report.hub import NAME, TOKEN, Hub, serving
from tests.report.reports import RUN, a_report

SECRET = "Marlowe has a cough"
TEXTS = {"synthetic.jsonl", "privacy_report.json", "privacy_report.html", CARD, CROISSANT, SHEET}
MODEL = {"model/config.json", "model/model.safetensors", "model/privacy_report.json"}
OF_MODEL = {"model": {"config.json": "0" * 64, "model.safetensors": "0" * 64}}
"""A report names its model's files, with their digests."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run's folder with a table and a model, and what must not leave it."""
    run = tmp_path / "run"
    (run / "private" / "parts").mkdir(parents=True)
    (run / "model" / "checkpoints").mkdir(parents=True)
    files = {
        "privacy_report.json": json.dumps(a_report(**OF_MODEL)),
        "run.json": json.dumps(RUN | {"secret": SECRET}),
        "privacy_report.html": f"PRIVATE, of an older version: {SECRET}",
        "ledger.db": SECRET,
        "notes.jsonl": SECRET,
        "synthetic.jsonl.tmp": SECRET,
        ".env": SECRET,
        "private/synthetic.jsonl": SECRET,
        "private/evaluation.json": SECRET,
        "private/parts/README.md": SECRET,
        "model/checkpoints/state.json": SECRET,
        "model/evaluation.json": SECRET,
        "model/notes": SECRET,
        "model/optimizer.pt": SECRET,
        "model/config.json": "{}",
        "model/privacy_report.json": json.dumps(a_report(**OF_MODEL)),
        "model/model.safetensors": "weights",
    }
    for name, content in files.items():
        (run / name).write_text(content)
    rows = [{"text": f"note {n}", "label": "ab"[n % 2]} for n in range(10)]
    (run / "synthetic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pa.table({"year": [1999, 2001], "cast": [["A"], ["B", "C"]]})
    pq.write_table(table, run / "table.parquet")
    lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    (run / "table.jsonl").write_text(lines)
    return run


@pytest.fixture(autouse=True)
def of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))


def shared(run_dir: Path, hub: Hub | str, repository: str = NAME, **options: Any) -> Any:
    """Share a release by this hub."""
    endpoint = hub if isinstance(hub, str) else hub.url
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        return share(run_dir, repository, **options)


def refusal(run_dir: Path, hub: Hub | str, name: str = NAME, **options: Any) -> str:
    """Return the message of a refused upload, which holds no token."""
    with pytest.raises(InputError) as caught:
        shared(run_dir, hub, name, **options)
    message = str(caught.value)
    assert TOKEN not in message and "\n" not in message
    return message


def test_the_released_files_arrive_and_nothing_else(run_dir: Path, tmp_path: Path) -> None:
    with serving() as hub:
        paths, url = shared(run_dir, hub, license="cc-by-4.0")
    assert url == f"{hub.url}/datasets/{NAME}" and hub.private and hub.commits == 1
    assert paths == [run_dir / name for name in (CARD, CROISSANT, SHEET)]
    table = {"table.jsonl", "table.parquet"}
    assert {*hub.files} == TEXTS | table | MODEL
    for name, content in hub.files.items():
        assert content == (run_dir / name).read_bytes() and SECRET.encode() not in content
    there = tmp_path / "there"
    hub.write_to(there)
    for name, rows in (("records", 10), ("table", 2)):
        loaded = datasets.load_dataset(str(there), name, split="train", cache_dir=tmp_path / "c")
        assert len(loaded) == rows
    header = yaml.safe_load((there / CARD).read_text().split("---\n")[1])
    assert header["license"] == "cc-by-4.0"


def test_a_report_without_versions_has_a_card(run_dir: Path) -> None:
    (run_dir / "privacy_report.json").write_text(json.dumps(a_report(**OF_MODEL, versions={})))
    write_card(run_dir, "notes", "mit")
    assert "(dpray of an unknown version)" in (run_dir / CARD).read_text()


def test_a_second_upload_replaces_the_first_one(run_dir: Path) -> None:
    with serving() as hub:
        shared(run_dir, hub)
        hub.files["LICENSE"] = b"ours"
        for name in ("table.jsonl", "table.parquet", "model/config.json"):
            (run_dir / name).unlink()
        shared(run_dir, hub, name="notes again")
        assert {*hub.files} == TEXTS | MODEL - {"model/config.json"} | {"LICENSE"}
        assert b"notes again" in hub.files[CARD] and b"`model/` is" in hub.files[CARD]
        # A run without a model in the same folder: the model there is of an earlier release.
        (run_dir / "privacy_report.json").write_text(json.dumps(a_report(epsilon=1.0)))
        shared(run_dir, hub)
    assert {*hub.files} == TEXTS | {"LICENSE"} and b"`model/` is" not in hub.files[CARD]


@pytest.mark.parametrize(
    "name",
    [
        "notes", "", "/", "owner/", "/notes", "a/b/c", "../notes", "owner/..", "owner/../x",
        "./notes", "owner/no tes", "owner/notes\n", "öwner/notes", "owner/" + "n" * 97,
        "owner\\notes",
        "https://hub/owner/notes", "owner/notes?x=1", "owner/%2e%2e", TOKEN,
    ],
)  # fmt: skip
def test_a_name_that_is_none_is_refused_before_anything_is_written(
    run_dir: Path, name: str
) -> None:
    with serving() as hub:
        assert refusal(run_dir, hub, name).startswith("--push-to-hub: give OWNER/NAME")
    assert hub.asked == [] and not (run_dir / CARD).exists()


@pytest.mark.parametrize(
    ("refuse", "words"),
    [
        ({"/api/repos/create": 401}, "does not know the token"),
        ({"/api/repos/create": 403}, "does not let the owner of the token write there"),
        ({"/api/repos/create": 404}, "has no owner of this name"),
        ({"/api/repos/create": 409}, "has it already, and hides it"),
        ({"/api/validate-yaml": 400}, "or the licence: --license is a name such as cc-by-4.0"),
        ({"/commit/main": 403}, "does not let the owner of the token write there"),
        ({f"/api/datasets/{NAME}": 500}, "answers with 500"),
    ],
    ids=lambda value: (
        "-".join(f"{k.split('/')[-1]}-{v}" for k, v in value.items())
        if isinstance(value, dict)
        else ""
    ),
)
def test_a_refusal_is_said_as_what_it_is(run_dir: Path, refuse: dict[str, int], words: str) -> None:
    with serving(refuse) as hub:
        message = refusal(run_dir, hub)
    assert message.startswith(f"--push-to-hub: the hub {hub.url} ") and words in message
    assert hub.commits == 0


def test_a_token_that_is_missing_or_wrong(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as hub:
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        message = refusal(run_dir, hub)
        assert "does not know the token" in message and "hf_wrong" not in message
        monkeypatch.delenv("HF_TOKEN")
        asked = len(hub.asked)
        assert "there is no token; set HF_TOKEN" in refusal(run_dir, hub)
    assert len(hub.asked) == asked and hub.files == {}


def test_a_hub_that_cannot_be_reached_or_does_not_answer(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and no more
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr("dpray.io.hub.PATIENCE", 0.2)
        assert "cannot be reached" in refusal(run_dir, endpoint)
    assert "cannot be reached" in refusal(run_dir, endpoint)
    message = refusal(run_dir, endpoint.replace("//", "//nurse:s3cret@"))
    assert "s3cret" not in message and f"the hub {endpoint} cannot" in message
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refusal(run_dir, endpoint).endswith("is not asked (HF_HUB_OFFLINE)")


def test_a_data_set_that_is_there_is_as_was_asked_and_of_dpray(run_dir: Path) -> None:
    with serving() as hub:
        hub.private = False
        message = refusal(run_dir, hub)
        assert f"{NAME} is there already and public" in message and "with --public" in message
        hub.private = True
        message = refusal(run_dir, hub, public=True, license="mit")
        assert f"{NAME} is there already and private" in message and "without --public" in message
        hub.files["README.md"] = b"---\nlicense: mit\ntags: [ours]\n---\n"
        assert "a README.md that is not from dpray card" in refusal(run_dir, hub)
        assert hub.commits == 0
        del hub.files["README.md"]
        hub.files[".gitattributes"] = b""
        shared(run_dir, hub)
    assert hub.commits == 1 and ".gitattributes" in hub.files


def test_a_public_release_needs_a_licence(run_dir: Path) -> None:
    with serving() as hub:
        assert refusal(run_dir, hub, public=True).startswith("--license: ")
        assert hub.asked == []
        shared(run_dir, hub, public=True, license="cc-by-4.0")
    assert hub.private is False and b"license: cc-by-4.0" in hub.files[CARD]


@pytest.mark.parametrize(
    "name",
    ["synthetic.jsonl", "table.parquet", CARD, "privacy_report.html", "model/a.json", "model"],
)
def test_a_link_is_refused_before_it_is_read(run_dir: Path, tmp_path: Path, name: str) -> None:
    place, private = run_dir / name, tmp_path / "private"
    if place.is_dir():
        place.rename(private)
    else:
        private.write_text(SECRET)
        place.unlink(missing_ok=True)
    place.symlink_to(private)
    with serving() as hub:
        assert (
            refusal(run_dir, hub) == f"{place}: a link is not uploaded; put the file itself there"
        )
    assert hub.asked == []


def test_what_may_not_be_released_is_not_uploaded(run_dir: Path, tmp_path: Path) -> None:
    with serving() as hub:
        assert "no such folder" in refusal(tmp_path / "none", hub)
        (run_dir / CARD).write_text("---\nlicense: mit\n---\n# ours\n")
        assert "not from dpray card; move it first" in refusal(run_dir, hub)
        (run_dir / CARD).unlink()
        (run_dir / "privacy_report.json").write_text(json.dumps(a_report(not_private=True)))
        assert "not private" in refusal(run_dir, hub)
    assert hub.asked == []


def test_the_command_by_the_endpoint_of_the_environment(run_dir: Path) -> None:
    """With large files, by the protocol that the hub names for them."""
    with serving(large=".parquet") as hub:
        done = subprocess.run(
            [sys.executable, "-m", "dpray", "card", str(run_dir), "--push-to-hub", NAME, "--json"],
            cwd=ROOT, capture_output=True, text=True,
            env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN,
                              "HF_HUB_DISABLE_XET": "1"},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "paths": [str(run_dir / name) for name in (CARD, CROISSANT, SHEET)],
        "url": f"{hub.url}/datasets/{NAME}",
    }
    assert hub.files["table.parquet"] == (run_dir / "table.parquet").read_bytes()
    assert TOKEN not in done.stdout + done.stderr


def test_the_command_and_python_end_with_a_sentence(
    run_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, words in (
        (["--public"], "--public: only with --push-to-hub"),
        (["--push-to-hub", "notes"], "--push-to-hub: give OWNER/NAME"),
        (["--push-to-hub", NAME, "--public"], "--license: "),
    ):
        assert run_command(["card", str(run_dir), *options]) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.startswith(f"dpray: {words}") and err.count("\n") == 1
    with serving() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        assert run_command(["card", str(run_dir), "--push-to-hub", NAME]) == 0
        said = capfd.readouterr().out.splitlines()[-1]
        assert (
            said == f"Uploaded to {hub.url}/datasets/{NAME}, for its owner only; licence: unknown"
        )
        url = dpray.SyntheticData(run_dir).push_to_hub(NAME, license="cc-by-4.0")
        assert url == f"{hub.url}/datasets/{NAME}" and b"license: cc-by-4.0" in hub.files[CARD]
        assert run_command(["card", str(run_dir), "--push-to-hub", NAME]) == 0
        assert capfd.readouterr().out.endswith("; licence: cc-by-4.0\n")
