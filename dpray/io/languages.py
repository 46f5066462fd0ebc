"""Languages by the words of `data.language`, from one table (languages.yaml), and the lists of
words that libraries have of them. docs/languages.md says what depends on the language.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from importlib.metadata import version
from typing import Any

from dpray.extras import Late, is_installed, require
from dpray.io.yaml_text import parse_yaml
from dpray.types import InputError

stopwordsiso, wordfreq = Late("stopwordsiso"), Late("wordfreq")

ENGLISH = "en"

DEFAULT_EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
"""It was trained on English texts."""

MULTILINGUAL_EMBEDDER = "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
"""It was trained on texts of 50 languages, all of the table among them."""

_CODE = re.compile("([a-z]{2})(?:[-_]([a-z]{2})|[-_][a-z]{4})?")

WITHOUT_SPACES = ("zh", "ja")
"""Languages without spaces between words of which there is a list of words."""

UNIT = 1e-9
"""The frequency of a word that counts as 1."""


@dataclass(frozen=True)
class Language:
    """`name` is in English, and `names` are other words for the language. Phone numbers of its
    `regions` are found without a country code. `text` is public; "" if there is none."""

    code: str
    name: str
    names: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    text: str = ""


@cache
def languages() -> Mapping[str, Language]:
    """Return the table by codes."""
    text = resources.files("dpray.io").joinpath("languages.yaml").read_text(encoding="utf-8")
    rows: Any = parse_yaml(text)
    return {
        code: Language(
            code, row["name"], tuple(row["names"]), tuple(row["regions"]), row.get("text", "")
        )
        for code, row in rows.items()
    }


def language_of(words: str | None) -> Language | None:
    """Return the language that the words name: by its name in English or in itself in any case, or
    by its code. A code may have a region, whose phone numbers are then those that are found:
    `pt-BR`. None if the table does not have it."""
    if not words:
        return None
    wanted = _folded(words)
    for language in languages().values():
        if wanted in map(_folded, (language.code, language.name, *language.names)):
            return language
    tag = _CODE.fullmatch(wanted)
    found = languages().get(tag[1]) if tag else None
    return replace(found, regions=(tag[2].upper(),)) if tag and tag[2] and found else found


def language_name(words: str) -> str:
    """Return the words for prompts: a code as the English name, and any other words as they are."""
    found = language_of(words) if _CODE.fullmatch(_folded(words)) else None
    return words if found is None else found.name


def _folded(words: str) -> str:
    return unicodedata.normalize("NFC", words.strip().casefold())


def listed() -> str:
    """Return the names of the table for a message."""
    return ", ".join(language.name for language in languages().values())


def code_of(words: str | None) -> str | None:
    """Return the code of a language for pages and metadata, None if it is not known."""
    found = language_of(words)
    return None if found is None else found.code


def embedder_advice(model: str, words: str | None, key: str) -> list[str]:
    """Return what to set instead of the default embedder for texts in this language."""
    language = language_of(words)
    if language is None or language.code == ENGLISH or model != DEFAULT_EMBEDDER:
        return []
    return [
        f"{key}: {DEFAULT_EMBEDDER} was trained on English; for {language.name} set "
        f"{MULTILINGUAL_EMBEDDER}"
    ]


@lru_cache(maxsize=1)
def frequent_words(code: str) -> Mapping[str, int]:
    """Return the words that occur once in a million words or more, the most frequent first, each
    with its count in a thousand million, by wordfreq. Words with digits are left out; so are, in
    Chinese and Japanese, single letters, which are mostly parts of other words. Raises
    InputError if there is no list."""
    require("method.vocabulary", "wordfreq")
    if code not in wordfreq.available_languages("small"):
        raise InputError(
            f"method.vocabulary: there is no list of words of {languages()[code].name}; give a "
            "file of public terms, one a line"
        )
    least = 2 if code in WITHOUT_SPACES else 1
    return {
        word: round(frequency / UNIT)
        for word, frequency in wordfreq.get_frequency_dict(code, "small").items()
        if len(word) >= least and any(map(str.isalpha, word)) and not any(map(str.isdigit, word))
    }


def words_named(words: str | None) -> str:
    """Return the public name of a language's `frequent_words`."""
    return f"the frequent words of {language_name(words or '')} (wordfreq {version('wordfreq')})"


def function_words(code: str) -> frozenset[str]:
    """Return a language's function words by stopwordsiso; none if it has no list."""
    require("method.stop_words", "stopwordsiso")
    has_list = stopwordsiso.has_lang(code)
    return frozenset(stopwordsiso.stopwords(code)) if has_list else frozenset()


def topic_words(words: str | None) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    """Return the stop words of names of topics, None for English ones, and, for a script without
    spaces, the words that they may have. Without the extra `languages` all are as in English."""
    code = code_of(words)
    has_lists = is_installed("stopwordsiso") and is_installed("wordfreq")
    if code is None or code == ENGLISH or not has_lists:
        return None, ()
    return function_words(code), tuple(frequent_words(code)) if code in WITHOUT_SPACES else ()
