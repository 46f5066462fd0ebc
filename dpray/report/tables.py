"""The tables of an evaluation for the report's private page and the terminal, and functions that
write numbers for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from statistics import fmean
from typing import Any

from dpray.evaluation.copies import STRING_KINDS
from dpray.evaluation.personal_data import LIMITS, matches_in_words
from dpray.runs.privacy_report import Guarantee
from dpray.types import ReadOnlyJson

FIDELITY = {
    "frechet_distance": "Fréchet distance (0)",
    "mauve": "MAUVE (1)",
}
SYNTHETIC = "these synthetic records"
TRAINED_ON = {"ceiling": "real records (ceiling)", "synthetic": SYNTHETIC, "floor": "file (floor)"}
SIDES = {"real": "real", "other_real": "other real", "synthetic": "synthetic"}


@dataclass(frozen=True)
class DataTable:
    """The first cell of each row is a name, the others are figures."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def person_in_words(guarantee: Guarantee) -> str:
    """Return what is guaranteed to a person with several records, after the words "a person"."""
    if guarantee.not_private:
        return "has no guarantee"
    if not guarantee.persons:
        most = guarantee.contribution_bound
        return f"is one unit, with at most {most:,} of its records; further ones are left out"

    def up(value: float, digits: int) -> str:
        return f"{_rounded_up(value * (1 - 1e-12), digits):.{digits}g}"

    known = [
        f"({up(each.epsilon, 4)}, {up(each.delta, 2)})-DP with {each.records} records"
        if each.delta < 1
        else f"no guarantee with {each.records} records"
        for each in guarantee.persons
    ]
    words = "; a column of the person in data.unit protects all of them together"
    return f"is protected record by record: for example, {', '.join(known)}{words}"


def evaluation_tables(result: ReadOnlyJson) -> dict[str, DataTable]:
    """Return a table for each part of `evaluation.json`; `topics` shows private words."""
    parts: dict[str, Callable[[Any], DataTable | None]] = {
        "downstream": _downstream,
        "fidelity": _fidelity,
        "copies": _copies,
        "replays": _replays,
        "topics": _topics,
        "lengths": _lengths,
        "structure": _structure,
        "columns": _column_distances,
        "personal_data": _personal_data,
    }
    given = dict(result)
    if downstream := given.get("downstream"):
        given["downstream"] = downstream | {"test_records": result["test_records"]}
    tables = {name: make(given[name]) for name, make in parts.items() if given.get(name)}
    return {name: table for name, table in tables.items() if table is not None}


def _downstream(found: ReadOnlyJson) -> DataTable:
    name, sides = found["classifier"], {key: found[key] for key in TRAINED_ON}
    names = TRAINED_ON | {"floor": f"{sides['floor']['kind']} (floor)"}
    return DataTable(
        f"{name[:1].upper()}{name[1:]}, tested on {number(found['test_records'])} real records. "
        f"Mean ± standard deviation over {found['seeds']} resamplings.",
        ("Trained on", "Records", "Accuracy", "Macro F1"),
        [
            (names[key], number(side["train_records"]),
             *_means((side["accuracy"], side["macro_f1"])))
            for key, side in sides.items()
        ],
    )  # fmt: skip


def _fidelity(found: ReadOnlyJson) -> DataTable:
    pair = ("synthetic", "real")
    return DataTable(
        f"Embeddings next to those of real test records: {number(found['records_a_side'])} a side, "
        f"{number(found['records_a_draw'])} a side for MAUVE. Mean ± "
        f"standard deviation over {found['draws']} draws.",
        ("Measure (best)", "Synthetic", "Other real records"),
        [
            (name, *_means(found["measures"][key][f"{side}_to_real"] for side in pair))
            for key, name in FIDELITY.items()
        ],
    )


def _copies(found: ReadOnlyJson) -> DataTable:
    sides = (found["synthetic"], found["held_out"])
    rows = {
        "longest_shared_words": ("longest shared run of words", 0),
        "ngram_overlap": (f"share of {found['ngram']}-grams", 3),
        "nearest_cosine": ("cosine with the nearest", 3),
    }
    figures = [
        (name, *(_figure(side[key][at], digits) for side in sides for at in ("quantile_95", "max")))
        for key, (name, digits) in rows.items()
    ]
    exact = [cell for side in sides for cell in (f"{side['exact_share']:.2%}", "")]
    return DataTable(
        f"Near-duplicates among {number(found['private_records'])} private records, of "
        f"{number(found['records_a_side'])} synthetic and as many held-out real records. Real "
        "texts resemble one another too: look where the synthetic ones do so more.",
        ("", "Synthetic, 95 %", "most", "Held-out, 95 %", "most"),
        [("exact copies", *exact), *figures],
    )


