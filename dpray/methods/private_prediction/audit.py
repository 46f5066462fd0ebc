"""The audit of private prediction bounds the epsilon of private tokens, of the sparse vector's
answers, and of whole runs with secret Poisson batches.

The unit's rows are sure of one token, or of another if the sparse vector is asked. Batches are
stepped through by the method's algorithm and the selector that runs next to the language model;
if many meet the same logits, the mechanism draws all their tokens at once.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLTokenizer, TokenizerWrapper

from dpray.accounting.composed_events import SelfComposed
from dpray.config.config import DataConfig
from dpray.engines.base import FinishReason, LockstepGroup, LockstepResult, select_token
from dpray.engines.schema.schema import Schema
from dpray.engines.schema.token_mask import TokenMask, Vocabulary
from dpray.mechanisms.batches import PoissonBatches
from dpray.mechanisms.monte_carlo import Scores, Target
from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.private_prediction.algorithm import Batch, BatchState, PrivatePrediction
from dpray.methods.private_prediction.mechanism import PrivateToken
from dpray.methods.private_prediction.step import draw_private
from dpray.methods.private_prediction.token import PrivateTokenSelector
from dpray.workers.rows import Row, RowsOf, local_rows, record_rows

TARGET, OTHER = 0, 1

MOST_TOKENS = 16
"""The most tokens that a trial draws one after the other; more of them take too long."""

RUN_BATCHES, RUN_TOKENS = 4, 4
"""The most batches of a small run, and the most tokens of each."""

COPIES = 4
"""The further units that have the same records as the withheld one, in one of the small runs."""

SURE = 1e3
"""Clipping has to cut a logit of this size."""

Logits = tuple[torch.Tensor, torch.Tensor]
"""The private rows (S, V) and the public one (V,)."""


def targets(mechanism: PrivateToken, has_schema: bool = False) -> Iterator[Target]:
    """Yield one token, several of a batch's, the sparse vector if it is on, and a text of a schema
    if there is one."""
    for tokens in sorted({1, min(mechanism.private_tokens, MOST_TOKENS)}):
        yield tokens_target(mechanism, tokens)
    if mechanism.sparse_vector is not None:
        yield sparse_vector_target(mechanism)
    if has_schema:
        yield schema_target(mechanism)


def runs_targets(
    data: DataConfig, batches: PoissonBatches, method: PrivatePrediction
) -> Iterator[Target]:
    """Yield small runs with Poisson batches, with one unit withheld: one in which no other unit
    joins by a coin, one in which `COPIES` others with the same records do, and, if units may have
    rows of two labels, one whose unit has them."""
    rows_of = partial(record_rows, data=data, by_place=True)
    rows_per_unit = data.max_records_per_unit
    counts, probabilities = batches.batches_per_label, batches.sampling_probabilities
    # First the label whose batches a unit joins most often.
    first, *others = sorted(counts, key=lambda x: (probabilities[x], counts[x]), reverse=True)
    units_of = [([first] * rows_per_unit, 1), ([first] * rows_per_unit, 1 + COPIES)]
    if rows_per_unit > 1 and others:
        units_of.append(([first] * (rows_per_unit - 1) + others[:1], 1))
    for labels, units in units_of:
        some_batches, short = small_run(batches, method, list(dict.fromkeys(labels)))
        yield runs_target(short, some_batches, made_up_rows(data, rows_of, labels, units))


def small_run(
    batches: PoissonBatches, method: PrivatePrediction, labels: Sequence[str]
) -> tuple[PoissonBatches, PrivatePrediction]:
    """Return the first few batches of these labels, and the method with few tokens for each."""
    most = RUN_BATCHES // len(labels)
    tokens = min(method.mechanism.private_tokens, RUN_TOKENS)
    return (
        PoissonBatches(
            {label: min(batches.batches_per_label[label], most) for label in labels},
            {label: batches.sampling_probabilities[label] for label in labels},
        ),
        replace(
            method,
            mechanism=replace(method.mechanism, private_tokens=tokens, sure_probability=None),
            max_tokens=tokens,
            form=None,  # what it allows is the same in both worlds
        ),
    )


def made_up_rows(data: DataConfig, rows_of: RowsOf, labels: Sequence[str], units: int) -> list[Row]:
    """Return the rows that the run's reader makes of the units, each with a record of each of
    `labels`, one unit after the other. The file that it reads is made up."""
    made_up = "made up" if data.turns is None else [{"role": data.roles[0], "content": "made up"}]
    records = [
        dict.fromkeys(data.text_columns, made_up)
        | ({data.label: data.released_label(label)} if data.label is not None else {})
        | ({data.unit: f"unit {unit}"} if data.unit is not None else {})
        for unit in range(units)
        for label in labels
    ]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "records.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return local_rows(data.model_copy(update={"path": str(file), "encoding": None}), rows_of)


def runs_target(
    method: PrivatePrediction,
    batches: PoissonBatches,
    rows: Sequence[Row],
    key: Callable[[], str] = new_key,
) -> Target:
    """Audit whole runs on `rows`, with and without the last unit's.

    The run's own code decides who joins, with a secret of `key` for each run, and draws the tokens.
    Further rows, which say OTHER, are in every batch: the claim holds given who else joined. The
    statistics count the tokens that are TARGET: in all batches, at most, and in each batch.

    Claim: what `PoissonBatches.dp_event` charges for such a run, whatever the other units are.
    """
    mechanism = method.mechanism
    withheld = mechanism.records_per_unit
    copies = len(rows) // withheld - 1
    names = list(batches.batch_ids())
    # All units together bring a batch within one draw's range of a tie, from below where one is
    # missing.
    rows_in_a_batch = max(Counter(row["label"] for row in rows[-withheld:]).values())
    behind = (copies + 1.0) * mechanism.sampler.dp_event.range * rows_in_a_batch / withheld
    rows_SV, unit_V, public_V = _tied_rows(mechanism, behind)

    @cache
    def logits(members: int) -> Logits:
        return torch.cat([rows_SV, unit_V.expand(members, -1)]), public_V

    def members(present: Sequence[Row]) -> list[int]:
        secret = key()
        counts = Counter(
            name for row in present for name in batches.joined(secret, row["label"], row["unit"])
        )
        return [counts[name] for name in names]

    def draw(with_unit: bool, trials: int) -> Scores:
        present = rows if with_unit else rows[:-withheld]
        members_BT = np.array([members(present) for _ in range(trials)]).T
        hits_BT = np.zeros(members_BT.shape)
        for number in np.unique(members_BT):
            where_BT = members_BT == number
            hits_BT[where_BT] = _hits(method, logits(int(number)), int(where_BT.sum()))
        return np.concatenate([[hits_BT.sum(axis=0), hits_BT.max(axis=0)], hits_BT])

    tokens, labels = mechanism.private_tokens, len(batches.batches_per_label)
    of_labels = f" of {labels} labels" if labels > 1 else ""
    among = f", among {copies} others with the same records" if copies else ""
    return Target(
        f"runs of {len(names)} Poisson batch(es), {tokens} token(s) each",
        f"one more unit of {withheld} row(s){of_labels}, sure of one token{among}",
        batches.dp_event(mechanism.sampler.dp_event, tokens, withheld),
        draw,
    )


def tokens_target(mechanism: PrivateToken, tokens: int) -> Target:
    """Audit `tokens` of a batch's private tokens; the statistic counts those that are TARGET."""
    mechanism = replace(mechanism.ungated, private_tokens=tokens)
    inputs = {with_unit: _contested(mechanism, with_unit) for with_unit in (True, False)}
    # The text is long enough for the selector to end it.
    method = PrivatePrediction(mechanism, max_tokens=tokens + 1, examples_per_batch=1)

    def draw(with_unit: bool, trials: int) -> Scores:
        return _hits(method, inputs[with_unit], trials)[None]

    return Target(
        "private token" if tokens == 1 else f"{tokens} private tokens",
        f"{mechanism.records_per_unit} more row(s), sure of one token",
        SelfComposed(mechanism.sampler.dp_event, tokens),
        draw,
    )


