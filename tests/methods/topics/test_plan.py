"""The public texts of a plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpray.config.config import Config
from dpray.methods.config import parse_config
from dpray.methods.topics.plan import make_plan, public_terms
from dpray.methods.topics.settings import TopicsSettings
from dpray.types import InputError

Make = Callable[..., tuple[Config, TopicsSettings]]


@pytest.fixture
def asked(settings: Callable[..., dict[str, Any]], tmp_path: Path) -> Make:
    """A configuration and the settings of topics over public `rows`."""

    def make(rows: list[dict[str, Any]], epsilon: float, data: Any = (), **keys: Any) -> Any:
        public = tmp_path / "public.jsonl"
        public.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = parse_config(settings(privacy__epsilon=epsilon, **dict(data)))
        return config, TopicsSettings(name="topics", public=str(public), **keys)

    return make


def rows(number: int, label: str = "a") -> list[dict[str, Any]]:
    return [{"text": f"Text {i} of elephants", "label": label} for i in range(number)]


def test_texts_without_words_are_left_out_and_the_longest_words_stand_in(asked: Make) -> None:
    blank = [{"text": "of the", "label": "b"}, {"text": "", "label": "a"}]
    plan = make_plan(*asked(rows(12) + blank, 2.0, topics=2, words=2))
    assert len(plan.public) == 12 and "elephants" not in repr(plan.public)
    assert public_terms(plan) == {"text", "elephants"}
    assert plan.cost.epsilon == pytest.approx(plan.config.privacy.epsilon, rel=1e-3)
    units = {"data__unit": "label", "data__max_records_per_unit": 3}
    of_three = make_plan(*asked(rows(2), 2.0, units, topics=2))
    assert of_three.votes.sigma == pytest.approx(3 * plan.votes.sigma, rel=0.02)
    assert of_three.noise_multiplier == of_three.votes.sigma / 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"text": "Marlowe", "label": "c"}, "method.public: public.jsonl, row 3: the label is not"),
        ({"text": "Marlowe"}, "method.public: public.jsonl, row 3: no column 'label'"),
        ({"label": "a"}, "method.public: public.jsonl, row 3: no column 'text'"),
        ({"text": ["Marlowe"], "label": "a"}, "method.public: public.jsonl, row 3: column 'text'"),
    ],
)
def test_a_wrong_public_row_is_named(asked: Make, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        make_plan(*asked([*rows(2), wrong], 2.0, topics=2))
    assert str(refused.value).startswith(said) and "Marlowe" not in str(refused.value)


def test_too_few_texts_and_the_private_file_are_refused(asked: Make) -> None:
    with pytest.raises(InputError, match=r"^method.topics: 3 topics of fewer texts, the 2 with"):
        make_plan(*asked(rows(2), 2.0, topics=3))
    config, method = asked(rows(2), 2.0, topics=2)
    private = method.model_copy(update={"public": config.data.path})
    with pytest.raises(InputError, match=r"^method.public: .* is data.path itself"):
        make_plan(config, private)
