"""Messages are one line, for terminals, logs and errors."""

from __future__ import annotations

CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff"
"""A regular expression's bracket may hold these: C0 but tab and line feed, delete, C1, and lone
surrogates."""


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error's message, or its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