def sparse_vector_target(mechanism: PrivateToken) -> Target:
    """Audit the answers up to the first "far": two queries that the unit brings nearer, then one
    that it takes farther; the statistic is whether they are near, near, far."""
    sparse_vector = mechanism.sparse_vector
    assert sparse_vector is not None
    mechanism = replace(mechanism, private_tokens=1, sure_probability=None)
    values = mechanism.values
    queries = {
        with_unit: [_asked(mechanism, with_unit, token) for token in (OTHER, OTHER, TARGET)]
        for with_unit in (True, False)
    }

    def draw(with_unit: bool, trials: int) -> Scores:
        nears = [_nears(values, queries[with_unit]) for _ in range(trials)]
        return np.array([[near == 2 for near in nears]], dtype=np.float64)

    return Target(
        "sparse vector, to its first 'far'",
        f"{mechanism.records_per_unit} more row(s) that bring two queries nearer and one farther",
        sparse_vector.dp_event,
        draw,
    )


def schema_target(mechanism: PrivateToken) -> Target:
    """Audit texts of a schema, token by token: choices between TARGET and OTHER, each followed by a
    token that the schema forces. Its text is longer than the batch's private tokens pay for. The
    statistic counts the tokens that are TARGET."""
    tokens = min(mechanism.private_tokens, 2)
    mechanism = replace(mechanism.ungated, private_tokens=tokens, candidates="all")
    values, vocabulary = mechanism.values, five_tokens()
    schema, length = Schema("regex", f"([ab]-){{{2 * tokens}}}"), 4 * tokens + 1
    room = length + 1  # with one token less, the text would be its own ending
    inputs = {}
    for with_unit in (True, False):
        rows_SV, public_V = _contested(mechanism, with_unit)
        others = torch.full((len(rows_SV), 3), -SURE)
        inputs[with_unit] = torch.cat([rows_SV, others], 1), torch.cat([public_V, others[0]])

    def hits(logits: Logits) -> int:
        selector = PrivateTokenSelector(values, new_key())
        selector.mask = TokenMask(schema, vocabulary, room)
        return [select_token(selector, *logits) for _ in range(length)].count(TARGET)

    def draw(with_unit: bool, trials: int) -> Scores:
        return np.array([[hits(inputs[with_unit]) for _ in range(trials)]], dtype=np.float64)

    return Target(
        f"a text of a schema, with {tokens} private token(s)",
        f"{mechanism.records_per_unit} more row(s), sure of one token",
        SelfComposed(mechanism.sampler.dp_event, tokens),
        draw,
    )


