"""The page of all budgets of a ledger, for the people who answer for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpray.report import pictures
from dpray.report.page import templates

RUNS_SHOWN = 200
"""A data set's table lists so many runs, the last ones; its chart has them all."""


def render_ledger(shown: Mapping[str, Any], made_at: str) -> str:
    """Return one HTML page that needs no network and no script. `shown` is what `Ledger.show`
    returns; `made_at` is the time of the page, in UTC and ISO 8601, at which its charts end."""
    return (
        templates()
        .get_template("ledger.html.j2")
        .render(
            ledger=shown["ledger"],
            datasets=shown["datasets"],
            made_at=made_at,
            pictures=pictures,
            runs_shown=RUNS_SHOWN,
        )
    )
