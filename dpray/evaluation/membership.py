"""Membership inference tries to tell the records that a release was made of from records that had
no part in it.

A record's score is its similarity to the nearest synthetic text: one score by embeddings, one by
shared words. The attacker is weak: it sees only the texts and compares. Scores near chance show
that records do not leak by copying; a better attack may still find something.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve

from dpray.engines.base import Embedder
from dpray.evaluation import NOT_FOR_RELEASE
from dpray.evaluation.copies import NGRAM, nearest_cosine, shared_words
from dpray.types import InputError, Json

FEWEST_RECORDS = 100
"""A false-positive rate of 1 % takes at least this many records a side."""

FALSE_POSITIVES = 0.01

Scores = npt.NDArray[np.float64]


def membership(
    members: Sequence[str],
    non_members: Sequence[str],
    synthetic: Sequence[str],
    embedder: Embedder,
    confidence: float = 0.95,
) -> Json:
    """Return for each score the area under the ROC curve (0.5 is chance) with its interval, and the
    true-positive rate at a false-positive rate of 1 % (Carlini et al. 2022).

    The scores are the cosine with the nearest synthetic text, and the share of a record's 5-grams
    that are in some synthetic text. Raises InputError as `check_numbers` does.
    """
    check_numbers(members, non_members, synthetic)
    made_ND = embedder.embed(synthetic)
    sides = (members, non_members)
    scores = {
        "nearest_cosine": [nearest_cosine(embedder.embed(texts), made_ND) for texts in sides],
        # A record of fewer words has no n-gram to share.
        "ngram_overlap": [
            np.nan_to_num(shared_words(texts, synthetic, NGRAM)[1]) for texts in sides
        ],
    }
    return {
        "private": NOT_FOR_RELEASE,
        "members": len(members),
        "non_members": len(non_members),
        "synthetic": len(synthetic),
        "ngram": NGRAM,
        "confidence": confidence,
        "false_positive_rate": FALSE_POSITIVES,
        "scores": {
            name: attack(inside, outside, confidence) for name, (inside, outside) in scores.items()
        },
    }


def check_numbers(
    members: Sequence[str], non_members: Sequence[str], synthetic: Sequence[str]
) -> None:
    """Raise InputError for fewer than 100 records a side or no synthetic text."""
    for name, texts in (("members", members), ("non-members", non_members)):
        if len(texts) < FEWEST_RECORDS:
            raise InputError(f"{name}: too few records, it takes {FEWEST_RECORDS}")
    if not synthetic:
        raise InputError("synthetic records: there are none")


def attack(members: Scores, non_members: Scores, confidence: float) -> dict[str, object]:
    """Attack by one score: larger values are taken for members.

    The interval of the area is normal, with DeLong's standard error. If that is 0 (the sides do not
    overlap, or all scores are equal), it shows nothing. Then Hoeffding's interval is used, which
    holds for all distributions: the area is a two-sample U-statistic of a kernel between 0 and 1
    (Hoeffding 1963, Section 5b).
    """
    is_member = np.repeat([1, 0], [len(members), len(non_members)])
    scores = np.concatenate([members, non_members])
    area = float(roc_auc_score(is_member, scores))
    error = auc_standard_error(members, non_members)
    half_width = float(stats.norm.ppf(0.5 + confidence / 2)) * error
    if error == 0:
        smaller = min(len(members), len(non_members))
        half_width = math.sqrt(math.log(2 / (1 - confidence)) / (2 * smaller))
    false, true, _ = roc_curve(is_member, scores, drop_intermediate=False)
    return {
        "auc": area,
        "auc_interval": [max(0.0, area - half_width), min(1.0, area + half_width)],
        "true_positive_rate": float(true[false <= FALSE_POSITIVES].max()),
    }


def auc_standard_error(members: Scores, non_members: Scores) -> float:
    """Return the standard error of the area under the curve by DeLong et al. (1988), in the rank
    form of Sun and Xu (2014).

    A member's component is the share of non-members below it, ties by half; a non-member's is the
    share of members above it.
    """
    m, n = len(members), len(non_members)
    ranks = stats.rankdata(np.concatenate([members, non_members]))
    above_m = (ranks[:m] - stats.rankdata(members)) / n
    above_n = 1 - (ranks[m:] - stats.rankdata(non_members)) / m
    return math.sqrt(above_m.var(ddof=1) / m + above_n.var(ddof=1) / n)