def five_tokens() -> Vocabulary:
    """Return a vocabulary of b (TARGET), a (OTHER), -, z and an end token. An ending has a if there
    is a choice, so it counts nothing."""
    return Vocabulary(LLTokenizer(TokenizerWrapper(_FiveTokens())))


class _FiveTokens:
    eos_token_id, bos_token_id, special_token_ids = 4, None, (4,)
    tokens = (b"b", b"a", b"-", b"z", b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return [max(b"ba-z".find(byte), 0) for byte in text]


@torch.inference_mode()
def _hits(method: PrivatePrediction, logits: Logits, batches: int) -> npt.NDArray[np.float64]:
    """Return how many tokens of each batch are TARGET, also those of a text that is not finished;
    every step's logits are the same.

    One batch is stepped through, which shows the mechanism of each text and the number of its
    tokens. No token changes these, so the mechanism draws those of all batches at once.
    """
    # The prompts tell the number of the batch's rows, which the algorithm may not use.
    state = BatchState(Batch("0/0", ((TARGET,),) * len(logits[0]), (OTHER,), new_key()))
    hits = np.zeros(batches)
    while method.goes_on(state):
        group = method.next_text(state)
        result = _in_lockstep(group, logits)
        mechanism = PrivateToken(**group.selector.arguments["mechanism"])
        drawn = (batches, len(result.token_ids))
        tokens = draw_private(mechanism, *logits, generator(new_key()), drawn)
        hits += (tokens == TARGET).sum(dim=1).numpy()
        state.add(result)
    return hits


def _in_lockstep(group: LockstepGroup, logits: Logits) -> LockstepResult:
    selector = group.selector.build()
    tokens: list[int] = []
    while len(tokens) < group.max_tokens and (token := select_token(selector, *logits)) is not None:
        tokens.append(token)
    reason: FinishReason = "length" if len(tokens) == group.max_tokens else "exhausted"
    return LockstepResult(group.group_id, "", tuple(tokens), reason, selector.state())


@torch.inference_mode()
def _nears(mechanism: Mapping[str, object], queries: list[Logits]) -> int:
    """Count the answers before the first "far", or all if there is none."""
    selector = PrivateTokenSelector(mechanism, new_key())
    for logits in queries:
        select_token(selector, *logits)
        if selector.t:
            break
    return selector.public_tokens


def _contested(mechanism: PrivateToken, with_unit: bool) -> Logits:
    """Make logits under which OTHER leads TARGET and the rest of the vocabulary is very unlikely.

    The statistic of several tokens is their sum, which is most informative where the two worlds lie
    on both sides of a tie, equally far from it. One token's ratio of probabilities is near its
    bound where TARGET is rare.
    """
    behind = mechanism.sampler.dp_event.range * (1.5 if mechanism.private_tokens == 1 else 0.5)
    rows_SV, unit_V, public_V = _tied_rows(mechanism, behind)
    unit_SV = unit_V.expand(mechanism.records_per_unit, -1)
    return torch.cat([rows_SV, unit_SV]) if with_unit else rows_SV, public_V


def _tied_rows(
    mechanism: PrivateToken, behind: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make rows whose average has TARGET so far `behind` OTHER, in units of the temperature; a row
    that is sure of TARGET; and the public row.

    The vocabulary is larger than the candidates: they are chosen too.
    """
    c, s, tau = mechanism.clip_bound, mechanism.batch_size, mechanism.temperature
    V = 2 if mechanism.candidates == "all" else max(mechanism.k, 2) + 1
    lead = math.log(V) + 3 + behind  # by which OTHER leads the rest
    unit_V = torch.full((V,), -SURE)
    unit_V[TARGET] = SURE
    public_V = torch.full((V,), -lead * tau)
    public_V[TARGET], public_V[OTHER] = -behind * tau, 0.0
    match mechanism.clip:
        case "recentred":
            rows = math.ceil(s * tau * lead / (2 * c))
            return (public_V * s / rows).expand(rows, V), unit_V, public_V
        case "dclip":
            # The unit lifts TARGET by c only where the public prompt makes it so unlikely; rows
            # that lift it by less than clipping allows compensate.
            rows = max(0, math.ceil(s * (c - behind * tau) / c))
            public_V[TARGET] -= c * rows / s
            rows_SV = public_V.repeat(rows, 1)
            rows_SV[:, TARGET] += c
            return rows_SV, unit_V, public_V


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
