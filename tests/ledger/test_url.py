"""A ledger is not in what Ray deletes, not on a disk of the network, not without TLS."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpray.cli import run_command
from dpray.io.files import in_ray_package, network_file_system
from dpray.ledger.ledger import Ledger
from dpray.ledger.store import parse_url
from dpray.runs.folder import ReleaseFolder
from dpray.types import InputError, LedgerUnavailable

PACKAGE = "ray/session_1/runtime_resources/working_dir_files/_ray_pkg_029f88d5ecc55e1e"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / PACKAGE
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        (f"{PACKAGE}/ledger.db", True),
        (f"{PACKAGE}/out/deep/ledger.db", True),
        ("runtime_resources/working_dir_files/s3_bucket_package/ledger.db", True),
        ("runtime_resources/py_modules_files/_ray_pkg_1/ledger.db", True),
        (f"{PACKAGE}/../../../../ledger.db", False),
        ("runtime_resources/ledger.db", False),
        ("working_dir_files/_ray_pkg_1/ledger.db", False),
        ("ledger.db", False),
    ],
)
def test_a_package_is_known_by_its_path(tmp_path: Path, path: str, inside: bool):
    assert in_ray_package(f"{tmp_path}/{path}") == inside


def test_links_are_followed(tmp_path: Path, package: Path):
    (tmp_path / "job").symlink_to(package)
    (package / "kept").symlink_to(tmp_path)
    assert in_ray_package(f"{tmp_path}/job/ledger.db")
    assert not in_ray_package(f"{package}/kept/ledger.db")


def test_rays_own_names_are_these(tmp_path: Path):
    """A package that Ray itself would unpack, from a working directory and from a bucket."""
    from ray._private.ray_constants import DEFAULT_RUNTIME_ENV_DIR_NAME
    from ray._private.runtime_env.packaging import get_local_dir_from_uri
    from ray._private.runtime_env.working_dir import WorkingDirPlugin

    plugin = WorkingDirPlugin(f"{tmp_path}/{DEFAULT_RUNTIME_ENV_DIR_NAME}", None)
    for uri in ("gcs://_ray_pkg_029f88d5ecc55e1e.zip", "s3://bucket/package.zip"):
        folder = get_local_dir_from_uri(uri, plugin._resources_dir)
        assert in_ray_package(f"{folder}/ledger.db")


def test_every_command_refuses_a_ledger_in_a_package(
    package: Path, monkeypatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(package)
    create = ["create", "--dataset", "notes", "--epsilon", "4", "--delta", "1e-6"]
    for command in (create, ["show"], ["verify"], ["export"]):
        assert run_command(["ledger", *command, "--ledger", "sqlite:///ledger.db"]) == 2
        error = capfd.readouterr().err
        assert "which Ray deletes" in error and "postgresql://" in error and error.count("\n") == 1
    assert not list(package.iterdir())


def test_an_output_in_a_package_is_refused(package: Path, monkeypatch):
    monkeypatch.chdir(package)
    with pytest.raises(InputError, match=r"^output\.path: out/run lies in a copy"):
        ReleaseFolder("out/run")
    assert not list(package.iterdir())


MOUNTS = [
    ("/proc", "proc"),
    ("/", "ext4"),
    ("/mnt/nfs", "nfs4"),
    ("/mnt/share", "cifs"),
    ("/mnt/with blank", "fuse.sshfs"),
    ("/mnt/nfs/scratch", "xfs"),
    ("/mnt/bucket", "fuse.gcsfuse"),
    ("/mnt/other", "fuse"),
    ("/mnt/over", "nfs"),
    ("/mnt/over", "tmpfs"),
    ("/mnt/rootless", "fuse.fuse-overlayfs"),
    ("/mnt/lustre", "lustre"),
    ("/mnt/host", "9p"),
]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me/ledger.db", None),
        ("/mnt/nfs/ledger.db", "nfs4"),
        ("/mnt/nfs2/ledger.db", None),
        ("/mnt/nfs/scratch/ledger.db", None),
        ("/mnt/share/a/b/ledger.db", "cifs"),
        ("/mnt/with blank/ledger.db", "sshfs"),
        ("/mnt/bucket/ledger.db", "gcsfuse"),
        ("/mnt/other/ledger.db", "fuse"),
        ("/mnt/over/ledger.db", None),
        ("/mnt/rootless/ledger.db", None),
        ("/mnt/lustre/ledger.db", "lustre"),
        ("/mnt/host/ledger.db", "9p"),
    ],
)
def test_a_network_file_system_is_refused(
    monkeypatch: pytest.MonkeyPatch, path: str, kind: str | None
):
    monkeypatch.setattr("dpray.io.files.mounted", lambda: MOUNTS)
    assert network_file_system(path) == kind
    if kind is None:
        assert parse_url(f"sqlite:///{path}").database == path
    else:
        with pytest.raises(InputError, match=rf"network file system \({kind}\)") as refused:
            parse_url(f"sqlite:///{path}")
        assert refused.value.exit_code == 2


def test_this_machines_own_table_is_read(tmp_path: Path):
    Ledger.create_or_open(f"sqlite:///{tmp_path}/ledger.db")


@pytest.mark.parametrize(
    ("url", "mode"),
    [
        ("me@ledger-db:5432/dpray", "require"),
        ("me:word@10.0.0.7/dpray", "require"),
        ("/dpray?host=ledger-db", "require"),
        ("/dpray?host=localhost:5432&host=ledger-db:5432", "require"),
        ("/dpray?hostaddr=10.0.0.7", "require"),
        ("me@ledger-db/dpray?sslmode=verify-full", "verify-full"),
        ("me@ledger-db/dpray?sslmode=disable", "disable"),
        ("me@ledger-db/dpray?service=ledger", None),
        ("/dpray", None),
        ("/dpray?host=/run/postgresql", None),
        ("me@localhost:5432/dpray", None),
        ("/dpray?host=localhost:5432", None),
        ("me@127.0.0.1:5432/dpray", None),
        ("me@[::1]:5432/dpray", None),
    ],
)
def test_another_machines_database_is_reached_over_tls(
    url: str, mode: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PGSSLMODE", raising=False)
    assert parse_url(f"postgresql://{url}").query.get("sslmode") == mode


def test_the_mode_that_libpq_has_already_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    assert "sslmode" not in parse_url("postgresql://ledger-db/dpray").query


@pytest.mark.parametrize(
    "url",
    ["postgresql://host:port/notes", "postgresql://u:word/notes", "postgresql://[::1/notes"],
)
def test_a_port_that_is_no_number_is_one_line_without_it(url: str):
    """A password whose `@` is forgotten stands in the port's place."""
    with pytest.raises(InputError) as refused:
        parse_url(url)
    assert "word" not in str(refused.value) and refused.value.__suppress_context__


@pytest.mark.parametrize(
    "url", ["sqlite://home/ledger.db", "sqlite://me:word@home/ledger.db", "sqlite:///a\0b"]
)
def test_an_sqlite_ledger_is_a_plain_file(url: str):
    """With two slashes, the first part of a path would be left out."""
    with pytest.raises(InputError, match="a plain file") as refused:
        parse_url(url)
    assert "word" not in str(refused.value)


def test_a_password_in_the_query_is_shown_to_nobody():
    with pytest.raises(LedgerUnavailable) as failed:
        Ledger.open("postgresql://127.0.0.1:1/notes?password=word&sslpassword=word")
    assert str(failed.value).count("password=hidden") == 2 and "=word" not in str(failed.value)
