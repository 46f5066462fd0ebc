"""Audits of every mechanism, as it is and with faults injected.

`python -m tests.evaluation.cases` prints the figures of docs/audit.md, with an argument the rows
that begin with it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import torch

from dpray.mechanisms import monte_carlo
from dpray.mechanisms.labels import LabelHistogram
from dpray.mechanisms.monte_carlo import Finding, Target, audit_target, labels_target, votes_target
from dpray.mechanisms.votes import VoteHistogram
from dpray.methods.dp_kps.audit import densities_target, joint_target, vocabulary_target
from dpray.methods.dp_kps.mechanisms import GRID, FeatureSum, VocabularyHistogram
from dpray.methods.dp_sgd.audit import training_target
from dpray.methods.private_prediction.audit import (
    schema_target,
    sparse_vector_target,
    tokens_target,
)
from dpray.methods.private_prediction.logits import Clip
from tests.evaluation.prediction_faults import (
    SPARSE,
    Fault,
    Runs,
    colder,
    exact_answers,
    free_where_sure,
    half_answers,
    one_row_for_the_batch,
    schema_of_a_row,
    token,
    unclipped,
)
from tests.evaluation.training_faults import (
    PLAN,
    batches,
    fixed_batch,
    fixed_shuffle,
    less_gradient_noise,
    noise_of_two_steps,
    secret_shuffle,
    unclipped_gradients,
)

DELTA = 1e-2
ALPHA = 1e-3


@dataclass(frozen=True)
class Case:
    """A mechanism with a fault, and whether the audit has to catch it."""

    target: Callable[[], Target]
    fault: str
    broken: Fault
    caught: bool
    trials: int

    def finding(self) -> Finding:
        with self.broken():
            return audit_target(self.target(), self.trials, DELTA, ALPHA)


def no_fault() -> AbstractContextManager[Any]:
    return nullcontext()


def noiseless(cls: type, unit: float = 1) -> Fault:
    """Release exact counts; `unit` is the number of steps in one count."""
    return lambda: patch.object(cls, "__call__", lambda self, exact: exact / unit)


def half_noise(cls: type, parameter: str) -> Fault:
    """Draw with half of the noise that is claimed."""
    noisy: Any = cls.__call__

    def halved(self: Any, *arguments: Any) -> Any:
        return noisy(replace(self, **{parameter: getattr(self, parameter) / 2}), *arguments)

    return lambda: patch.object(cls, "__call__", halved)


def twice_epsilon() -> AbstractContextManager[Any]:
    """Draw with half of the noise, which is 1 / epsilon."""
    noisy = LabelHistogram.__call__

    def halved(self: Any, counts: Any) -> Any:
        return noisy(replace(self, epsilon=2 * self.epsilon), counts)

    return patch.object(LabelHistogram, "__call__", halved)


# Aug-PE, topics and DP-KPS.

VOTES = VoteHistogram(math.sqrt(4) * 1.5)
TOPICS = VoteHistogram(3 * 1.5, 3)
TERMS = VocabularyHistogram(1000, 3, 3.0)
DENSITIES = VocabularyHistogram(1000, 3, 6.0)
FOURIER = FeatureSum(100, "laplace", 0.5)
NORMAL = FeatureSum(100, "gaussian", 1.5)


def votes_of(number: int) -> Fault:
    """Cast so many votes of a record for its nearest text."""
    right = monte_carlo.count_votes
    return lambda: patch.object(monte_carlo, "count_votes", lambda p, s: number * right(p, s))


def noise_of_one_record() -> AbstractContextManager[Any]:
    """Draw with the noise for units of one record."""
    noisy = VoteHistogram.__call__

    def less(self: VoteHistogram, counts: Any) -> Any:
        return noisy(replace(self, noise_std=self.noise_multiplier), counts)

    return patch.object(VoteHistogram, "__call__", less)


def all_terms() -> AbstractContextManager[Any]:
    """Count every term that a record holds."""

    def count(self: VocabularyHistogram, terms_of_records: Any) -> Any:
        counts = np.zeros(self.size, dtype=np.int64)
        for terms in terms_of_records:
            counts[list(terms)] += 1
        return counts

    return patch.object(VocabularyHistogram, "count", count)


def terms_twice() -> AbstractContextManager[Any]:
    """Count each of a record's S terms twice."""
    right = VocabularyHistogram.count
    return patch.object(VocabularyHistogram, "count", lambda self, found: 2 * right(self, found))


