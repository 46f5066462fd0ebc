"""Compares the combinations of attributes with the records', for docs/results.md.

`python experiments/attributes.py` prints the total variation distance between the shares that are
drawn from and those of the records, the mean over all pairs of columns and over `DRAWS` draws of
the noise, which gets the default share of epsilon. No model writes a text here.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from math import prod
from statistics import fmean
from typing import Any

from clinic_notes import LABELS, PRIVATE_BOOK
from runs import DATA, rows

from dpray.mechanisms.attributes import PairHistograms, Values, margins, noise_for

SHARE, DELTA, DRAWS = 0.4, 1e-6, 3

Record = Mapping[str, str]
Domains = Mapping[str, Sequence[str]]
Shares = Mapping[Values, float]


def words(row: Mapping[str, Any]) -> str:
    return str(min(len(row["text"].split()) // 30, 2))


def film(row: Mapping[str, Any]) -> Record:
    return {
        "genre": str(row["label"]), "decade": str(row["decade"]),
        "genres": str(min(len(row["genres"]), 4)), "cast": str(min(len(row["cast"]) // 3, 2)),
        "words": words(row),
    }  # fmt: skip


def review(row: Mapping[str, Any]) -> Record:
    return {"kind": str(row["label"]), "stars": str(row["stars"]), "words": words(row)}


def clinic(number: int, seed: int) -> list[Record]:
    """Draw notes of the fictional clinic, as the columns of its register."""
    rng = random.Random(seed)

    def pick(label: str, slot: str) -> str:
        weights = PRIVATE_BOOK[label][slot]
        return rng.choices(tuple(weights), tuple(weights.values()))[0]

    def row(label: str) -> Record:
        own = {slot: pick(label, slot) for slot in ("system", "route", "plan", "decade")}
        return {"triage": label, "condition": pick(label, own["system"]), **own}

    return [row(rng.choice(LABELS)) for _ in range(number)]


SETS: dict[str, Callable[[str], list[Record]]] = {
    "WikiMovies": lambda part: [*map(film, rows(DATA / "wikimovies" / f"{part}.jsonl"))],
    "Yelp": lambda part: [*map(review, rows(DATA / "yelp" / f"{part}.jsonl"))],
    "a clinic's register": lambda part: clinic(2500, ["private", "test"].index(part)),
}


def measured(records: Sequence[Record], domains: Domains, epsilon: float) -> Shares:
    """Return the shares of combinations that the noisy histograms of these columns give."""
    histograms = len(PairHistograms(domains, 1.0).pairs)
    pairs = PairHistograms(domains, noise_for(SHARE * epsilon, DELTA, histograms, 1))
    return pairs.shares(pairs(pairs.count(records)))


def alone(records: Sequence[Record], domains: Domains, epsilon: float, columns: int) -> Shares:
    """Measure the first columns each by itself, and take all values of the others as equal."""
    ways = [dict.fromkeys(values, 1 / len(values)) for values in domains.values()]
    for place, name in enumerate([*domains][:columns]):
        noise = noise_for(SHARE * epsilon, DELTA, columns, 1)
        one = PairHistograms({name: domains[name]}, noise)
        ways[place] = margins(one.shares(one(one.count(records))))[name]
    shares = (prod(each) for each in product(*(way.values() for way in ways)))
    named = ([(name, value) for value in values] for name, values in domains.items())
    return dict(zip(product(*named), shares, strict=True))


def distance(shares: Shares, records: Sequence[Record]) -> float:
    """Return the mean total variation distance over the pairs of columns."""
    found = []
    for one, two in combinations(range(len(records[0])), 2):
        left: defaultdict[Values, float] = defaultdict(float)
        for side, sign in ((shares, 1), (shares_of(records), -1)):
            for values, share in side.items():
                left[values[one], values[two]] += sign * share
        found.append(sum(map(abs, left.values())) / 2)
    return fmean(found)


def shares_of(records: Sequence[Record]) -> Shares:
    counts = Counter(tuple(record.items()) for record in records)
    return {values: count / len(records) for values, count in counts.items()}


def main() -> None:
    print("| set | eps | labels alone | each column alone | pairs | other real records |")
    print("|---|---|---|---|---|---|")
    for name, part in SETS.items():
        records, others = part("private"), distance(shares_of(part("test")), part("private"))
        domains = {name: sorted({record[name] for record in records}) for name in records[0]}
        for epsilon in (1.0, 4.0):
            draws = [
                (
                    distance(alone(records, domains, epsilon, 1), records),
                    distance(alone(records, domains, epsilon, len(domains)), records),
                    distance(measured(records, domains, epsilon), records),
                )
                for _ in range(DRAWS)
            ]
            means = (*map(fmean, zip(*draws, strict=True)), others)
            print(f"| {name} | {epsilon:g} | {' | '.join(f'{m:.3f}' for m in means)} |", flush=True)


if __name__ == "__main__":
    main()
