"""The topics of the customers' messages."""

import pytest
from bank_messages import OTHER, topic


@pytest.mark.parametrize(
    ("intent", "expected"),
    [
        ("top_up_by_card_charge", "top-ups"),
        ("cash_withdrawal_charge", "cash"),
        ("transfer_fee_charged", "transfers"),
        ("Refund_not_showing_up", "payments and fees"),
        ("reverted_card_payment?", "payments and fees"),
        ("card_arrival", "cards"),
        ("verify_my_identity", OTHER),
    ],
)
def test_an_intents_topic_is_the_first_that_has_its_words(intent: str, expected: str) -> None:
    assert topic(intent) == expected
