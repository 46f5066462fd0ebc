"""The tokens a second of a model on a machine, measured with public prompts only.

The rates of a finished run are in its `run.json`, which is released. The time that private rows
take says how many there are, and no epsilon covers it: it is in no rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from weakref import WeakKeyDictionary

from dpray.engines.base import Engine, LockstepGroup, SelectorSpec
from dpray.types import Prompt

PREFILLED = 1024
"""The tokens that are prefilled for a measurement, in rows of `ROW_TOKENS` tokens or fewer."""

ROW_TOKENS = 128

DECODED_TOKENS = 8
"""The tokens that each row decodes for a measurement."""


@dataclass(frozen=True)
class Rates:
    """The tokens a second of one engine.

    `prefill` and `decode` are those of each work by itself; or, with `together`, the prompts and
    the new tokens of calls in the same time. `train` is that of forward and backward passes.
    """

    prefill: float
    decode: float
    train: float | None = None
    together: bool = False

    def seconds(self, prefill: int, decode: int, train: int = 0) -> float:
        """Return the time of one engine. With `together` it is that of the slower of both: never
        less than it would be if both rates were known by themselves."""
        parts = prefill / self.prefill, decode / self.decode
        passes = train / self.train if self.train else 0.0
        return (max(parts) if self.together else sum(parts)) + passes


_measured: WeakKeyDictionary[Engine, Rates] = WeakKeyDictionary()


def rates_of(engine: object) -> Rates | None:
    """Return what `measure_rates` found for this engine, or None."""
    return _measured.get(engine) if isinstance(engine, Engine) else None


def measure_rates(engine: Engine, rows: int, clock: Callable[[], float] = monotonic) -> None:
    """Measure how fast an engine prefills, and how fast it decodes groups of `rows` rows, by
    made-up prompts. Called before the charge, after the engine has done its first passes.

    Claim: the rates depend on no private row: the engine has seen none, and the prompts are made
    up. Proof: docs/privacy.md, section 7.6.
    """
    length = max(1, min(ROW_TOKENS, engine.context_length // 2))
    prompts = 0

    def took(number: int, words: int, tokens: int) -> tuple[float, int]:
        """Return the seconds of a group of new prompts, which no prefix cache has, and the tokens
        of its prompts."""
        nonlocal prompts
        rows = tuple(
            engine.encode(Prompt(f"{prompts + row} " + "a " * words)) for row in range(number)
        )
        prompts += number
        room = engine.context_length - tokens
        rows = tuple(row[:room] for row in rows)
        spec = SelectorSpec("dpray.engines.row_variation:RowProbe", {"token": rows[0][-1]})
        began = clock()
        for _ in engine.decode_lockstep([LockstepGroup("0", rows, rows[0], spec, tokens)]):
            pass
        return clock() - began, sum(map(len, rows)) + len(rows[0])

    held = engine.rows_at_once(2 * length + DECODED_TOKENS + 1)
    seconds, tokens = took(min(max(1, PREFILLED // length), max(1, held - 1)), length, 1)
    at_once = max(1, min(rows, held - 1))
    one, _ = took(at_once, 1, 1)
    several, _ = took(at_once, 1, 1 + DECODED_TOKENS)
    if seconds > 0 and several > one:
        _measured[engine] = Rates(
            tokens / seconds, (at_once + 1) * DECODED_TOKENS / (several - one)
        )
