"""A text is kept from copying its public prompt, or from repeating itself, by tokens that are
barred; that costs nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence


class CopyBar:
    """Bars every token after which more than `longest` tokens in a row would be the same as in the
    public prompt, or as before in the text.

    The prompt and the tokens drawn so far decide alone which ones: both are public.
    Proof: docs/privacy.md, section 2.4.
    """

    def __init__(self, prompt: Sequence[int], longest: int) -> None:
        self._longest = longest
        self._last: tuple[int, ...] = ()
        self._next: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for token in prompt:
            self.add(token)
        self._last = ()  # a text begins anew: the end of the prompt is no part of it

    def add(self, token: int) -> None:
        """Note the token that comes next in the text."""
        if len(self._last) == self._longest:
            self._next[self._last].add(token)
        self._last = (*self._last, token)[-self._longest :]

    @property
    def barred(self) -> Collection[int]:
        """Return the tokens that may not come next."""
        return self._next.get(self._last, ())
