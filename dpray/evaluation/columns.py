"""The columns of tables are compared, each alone and in pairs, by total variation distances.

A record of a table is a text that is a JSON object. Numbers are divided into the deciles of the
real ones. Each other value is a category; rare values share one. If the common categories cover
less than half of the real values, the column is free text and is not compared.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from dpray.evaluation.downstream import summaries
from dpray.evaluation.texts import Parse, parsed_record

MOST_COLUMNS = 40
"""Further columns are not compared."""

CATEGORIES = 20
"""A column has at most this many categories, including `RARE` and excluding `MISSING`."""

FEW_NUMBERS = 10
"""If a column has at most this many distinct numbers, each is a category."""

REPEATED = 0.5
"""A column is no free text if its common values make up this share of the real ones."""

MISSING, RARE = "missing", "rare"

Codes = npt.NDArray[np.int64]


def compare_columns(
    synthetic: Sequence[str],
    train: Sequence[str],
    test: Sequence[str],
    seeds: int,
    parse: Parse = parsed_record,
) -> dict[str, object] | None:
    """Compare the columns of synthetic and of real test records; None unless most of the real texts
    are JSON objects.

    The total variation distance is the largest difference of the probabilities of any set of
    categories: 0 for the same shares, 1 for none in common (Levin et al. 2009, Section 4.1). The
    reference is the distance between the real test records and other real ones (`train`). Every
    seed draws equally many synthetic and other real records, and all test records again
    (bootstrap). A text that is no object has no column. All sequences must be non-empty.
    """
    sides = [_objects(texts, parse) for texts in (synthetic, train, test)]
    names = _usual_columns([*sides[1], *sides[2]])
    if not names:
        return None
    coded: dict[str, list[Codes]] = {}
    for name in names:
        values = [[record.get(name) for record in records] for records in sides]
        if (found := _coded(values)) is not None:
            coded[name] = found
    size = min(len(synthetic), len(train))
    one_way: dict[str, list[dict[str, float]]] = {name: [] for name in coded}
    pairs: dict[tuple[str, str], list[dict[str, float]]] = {
        pair: [] for pair in combinations(coded, 2)
    }
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        made, other = (rng.choice(len(side), size) for side in sides[:2])
        tested = rng.choice(len(test), len(test))
        drawn = {
            name: [codes[0][made], codes[1][other], codes[2][tested]]
            for name, codes in coded.items()
        }
        for name, found_by in one_way.items():
            found_by.append(_distances(drawn[name]))
        for (first, second), found_by in pairs.items():
            joint = zip(drawn[first], drawn[second], strict=True)
            found_by.append(_distances([a * (CATEGORIES + 1) + b for a, b in joint]))
    return {
        "free_text": [name for name in names if name not in coded],
        "one_way": {name: summaries(draws) for name, draws in one_way.items()},
        "pairs": [{"columns": list(pair)} | summaries(draws) for pair, draws in pairs.items()],
        "sample_size": size,
        "seeds": seeds,
    }


def other_types(
    synthetic: Sequence[str], real: Sequence[str], parse: Parse = parsed_record
) -> list[str]:
    """Return the columns that hold numbers on one side and texts on the other, as the cells of CSV
    do: none of their values can be the same."""
    sides = [_objects(texts, parse) for texts in (synthetic, real)]
    return [
        name for name in _usual_columns(sides[1]) if len({_type(side, name) for side in sides}) > 1
    ]


def _type(records: Sequence[Mapping[str, object]], name: str) -> str:
    """Return what most values of a column are."""
    values = [record[name] for record in records if record.get(name) is not None]
    kinds = Counter("text" if isinstance(value, str) else "value" for value in values)
    return kinds.most_common(1)[0][0] if kinds else "value"


def _objects(texts: Sequence[str], parse: Parse) -> list[dict[str, object]]:
    """Return the texts' columns: none of a text that is no JSON object."""
    return [value if isinstance(value, dict) else {} for value in map(parse, texts)]


def _usual_columns(real: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the columns that most of the real records have."""
    counts = Counter(name for record in real for name in record)
    return [name for name, count in counts.items() if count > len(real) / 2][:MOST_COLUMNS]


def _coded(values: Sequence[Sequence[object]]) -> list[Codes] | None:
    """Return the categories of each side, None for free text; the last two are real."""
    real = [value for side in values[1:] for value in side if value is not None]
    if not real:
        return None
    numbers = {float(value) for value in real if _is_number(value)}
    edges = None
    if len(numbers) > FEW_NUMBERS:
        given = [float(value) for value in real if _is_number(value)]
        edges = np.unique(np.quantile(given, np.linspace(0, 1, 11)[1:-1]))
    named = [[_category(value, edges) for value in side] for side in values]
    counts = Counter(name for side in named[1:] for name in side if name != MISSING)
    common = [name for name, _ in counts.most_common(CATEGORIES - 1)]
    if sum(counts[name] for name in common) < REPEATED * counts.total():
        return None
    codes = {name: code for code, name in enumerate([MISSING, RARE, *common])}
    return [np.array([codes.get(name, codes[RARE]) for name in side]) for side in named]


def _is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number that is a finite float, too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def _category(value: object, edges: npt.NDArray[np.float64] | None) -> str:
    if value is None:
        return MISSING
    if edges is not None and _is_number(value):
        return f"decile {np.searchsorted(edges, float(value), side='right')}"
    return f"value {json.dumps(value)}"


def _distances(sides: Sequence[Codes]) -> dict[str, float]:
    made, other, tested = (
        np.bincount(side, minlength=(CATEGORIES + 1) ** 2) / len(side) for side in sides
    )
    return {
        "synthetic_to_real": float(np.abs(made - tested).sum() / 2),
        "real_to_real": float(np.abs(other - tested).sum() / 2),
    }
