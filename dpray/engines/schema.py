"""A schema is the form that all texts of a run have. It is public, and so is everything here.

A schema is a JSON Schema, a regular expression, a list of choices, or a grammar in Lark's notation.
llguidance turns it into an automaton over a model's tokens. `TokenMask` follows one text through
that automaton: it says which tokens may come next, and how the text can still end in time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from string import ascii_letters, digits
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dpray.engines.model_path import resolve_model
from dpray.engines.text import TextCodec
from dpray.types import InputError

# Imported late: a plan holds a `Schema`, and most runs have none.
if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

LONGEST_SCHEMA = 256 * 1024
"""The most characters of a schema."""

CLOSERS = b'}])"'
"""A text that has to end takes the first of these bytes that changes what may come next."""

FILLERS = b"a0 " + (ascii_letters + digits).encode()
"""If there is none, it takes one of these, or any other byte after them, and brackets last."""

OFTEN = 64
"""It takes another filler after this many times."""

MOST_BYTES = 4
"""The search for an ending gives up after this many bytes for each token that is left."""

KINDS = ("regex", "choices", "lark")
"""A mapping with one of these keys alone is no JSON Schema."""


@dataclass(frozen=True)
class Schema:
    """A public form of texts. `text` is the schema's source; for choices, a JSON list."""

    kind: Literal["json", "regex", "choices", "lark"]
    text: str

    @property
    def title(self) -> str:
        """Return what the schema is, in words."""
        titles = {"json": "a JSON Schema", "regex": "a regular expression", "lark": "a grammar"}
        return titles.get(self.kind, "a list of choices")

    @cached_property
    def grammar(self) -> str:
        """Return the schema as llguidance reads it. Raises ValueError for one that it cannot."""
        from llguidance import LLMatcher

        match self.kind:
            case "regex":
                return LLMatcher.grammar_from_regex(self.text)
            case "lark":
                return LLMatcher.grammar_from_lark(self.text)
            case "choices":
                # A terminal, which is in capitals, may have thousands of them.
                choices = " | ".join(map(json.dumps, json.loads(self.text)))
                return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        # As `json.dumps` writes it: private records are shown in the same style.
        style: JsonCompileOptions = {
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
        }
        return LLMatcher.grammar_from_json_schema(self.text, overrides=style)


@dataclass(frozen=True)
class Form:
    """The form of the texts that `model` writes: their schema, and their beginning `before`, which
    the prompts have already."""

    schema: Schema
    model: str
    before: str = ""

    def mask_arguments(self, max_tokens: int) -> dict[str, Any]:
        """Return the arguments of `open_mask` but `size`, as plain values."""
        return asdict(self) | {"max_tokens": max_tokens}


def read_schema(value: str | dict[str, Any]) -> Schema:
    """Read `method.schema`: a JSON Schema, a mapping with `regex`, `choices` or `lark`, or the name
    of a file with a JSON Schema (`.json`) or a Lark grammar (`.lark`). Raises InputError for one
    that cannot be read or compiled, or is too large."""
    try:
        schema = _read(value)
        if len(schema.text) > LONGEST_SCHEMA:
            raise ValueError(f"more than {LONGEST_SCHEMA:,} characters")
        _check(schema)
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"method.schema: {reason or type(error).__name__}") from None
    return schema


def _read(value: str | dict[str, Any]) -> Schema:
    if isinstance(value, str):
        path = Path(value)
        if path.suffix not in (".json", ".lark"):
            raise ValueError(f"{value}: a file's name ends in .json (a JSON Schema) or .lark")
        if path.stat().st_size > 4 * LONGEST_SCHEMA:
            raise ValueError(f"{value}: more than {LONGEST_SCHEMA:,} characters")
        text = path.read_text(encoding="utf-8")
        return Schema("lark" if path.suffix == ".lark" else "json", text)
    if len(value) == 1 and (kind := next(iter(value))) in KINDS:
        return _of_kind(kind, value[kind])
    return Schema("json", json.dumps(value))