def uncut() -> AbstractContextManager[Any]:
    def total(self: FeatureSum, blocks_of_records: Any) -> Any:
        return sum(
            np.trunc(block * GRID).astype(np.int64).sum(axis=0) for block in blocks_of_records
        )

    return patch.object(FeatureSum, "sum", total)


def _cases() -> dict[str, Case]:
    found: dict[str, Case] = {}

    def add(
        name: str,
        target: Callable[[], Target],
        trials: int,
        *faults: tuple[str, Fault, bool],
    ) -> None:
        for fault, broken, caught in (("none", no_fault, False), *faults):
            found[f"{name}: {fault}"] = Case(target, fault, broken, caught, trials)

    halved = "half the noise"
    for clip in get_args(Clip):
        for tokens, times in ((1, 2), (6, 4)) if clip == "recentred" else ((1, 2),):
            add(
                f"private prediction, {clip}, {tokens} token(s)",
                lambda clip=clip, tokens=tokens: tokens_target(token(clip=clip), tokens),
                4500 if tokens == 1 else 1000,
                ("clipping removed", unclipped, True),
                (f"temperature / {times}", colder(times), True),
            )
    found["private prediction, dclip, 1 token(s): one row for the batch"] = replace(
        found["private prediction, dclip, 1 token(s): none"],
        fault="one row for the batch", broken=one_row_for_the_batch, caught=True,
    )  # fmt: skip
    add(
        "private prediction, sparse vector",
        lambda: sparse_vector_target(SPARSE),
        1500,
        ("no noise", exact_answers, True),
        (halved, half_answers, False),
    )
    add(
        "private prediction, a schema",
        lambda: schema_target(token(temperature=1.0)),
        700,
        ("the schema reads a private row", schema_of_a_row, True),
        ("tokens are free where private rows are sure", free_where_sure, True),
    )
    one = token(private_tokens=1, temperature=0.6)  # of range 2
    four = token(private_tokens=4, temperature=1.2)  # of range 1
    few_rows = token(private_tokens=1, batch_size=16, clip_bound=10.0)
    # A row moves a batch by half of what its unit may.
    of_two = token(private_tokens=1, temperature=0.6, records_per_unit=2)
    copied, known = Runs(4, 0.1, one, copies=2), Runs(2, 0.1, four)
    labels = Runs(1, 0.9, of_two, labels=("a", "b"))
    partition, divided = Runs(4, 0.1, one), Runs(1, 0.5, few_rows)
    # s / q = 10 records are expected, and 4 and 8 times as many are there.
    larger = [Runs(2, 0.5, one, copies=10 * times - 1) for times in (4, 8)]
    # A batch costs as much as a trial: few batches, and as many trials as the fault's margin takes.
    for runs, trials, fault, broken in (
        (Runs(2, 0.5, one), 4000, "", None),
        (Runs(2, 0.5, four), 4000, "", None),
        (copied, 6000, "coins by content", copied.coins_by_content),
        (known, 2000, "a key that is known", known.reused_key),
        (partition, 1500, "a disjoint partition", partition.partition),
        (divided, 3000, "divided by the rows that joined", divided.real_size),
        (labels, 8000, "labels charged one by one", labels.label_by_label),
        *((runs, 500, "", None) for runs in larger),
    ):
        name = (
            f"private prediction, Poisson, q {runs.q}, {runs.number} x "
            f"{runs.mechanism.private_tokens} token(s), {runs.copies} copies"
            f"{', units of two labels' if len(runs.labels) == 2 else ''}"
        )
        add(name, runs.target, trials)
        if broken is not None:
            found[f"{name}: {fault}"] = Case(broken, fault, no_fault, True, trials)
    add(
        "label histogram, eps 0.5",
        lambda: labels_target(LabelHistogram(("a", "b"), 0.5)),
        4000,
        ("no noise", noiseless(LabelHistogram), True),
        (halved, twice_epsilon, True),
    )
    add(
        "Aug-PE, votes of 4 iterations",
        lambda: votes_target("votes", VOTES, 4),
        16_000,
        ("no noise", noiseless(VoteHistogram), True),
        (halved, half_noise(VoteHistogram, "noise_std"), True),
        ("three votes a record", votes_of(3), True),
    )
    add(
        "topics, histogram, units of 3 records",
        lambda: votes_target("topic histogram", TOPICS),
        16_000,
        ("no noise", noiseless(VoteHistogram), True),
        (halved, half_noise(VoteHistogram, "noise_std"), True),
        ("the noise of one record", noise_of_one_record, True),
        ("a record counts twice", votes_of(2), True),
    )
    add(
        "DP-KPS, vocabulary, S = 3",
        lambda: vocabulary_target("vocabulary", TERMS),
        8000,
        ("no noise", noiseless(VocabularyHistogram), True),
        ("every term of a record counts", all_terms, False),
        ("a term counts twice", terms_twice, True),
        (halved, half_noise(VocabularyHistogram, "scale"), True),
    )
    add(
        "DP-KPS, vocabulary and densities",
        lambda: joint_target(
            vocabulary_target("vocabulary", TERMS), vocabulary_target("densities", DENSITIES)
        ),
        8000,
        ("a term counts twice", terms_twice, True),
        (halved, half_noise(VocabularyHistogram, "scale"), True),
    )
    add(
        "DP-KPS, vocabulary and Gaussian densities",
        lambda: joint_target(
            vocabulary_target("vocabulary", TERMS), densities_target("densities", NORMAL, 1)
        ),
        4000,
        ("no noise in the densities", noiseless(FeatureSum, GRID), True),
    )
    for name, mechanism in (("Laplace", FOURIER), ("Gaussian", NORMAL)):
        add(
            f"DP-KPS, densities, {name}",
            lambda mechanism=mechanism: densities_target("densities", mechanism, 1),
            8000,
            ("no noise", noiseless(FeatureSum, GRID), True),
            ("cut removed", uncut, True),
            (halved, half_noise(FeatureSum, "noise_multiplier"), True),
        )
    add(
        "DP-SGD",
        lambda: training_target(PLAN),
        6000,
        ("clipping removed", unclipped_gradients, True),
        ("no noise", less_gradient_noise(10**9), True),
        ("a tenth of the noise", less_gradient_noise(10), True),
        (halved, less_gradient_noise(2), True),
        ("the same noise in two steps", noise_of_two_steps, True),
        ("a fixed shuffle for Poisson", batches(fixed_shuffle), True),
        ("a fixed batch for Poisson", batches(fixed_batch), True),
        ("a secret shuffle for Poisson", batches(secret_shuffle), False),
    )
    return found


CASES = _cases()


def main() -> None:
    torch.set_num_threads(1)
    print("| mechanism | fault | delta | trials | claimed eps | lower bound | |")
    print("|---|---|---|---|---|---|---|")
    begin = sys.argv[1] if len(sys.argv) > 1 else ""
    for name, case in CASES.items():
        if not name.startswith(begin):
            continue
        found = case.finding()
        verdict = "holds" if found.holds else "**EXCEEDED**"
        if case.fault != "none" and found.holds:
            verdict = "not seen"
        print(
            f"| {name.rsplit(': ', 1)[0]} | {case.fault} | {DELTA:g} | {found.trials:,} | "
            f"{found.claimed:.3f} | {found.lower_bound:.3f} | {verdict} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
