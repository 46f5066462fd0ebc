"""Sentences end at their signs. A text that `max_tokens` cut ends at one, or goes on to one."""

from __future__ import annotations

import re
from collections.abc import Iterator

# The signs of Chinese and Japanese, and of Armenian, Ethiopic, Burmese, Khmer and Tibetan, end a
# sentence wherever they are. Thai and Lao have none.
_SENTENCE_END = re.compile(r"[.!?…؟۔।][\"'”’»)\]]*(?=\s)|[。！？։።፧။។།][”’」』）»]*|\S(?=\n)")

PART_OF_CHARACTER = "\ufffd"
"""A text that was cut in a character ends with it."""

LEAST_WHOLE = 0.25
"""The least part of a text that whole sentences have to be, or it stays as it is: the end may be
that of an abbreviation."""


def sentence_ends(text: str) -> Iterator[int]:
    """Yield where sentences and lines of a text end."""
    return (found.end() for found in _SENTENCE_END.finditer(text))


def whole_sentences(text: str) -> str:
    """Return a text that was cut up to the end of its last whole sentence or line, or of its last
    whole character.

    >>> whole_sentences("The card is here. It does not wo")
    'The card is here.'
    """
    text = text.rstrip(PART_OF_CHARACTER)
    end = max(sentence_ends(text), default=0)
    return text[:end] if end >= LEAST_WHOLE * len(text) else text


def is_cut_short(text: str) -> bool:
    """Return whether `whole_sentences` leaves a part of a sentence at the end of a text. Blanks are
    none, and a last line that a new line ends is whole.

    >>> is_cut_short("The card does not wo"), is_cut_short("The card is here. It does not wo")
    (True, False)
    """
    whole = whole_sentences(text)
    if not whole.strip() or len(whole) in sentence_ends(f"{whole} "):
        return False
    left_out = text[len(whole) :]
    return not ("\n" in left_out and left_out.isspace())


def ended_text(before: str, text: str, has_ended: bool) -> str | None:
    """Return a text that was cut after `before` and went on, up to the first end of a sentence from
    there. Without one, return all of it if the model `has_ended` it, else None.

    >>> ended_text("The card does not wo", "The card does not work. I", False)
    'The card does not work.'
    """
    begins = len(before.rstrip(PART_OF_CHARACTER))  # the character may be whole now
    # At the same place, it went on with a new line.
    end = next((end for end in sentence_ends(f"{text} ") if end >= begins), None)
    return text[:end] if has_ended or end is not None else None


_MARKS = {
    '"': '"', "“": "”", "”": "”", "„": "“”", "«": "»", "»": "«", "‹": "›", "›": "‹", "「": "」",
    "『": "』",
}  # fmt: skip
"""The quotation marks of languages: an opening one, and those that close it."""

_QUOTED = re.compile(
    "|".join(
        # Whole, or else cut, or closed by the mark that every keyboard has.
        f'{opening}([^{opening}{close}]+)[{close}]|{opening}([^{opening}{close}"]+)"?'
        for opening, close in _MARKS.items()
    )
)


def unquoted(text: str) -> str:
    """Return a text without the pair of quotation marks around all of it, in which chat models put
    an example; the closing one is missing if the text was cut.

    >>> unquoted('"The card is here."'), unquoted('"Yes", she said. "No."')
    ('The card is here.', '"Yes", she said. "No."')
    """
    found = _QUOTED.fullmatch(text)
    return text if found is None else found[found.lastindex or 0].strip()
