"""The section of docs/papers.md that puts the papers' figures next to ours.

Ours come from the figures in measured/ and from pages that quote their command; nothing is run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import inf
from pathlib import Path

from jinja2 import Environment, StrictUndefined

HERE = Path(__file__).parent
ROOT = HERE.parent
MEASURED = HERE / "measured"

HEADLINES = HERE / "papers_headlines.md.j2"


def of(data: str, method: str, epsilon: float, figure: str = "accuracy") -> str:
    """Return the mean of a figure over a cell's runs, with their number if it is not 1."""
    files = sorted((MEASURED / "smollm2" / data).glob(f"{method}-{epsilon:g}-*.json"))
    found = [json.loads(file.read_text())["figures"][figure] for file in files]
    return mean([value for value in found if value is not None])


def real(data: str, name: str, figure: str = "accuracy") -> str:
    """Return the same of real records: 80 `private` ones, or `all private` ones."""
    draws = json.loads((MEASURED / "smollm2" / data / "real.json").read_text())[name]
    return mean([draw[figure] for draw in draws])


def over_n(way: str, records: int) -> str:
    """Return the mean accuracy of DP-KPS's sequences at so many records a class."""
    found = json.loads((MEASURED / "kps_over_n" / "agnews.json").read_text())[way]
    return mean([value for key, value in found.items() if key.startswith(f"{records}-")])


def trained_with_dp(data: str, epsilon: str, figure: str = "accuracy") -> str:
    """Return the mean score of a classifier that is trained with DP on the private records."""
    found = json.loads((MEASURED / "dp_classifier" / f"{data}.json").read_text())[epsilon]
    return mean([run[figure] for run in found])


def run_of(folder: str, name: str, figure: str) -> str:
    """Return the mean of a figure over the runs in measured/FOLDER/NAME-RUN.json."""
    files = sorted((MEASURED / folder).glob(f"{name}-?.json"))
    return mean([json.loads(file.read_text())[figure] for file in files])


def affordable(way: str) -> str:
    """Return the texts that epsilon 1 pays for by a way of algorithm_1.py."""
    found = json.loads((MEASURED / "algorithm_1" / f"{way}-0.json").read_text())
    return f"{found['affordable']:,}"


def mean(values: Sequence[float]) -> str:
    number = "" if len(values) == 1 else f" ({len(values)})"
    return f"{sum(values) / len(values):.2f}{number}"


def networks(name: str, side: str) -> str:
    """Return the accuracies of a network that learned from a side, of each release."""
    files = sorted((MEASURED / "papers").glob("coral-*.json"))
    return " and ".join(f"{json.loads(file.read_text())[name][side]:.3f}" for file in files)


def ranks(epsilon: float) -> str:
    """Return the mean ranks of canaries that were put in 1, 10 and 100 times."""
    files = sorted((MEASURED / "papers").glob(f"canaries-{epsilon:g}-*.json"))
    secrets = [secret for file in files for secret in json.loads(file.read_text())["secrets"]]
    of_each = (
        [secret["rank"] for secret in secrets if secret["repetitions"] == times]
        for times in (1, 10, 100)
    )
    number = f" ({len(files)})" if len(files) > 1 else ""
    return " / ".join(f"{sum(each) / len(each):.0f}" for each in of_each) + number


def quoted(file: str, *figures: str) -> str:
    """Return figures as a file has them. Raises ValueError for one that it does not have."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if missing := [each for each in figures if each not in text]:
        raise ValueError(f"{file} has no {missing[0]}")
    return ", ".join(figures)


def section() -> list[str]:
    """Return the section, in which `papers_headlines.md.j2` calls the functions above."""
    page = Environment(undefined=StrictUndefined).from_string(HEADLINES.read_text())
    return page.render(
        of=of, real=real, over_n=over_n, trained_with_dp=trained_with_dp, run_of=run_of,
        affordable=affordable, networks=networks, ranks=ranks, quoted=quoted, inf=inf,
    ).splitlines()  # fmt: skip


if __name__ == "__main__":
    print("\n".join(section()))
