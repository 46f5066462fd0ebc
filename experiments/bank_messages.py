"""`python experiments/bank_messages.py` makes the texts of `dpray demo --model smollm2`.

They are 5,000 training messages and every fifth test message of BANKING77 (Casanueva et al. 2020;
CC BY 4.0), as ../shared/data has them; instead of its 77 intents a message has one of six topics.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from runs import DATA, HERE

FOLDER = HERE.parent / "dpray" / "demo" / "messages"

TOPICS = {
    "top-ups": ("top_up", "topping_up", "apple_pay"),
    "cash": ("cash", "atm", "card_swallowed"),
    "transfers": ("transfer", "beneficiary", "receiving_money"),
    "payments and fees": (
        "payment", "fee", "charge", "exchange", "refund", "currency", "currencies",
        "direct_debit", "balance",
    ),
    "cards": ("card", "pin", "visa", "contactless"),
}  # fmt: skip
"""A message's topic is the first that has a word of its intent."""

OTHER = "accounts"

EVERY = {"private": 1, "test": 5}
"""The test messages are in the order of their intents."""


def topic(intent: str) -> str:
    """Return the topic of one of the 77 intents."""
    words = intent.lower()
    return next((name for name, parts in TOPICS.items() if any(p in words for p in parts)), OTHER)


def messages(part: str) -> Iterator[dict[str, str]]:
    with open(DATA / "banking77" / f"{part}.jsonl") as file:
        for line in islice(file, 0, None, EVERY[part]):
            row = json.loads(line)
            yield {"text": " ".join(row["text"].split()), "label": topic(row["label"])}


def main(out: Path = FOLDER) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for part in EVERY:
        lines = (json.dumps(row) + "\n" for row in messages(part))
        (out / f"{part}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