def _replays(found: ReadOnlyJson) -> DataTable:
    rows = [
        (STRING_KINDS[kind], number(each["strings"]), number(each["found"]),
         f"{each['expected']:.1f}", "none" if each["ratio"] is None else f"{each['ratio']:.1f}")
        for kind, each in found["kinds"].items()
    ]  # fmt: skip
    return DataTable(
        f"Strings that one private person or record has and no other, in the synthetic texts; "
        f"expected from {number(found['held_out_records'])} held-out real records, which share "
        "such strings by chance.",
        ("", "In the texts", "Of one only", "Expected", "Ratio"),
        rows,
    )


def _topics(topics: Sequence[ReadOnlyJson]) -> DataTable:
    return DataTable(
        "Topics: clusters of embeddings, with the terms that mark them and their share of the "
        "records.",
        ("Terms", *(name.capitalize() for name in SIDES.values())),
        [
            (", ".join(topic["terms"]) or "none", *(f"{topic[side]:.1%}" for side in SIDES))
            for topic in topics
        ],
    )


def _lengths(found: ReadOnlyJson) -> DataTable:
    return DataTable(
        f"Lengths in {found['unit']}. Distance: 1-Wasserstein to the real test records; for real "
        "records, to other real ones.",
        ("", "Mean", *(f"{float(q):.0%}" for q in found["real"]["quantiles"]), "Distance"),
        [
            (side, f"{found[side]['mean']:.1f}",
             *(f"{words:.0f}" for words in found[side]["quantiles"].values()),
             plus_minus(found["wasserstein"][f"{side}_to_real"], 2))
            for side in ("real", "synthetic")
        ],
    )  # fmt: skip


def _structure(found: ReadOnlyJson) -> DataTable | None:
    sides = {name: found[name] for name in ("real", "synthetic")}
    if not any(s["json_parse_share"] or s["schema_share"] is not None for s in sides.values()):
        return None
    rows = []
    for name, side in sides.items():
        fits = side["schema_share"]
        fitting = "no schema given" if fits is None else f"{fits:.1%}"
        rows.append((name, f"{side['json_parse_share']:.1%}", fitting))
    return DataTable("Structure", ("", "Is JSON", "Fits the schema"), rows)


def _column_distances(found: ReadOnlyJson) -> DataTable | None:
    if not found["one_way"]:
        return None
    sides = ("synthetic_to_real", "real_to_real")
    rows = [
        (name, *_means(distances[side] for side in sides))
        for name, distances in found["one_way"].items()
    ]
    if pairs := found["pairs"]:
        means = (fmean(pair[side]["mean"] for pair in pairs) for side in sides)
        rows.append((f"mean of {len(pairs)} pairs", *(f"{mean:.3f}" for mean in means)))
        worst = max(pairs, key=lambda pair: pair["synthetic_to_real"]["mean"])
        farthest = " and ".join(worst["columns"])
        rows.append((f"farthest pair: {farthest}", *_means(worst[side] for side in sides)))
    return DataTable(
        f"Columns: total variation distance to real test records, 0 to 1, of "
        f"{number(found['sample_size'])} records. Mean ± standard deviation over "
        f"{found['seeds']} draws. Free text is not compared here.",
        ("Column", "Synthetic", "Other real records"),
        rows,
    )


def _personal_data(found: ReadOnlyJson) -> DataTable:
    return DataTable(
        f"Personal data, as far as patterns find it in the synthetic texts only. {LIMITS}",
        ("Matches", "Texts with a match"),
        [matches_in_words(found)],
    )


def _means(values: Iterable[Mapping[str, float]]) -> list[str]:
    return [plus_minus(value, 3) for value in values]


def _figure(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"


def at_most(value: float, digits: int = 3) -> str:
    """Write an upper bound, rounded up to `digits` significant digits."""
    rounded = _rounded_up(value * (1 - 1e-12), digits)
    whole = rounded >= 10 ** (digits - 1)
    return f"{rounded:,.0f}" if whole else f"{rounded:.{digits}g}"


def one_in(probability: float) -> str:
    """Write a small probability as "1 in 1,000,000", never understated; empty for zero."""
    return f"1 in {math.floor(1 / probability * (1 + 1e-12)):,}" if probability > 0 else ""


def number(value: float) -> str:
    """Write a number with commas between thousands or six significant digits; 1e-6, not 1e-06."""
    if isinstance(value, int):
        return f"{value:,}"
    mantissa, _, exponent = f"{value:.6g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def bound(value: float) -> str:
    """Write an upper bound as `number` writes a number, rounded up."""
    return number(_rounded_up(value, digits=6))


def _rounded_up(value: float, digits: int) -> float:
    """Return the least number of `digits` significant digits that is not below the value."""
    return float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(value)))


def plus_minus(value: Mapping[str, float], digits: int) -> str:
    return f"{value['mean']:.{digits}f} ± {value['deviation']:.{digits}f}"
