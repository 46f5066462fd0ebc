"""A file of public terms, one a line, or `term<tab>count`."""

from __future__ import annotations

import unicodedata
from pathlib import Path

from dpray.types import InputError


def read_vocabulary(path: str | Path, stop_words: str = "keep") -> list[str]:
    """Return the terms of a UTF-8 file, one per line, in the file's order.

    What follows a tab is left out (so is a column of counts), and so are blank lines, and terms
    that equal an earlier one but for case. `stop_words` "english" leaves out scikit-learn's list of
    318 English function words. Raises InputError that names the key and the line.
    """
    return list(read_counts(path, stop_words))


def read_counts(path: str | Path, stop_words: str = "keep") -> dict[str, int | None]:
    """Return the terms of `read_vocabulary`, each with its public count, or None where there is
    none."""
    terms: dict[str, tuple[str, int | None]] = {}
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise InputError(
                        f"method.vocabulary: {path}, line {number}: the bytes are not valid UTF-8"
                    ) from None
                first, _, rest = text.partition("\t")
                term, count = " ".join(first.split()), rest.strip()
                if term:
                    folded = unicodedata.normalize("NFC", term.casefold())
                    terms.setdefault(folded, (term, int(count) if count.isdecimal() else None))
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise InputError(f"method.vocabulary: {path}: {reason}") from None
    if stop_words == "english":
        # Imported late: it takes a second.
        from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

        for word in ENGLISH_STOP_WORDS:
            terms.pop(word, None)
    if not terms:
        raise InputError(f"method.vocabulary: {path}: there is no term in the file")
    return dict(terms.values())
