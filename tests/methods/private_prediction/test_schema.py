"""A schema costs nothing: every outcome of small adaptive games is enumerated, with its mask.

The adversary picks all logits anew after every token. The selector is the run's own; its draws are
scripted, so that each branch of the game is played once and its probability is exact.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import jsonschema
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dpray
from dpray.engines.base import select_token
from dpray.engines.schema.forms import vocabulary
from dpray.engines.schema.schema import Schema, read_schema
from dpray.engines.schema.token_mask import TokenMask
from dpray.methods.config import parse_config
from dpray.methods.private_prediction.audit import five_tokens
from dpray.methods.private_prediction.logits import Clip
from dpray.methods.private_prediction.mechanism import PrivateToken
from dpray.methods.private_prediction.token import PrivateTokenSelector
from dpray.types import InputError
from tests.engines.schemas import DASH, EOS, FILM, A, B
from tests.methods.private_prediction.one_by_one import private_token

Settings = Callable[..., dict[str, Any]]

TEXTS, R, MAX_TOKENS, V = 2, 3, 7, 5
STEP = "dpray.methods.private_prediction.step"
SURE = 1e3

TWO_OR_THREE = Schema("regex", "([ab]-){2,3}")
"""Each choice is followed by a token that the schema forces."""

VOCABULARY = five_tokens()

Transcript = tuple[int, ...]
Logits = tuple[torch.Tensor, torch.Tensor]


token = partial(private_token, private_tokens=R, clip="dclip")


@dataclass
class Scripted:
    """Takes the options of a script, and then the first ones."""

    script: Transcript
    probability: float = 1.0
    taken: list[int] = field(default_factory=list)
    options: list[int] = field(default_factory=list)

    def sample(self, exponents: torch.Tensor, _: object) -> torch.Tensor:
        [law] = exponents.softmax(-1)
        at = len(self.taken)
        self.taken.append(self.script[at] if at < len(self.script) else 0)
        self.options.append(len(law))
        self.probability *= float(law[self.taken[-1]])
        return torch.tensor([[self.taken[-1]]])


@dataclass(frozen=True)
class Adversary:
    """Chooses all rows by the tokens so far: the withheld unit's is sure of one of them."""

    seed: int
    with_unit: bool

    def logits(self, transcript: Transcript) -> Logits:
        rng = np.random.default_rng([self.seed, *transcript])
        public_V = torch.tensor(rng.normal(0, 1, V))
        others_SV = torch.tensor(rng.choice([-SURE, 0.0, SURE], size=(rng.integers(0, 4), V)))
        unit_V = torch.full((1, V), -SURE, dtype=torch.float64)
        unit_V[0, rng.integers(0, V)] = SURE
        rows_SV = torch.cat([others_SV, unit_V]) if self.with_unit else others_SV
        return rows_SV.float(), public_V.float()


class Honest:
    """Plays a game as a run does. Faults are subclasses."""

    def mask(self, logits: Logits) -> TokenMask:
        return TokenMask(TWO_OR_THREE, VOCABULARY, MAX_TOKENS)

    def after(self, selector: PrivateTokenSelector, logits: Logits) -> None:
        """See what the selector did."""

    def play(self, mechanism: PrivateToken, adversary: Adversary, script: Scripted) -> Transcript:
        t, transcript = 0, ()
        for _ in range(TEXTS):
            selector = PrivateTokenSelector(asdict(mechanism), "00" * 32, t=t)
            selector.mask = self.mask(adversary.logits(transcript))
            drawn = None
            while drawn != EOS:
                logits = adversary.logits(transcript)
                with patch(f"{STEP}.sample_softmax", script.sample):
                    drawn = select_token(selector, *logits)
                assert drawn is not None
                transcript += (drawn,)
                self.after(selector, logits)
            t = selector.t
            if t >= mechanism.private_tokens:
                break
        return transcript

    def law(self, mechanism: PrivateToken, adversary: Adversary) -> dict[Transcript, float]:
        law: Counter[Transcript] = Counter()
        pending: list[Transcript] = [()]
        while pending:
            script = Scripted(pending.pop())
            outcome = self.play(mechanism, adversary, script)
            law[outcome] += script.probability  # type: ignore[assignment]
            for depth in range(len(script.script), len(script.taken)):
                pending += [
                    (*script.taken[:depth], other) for other in range(1, script.options[depth])
                ]
        assert math.isclose(sum(law.values()), 1.0, rel_tol=1e-9)
        return dict(law)


