"""The sections of docs/results.md, results_tables.md and results_texts.md on four_methods.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from embedding import embedded
from figures import A_SIDE, COPIED, SAMPLES, Figures, Yardstick, rounded
from four_methods import FLOOR, METHODS, Cell, cells
from reproduction import RUNS_OF_EACH, draw, spread
from runs import HERE
from sets import SETS, part, size

LEGEND = f"""\
One table for each data set, a row for each method and epsilon, from `python
experiments/four_methods.py DATA`; the settings are in experiments/smollm2. Figures are the mean and
deviation over independent runs, with their number in brackets, or of one run.

| column | is |
|---|---|
| eps | the budget; {FLOOR:g} is the floor, as next to nothing of the private texts comes through, \
or for DP-SGD that begins with public records what these teach alone |
| accuracy | that of a logistic regression on MiniLM embeddings, trained on what the run released, \
on real test texts |
| by label | the mean of the labels' accuracies, by a regression to which all labels matter \
equally |
| distance, MAUVE | the Fréchet distance of the embeddings of {A_SIDE} released texts to those of \
{A_SIDE} test texts, and MAUVE of the same |
| copies | released texts that share {COPIED} words in a row with a public text, which prompts may \
show, and with a private one |
| membership | the AUC of telling private records from test texts by the nearest released text \
(0.5 is chance) |
| parses | texts that are one JSON record, where the data is |
| CPU | minutes of one core for a run |
"""

READING = """\
In short, at epsilon 4: Aug-PE's texts are nearest to real ones by distance on all five data sets,
tied with private prediction on pubmed, though not by MAUVE on Yelp and wikimovies. Aug-PE gains
most from the private records where labels are many. DP-SGD that begins with public records is as
accurate as the others on the two sets where it was tried, and copies no public text. DP-KPS takes
a tenth to a third of Aug-PE's CPU time, and is as accurate on AG News.

One run a row, or two: differences of a few hundredths may be chance.

- With public texts in the prompts the floor is high, and on AG News nothing exceeds it by 0.1.
  SmolLM2 writes little of use without examples, so the prompts show public texts of the label,
  which are free, and these carry most of what a classifier learns. At its floor private prediction
  is as accurate as at epsilon 1. Aug-PE and DP-KPS gain some hundredths over theirs, and more
  epsilon than 1 adds nothing.
- Without public texts in its prompts private prediction's texts train a classifier to 0.55 at the
  floor and to 0.75 at epsilon 1 (AG News): the difference comes from the private records. On Yelp
  it is 0.29 and 0.32 by label, which may be chance. Its texts stay on the topic and far from the
  real texts' style (distance, MAUVE). Batches are of 16; larger ones were not tried.
- One epoch of DP-SGD (20 steps of 200 records on AG News, 14 on Yelp) teaches adapters on all
  layers a part of the topics of AG News: 0.61, where a guess is 0.25. On Yelp it teaches the look
  of reviews (MAUVE 0.94) and none of the categories: 0.17 by label, where a guess is 0.10 and the
  other methods' floors are 0.24 to 0.29. Four epochs teach the look of the news (MAUVE 0.99 instead
  of 0.63) and hardly more of the topics (0.64), for three times the CPU. Terms of DP-KPS as control
  codes teach the topics of AG News in one epoch (0.78), and the look, too (0.95), but not the
  categories of Yelp (0.16).
- DP-SGD should begin with public records where there are any. After an epoch of ordinary training
  on as many public records, in batches of 64, an epoch of DP-SGD reaches 0.82 on AG News and 0.31
  by label on Yelp, as the other methods do, and copies no public text. Nearly all of that is the
  public records' doing: the model that was tuned on them alone is at 0.80 and 0.31. What DP-SGD
  adds may be chance: MAUVE rises on Yelp (0.54 to 0.82; without public records it was 0.94), and
  distance and MAUVE get slightly worse on AG News.
- No chain beats the best single method by more than chance. With terms of DP-KPS or of topics in
  its prompts Aug-PE is at 0.84 and 0.83, as without them, and private prediction stays at its
  floor (0.82). DP-SGD gains (above).
- On Yelp, 100 texts teach the usual regression the most frequent label alone, and so do 80 real
  records: the accuracy is that label's share. Where all labels matter equally (by label), Aug-PE
  exceeds its floor by a tenth at epsilon 1 (two runs each). Private prediction is at 0.34 and 0.33
  at epsilons 1 and 4, and its floor at 0.29. DP-KPS exceeds its floor from epsilon 4 on. 80 real
  records have 0.35, and all 2,800 of them 0.52.
- The target for private prediction at epsilon 1 was 0.1 above its floor. It is met where the
  prompts show no public texts, on AG News, and missed elsewhere. Where they show some, it would be
  0.92 on AG News, more than all 4,000 real records teach (0.88), and 0.39 on Yelp.
- 100 texts hold one or two examples of each of BANKING77's 77 intents, so plain accuracies are low
  for every method. Aug-PE gains most from the private records here: 0.57 by label, where its floor
  has 0.32 and 80 real records have 0.40. A likely reason is that votes choose texts that are
  typical of an intent. Private prediction has 0.43, where its floor has 0.36, and DP-SGD 0.21.
  DP-KPS does not exceed its floor.
