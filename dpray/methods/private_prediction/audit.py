"""The audit of private prediction bounds the epsilon of private tokens and of the sparse vector's
answers.

The unit's rows are sure of one token, or of another where the sparse vector is asked; all draws are
made by the selector that runs beside the language model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from dpray.accounting.events import SelfComposed
from dpray.auditing.monte_carlo import MonteCarlo, Scores
from dpray.auditing.target import Target
from dpray.mechanisms.randomness import new_key
from dpray.methods.private_prediction.token import PrivateToken, PrivateTokenSelector

TARGET, OTHER = 0, 1

NO_GATE: dict[str, Any] = {"sure_probability": None, "sure_entropy": None}
"""The worst case is a token for which the gate is closed."""

MOST_TOKENS = 16
"""A trial draws at most so many tokens one after the other; more of them take too long."""

SURE = 1e3
"""Clipping has to cut a logit of this size."""

Logits = tuple[torch.Tensor, torch.Tensor]
"""Holds private rows (S, V) and the public one (V,)."""


def targets(mechanism: PrivateToken) -> Iterator[Target]:
    """Yield one token, several of a batch's, and the sparse vector where it is on."""
    for tokens in sorted({1, min(mechanism.private_tokens, MOST_TOKENS)}):
        yield tokens_target(mechanism, tokens)
    if mechanism.sparse_vector is not None:
        yield sparse_vector_target(mechanism)


def tokens_target(mechanism: PrivateToken, tokens: int) -> MonteCarlo:
    """Audit `tokens` of a batch's private tokens; the statistic counts those that are TARGET."""
    mechanism = replace(mechanism, private_tokens=tokens, threshold=None, noise=None, **NO_GATE)
    inputs = {with_unit: _contested(mechanism, with_unit) for with_unit in (True, False)}
    values = asdict(mechanism)

    def draw(with_unit: bool, trials: int) -> Scores:
        hits = [_drawn(values, inputs[with_unit]).count(TARGET) for _ in range(trials)]
        return np.array([hits], dtype=np.float64)

    return MonteCarlo(
        "private token" if tokens == 1 else f"{tokens} private tokens",
        f"{mechanism.records_per_unit} more row(s), sure of one token",
        SelfComposed(mechanism.sampler.dp_event, tokens),
        draw,
        at_once=max(1, 1000 // tokens),
    )


def sparse_vector_target(mechanism: PrivateToken) -> MonteCarlo:
    """Audit the answers up to the first "far": two queries that the unit brings nearer, then one
    that it takes farther; the statistic is whether they are near, near, far."""
    sparse_vector = mechanism.sparse_vector
    assert sparse_vector is not None
    mechanism = replace(mechanism, private_tokens=1, **NO_GATE)
    values = asdict(mechanism)
    queries = {
        with_unit: [_asked(mechanism, with_unit, token) for token in (OTHER, OTHER, TARGET)]
        for with_unit in (True, False)
    }

    def draw(with_unit: bool, trials: int) -> Scores:
        nears = [_nears(values, queries[with_unit]) for _ in range(trials)]
        return np.array([[near == 2 for near in nears]], dtype=np.float64)

    return MonteCarlo(
        "sparse vector, to its first 'far'",
        f"{mechanism.records_per_unit} more row(s) that bring two queries nearer and one farther",
        sparse_vector.dp_event,
        draw,
    )


def _drawn(mechanism: dict[str, Any], logits: Logits) -> list[int]:
    selector = PrivateTokenSelector(mechanism, new_key())
    tokens: list[int] = []
    while (token := selector.select(*logits)) is not None:
        tokens.append(token)
    return tokens


def _nears(mechanism: dict[str, Any], queries: list[Logits]) -> int:
    """Count the answers before the first "far", or all where there is none."""
    selector = PrivateTokenSelector(mechanism, new_key())
    for logits in queries:
        selector.select(*logits)
        if selector.t:
            break
    return selector.public_tokens


def _contested(mechanism: PrivateToken, with_unit: bool) -> Logits:
    """Make logits under which OTHER leads TARGET and the rest of the vocabulary is very unlikely.

    The statistic of several tokens is their sum, which is most informative where the two worlds lie
    on both sides of a tie, equally far from it. One token's ratio of probabilities is near its
    bound where TARGET is rare. The vocabulary is larger than the candidates: they are chosen too.
    """
    c, s, tau = mechanism.clip_bound, mechanism.batch_size, mechanism.temperature
    V = 2 if mechanism.candidates == "all" else max(mechanism.k, 2) + 1
    behind = mechanism.sampler.dp_event.range * (1.5 if mechanism.private_tokens == 1 else 0.5)
    lead = math.log(V) + 3 + behind  # by which OTHER leads the rest
    unit_V = torch.full((mechanism.records_per_unit, V), -SURE)
    unit_V[:, TARGET] = SURE
    public_V = torch.full((V,), -lead * tau)
    public_V[TARGET], public_V[OTHER] = -behind * tau, 0.0
    if mechanism.clip == "dclip":
        # The unit lifts TARGET by c only where the public prompt makes it so unlikely; rows that
        # lift it by less than clipping allows compensate.
        rows = max(0, math.ceil(s * (c - behind * tau) / c))
        public_V[TARGET] -= c * rows / s
        rows_SV = public_V.repeat(rows, 1)
        rows_SV[:, TARGET] += c
    else:
        rows = math.ceil(s * tau * lead / (2 * c))
        rows_SV = (public_V * s / rows).expand(rows, V)
    return torch.cat([rows_SV, unit_V]) if with_unit else rows_SV, public_V


def _asked(mechanism: PrivateToken, with_unit: bool, unit_says: int) -> Logits:
    """Make rows at the threshold's distance from the public row, which says OTHER, in a vocabulary
    of TARGET and OTHER: of s rows that say OTHER some are left out, or others say TARGET too."""
    s, k = mechanism.batch_size, mechanism.records_per_unit
    assert mechanism.threshold is not None
    both = torch.tensor([[SURE, -SURE], [-SURE, SURE]])
    away = round(mechanism.threshold * s)
    if unit_says == OTHER:
        # Without the unit `away / s` of the mass is missing at OTHER.
        rows_SV = both[[OTHER] * max(0, s - away)]
    else:
        rows_SV = both[[OTHER] * s + [TARGET] * away]
    unit_SV = both[[unit_says] * k]
    return torch.cat([rows_SV, unit_SV]) if with_unit else rows_SV, both[OTHER]
