"""A real browser looks at a page."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def needs_browser(test):
    why = "no Chromium on this machine"
    return pytest.mark.slow(pytest.mark.skipif(CHROMIUM is None, reason=why)(test))


def show(path: Path) -> tuple[str, str, str]:
    """Return the page's DOM, the browser's log and its network log."""
    network_log = path.with_suffix(".net.json")
    # --no-sandbox: a container's root user has no sandbox to use.
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--enable-logging=stderr", f"--log-net-log={network_log}",
            f"--user-data-dir={path.with_suffix('.profile')}", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, done.stderr, network_log.read_text(errors="replace")


@cache
def hears_a_page() -> bool:
    """Return whether a page that logs and asks for something is seen to do so."""
    with TemporaryDirectory() as folder:
        control = Path(folder) / "control.html"
        control.write_text("<script>console.error('heard')</script><img src=http://evil.example/x>")
        _, log, network = show(control)
    return "CONSOLE" in log and "evil.example" in network


def rendered_in_silence(path: Path) -> str:
    """Return the DOM of a page that logs nothing and asks for nothing."""
    dom, log, network = show(path)
    assert "CONSOLE" not in log and "evil.example" not in network and hears_a_page()
    return dom
