"""A ledger that has two names is spent once: SQLite keeps its newest entries beside the name."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest

from dpray.accounting.events import DiscreteLaplace
from dpray.io.files import is_mounted_alone, touch_private
from dpray.ledger.ledger import Ledger
from dpray.ledger.store import parse_url
from dpray.types import Budget, InputError
from tests.ledger.charges import BUDGET, STATED_FOR
from tests.ledger.test_processes import Child

HALF = (DiscreteLaplace(2.0, 1), Budget(0.5, 0.0))

PRIVATE_MOUNTS = ["unshare", "--mount", "--propagation", "private"]
MOUNT = 'touch "$1" && mount --bind "$0" "$1" && shift && exec "$@"'


def open_link(first: Path, second: Path) -> Child:
    if not second.exists():
        os.link(first, second)
    return Child(f"sqlite:///{second}")


def open_mount(first: Path, second: Path) -> Child:
    """As a container does: the mount is there for one process alone."""
    before = [*PRIVATE_MOUNTS, "sh", "-c", MOUNT, str(first), str(second)]
    return Child(f"sqlite:///{second}", *before)


def may_mount(folder: Path) -> bool:
    one, other = folder / "one", folder / "other"
    one.touch()
    try:
        command = [*PRIVATE_MOUNTS, "sh", "-c", MOUNT, str(one), str(other), "true"]
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False
    finally:
        one.unlink()
        other.unlink(missing_ok=True)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"
    opened = Ledger.create_or_open(f"sqlite:///{path}")
    opened.create_dataset("notes", BUDGET, *STATED_FOR)
    opened.close()
    return path


@pytest.fixture
def started() -> Iterator[list[Child]]:
    children: list[Child] = []
    yield children
    for child in children:
        child.kill()


@pytest.mark.slow
@pytest.mark.parametrize("open_second", [open_link, open_mount])
def test_a_budget_of_two_charges_is_spent_twice_at_most(
    ledger: Path, started: list[Child], open_second: Callable[[Path, Path], Child]
):
    """Both names at once, a kill that leaves the log beside its name, and both names again."""
    if open_second is open_mount and not may_mount(ledger.parent):
        pytest.skip("this process may not mount a file")
    second, charged = ledger.with_name("second.db"), []

    def charge(child: Child, name: str) -> None:
        for number in range(2):
            if child.process.poll() is None:
                child.ask(f"reserve notes {name}-{number}")
                charged.extend([name] if child.hear() == "won\n" else [])

    def both(round_: str) -> None:
        started.extend([Child(f"sqlite:///{ledger}"), open_second(ledger, second)])
        pair = [child for child in started[-2:] if child.hear() == "ready\n"]
        threads = [
            Thread(target=charge, args=(child, f"{round_}-{number}"))
            for number, child in enumerate(pair)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    first = Child(f"sqlite:///{ledger}")
    started.append(first)
    assert first.hear() == "ready\n"
    first.ask("hold - -")
    first.ask("reserve notes first")
    assert [first.hear(), first.hear()] == ["won\n", "won\n"]
    charged.append("first")
    both("before")
    first.kill()
    both("after")
    second.unlink()
    if open_second is open_link:
        both("linked-anew")
        second.unlink()
    assert len(charged) <= 2
    account = Ledger.open(f"sqlite:///{ledger}").account("notes")
    assert len(account.charges) == len(charged)


def test_a_link_that_is_made_while_the_ledger_is_open_is_noticed(ledger: Path):
    opened, second = Ledger.open(f"sqlite:///{ledger}"), ledger.with_name("second.db")
    opened.reserve("notes", {"first": HALF}, *STATED_FOR)
    os.link(ledger, second)
    for use in (
        lambda: opened.reserve("notes", {"second": HALF}, *STATED_FOR),
        lambda: opened.show(),
        lambda: Ledger.open(f"sqlite:///{second}"),
    ):
        with pytest.raises(InputError, match=r"2 names \(hard links\).* `-wal` file next to it"):
            use()
    second.unlink()
    opened.reserve("notes", {"second": HALF}, *STATED_FOR)
    assert opened.verify() == []


def test_a_symbolic_link_is_no_second_name(ledger: Path):
    link = ledger.parent / "elsewhere" / "link.db"
    link.parent.mkdir()
    link.symlink_to(ledger)
    by_link, by_name = (Ledger.open(f"sqlite:///{path}") for path in (link, ledger))
    with by_link._store.read() as connection:
        connection.exec_driver_sql("SELECT name FROM sqlite_master")
        by_link.reserve("notes", {"first": HALF}, *STATED_FOR)
        by_name.reserve("notes", {"second": HALF}, *STATED_FOR)
        assert ledger.with_name("ledger.db-wal").exists()
        assert list(link.parent.iterdir()) == [link]
    assert by_link.account("notes").spent.epsilon == 1.0


@pytest.fixture
def mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    points = ("/", "/data/ledger.db", "/data/a b\\c.db", "/mnt/folder")
    found = [(point, "ext4") for point in points]
    monkeypatch.setattr("dpray.io.files.mounted", lambda: found)


@pytest.mark.usefixtures("mounts")
def test_a_file_that_is_mounted_alone_is_refused(tmp_path: Path):
    link = tmp_path / "link.db"
    link.symlink_to("/data/ledger.db")
    alone = ("/data/ledger.db", "/data/../data/ledger.db", "/data/a b\\c.db", str(link))
    others = ("/data/ledger.db2", "/mnt/folder/ledger.db", "/host/ledger.db")
    for path in alone:
        assert is_mounted_alone(path)
        with pytest.raises(InputError, match=r"mounted as a single file: .*mount the folder"):
            parse_url(f"sqlite:///{path}")
    for path in others:
        assert not is_mounted_alone(path) and parse_url(f"sqlite:///{path}").database == path


def test_making_a_ledger_anew_keeps_the_locks_of_one_that_is_open(ledger: Path):
    """Closing any descriptor of a file gives up the process's locks on it."""
    opened = Ledger.open(f"sqlite:///{ledger}")
    number = os.stat(ledger).st_ino
    with opened._store.begin():
        before = locks(number)
        touch_private(str(ledger))
        assert before and locks(number) == before


def locks(inode: int) -> list[str]:
    """Return this process's locks on a file."""
    own = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return [" ".join(w[1:]) for w in own if w[4] == str(os.getpid()) and w[5].endswith(f":{inode}")]