def exceeds(
    game: Honest, mechanism: PrivateToken, seeds: int = 4, enough: float = math.inf
) -> float:
    """Return the largest ratio of the true delta to the claimed one, over epsilon, both directions
    and the adversaries, or the first that is `enough`."""
    epsilons: npt.NDArray[np.float64] = np.arange(0.0, 3.0, 0.25)
    ((term, count),) = mechanism.dp_event.terms().items()
    claimed = term.pld(2.0**-11, count).get_delta_for_epsilon(epsilons)
    worst = 0.0
    for seed in range(seeds):
        laws = [game.law(mechanism, Adversary(seed, with_unit)) for with_unit in (True, False)]
        outcomes = sorted(set(laws[0]) | set(laws[1]))
        p, q = (np.array([law.get(each, 0.0) for each in outcomes]) for law in laws)
        for one, other in ((p, q), (q, p)):
            for epsilon, delta in zip(epsilons, claimed, strict=True):
                if delta > 1e-12:
                    excess = float(np.maximum(one - math.exp(epsilon) * other, 0).sum())
                    worst = max(worst, excess / float(delta))
        if worst > enough:
            break
    return worst


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip": "recentred"},
        {"candidates": "top_k", "k": 1},
        {"candidates": "top_k_plus", "k": 2},
        {"sure_probability": 0.7},
    ],
    ids=["dclip", "recentred", "top_k", "top_k_plus", "gate"],
)
def test_the_claim_is_never_exceeded(changes: dict[str, object]) -> None:
    if "sure_probability" in changes:
        changes |= {"private_tokens": 2}
    assert exceeds(Honest(), token(**changes)) <= 1 + 1e-9


def test_the_games_come_near_the_claim() -> None:
    assert exceeds(Honest(), token(), enough=0.3) > 0.3


class ReadsAPrivateRow(Honest):
    """The fault: the last private row decides what the schema allows first."""

    def mask(self, logits: Logits) -> TokenMask:
        rows_SV, _ = logits
        first = "a" if len(rows_SV) and rows_SV[-1].argmax() != B else "[ab]"
        return TokenMask(Schema("regex", f"{first}-([ab]-){{1,2}}"), VOCABULARY, MAX_TOKENS)


class PrivateDecisionsAreFree(Honest):
    """The fault: a token is not counted if the private rows, not the schema, leave no choice."""

    def after(self, selector: PrivateTokenSelector, logits: Logits) -> None:
        if len(logits[0]) and float(logits[0].double().mean(0).softmax(-1).max()) > 0.9:
            selector.t = max(0, selector.t - 1)


@pytest.mark.parametrize("fault", [ReadsAPrivateRow, PrivateDecisionsAreFree])
def test_faults_exceed_it(fault: Callable[[], Honest]) -> None:
    assert exceeds(fault(), token(private_tokens=2), seeds=6, enough=1.2) > 1.2


def selector(private_tokens: int = 3, **changes: object) -> PrivateTokenSelector:
    made = PrivateTokenSelector(asdict(token(private_tokens=private_tokens, **changes)), "00" * 32)
    made.mask = TokenMask(TWO_OR_THREE, VOCABULARY, MAX_TOKENS)
    return made


FLAT = (torch.zeros(3, V), torch.zeros(V))


def text_of(chosen: PrivateTokenSelector) -> list[int]:
    tokens: list[int] = []
    while not tokens or tokens[-1] != EOS:
        drawn = select_token(chosen, *FLAT)
        assert drawn is not None
        tokens.append(drawn)
    return tokens


def test_forced_tokens_are_free_and_a_used_up_batch_ends_its_text() -> None:
    chosen = selector(private_tokens=1)
    tokens = text_of(chosen)
    assert tokens[0] in (A, B) and tokens[1] == DASH
    assert tokens[2:] == [A, DASH, EOS]  # the shortest ending
    assert chosen.state()["t"] == 1 and chosen.state()["public_tokens"] == 4


def test_tokens_that_the_schema_forbids_are_never_drawn() -> None:
    for _ in range(40):
        tokens = text_of(selector())
        assert set(tokens) <= {A, B, DASH, EOS} and len(tokens) <= MAX_TOKENS


def test_clipping_is_among_allowed_tokens() -> None:
    """A row that wants a forbidden token most still tells which allowed one it likes better."""
    rows = torch.tensor([[0.0, 2.0, -9.0, 50.0, -9.0]] * 400)
    chosen = selector(batch_size=400, clip="recentred", clip_bound=10.0, temperature=0.1)
    assert select_token(chosen, rows, torch.zeros(V)) == A


def test_copies_are_excluded_unless_nothing_else_is_allowed() -> None:
    for _ in range(20):
        made = selector(candidates="top_k", k=5)
        copying = PrivateTokenSelector(
            asdict(made.mechanism), "00" * 32, prompt=[DASH, A, DASH, B], longest_copy=1
        )
        copying.mask = TokenMask(Schema("regex", "[ab]-[ab]"), VOCABULARY, MAX_TOKENS)
        # Both choices after the dash would be copies of the prompt.
        assert len(text_of(copying)) == 4


OPTIONS: list[dict[str, object]] = [
    {},
    {"candidates": "top_k", "k": 2},
    {"candidates": "top_k", "k": 9},
    {"candidates": "top_k_plus", "k": 2},
    {"sure_probability": 0.9},
    {"threshold": 0.5, "noise": 0.1},
    {"threshold": -50.0, "noise": 0.1},
]
odd = st.sampled_from([-math.inf, -3e38, -1.0, 2.0, 3e38])


