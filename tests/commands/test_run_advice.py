"""After a run, one line names the key to turn if the texts are cut, alike or no words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpray.commands.run import advice
from dpray.io.columns import cut_advice

GOOD = [f"the {place} was clean and the staff helped us" for place in "abcdefghij"]


@pytest.mark.parametrize(
    ("texts", "cut", "key"),
    [
        (GOOD, 1, None),
        (GOOD, 2, cut_advice(0.2)),
        (GOOD[:6] + GOOD[:4], 0, "raise method.temperature"),
        (GOOD[:7] + [f"{n} 1.5 % (3)" for n in range(3)], 0, "lower method.temperature"),
        ([f"{word} हिन्दी में लिखा" for word in "कखगघचछजझटठ"], 0, None),
    ],
)
def test_the_key_to_turn(tmp_path: Path, texts: list[str], cut: int, key: str | None) -> None:
    rows = [
        {"text": text, "finish_reason": "length" if n < cut else "stop"}
        for n, text in enumerate(texts)
    ]
    (tmp_path / "synthetic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = advice(tmp_path)
    assert found is None if key is None else key in (found or "")


def test_records_that_do_not_say_how_they_ended_are_not_called_cut(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": text}) + "\n" for text in GOOD)
    (tmp_path / "synthetic.jsonl").write_text(rows)
    assert advice(tmp_path) is None
