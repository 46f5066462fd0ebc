"""`find_patterns` counts what looks like personal data in released texts: addresses and numbers,
found by their form and their check digits. Names are not found.

It reads the released texts only, so it costs no privacy and its counts may be released.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from ipaddress import ip_address

from dpray.extras import Late
from dpray.io.languages import language_of
from dpray.types import ReadOnlyJson

phonenumbers = Late("phonenumbers")

LIMITS = (
    "The scan finds patterns, not names. A match may be an invention of the model, and no match "
    "does not mean that there is no personal data. The guarantee is epsilon, not this scan."
)

REGIONS = ("US",)
"""Phone numbers of these regions are found without their country code, too, in texts of a language
that is not known."""

PHONE_DIGITS = 7
"""A text with fewer digits is taken to have no phone number."""


@dataclass(frozen=True)
class PersonalKind:
    """A kind of personal data. Every quantifier of its pattern is bounded, and a match begins where
    a word does, so the time is linear in the length of a text."""

    name: str
    pattern: re.Pattern[str]
    is_valid: Callable[[str], bool] = lambda found: True


def _is_card_number(found: str) -> bool:
    """Check the last digit by Luhn's formula (ISO/IEC 7812-1, Annex B)."""
    digits = [int(sign) for sign in found if sign.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _is_iban(found: str) -> bool:
    """Check an IBAN, or the beginning of `found` if capitals come after it, by ISO/IEC 7064's
    MOD 97-10: letters count from A = 10, and the first four signs come last."""
    groups = found.split(" ")
    for count in range(len(groups), 0, -1):
        iban = "".join(groups[:count])
        number = "".join(str(int(sign, 36)) for sign in iban[4:] + iban[:4])
        if 15 <= len(iban) <= 34 and int(number) % 97 == 1:
            return True
    return False


def _is_address(found: str) -> bool:
    try:
        ip_address(found)
    except ValueError:
        return False
    return True


IDENTIFIERS = (
    PersonalKind(
        "e-mail addresses",
        re.compile(r"(?<![\w.+%-])[\w.+%-]{1,64}@(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,24}"),
    ),
    PersonalKind("URLs", re.compile(r"(?:\bhttps?://|\bwww\.)[^\s<>\"']{1,2000}", re.IGNORECASE)),
    PersonalKind(
        "IBANs",
        re.compile(r"\b[A-Z]{2}\d\d(?: ?[A-Z\d]{4}){2,7}(?: ?[A-Z\d]{1,3})?\b", re.ASCII),
        _is_iban,
    ),
    PersonalKind(
        "card numbers",
        re.compile(
            # 16 digits in fours (13 to 19 in a row), 15 of American Express, 14 of Diners Club
            r"(?<!\d)[2-6]\d{3}(?:([ -]?)\d{4}\1\d{4}\1\d{1,7}|([ -])\d{6}\2\d{4,5})(?!\d)",
            re.ASCII,
        ),
        _is_card_number,
    ),
    PersonalKind(
        "US social security numbers",
        re.compile(
            r"(?<![\d-])(?!000|666|9)\d{3}([ -])(?!00)\d\d\1(?!0000)\d{4}(?![\d-])", re.ASCII
        ),
    ),
    PersonalKind(
        "IP addresses",
        re.compile(
            r"(?<![\w.:])(?:(?:\d{1,3}\.){3}\d{1,3}|[\dA-Fa-f]{1,4}(?::[\dA-Fa-f]{0,4}){2,7})"
            r"(?![\w:]|\.\d)",
            re.ASCII,
        ),
        _is_address,
    ),
)
PHONES = "phone numbers"


def _is_german_tax_number(found: str) -> bool:
    """Check the last of 11 digits by ISO/IEC 7064's MOD 11, 10."""
    digits = [int(sign) for sign in found if sign != " "]
    rest = 10
    for digit in digits[:-1]:
        rest = ((digit + rest) % 10 or 10) * 2 % 11
    return (11 - rest) % 10 == digits[-1]


def _is_spanish_number(found: str) -> bool:
    """Check the letter, which is the rest by 23; X, Y and Z stand for 0, 1 and 2."""
    number = found[:-1].replace("-", "").translate(str.maketrans("XYZ", "012"))
    return "TRWAGMYFPDXBNJZSQVHLCKE"[int(number) % 23] == found[-1]


def _is_french_number(found: str) -> bool:
    """Check the last two digits, by the rest by 97; Corsica's 2A and 2B are 19 and 18."""
    number = found.replace(" ", "").replace("2A", "19").replace("2B", "18")
    return 97 - int(number[:13]) % 97 == int(number[13:])


def _is_chinese_number(found: str) -> bool:
    """Check the last sign by ISO/IEC 7064's MOD 11-2; X is 10."""
    values = [10 if sign in "Xx" else int(sign) for sign in found]
    return sum(value << (17 - place) for place, value in enumerate(values)) % 11 == 1


OF_LANGUAGES = {
    "de": PersonalKind(
        "German tax numbers",
        re.compile(r"(?<!\w)[1-9]\d(?: ?\d{3}){3}(?!\w)", re.ASCII),
        _is_german_tax_number,
    ),
    "es": PersonalKind(
        "Spanish identity numbers",
        re.compile(r"(?<!\w)(?:\d{8}|[XYZ]-?\d{7})-?[A-Z](?!\w)", re.ASCII),
        _is_spanish_number,
    ),
    "fr": PersonalKind(
        "French social security numbers",
        re.compile(r"(?<!\w)[12] ?\d\d ?\d\d ?(?:\d\d|2[AB]) ?\d{3} ?\d{3} ?\d\d(?!\w)", re.ASCII),
        _is_french_number,
    ),
    "zh": PersonalKind(
        "Chinese identity numbers",
        re.compile(
            r"(?<![A-Za-z\d])[1-9]\d{5}(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3}"
            r"[\dXx](?![A-Za-z\d])",
            re.ASCII,
        ),
        _is_chinese_number,
    ),
}
"""Numbers of persons that are looked for in texts of a language, by its code."""


def find_patterns(texts: Iterable[str], language: str | None = None) -> dict[str, object]:
    """Return the number of `texts`, the number of those with a match, and the matches of each
    kind. `language` is the words of data.language: numbers of persons and of phones are then those
    of its countries. No match is in the result. Needs the package `phonenumbers`."""
    known = language_of(language)
    regions = known.regions if known is not None else REGIONS
    # The first kind that matches takes the digits: a person's number may also be that of a card.
    of_language = () if known is None else tuple(filter(None, [OF_LANGUAGES.get(known.code)]))
    kinds = (*of_language, *IDENTIFIERS)
    found: Counter[str] = Counter()
    count = with_matches = 0
    for text in texts:
        count += 1
        of_text = _matches(text, kinds, regions)
        with_matches += bool(of_text.total())
        found.update(of_text)
    names = (*(kind.name for kind in kinds), PHONES)
    return {
        "texts": count,
        "texts_with_matches": with_matches,
        "matches": {name: found[name] for name in names},
    }


def _matches(text: str, kinds: Iterable[PersonalKind], regions: Iterable[str]) -> Counter[str]:
    """Count the matches in one text. What one kind has matched is taken out of the text: an e-mail
    address in a URL is no second URL, nor are the digits of a card a phone number."""
    found: Counter[str] = Counter()
    for kind in kinds:

        def take(match: re.Match[str], kind: PersonalKind = kind) -> str:
            if not kind.is_valid(match[0]):
                return match[0]
            found[kind.name] += 1
            return "\n"

        text = kind.pattern.sub(take, text)
    for region in regions:
        count, text = _phone_numbers(text, region)
        found[PHONES] += count
    return found


def _phone_numbers(text: str, region: str) -> tuple[int, str]:
    """Count the numbers that exist in their country's plan, in international form or in that of the
    region. Return the text without them, too."""
    if sum(map(str.isdigit, text)) < PHONE_DIGITS:
        return 0, text
    found = phonenumbers.PhoneNumberMatcher(text, region, phonenumbers.Leniency.VALID)
    spans = [(each.start, each.end) for each in found]
    for start, end in reversed(spans):
        text = f"{text[:start]}\n{text[end:]}"
    return len(spans), text


def matches_in_words(found: ReadOnlyJson) -> tuple[str, str]:
    """Return the matches of `find_patterns` by kind, and the number of texts that have one."""
    matches = [f"{name}: {count:,}" for name, count in found["matches"].items() if count]
    of_texts = f"{found['texts_with_matches']:,} of {found['texts']:,}"
    return ", ".join(matches) or "none", of_texts