@settings(max_examples=100)
@given(
    public=st.lists(odd, min_size=V, max_size=V),
    clip=st.sampled_from(get_args(Clip)),
    changes=st.sampled_from(OPTIONS),
    size=st.integers(0, 3),
    copying=st.booleans(),
)
def test_no_public_logits_leave_a_text_without_a_token(
    public: list[float], clip: str, changes: dict[str, object], size: int, copying: bool
) -> None:
    """Those of all allowed tokens may be -inf, which depends on the tokens that were drawn."""
    made = selector(private_tokens=9, clip=clip, **changes)
    if copying:
        prompt = [A, B, DASH, A, DASH, B]
        made = PrivateTokenSelector(
            asdict(made.mechanism), "00" * 32, prompt=prompt, longest_copy=1
        )
        made.mask = TokenMask(Schema("regex", "[ab]-[ab]"), VOCABULARY, MAX_TOKENS)
    logits = (torch.randn(size, V), torch.tensor(public))
    tokens: list[int | None] = []
    while not tokens or tokens[-1] != EOS:
        tokens.append(select_token(made, *logits))
    assert len(tokens) <= MAX_TOKENS and {*tokens} <= {A, B, DASH, EOS}


def test_without_a_schema_a_copy_may_be_the_only_token_above_minus_infinity() -> None:
    public = torch.full((V,), -math.inf)
    public[A] = 1.0
    for changes in OPTIONS:
        made = token(clip="dclip", private_tokens=9, **changes)
        copying = PrivateTokenSelector(asdict(made), "00" * 32, prompt=[B, A], longest_copy=1)
        copying.copies.add(B)  # type: ignore[union-attr]
        assert select_token(copying, torch.zeros(2, V), public) not in (A, None)


def test_every_released_record_is_valid(settings: Settings, tmp_path: Path) -> None:
    schema = tmp_path / "film.json"
    schema.write_text(json.dumps(FILM))
    method = {
        "name": "private_prediction", "batch_size": 5, "clip": "dclip", "clip_bound": 0.2,
        "max_tokens": 96, "max_records": 3, "schema": str(schema),
    }  # fmt: skip
    poisson = dpray.plan(parse_config(settings(method=method | {"batches": "poisson"})))
    assert poisson.forced_tokens > 20 and poisson.summary()["method"]["schema"] == FILM
    assert poisson.private_tokens == 96 - poisson.forced_tokens
    config = parse_config(settings(method=method | {"batches": "disjoint"}))
    records = dpray.run(config).records
    assert len(records) == 3
    for record in records:
        jsonschema.validate(json.loads(record["text"]), FILM)
        assert record["finish_reason"] in ("stop", "length")
    report = json.loads(Path(config.output.path, "privacy_report.json").read_text())
    assert report["tokens"]["private"] < report["tokens"]["total"] - 3 * 20
    assert report["public_inputs"]["schema"] == FILM
    assert "schema" in report["sampling"]["tokens"]


def test_a_schema_without_room_is_refused_before_the_charge(settings: Settings) -> None:
    config = settings()
    config["method"] |= {"max_tokens": 12, "schema": FILM}
    with pytest.raises(InputError, match=r"^method\.max_tokens: no text"):
        dpray.plan(parse_config(config))


def test_an_output_that_goes_on_after_the_completion_is_refused(
    settings: Settings, tmp_path: Path
) -> None:
    template = tmp_path / "template.yaml"
    template.write_text('user: "{text}"\noutput: "{completion} ends"\n')
    config = settings()
    config["method"] |= {"max_tokens": 96, "schema": FILM, "template": str(template)}
    with pytest.raises(InputError, match="words after"):
        dpray.plan(parse_config(config))


def test_a_schema_that_decides_everything_is_one_private_token_at_most(settings: Settings) -> None:
    config = settings()
    config["method"] |= {
        "batches": "poisson", "clip": "dclip", "clip_bound": 0.2, "max_records": 2,
        "max_tokens": 8, "schema": {"choices": [" x "]},
    }  # fmt: skip
    plan = dpray.plan(parse_config(config))
    assert 1 <= plan.private_tokens == plan.free_tokens < 8
    # The blanks belong to the form.
    records = dpray.run(parse_config(config)).records
    assert [(record["text"], record["finish_reason"]) for record in records] == [
        (" x ", "stop")
    ] * 2


@pytest.mark.parametrize("schema", [FILM, {"type": "string", "pattern": "^(cat|dog)$"}])
def test_tokens_beyond_those_that_the_model_reads_are_never_allowed(schema: dict[str, Any]) -> None:
    demo = str(Path(dpray.__file__).parent / "demo" / "model")
    size = vocabulary(demo).size - 400
    few, rng = vocabulary(demo, size), np.random.default_rng(0)
    mask = TokenMask(read_schema(schema), few, 200)
    while mask.ending:
        assert max(mask.ending) < size and mask.allowed.shape == mask.choices.shape == (size,)
        mask.take(int(rng.choice(np.flatnonzero(mask.choices))))
