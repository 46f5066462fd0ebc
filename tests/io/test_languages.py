"""The table of languages, the words of `data.language`, and the lists of libraries."""

from __future__ import annotations

import re

import pytest
from phonenumbers.phonenumberutil import SUPPORTED_REGIONS

from dpray.config.data import DataConfig
from dpray.io.languages import (
    DEFAULT_EMBEDDER,
    MULTILINGUAL_EMBEDDER,
    code_of,
    embedder_advice,
    frequent_words,
    function_words,
    language_name,
    language_of,
    languages,
    words_named,
)
from dpray.types import InputError


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("German", "de"), ("de", "de"), ("deutsch", "de"), ("de-AT", "de"), ("de_at", "de"),
        ("espan\u0303ol", "es"), (" Français ", "fr"), ("中文", "zh"), ("zh-CN", "zh"),
        ("zh-Hans", "zh"), ("zh-TW", "zh-Hant"), ("Traditional Chinese", "zh-Hant"),
        ("العربية", "ar"), ("ARABIC", "ar"), ("pt-BR", "pt"), ("Klingon", None), ("", None),
        (None, None), ("de-", None), ("d", None),
    ],
)  # fmt: skip
def test_words_name_a_language(words: str | None, code: str | None) -> None:
    assert code_of(words) == code


def test_a_region_chooses_its_phone_numbers() -> None:
    swiss, german = language_of("de-CH"), language_of("German")
    assert swiss is not None and swiss.regions == ("CH",)
    assert german is not None and german.regions == ("DE", "AT", "CH")


def test_the_table_names_each_language_once_and_regions_that_exist() -> None:
    names = [n.casefold() for e in languages().values() for n in (e.code, e.name, *e.names)]
    assert len(names) == len({*names})
    assert all({*each.regions} <= SUPPORTED_REGIONS for each in languages().values())
    # The languages with a public text are those that a preview measures.
    assert {"en", "de", "es", "fr", "zh", "ar"} <= {e.code for e in languages().values() if e.text}


def test_prompts_say_the_name_of_a_code_and_other_words_as_they_are() -> None:
    said = {"de": "German", "pt-BR": "Portuguese", "Deutsch": "Deutsch", "Klingon": "Klingon"}
    assert {words: language_name(words) for words in said} == said
    data = DataConfig(path="a.jsonl", public_size=9, language="fr")
    assert data.about_texts.language == "French"


@pytest.mark.parametrize(
    ("code", "word", "function_word"),
    [
        ("de", "strasse", "nicht"), ("es", "año", "pero"), ("fr", "maison", "avec"),
        ("zh", "天气", "因为"), ("ar", "مدينة", "على"), ("en", "weather", "the"),
    ],
)  # fmt: skip
def test_each_language_has_words(code: str, word: str, function_word: str) -> None:
    words = frequent_words(code)
    assert 10_000 < len(words) < 60_000 and words[word] >= 1000 and function_word in words
    assert sum(len(each.encode()) for each in words) < 1_000_000
    assert not any(re.search(r"\d", each) for each in words) and "" not in words
    assert list(words.values()) == sorted(words.values(), reverse=True)
    assert function_word in function_words(code) and word not in function_words(code)
    assert "wordfreq" in words_named(code)


def test_single_letters_are_no_words_of_a_script_without_spaces() -> None:
    assert min(map(len, frequent_words("zh"))) == 2 and "中" not in frequent_words("zh")
    assert "a" in frequent_words("es")


def test_a_language_without_a_list_says_so() -> None:
    with pytest.raises(InputError, match=r"method\.vocabulary: .* Thai; give a file"):
        frequent_words("th")
    assert function_words("zh-Hant") == frozenset() != function_words("th")


def test_another_embedder_is_advised_for_other_languages_than_english() -> None:
    [line] = embedder_advice(DEFAULT_EMBEDDER, "Arabic", "embedder.model")
    assert line.startswith("embedder.model: ") and line.endswith(MULTILINGUAL_EMBEDDER)
    for model, words in [
        (DEFAULT_EMBEDDER, "English"), (DEFAULT_EMBEDDER, None), (DEFAULT_EMBEDDER, "Klingon"),
        (MULTILINGUAL_EMBEDDER, "Arabic"),
    ]:  # fmt: skip
        assert embedder_advice(model, words, "embedder.model") == []
