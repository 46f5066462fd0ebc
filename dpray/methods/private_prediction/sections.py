"""A long text is read by sections, by a public rule on the text itself."""

from __future__ import annotations

from collections.abc import Iterator

from dpray.engines.sentences import sentence_ends

LONGEST_HEADING = 60

SHORT = 400
"""Characters of a section that is cut no further, whatever its even share is."""


def sections_of(text: str, number: int) -> list[str]:
    """Cut a text into `number` sections of about the same length, in order.

    A section begins at a heading; if these do not cut the text well, after a blank line; else at a
    sentence, a blank, or any character. A cut is good if it has `number` sections, none of them
    longer than twice its even share. A short text with fewer sentences than sections repeats its
    last one.

    Claim: this is a total function of the text and a public number, so a record has one row in
    every section, whatever it and the others look like. Proof: docs/privacy.md, section 2.11.

    >>> sections_of("Fell. Hit the left arm.\\nNo pain.", 2)
    ['Fell. Hit the left arm.', 'No pain.']
    """
    if number == 1:
        return [text]
    begins: list[int] = []
    for rule in (_headings, _paragraphs, sentence_ends, _blanks, _characters):
        begins = _balanced(_places(text, rule(text)), len(text), number)
        ends = [*begins[1:], len(text)]
        longest = max(b - a for a, b in zip(begins, ends, strict=True))
        is_whole = len(begins) == number or (rule is sentence_ends and longest <= SHORT)
        if is_whole and longest <= max(2 * len(text) / number, SHORT):
            break
    sections = [text[a:b].strip() for a, b in zip(begins, ends, strict=True)]
    return sections + sections[-1:] * (number - len(sections))


def _places(text: str, found: Iterator[int]) -> list[int]:
    """Return where parts begin: at the text's start, and wherever words are on both sides."""
    first, last = len(text) - len(text.lstrip()), len(text.rstrip())
    return [0, *(place for place in found if first < place < last)]


def _balanced(starts: list[int], length: int, number: int) -> list[int]:
    """Return the starts of at most `number` runs of parts. A run ends at the part whose middle
    is beyond its even share; every run has a part."""
    begins, ends = [0], [*starts[1:], length]
    for i in range(1, len(starts)):
        left, share = number - len(begins), length * len(begins) / number
        must = len(starts) - i <= left
        if left and (must or (starts[i] + ends[i]) / 2 > share):
            begins.append(starts[i])
    return begins


def _lines(text: str) -> Iterator[tuple[int, str]]:
    place = 0
    for line in text.splitlines(keepends=True):
        yield place, line.strip()
        place += len(line)


def _headings(text: str) -> Iterator[int]:
    """Yield where a line begins that is a heading: it begins with `#`, ends with a colon, or is, up
    to a colon, in capitals. Words before the first one belong to it."""
    found = (place for place, line in _lines(text) if _is_heading(line))
    next(found, None)
    yield from found


def _is_heading(line: str) -> bool:
    title, colon, rest = line.partition(":")
    is_short = 2 < len(title) <= LONGEST_HEADING
    return line.startswith("#") or (is_short and (title.isupper() or bool(colon and not rest)))


def _paragraphs(text: str) -> Iterator[int]:
    after_blank = False
    for place, line in _lines(text):
        if line and after_blank:
            yield place
        after_blank = not line


def _blanks(text: str) -> Iterator[int]:
    return (place for place, letter in enumerate(text) if letter.isspace())


def _characters(text: str) -> Iterator[int]:
    return iter(range(len(text)))