def _of_kind(kind: Any, source: Any) -> Schema:
    if kind == "choices":
        if not isinstance(source, list) or not source or not all(map(_is_text, source)):
            raise ValueError("choices: a list of texts that are not empty")
        return Schema(kind, json.dumps(source))
    if not _is_text(source):
        raise ValueError(f"{kind}: a text that is not empty")
    return Schema(kind, source)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _check(schema: Schema) -> None:
    """Compile a schema for an alphabet of bytes. Raises ValueError if that fails."""
    from llguidance import LLMatcher

    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(schema.grammar, limits=_limits())
    if is_wrong:
        raise ValueError(messages[0])


def _limits() -> LLParserLimits:
    """Return limits that bound the time of compiling a schema, and of one mask of it."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        max_grammar_size=20_000,
        step_max_items=5_000,
        step_lexer_fuel=100_000,
        verbose_errors=False,
    )


class Vocabulary:
    """A model's tokens as llguidance reads them; `tokenizer.vocab_size` is the length of the
    model's logits, V."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self.size = tokenizer.vocab_size
        self.eos = tokenizer.eos_token
        self.closers = self._single_bytes(CLOSERS)
        rest = bytes(sorted(range(256), key=b"([{".__contains__))
        self.fillers = self._single_bytes(bytes(dict.fromkeys(FILLERS + rest)))

    def _single_bytes(self, wanted: bytes) -> np.ndarray:
        """Return the tokens that are one of these bytes, in their order."""
        found = []
        for byte in wanted:
            ids = self.tokenizer.tokenize_bytes(bytes([byte]))
            # A tokenizer may write a byte it has no token for as another one.
            if len(ids) == 1 and self.tokenizer.decode_bytes(ids) == bytes([byte]):
                found.append(ids[0])
        return np.array(found, dtype=np.int64)

    def mask(self, matcher: LLMatcher) -> bytes:
        """Return a bit for each token, set if it may come next; none is if the matcher failed."""
        return bytes(-(-self.size // 8)) if matcher.is_error() else matcher.compute_bitmask()

    def unpacked(self, mask: bytes) -> np.ndarray:
        """Return a mask as truth values, of shape (V,)."""
        bits = np.frombuffer(mask, dtype=np.uint8)
        return np.unpackbits(bits, count=self.size, bitorder="little").view(bool)


@cache
def vocabulary(model: str, size: int) -> Vocabulary:
    """Return the vocabulary of a model with logits of length `size`."""
    from llguidance.hf import from_tokenizer

    codec = TextCodec(resolve_model(model), None)
    return Vocabulary(from_tokenizer(codec.tokenizer, size, codec.eos_ids[0]))


class TokenMask:
    """Follows one text through the automaton of its schema.

    A text has at most `max_tokens` tokens, its end token included. `ending` always has tokens that
    make what is written so far a text of the schema, and fits what is left of them. A token
    after which no ending would fit is replaced by the first one of `ending`. So every text
    is whole, whatever tokens are drawn.

    `before` is the beginning of the text that the prompt has already. Everything here is a
    function of the schema, the vocabulary and the tokens drawn so far.
    Raises InputError if `max_tokens` is too few for the schema, or `before` does not begin a text.
    """

    def __init__(
        self, schema: Schema, vocabulary: Vocabulary, max_tokens: int, before: str = ""
    ) -> None:
        from llguidance import LLMatcher

        self._vocabulary = vocabulary
        self._left = max_tokens
        tokenizer = vocabulary.tokenizer
        self._matcher = LLMatcher(tokenizer, schema.grammar, log_level=0, limits=_limits())
        if self._matcher.is_error():
            raise InputError(f"method.schema: {self._matcher.get_error()[:300]}")
        if not self._matcher.consume_tokens(tokenizer.tokenize_str(before)):
            raise InputError("method.template: no text of method.schema begins like `output`")
        self._allowed: np.ndarray | None = None
        self._ends = False
        ending = self._shortest_ending()
        if ending is None:
            raise InputError(
                f"method.max_tokens: no text of method.schema was found within {max_tokens} tokens"
            )
        self.ending = ending

    @property
    def allowed(self) -> np.ndarray:
        """Return which tokens may come next, of shape (V,); none once the text has to end."""
        if self._allowed is None:
            self._allowed = self._vocabulary.unpacked(self._vocabulary.mask(self._matcher))
        return self._allowed

    def forced(self, must_end: bool = False) -> int | None:
        """Return the next token if there is no choice: the schema allows one token, or the text
        has to end because `must_end` says so or its tokens run out."""
        count = np.count_nonzero(self.allowed)
        self._ends = self._ends or must_end or count == 0 or self._left <= len(self.ending)
        if self._ends:
            return self.ending[0]
        return int(self.allowed.argmax()) if count == 1 else None

    def take(self, token: int) -> int:
        """Note the next token, and return it, or the one that takes its place if no ending fits
        after it."""
        first, rest = self.ending[0], self.ending[1:]
        self._left -= 1
        self._allowed = None
        if not self._ends:
            following = rest if token == first else None
            if token == self._vocabulary.eos:
                following = []
            elif self._matcher.consume_token(token) and following is None:
                following = self._ending_after()
            if following is not None:
                self.ending = following
                return token
        self._ends, self.ending = True, rest
        return first

    def _ending_after(self) -> list[int] | None:
        """Return an ending for the present state: the last one, if it fits with room to spare."""
        ending = self.ending
        if len(ending) < self._left and self._matcher.validate_tokens(ending) == len(ending):
            return ending
        return self._shortest_ending()

    def _shortest_ending(self) -> list[int] | None:
        """Return a short ending, or None if none is found within the tokens that are left."""
        found = self._walk(OFTEN)
        if found is None or len(found) > OFTEN:
            # The walk met a loop of the schema: leave it at once.
            found = min(filter(None, (found, self._walk(1))), key=len, default=None)
        return found if found is not None and len(found) <= self._left else None

    def _walk(self, often: int) -> list[int] | None:
        """Walk to the end of a text, byte by byte; return its tokens."""
        matcher = self._matcher.deep_copy()
        path: list[int] = []
        used: Counter[int] = Counter()
        while not matcher.is_accepting():
            token = self._closer(matcher, used, often)
            if token is None or len(path) > MOST_BYTES * self._left:
                return None
            used[token] += 1
            path.append(token)
            matcher.consume_token(token)
        return [*self._as_text(path), self._vocabulary.eos]

    def _closer(self, matcher: LLMatcher, used: Counter[int], often: int) -> int | None:
        """Return the token that leads to the end of a text: the first that changes what may come
        next, or else the first filler that was not used `often` times more than the others.
        Return None if no token may come next."""
        packed = self._vocabulary.mask(matcher)
        allowed = self._vocabulary.unpacked(packed)
        for token in self._vocabulary.closers:
            if allowed[token]:
                matcher.consume_token(token)
                moves = self._vocabulary.mask(matcher) != packed
                matcher.rollback(1)
                if moves:
                    return int(token)
        fillers = self._vocabulary.fillers[allowed[self._vocabulary.fillers]]
        if len(fillers) == 0:
            return int(allowed.argmax()) if allowed.any() else None
        return int(min(fillers, key=lambda token: used[int(token)] // often))

    def _as_text(self, path: list[int]) -> list[int]:
        """Return the tokens that the tokenizer gives the text of `path`, which are fewer, if the
        schema takes them."""
        tokenizer = self._vocabulary.tokenizer
        tokens = tokenizer.tokenize_bytes(tokenizer.decode_bytes(path))
        return tokens if self._matcher.validate_tokens(tokens) == len(tokens) else path


def forced_tokens(form: Form, max_tokens: int) -> int:
    """Return how many tokens of the form's shortest text its schema leaves no choice about. Raises
    InputError if the schema does not fit the model, the beginning or `max_tokens`."""
    size: int = TextCodec(resolve_model(form.model), None).model_config.vocab_size
    mask = open_mask(**form.mask_arguments(max_tokens), size=size)
    forced = 0
    for token in list(mask.ending):
        forced += np.count_nonzero(mask.allowed) == 1
        mask.take(token)
    return int(forced)


def open_mask(
    schema: Mapping[str, Any], model: str, before: str, max_tokens: int, size: int
) -> TokenMask:
    """Return the mask of a text that begins: the fields of a `Form`, the most tokens of the text,
    and the length of the model's logits."""
    return TokenMask(Schema(**schema), vocabulary(model, size), max_tokens, before)
