"""A batch is divided over ranks, into micro-batches of fixed shapes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dpray.training.step import TrainingText, padded_length, share


def test_texts_of_a_length_go_together() -> None:
    batch = [TrainingText((1,) * length, 0) for length in (2, 9, 3, 8, 2, 9, 3, 8)]
    assert [(len(texts), n) for texts, n in share(batch, 2, 0, 1)] == [
        (2, 5), (2, 5), (2, 9), (2, 13),
    ]  # fmt: skip


def test_a_text_is_padded_by_its_own_length_alone() -> None:
    assert [padded_length(n) for n in (0, 1, 4, 5, 6, 7, 8, 9, 12, 13)] == [
        5, 5, 5, 7, 7, 9, 9, 13, 13, 17,
    ]  # fmt: skip
    assert [padded_length(n) for n in (64, 65, 96, 97, 128, 1024)] == [65, 97, 97, 129, 129, 1025]
    assert all(n < padded_length(n) <= max(5, 3 * n // 2 + 1) for n in range(1, 3000))


@given(size=st.integers(1, 5), ranks=st.integers(1, 5), count=st.integers(0, 40))
def test_shares_are_equally_many_and_hold_every_text_once(
    size: int, ranks: int, count: int
) -> None:
    batch = [TrainingText((i,) * (i % 11 + 1), 0) for i in range(count)]
    shares = [share(batch, size, rank, ranks) for rank in range(ranks)]
    assert len({len(of_rank) for of_rank in shares}) == 1 and len(shares[0]) >= 1
    assert all(len(micro) <= size for of_rank in shares for micro, _ in of_rank)
    assert all(
        positions == padded_length(len(text.ids))
        for of_rank in shares
        for micro, positions in of_rank
        for text in micro
    )
    held = [text.ids[0] for of_rank in shares for micro, _ in of_rank for text in micro]
    assert sorted(held) == list(range(count))
