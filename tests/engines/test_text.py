"""Prompts, truncation and decoding: the tokenizer's side of the local engines."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpray.engines.base import EngineError, Prompt
from dpray.engines.text import TextCodec
from dpray.types import InputError
from tests.engines.tiny_model import WORDS

CHAT = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[answer] {% endif %}"
)
texts = st.one_of(
    st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join),
    st.text(max_size=80),
    st.text(alphabet="ab é漢🙂 \n", max_size=80),
)


@pytest.fixture(scope="session")
def codec(model_folder: str) -> TextCodec:
    return TextCodec(model_folder, None)


def tokens(codec: TextCodec, text: str) -> int:
    return len(codec.tokenizer(text, add_special_tokens=False)["input_ids"])


@settings(max_examples=60)
@given(text=texts, most=st.integers(1, 20))
def test_the_first_ids_are_those_of_the_whole_text(codec: TextCodec, text: str, most: int) -> None:
    assert codec.first_ids(text, most) == codec.ids(text)[:most]


@pytest.mark.parametrize("part", ["x", "a ", "\ud800", "\u0300\u0316", "\u200b", "</s>"])
def test_the_first_ids_of_any_text_take_bounded_time(codec: TextCodec, part: str) -> None:
    text = part * (10**7 // len(part))
    before = time.monotonic()
    assert 0 < len(codec.first_ids(text, 16)) <= 16
    assert time.monotonic() - before < 10


def test_a_prompts_length_is_in_no_error(codec: TextCodec) -> None:
    with pytest.raises(EngineError, match="do not fit the context") as refused:
        codec.check_length(98_765, 4)
    assert "98765" not in str(refused.value)


def test_without_a_chat_template(codec: TextCodec) -> None:
    ids = codec.encode(Prompt("the patient", "came with"))
    assert ids[0] == 1
    assert codec.tokenizer.decode(ids[1:]) == "the patient\n\ncame with"


def test_with_a_chat_template(model_folder: str) -> None:
    chat = TextCodec(model_folder, None)
    chat.tokenizer.chat_template = CHAT
    ids = chat.encode(Prompt("the patient", "came"))
    assert chat.tokenizer.decode(ids) == "[user] the patient\n[answer] came"


def test_neither_prompt_nor_completion_shows_its_text() -> None:
    assert "secret" not in repr(Prompt("secret", "secret"))


@settings(max_examples=150, deadline=None)
@given(text=texts, limit=st.integers(0, 20))
def test_truncate_gives_the_longest_prefix_that_fits(
    codec: TextCodec, text: str, limit: int
) -> None:
    cut = codec.truncate(text, limit)
    assert text.startswith(cut)
    assert tokens(codec, cut.encode("utf-8", "replace").decode()) <= limit
    if cut != text:
        assert tokens(codec, text[: len(cut) + 1].encode("utf-8", "replace").decode()) > limit
        assert codec.truncate(cut, limit) == cut


@pytest.mark.parametrize("unit", ["patient ", "a", " ", "é", "🙂", "ab12\n"])
def test_a_text_of_a_million_characters_is_truncated_at_once(codec: TextCodec, unit: str) -> None:
    text = (unit * 1_000_000)[:1_000_000]
    began = time.perf_counter()
    cut = codec.truncate(text, 100)
    assert time.perf_counter() - began < 1
    assert text.startswith(cut) and cut
    assert cut == codec.truncate(text[:20_000], 100)


def test_a_lone_surrogate_is_no_error(codec: TextCodec) -> None:
    text = "the \ud800 patient " * 20
    assert codec.encode(Prompt(text))
    assert text.startswith(codec.truncate(text, 10))


def test_ended(codec: TextCodec) -> None:
    prompt = codec.encode(Prompt("the"))
    said = list(codec.encode(Prompt("", "cough and fever"))[1:])
    assert codec.ended(prompt, said, ()) is None
    assert codec.ended(prompt, [*said, 2], ()) == "\n\ncough and fever"
    assert codec.ended(prompt, said, ("fever", "and")) == "\n\ncough "


def test_bad_lengths_and_folders(model_folder: str, tmp_path: object) -> None:
    with pytest.raises(InputError, match=r"engine\.max_model_len: 999 is more than .* 256"):
        TextCodec(model_folder, 999)
    with pytest.raises(InputError, match=r"engine\.model: cannot read"):
        TextCodec(str(tmp_path), None)
