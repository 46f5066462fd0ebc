"""DP-KPS by hand: its plan, its costs, its passes and its sequences, without an LLM."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import DiscreteLaplace, Gaussian
from dpray.mechanisms.term_matcher import TermMatcher
from dpray.methods.dp_kps.algorithm import DensityPass, DpKps, Sequences
from dpray.methods.dp_kps.mechanisms import GRID, LARGEST, FeatureSum, density, record_prefixes
from dpray.methods.dp_kps.settings import DpKpsSettings

WORDS = ["goal", "team", "match", "stock", "bank", "oil", "moon", "star", "comet", "common"]
SPORT = ["The common team scored a goal in the match"] * 30
MONEY = ["A common bank sold stock for oil"] * 20
D = 12
VECTORS = np.linalg.qr(np.random.default_rng(0).standard_normal((D, D)))[0][: len(WORDS)]


def settings(**changes: Any) -> DpKpsSettings:
    return DpKpsSettings.model_validate({"name": "dp_kps", "vocabulary": "terms.txt", **changes})


OWN = {field.name for field in fields(DpKps)}


def changed(plan: DpKps, **changes: Any) -> DpKps:
    """The plan with other values of its own and of its settings."""
    own = {name: value for name, value in changes.items() if name in OWN}
    of_settings = {name: value for name, value in changes.items() if name not in own}
    return replace(plan, settings=settings(**(plan.settings.model_dump() | of_settings)), **own)


EXACT = DpKps(
    settings(
        phrases_per_record=4,
        vocabulary_size=len(WORDS),
        sequence_length=6,
        threshold=0.0,
        contrast=0.0,
    ),
    labels=("sport", "money"),
    public_terms=len(WORDS),
    dimension=D,
    epsilon_vocabulary=1.0,
    epsilon_kde=5.0,
)
RFF = changed(EXACT, estimator="rff", features=400, bandwidth=1.0)
ITERATIVE = changed(RFF, sampling="iterative", sequence_length=4)
LINEAR = changed(ITERATIVE, ensemble="linear")
PLANS = {"exact": EXACT, "rff": RFF, "logarithmic": ITERATIVE, "linear": LINEAR}


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def drawn(plan: DpKps, noisy: dict[str, Any], label: str, number: int = 40) -> list[list[str]]:
    ids = Sequences(plan, VECTORS, noisy).draw(label, number, rng())
    assert ids.shape == (number, plan.settings.sequence_length)
    return [[WORDS[i] for i in row] for row in ids]


def without_noise(plan: DpKps, **texts: list[str]) -> dict[str, Any]:
    unit = GRID if plan.settings.estimator == "rff" else 1
    return {label: sums / unit for label, sums in exact_sums(plan, **texts).items()}


def exact_sums(plan: DpKps, **texts: list[str]) -> dict[str, Any]:
    density_pass = DensityPass(plan, WORDS, VECTORS)
    return {label: density_pass.sums(found) for label, found in texts.items()}


def test_the_vocabulary_is_the_paper_s_b1() -> None:
    counts = EXACT.vocabulary_counts(TermMatcher(WORDS), [*SPORT, *MONEY])
    assert dict(zip(WORDS, counts.tolist(), strict=True))["common"] == 50
    assert counts.sum() == 50 * 4
    ids = changed(EXACT, epsilon_vocabulary=1e6, vocabulary_size=4).noisy_vocabulary(counts, rng())
    assert {WORDS[i] for i in ids} == {"common", "goal", "team", "match"}


def test_terms_of_noise_are_no_part_of_the_vocabulary() -> None:
    """Half of the words are in no record. A sequence is left if nothing stands above the noise."""
    counts = np.array([1000 if place < 6 else 0 for place in range(len(WORDS))])
    plan = changed(EXACT, vocabulary_size=99, sequence_length=3, epsilon_vocabulary=1e6)
    assert len(plan.noisy_vocabulary(counts, rng())) == len(WORDS), "as in the paper"
    real = changed(plan, vocabulary_fdr=0.01).noisy_vocabulary(counts, rng())
    assert sorted(real) == list(range(6))
    assert len(changed(plan, vocabulary_fdr=0.01).noisy_vocabulary(counts * 0, rng())) == 3
    assert (
        len(changed(plan, vocabulary_fdr=0.01, vocabulary_size=2).noisy_vocabulary(counts, rng()))
        == 2
    )


def test_the_two_events_of_the_exact_estimator() -> None:
    """A record moves four counts by one each."""
    assert EXACT.dp_event.terms() == {
        DiscreteLaplace(4 / 1.0, 1): 4,
        DiscreteLaplace(4 / 5.0, 1): 4,
    }
    assert EXACT.dp_event.pure_epsilon() == pytest.approx(6.0)
    assert changed(EXACT, records_per_unit=3).dp_event.pure_epsilon() == pytest.approx(6.0)


@pytest.mark.parametrize(("plan", "estimators"), [(RFF, 1), (ITERATIVE, 2), (LINEAR, 4)])
def test_an_ensemble_s_estimators_share_eps_kde(plan: DpKps, estimators: int) -> None:
    assert plan.dp_event.pure_epsilon() == pytest.approx(6.0)
    assert isinstance(plan.kde, FeatureSum)
    one_feature = DiscreteLaplace(plan.kde.grid_scale, LARGEST)
    assert plan.dp_event.terms()[one_feature] == 400 * estimators
    assert plan.kde.scale == pytest.approx(math.sqrt(2) * 400 * estimators / 5.0)


def test_gaussian_noise_is_calibrated_for_the_whole_ensemble() -> None:
    plan = changed(LINEAR, noise="gaussian", delta=1e-6)
    (_, kde) = plan.dp_event.events  # type: ignore[attr-defined]
    assert isinstance(kde, SelfComposed) and isinstance(kde.event, Gaussian) and kde.count == 4
    assert cost(kde, 1e-6).epsilon == pytest.approx(5.0, rel=1e-4)
    assert cost(kde, 1e-6).epsilon <= 5.0
    assert cost(plan.dp_event, 1e-6).epsilon <= 6.0


def test_classes_compose_in_parallel() -> None:
    many = changed(EXACT, labels=tuple("abcdefgh"))
    assert many.dp_event == EXACT.dp_event == changed(EXACT, labels=()).dp_event


@pytest.mark.parametrize(
    ("length", "blocks"), [(1, [2]), (2, [2]), (4, [2, 4]), (9, [2, 4, 8, 16]), (10, [2, 4, 8, 16])]
)
def test_the_logarithmic_ensemble(length: int, blocks: list[int]) -> None:
    plan = changed(ITERATIVE, sequence_length=length)
    assert [K.blocks for K in plan.estimators] == blocks
    assert [K.block_norm for K in plan.estimators] == [2 / b for b in blocks]
    for prefix in range(1, length + 1):
        K = plan.estimators[plan.estimator_of(prefix)]
        assert prefix <= K.blocks <= max(2, 2 * prefix - 1)


def test_the_linear_ensemble() -> None:
    assert [K.blocks for K in LINEAR.estimators] == [1, 2, 3, 4]
    assert [K.block_norm for K in LINEAR.estimators] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert [LINEAR.estimator_of(prefix) for prefix in (1, 2, 3, 4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_shards_sums_add_up_to_the_last_bit(plan: DpKps) -> None:
    sums, texts = DensityPass(plan, WORDS, VECTORS).sums, [*SPORT, *MONEY, "moon", "nothing"]
    assert (sums(texts[:31]) + sums(texts[31:]) == sums(texts)).all()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_one_record_moves_each_estimator_by_at_most_its_sensitivity(plan: DpKps) -> None:
    sums = DensityPass(plan, WORDS, VECTORS).sums
    for text in ["goal", "moon star comet common goal team", "nothing", SPORT[0]]:
        moved = np.abs(sums([*MONEY, text]) - sums(MONEY)).sum(axis=1)
        bound = 400 * LARGEST if isinstance(plan.kde, FeatureSum) else 4
        assert (moved <= bound).all()


def in_turns(*words: str) -> list[str]:
    """30 texts of the same words, each word first in ten of them."""
    return [" ".join((*words[i % 3 :], *words[: i % 3])) for i in range(30)]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_without_noise_each_class_gets_its_own_terms(plan: DpKps) -> None:
    plan = changed(plan, contrast=1.0, sequence_length=3, features=4000, temperature=0.2)
    classes = {
        "sport": in_turns("goal", "team", "match"),
        "money": in_turns("bank", "stock", "oil"),
    }
    noisy = without_noise(plan, **classes)
    for label, texts in classes.items():
        terms = [term for row in drawn(plan, noisy, label) for term in row]
        assert sum(term in texts[0] for term in terms) > 0.98 * len(terms)


def test_independent_draws_follow_the_densities() -> None:
    plan = changed(EXACT, sequence_length=5)
    noisy = {"sport": np.array([[30, 10, 0, -5, 0, 0, 0, 0, 0, 60]])}
    drawn_ids = Sequences(plan, VECTORS, noisy).draw("sport", 4000, rng())
    shares = np.bincount(drawn_ids.ravel(), minlength=10) / drawn_ids.size
    np.testing.assert_allclose(shares[[0, 1, 9]], [0.3, 0.1, 0.6], atol=0.02)
    assert shares[2:9].sum() == 0


def weights(plan: DpKps, noisy: dict[str, Any], label: str = "a") -> np.ndarray:
    row = Sequences(plan, VECTORS[: noisy[label].shape[1]], noisy)._weights(label, None)
    return row[0]


COUNTS = {"a": np.array([[8, 4, 2, 2, -3]]), "b": np.array([[8, 0, 2, 6, 0]])}


def test_temperature_top_m_threshold_and_contrast() -> None:
    plain = weights(EXACT, COUNTS)
    np.testing.assert_allclose(plain, [0.5, 0.25, 0.125, 0.125, 0.0])
    np.testing.assert_allclose(
        weights(changed(EXACT, temperature=0.5), COUNTS), plain**2 / (plain**2).sum()
    )
    np.testing.assert_allclose(weights(changed(EXACT, top_m=2), COUNTS), [2 / 3, 1 / 3, 0, 0, 0])
    noise = math.sqrt(2) * 4 / 5
    assert EXACT.density_noise_std == pytest.approx(noise)
    cut = weights(changed(EXACT, threshold=2 / noise), COUNTS)
    np.testing.assert_allclose(cut, [6 / 8, 2 / 8, 0, 0, 0], atol=1e-12)
    # Of both: 16, 4, 4, 8 of 32. What a has more of than both: the second term alone.
    assert weights(changed(EXACT, contrast=1.0), COUNTS).tolist() == [0, 1, 0, 0, 0]
    # Two classes' noise is sqrt(2) times as large: 16 - sqrt(2), 4 - sqrt(2), ... of both.
    plan = changed(EXACT, contrast=1.0, threshold=1 / noise)
    both = np.maximum(np.array([16, 4, 4, 8, -3]) - math.sqrt(2), 0)
    own = np.array([7, 3, 1, 1, 0]) / 12
    left = np.maximum(own - both / both.sum(), 0)
    np.testing.assert_allclose(weights(plan, COUNTS), left / left.sum())


@pytest.mark.parametrize("plan", [RFF, changed(RFF, noise="gaussian", delta=1e-6)])
def test_the_noise_of_a_density(plan: DpKps) -> None:
    """`density_noise_std` against densities of noise alone. A right one is outside once in 10^6:
    the ten terms' densities of a draw are ten numbers with the same noise in them."""
    plan = changed(plan, features=100)
    K, zeros = plan.estimators[0], np.zeros((1, 100), dtype=np.int64)
    draws = [plan.noisy_sums(zeros)[0] for _ in range(1000)]
    found = np.std([density(noise, K(VECTORS)) for noise in draws])
    assert found == pytest.approx(plan.density_noise_std, rel=0.1)


