"""The automaton of a schema over a model's tokens, by llguidance. All of it is public.

`TokenMask` follows one text: it says which tokens may come next, and how the text can still end in
time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import copy
from functools import lru_cache
from string import ascii_letters, digits
from typing import TYPE_CHECKING

import numpy as np

from dpray.engines.schema.pattern_text import pattern_texts
from dpray.engines.schema.schema import Schema, compile_limits
from dpray.extras import Late
from dpray.types import InputError

if TYPE_CHECKING:
    import llguidance
else:
    llguidance = Late("llguidance")

BRACKETS, QUOTE = b"}])", b'"'
"""Bytes that are tried first when a text has to end. The first one that changes what may come next
is taken. Between values of JSON a quote begins a string; in a string, which may hold all brackets,
it ends the string and is tried before them."""

FILLERS = b"a0 " + (ascii_letters + digits).encode()
"""Bytes that are tried if no closer and no text of a pattern is taken; any other byte follows,
opening brackets last."""

OFTEN = 64
"""A filler is used this many times before the next one is."""

MOST_BYTES = 4
"""The search for an ending gives up after this many bytes for each token that is left."""


class Vocabulary:
    """A model's tokens as llguidance reads them. `size` is the length of the model's logits, V: the
    tokenizer's further tokens are never allowed."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, size: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.size = size or tokenizer.vocab_size
        self.eos = tokenizer.eos_token
        self.brackets, self.quote = map(self._single_bytes, (BRACKETS, QUOTE))
        rest = bytes(sorted(range(256), key=b"([{".__contains__))
        self.fillers = self._single_bytes(bytes(dict.fromkeys(FILLERS + rest)))

    def _single_bytes(self, wanted: bytes) -> np.ndarray:
        """Return the tokens that are one of these bytes, in their order."""
        found = []
        for byte in wanted:
            ids = self.tokenizer.tokenize_bytes(bytes([byte]))
            # A tokenizer may write a byte it has no token for as another one.
            if (
                self.has(ids)
                and len(ids) == 1
                and self.tokenizer.decode_bytes(ids) == bytes([byte])
            ):
                found.append(ids[0])
        return np.array(found, dtype=np.int64)

    def has(self, ids: list[int]) -> bool:
        """Return whether all of these tokens have a logit."""
        return max(ids, default=0) < self.size

    def mask(self, matcher: llguidance.LLMatcher) -> bytes:
        """Return a bit for each of the tokenizer's tokens, set if it may come next; none is if the
        matcher failed."""
        return (
            bytes(-(-self.tokenizer.vocab_size // 8))
            if matcher.is_error()
            else matcher.compute_bitmask()
        )

    def unpacked(self, mask: bytes) -> np.ndarray:
        """Return a mask as truth values, of shape (V,)."""
        bits = np.frombuffer(mask, dtype=np.uint8)
        return np.unpackbits(bits, count=self.size, bitorder="little").view(bool)


class TokenMask:
    """Follows one text through the automaton of its schema.

    A text has at most `max_tokens` tokens, its end token included. `ending` is a list of tokens
    that completes the text within the tokens that are left. A token after which no ending would fit
    is replaced by the first one of `ending`. So every text is whole, whatever tokens are drawn.
    `was_closed` is whether `ending` had to be followed.

    `before` is the part of the text that stands in the prompt already. Everything here is a
    function of the schema, the vocabulary and the tokens drawn so far.
    Raises InputError if `max_tokens` is too few for the schema, or `before` does not begin a text.
    """

    def __init__(
        self, schema: Schema, vocabulary: Vocabulary, max_tokens: int, before: str = ""
    ) -> None:
        self._vocabulary = vocabulary
        self._left = max_tokens
        tokenizer = vocabulary.tokenizer
        self._matcher = llguidance.LLMatcher(
            tokenizer, schema.grammar, log_level=0, limits=compile_limits()
        )
        if self._matcher.is_error():
            raise InputError(f"method.schema: {self._matcher.get_error()[:300]}")
        if not self._matcher.consume_tokens(tokenizer.tokenize_str(before)):
            raise InputError("method.template: no text of method.schema begins like `output`")
        self._is_json, self._is_grammar = schema.kind == "json", schema.kind == "lark"
        patterns = map(tokenizer.tokenize_str, pattern_texts(schema))
        self._patterns = list(filter(vocabulary.has, patterns))
        self._allowed: np.ndarray | None = None
        self.was_closed = False
        ending = self._shortest_ending()
        if ending is None:
            raise InputError(
                f"method.max_tokens: no text of method.schema was found within {max_tokens} tokens"
            )
        self.ending = ending

    def copy(self) -> TokenMask:
        """Return an independent copy in the same state."""
        copied = copy(self)
        copied._matcher = self._matcher.deep_copy()
        return copied

    @property
    def allowed(self) -> np.ndarray:
        """Return which tokens may come next, of shape (V,); none if the automaton has failed."""
        if self._allowed is None:
            self._allowed = self._vocabulary.unpacked(self._vocabulary.mask(self._matcher))
        return self._allowed

    def forced(self, must_end: bool = False) -> int | None:
        """Return the next token if there is no choice: the schema allows one token, or the text
        has to end because `must_end` says so or its tokens run out."""
        count = np.count_nonzero(self.allowed)
        self.was_closed = (
            self.was_closed or must_end or count == 0 or self._left <= len(self.ending)
        )
        if self.was_closed:
            return self.ending[0]
        return int(self.allowed.argmax()) if count == 1 else None

    @property
    def choices(self) -> np.ndarray:
        """Return which tokens a generator may draw next, of shape (V,): all after the end, where no
        token counts."""
        if not self.ending:
            return np.ones(self._vocabulary.size, dtype=bool)
        token = self.forced()
        return self.allowed if token is None else np.arange(self._vocabulary.size) == token

    def take(self, token: int) -> int:
        """Note the next token, and return it, or the one that takes its place if no ending fits
        after it."""
        first, rest = self.ending[0], self.ending[1:]
        self._left -= 1
        self._allowed = None
        if not self.was_closed:
            following = rest if token == first else None
            if token == self._vocabulary.eos:
                following = [] if self._matcher.is_accepting() else None
            elif self._matcher.consume_token(token) and following is None:
                following = self._ending_after()
            if following is not None:
                self.ending = following
                return token
        self.was_closed, self.ending = True, rest
        return first

    def most_choices(self, limit: int) -> int | None:
        """Return the largest number of tokens, over all texts that go on from here, which are one
        of several that the schema allows; None if these texts have more than `limit` beginnings.

        What may come next depends on the bytes of a beginning only, not on its tokens; only a
        grammar may count tokens.
        """
        if self._is_grammar:
            return None
        vocabulary, tokenizer = self._vocabulary, self._vocabulary.tokenizer
        following: dict[bytes, list[bytes]] = {}
        matchers = {b"": self._matcher}
        while matchers:
            beginning, matcher = matchers.popitem()
            allowed = np.flatnonzero(vocabulary.unpacked(vocabulary.mask(matcher)))
            # The end token adds no bytes, and has no beginning after it.
            following[beginning] = [
                beginning + (b"" if token == vocabulary.eos else tokenizer.decode_bytes([token]))
                for token in allowed.tolist()
            ]
            if len({*following, *matchers, *following[beginning]}) > limit:
                return None
            for token, longer in zip(allowed.tolist(), following[beginning], strict=True):
                if longer not in following and longer not in matchers:
                    matchers[longer] = matcher.deep_copy()
                    matchers[longer].consume_token(token)
        most: dict[bytes, int] = {}
        for beginning in sorted(following, key=len, reverse=True):
            after = [most.get(longer, 0) for longer in following[beginning]]
            most[beginning] = max(after, default=0) + (len(after) > 1)
        return most[b""]

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
            # The walk met a loop of the schema: change the filler after every byte.
            found = min(filter(None, (found, self._walk(1))), key=len, default=None)
        return found if found is not None and len(found) <= self._left else None

    def _walk(self, often: int) -> list[int] | None:
        """Walk to the end of a text; return its tokens."""
        matcher = self._matcher.deep_copy()
        path: list[int] = []
        used: Counter[int] = Counter()
        while not matcher.is_accepting():
            tokens = self._closer(matcher, used, often)
            if not tokens or len(path) > MOST_BYTES * self._left:
                return None
            used.update(tokens)
            path += tokens
            matcher.consume_tokens(tokens)
        return [*self._as_text(path), self._vocabulary.eos]

    def _closer(self, matcher: llguidance.LLMatcher, used: Counter[int], often: int) -> list[int]:
        """Return the tokens that lead to the end of a text: the first closer, or text of a pattern,
        that changes what may come next, or else the first filler that was not used `often` times
        more than the others. Return none if no token may come next."""
        packed = self._vocabulary.mask(matcher)
        allowed = self._vocabulary.unpacked(packed)
        closers = [self._vocabulary.brackets, self._vocabulary.quote]
        if self._is_json and allowed[self._vocabulary.brackets].all():
            closers.reverse()
        leads: list[list[int]] = [*np.concatenate(closers)[:, None].tolist(), *self._patterns]
        for tokens in leads:
            if matcher.validate_tokens(tokens) == len(tokens):
                matcher.consume_tokens(tokens)
                moves = self._vocabulary.mask(matcher) != packed
                matcher.rollback(len(tokens))
                if moves:
                    return tokens
        fillers = self._vocabulary.fillers[allowed[self._vocabulary.fillers]]
        if len(fillers) == 0:
            return [int(allowed.argmax())] if allowed.any() else []
        return [int(min(fillers, key=lambda token: used[int(token)] // often))]

    def _as_text(self, path: list[int]) -> list[int]:
        """Return the tokenizer's own tokens for the text of `path` if the schema takes them, else
        `path`."""
        tokenizer = self._vocabulary.tokenizer
        tokens = tokenizer.tokenize_bytes(tokenizer.decode_bytes(path))
        is_taken = self._matcher.validate_tokens(tokens) == len(tokens)
        return tokens if is_taken and self._vocabulary.has(tokens) else path


@lru_cache(maxsize=16)
def _first_mask(schema: Schema, vocabulary: Vocabulary, max_tokens: int, before: str) -> TokenMask:
    return TokenMask(schema, vocabulary, max_tokens, before)


def first_mask(
    schema: Schema, vocabulary: Vocabulary, max_tokens: int, before: str = ""
) -> TokenMask:
    """Return the mask of a text that begins, as `TokenMask` makes it: a schema is compiled once for
    all texts of a run."""
    return _first_mask(schema, vocabulary, max_tokens, before).copy()


def fitted(mask: TokenMask, tokens: Iterable[int]) -> list[int]:
    """Return the tokens until the text ends, or until the mask puts another one in a token's place;
    then the mask's ending."""
    taken: list[int] = []
    for token in tokens:
        taken.append(mask.take(token))
        if taken[-1] != token or not mask.ending:
            break
    return [*taken, *mask.ending]