- On the abstracts (pubmed), which have no labels, Aug-PE's distance is 0.83 and its MAUVE 0.99,
  where its floor has 0.97 and 0.78, and real texts 0.77 and 0.98. Private prediction is at 0.84 and
  0.89. DP-KPS is no better than its floor. DP-SGD fails: ten steps without a label teach the model
  no subject, and some of its texts are formulas or code (distance 1.09).
- On the JSON records (wikimovies) Aug-PE moves from a distance of 0.62 at its floor to 0.34, and
  real texts have 0.31. By MAUVE DP-KPS is nearest (0.78). 47 to 58 % of SmolLM2's records parse at
  epsilon 4: most of the others stop inside a list that never closes. With a schema all records of
  private prediction parse, and they are as near: distance 0.38 at epsilon 1 and 0.36 at 4, where it
  has 0.39 without, MAUVE 0.34 and 0.34, where it has 0.32. 30 % of their tokens are free. At the
  same clip and epsilon the plan pays for 932 texts in place of 76 (epsilon 1), and for 227 in place
  of 15 (epsilon 4).
- Many texts of Aug-PE and DP-KPS on AG News repeat a public one for eight words or more, few of
  private prediction, and none of DP-SGD. `longest_copy` bars private prediction from a seventh
  token in a row of the examples in that text's prompt, and not of other public texts. Whoever may
  not pass the public texts on should not show them to the model. Of the abstracts up to 6 % share
  eight words in a row with a private one, most at DP-KPS. Some are stock phrases of the field:
  at Aug-PE's floor, which knows nothing of the private texts, it is 3 %.
- Without noise Aug-PE is no better on AG News (0.84) than at epsilon 1 (0.83): the model's own
  texts are the limit.
- Where membership was measured, a release tells members from others no better than chance.
- Not run with this model: DP-SGD on private records without noise or on wikimovies, second runs of
  most rows, and every set and row that is not in the tables. CPU minutes were taken with other work
  on the machine. Rows of DP-SGD, chains and Yelp ran on one thread, which wastes less time than
  two.
"""


def table(data: str) -> list[str]:
    """The section of the page; empty where no run was measured."""
    found: dict[tuple[str, float], list[Figures]] = {}
    for method in METHODS:
        for cell in cells(data, method):
            if (figures := cell.figures) is not None:
                found.setdefault((method, cell.epsilon), []).append(figures)
    if not found:
        return []
    real = real_texts(data)
    lines = [
        f"## SmolLM2-135M, four methods: {data}, {size(data):,} private records",
        "",
        f"`python experiments/four_methods.py {data}`; {real['tests']:,} test texts.",
        "",
        "| method | eps | texts | accuracy | by label | distance | MAUVE | copies, public "
        "| private | membership | parses | CPU |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (method, epsilon), runs in found.items():
        texts = sorted({f"{figures['texts']}" for figures in runs}, key=int)
        line = [METHODS[method], f"{epsilon:g}", " to ".join(texts)]
        lines.append("| " + " | ".join([*line, *in_words(runs)]) + " |")
    for name, number in (("public", A_SIDE), ("private", A_SIDE), ("all private", size(data))):
        cells_of_row = [f"{name} records", "", f"{number}", *in_words(real[name])]
        lines.append("| " + " | ".join(cells_of_row) + " |")
    return lines


def real_texts(data: str) -> dict[str, Any]:
    """Return the figures of `A_SIDE` real records, for each of some draws from the `public` and the
    `private` ones, and of `all private` ones, with the number of `tests` and the mean of the
    private texts' `words`. Once computed, they are kept beside those of the runs."""
    path = HERE / "measured" / "smollm2" / data / "real.json"
    if not path.exists():
        yardstick = Yardstick(data)
        found: dict[str, Any] = {
            "tests": len(yardstick.test.labels),
            "words": np.mean([len(text.split()) for text in yardstick.private]),
        }
        for name in ("public", "private"):
            records = embedded(part(data, name))
            draws = [draw(records, A_SIDE, seed) for seed in range(RUNS_OF_EACH)]
            found[name] = [rounded(yardstick.of_vectors(few)) for few in draws]
        found["all private"] = [rounded(yardstick.of_vectors(records))]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def in_words(runs: Sequence[Figures]) -> list[str]:
    """The columns from accuracy on; empty where there is no figure."""

    def values(name: str) -> list[float]:
        return [value for figures in runs if (value := figures.get(name)) is not None]

    def mean(name: str, form: str) -> str:
        return f"{np.mean(found):{form}}" if (found := values(name)) else ""

    return [
        *(
            spread(values(name)) if values(name) else ""
            for name in ("accuracy", "by_label", "distance", "mauve")
        ),
        mean("copies_public", ".0%"),
        mean("copies_private", ".0%"),
        mean("membership", ".3f"),
        mean("parses", ".0%"),
        mean("cpu_minutes", ".0f"),
    ]


def samples(data: str) -> list[str]:
    """The section with texts that each method released, at epsilon 4 or 1."""
    lines: list[str] = []
    for method, name in METHODS.items():
        for epsilon in (4.0, 1.0):
            if (kept := Cell(data, method, epsilon, 0).kept).exists():
                texts = json.loads(kept.read_text())["samples"]
                if texts:
                    lines += ["", f"{name}, eps {epsilon:g}:", "", *(f"1. {t}" for t in texts)]
                break
    if not lines:
        return []
    words = real_texts(data)["words"]
    heading = f"## {data}: {SAMPLES} texts a method"
    style = f"A real text is {SETS[data].style}. Real texts have {words:.0f} words on average."
    return [heading, "", style, *lines]