def test_the_threshold_of_a_padded_prefix_grows_with_its_factor() -> None:
    noisy = exact_sums(ITERATIVE, a=SPORT)  # as if no noise had been drawn: the same in every run
    P = np.zeros((1, 0), dtype=np.int64)
    found = Sequences(ITERATIVE, VECTORS, noisy).extensions(noisy["a"], P)[0]
    floor = float(np.median(found))
    unit = ITERATIVE.density_noise_std * ITERATIVE.estimators[0].padding_factor(1)
    plan = changed(ITERATIVE, threshold=floor / unit)
    left = np.maximum(found - floor, 0)
    assert np.count_nonzero(left) == len(WORDS) // 2
    np.testing.assert_allclose(
        Sequences(plan, VECTORS, noisy)._weights("a", P)[0], left / left.sum()
    )


def test_one_class_has_nothing_to_contrast_with() -> None:
    only = {"a": COUNTS["a"]}
    assert weights(changed(EXACT, contrast=1.0), only).tolist() == weights(EXACT, only).tolist()


def test_where_nothing_is_above_zero_all_terms_are_alike() -> None:
    assert weights(EXACT, {"a": np.array([[-1, 0, -7, 0, 0]])}).tolist() == [0.2] * 5


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_class_without_records_still_gives_sequences(plan: DpKps) -> None:
    noisy = {
        label: plan.noisy_sums(sums)
        for label, sums in exact_sums(plan, sport=[], money=["no hit at all"]).items()
    }
    assert all(np.abs(sums).max() > 0 for sums in noisy.values())
    assert len(drawn(plan, noisy, "sport")) == len(drawn(plan, noisy, "money")) == 40


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_more_terms_wanted_than_there_are(plan: DpKps) -> None:
    plan = changed(plan, phrases_per_record=50, vocabulary_size=99, sequence_length=12)
    counts = plan.vocabulary_counts(TermMatcher(WORDS), SPORT)
    assert sorted(plan.noisy_vocabulary(counts, rng())) == list(range(len(WORDS)))
    noisy = {"sport": plan.noisy_sums(exact_sums(plan, sport=SPORT)["sport"])}
    assert len(drawn(plan, noisy, "sport")) == 40


