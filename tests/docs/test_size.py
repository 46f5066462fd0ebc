"""The house does not grow unseen: a change that makes it larger writes the new number, and why."""

from __future__ import annotations

import tomllib

from tests.docs.size import SIZES, in_circles, measure

SLACK = 0.98
"""A number that falls below this share of what is on record is written down, too."""


def test_the_house_is_as_large_as_it_is_written() -> None:
    """`python -m tests.docs.size` prints the numbers for `size.toml`."""
    written = {name: each["is"] for name, each in tomllib.loads(SIZES.read_text()).items()}
    found = measure()
    assert written.keys() == found.keys()
    larger = {name: found[name] for name in found if found[name] > written[name]}
    assert larger == {}, "write the new number into tests/docs/size.toml, and why it is worth it"
    smaller = {name: found[name] for name in found if found[name] < SLACK * written[name]}
    assert smaller == {}, "write the smaller number into tests/docs/size.toml, so that it stays"


def test_a_circle_is_found() -> None:
    down = {("a", "b"), ("b", "c"), ("a", "c")}
    assert in_circles(down) == 0
    assert in_circles(down | {("c", "b")}) == 2