@pytest.mark.parametrize("plan", [ITERATIVE, LINEAR], ids=["logarithmic", "linear"])
def test_extensions_are_the_estimator_s_densities(plan: DpKps) -> None:
    """The two products of matrices against Theorem B.2 written out, for every prefix length."""
    noisy = without_noise(plan, sport=[*SPORT, "moon star comet goal", "bank oil"])["sport"]
    sequences = Sequences(plan, VECTORS, {"sport": noisy})
    for length in range(1, plan.settings.sequence_length + 1):
        P = np.array([[1, 4, 2], [6, 7, 8]])[:, : length - 1]
        k = plan.estimator_of(length)
        K = plan.estimators[k]
        angles = [K.angles(VECTORS, block) for block in range(length)]
        queries = [[*row, term] for row in P.tolist() for term in range(len(WORDS))]
        (features,) = record_prefixes(K, angles, queries, shortest=1)
        expected = density(noisy[k], features) * K.padding_factor(length)
        np.testing.assert_allclose(
            sequences.extensions(noisy, P), expected.reshape(2, len(WORDS)), atol=1e-9
        )


@pytest.mark.parametrize(
    "plan",
    [ITERATIVE, changed(LINEAR, bandwidth=0.4)],  # padding needs a bandwidth about 1
    ids=["logarithmic", "linear"],
)
def test_iterative_sequences_keep_what_occurs_together(plan: DpKps) -> None:
    """Two kinds of texts in one class: a sequence is of one kind, where independent draws mix."""
    plan = changed(plan, sequence_length=3, features=4000, temperature=0.05)
    kinds = [{"team", "goal", "match"}, {"moon", "star", "comet"}]
    noisy = without_noise(plan, sport=[t for kind in kinds for t in in_turns(*sorted(kind))])
    rows = [set(row) for row in drawn(plan, noisy, "sport")]
    assert sum(row in kinds for row in rows) > 0.95 * len(rows)
    assert all(sum(row == kind for row in rows) > 5 for kind in kinds)


@pytest.mark.parametrize("plan", [ITERATIVE, LINEAR], ids=["logarithmic", "linear"])
def test_a_record_has_no_part_in_estimators_of_longer_prefixes(plan: DpKps) -> None:
    sums = DensityPass(plan, WORDS, VECTORS).sums
    for text, length in (("nothing", 0), ("goal", 1), ("goal team", 2), ("goal team match", 3)):
        taken = np.flatnonzero(np.abs(sums([text])).max(axis=1)).tolist()
        assert taken == sorted({plan.estimator_of(prefix) for prefix in range(1, length + 1)})


@pytest.mark.parametrize("plan", [ITERATIVE, LINEAR], ids=["logarithmic", "linear"])
def test_the_terms_of_an_iterative_sequence_are_distinct(plan: DpKps) -> None:
    plan = changed(plan, sequence_length=len(WORDS) + 2, features=20)
    noisy = {"sport": plan.noisy_sums(exact_sums(plan, sport=SPORT)["sport"])}
    for row in drawn(plan, noisy, "sport"):
        assert sorted(row[: len(WORDS)]) == sorted(WORDS)
