"""This module measures what a clip leaves of the private prompts' help, on public texts alone.

A held-out text's tokens are what a `GainMeter` "draws": the engine continues every row with them,
as it does with a run's, and the meter reads off how likely they were.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dpray.engines.base import EngineError, LockstepGroup, SelectorSpec, Waiting
from dpray.methods.private_prediction.decoder import encode_private, shown_examples
from dpray.methods.private_prediction.prompts import PromptTemplate
from dpray.methods.private_prediction.token import PrivateToken

if TYPE_CHECKING:
    import torch

    from dpray.engines.transformers import TransformersEngine

METER = "dpray.methods.private_prediction.gains:GainMeter"


class GainMeter:
    """Sums, over a given text's tokens, the gain `log softmax(a_c / tau)[x] - log softmax(p)[x]`
    for each clip bound c and temperature tau: a_c is the clipped average of the private logits and
    p the public ones, both over the candidates. A token x that is no candidate adds 0.

    It is a `dpray.engines.base.TokenSelector` that returns the text's own tokens.
    """

    def __init__(
        self,
        mechanism: Mapping[str, Any],
        tokens: Sequence[int],
        clip_bounds: Sequence[float],
        temperatures: Sequence[float],
    ) -> None:
        base = PrivateToken(**mechanism)
        self._mechanisms = [replace(base, clip_bound=c) for c in clip_bounds]
        self._temperatures, self._tokens, self._read = temperatures, tokens, 0
        self._sums = np.zeros(len(clip_bounds) * len(temperatures))
        self._added: list[Any] = [0.0] * len(clip_bounds)

    def add(self, logits_private_SV: torch.Tensor, logits_public_V: torch.Tensor) -> None:
        self._added = self._totals(logits_private_SV, logits_public_V)

    def _totals(
        self, logits_private_SV: torch.Tensor, logits_public_V: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the clipped sums of the rows that were added and of these, for each clip bound."""
        return [
            added
            + mechanism.clipped_sum(
                logits_private_SV, logits_public_V, mechanism.candidate_set(logits_public_V)
            )
            for mechanism, added in zip(self._mechanisms, self._added, strict=True)
        ]

    def select(
        self, logits_private_SV: torch.Tensor, logits_public_V: torch.Tensor
    ) -> Waiting[int | None]:
        import torch

        token = self._tokens[self._read]
        found = []
        totals = self._totals(logits_private_SV, logits_public_V)
        self._added = [0.0] * len(totals)
        for mechanism, total_K in zip(self._mechanisms, totals, strict=True):
            candidates_K = mechanism.candidate_set(logits_public_V)
            mean_K = mechanism.average(total_K, logits_public_V, candidates_K)
            if candidates_K is None:
                candidates_K = torch.arange(len(logits_public_V), device=logits_public_V.device)
            public_K = logits_public_V[candidates_K].double().log_softmax(-1)
            is_it_K = candidates_K == token
            for tau in self._temperatures:
                gain_K = (mean_K / tau).log_softmax(-1) - public_K
                found.append(gain_K.where(is_it_K, 0.0).sum())
        self._sums += np.asarray((yield torch.stack(found)))
        self._read += 1
        return token

    def state(self) -> dict[str, Any]:
        return {"sums": self._sums.tolist(), "tokens": self._read}


@dataclass(frozen=True)
class Gains:
    """Holds `sums`, the gains of T texts at each of G settings, summed over a text's tokens, shape
    (T, G), and `lengths`, the texts' numbers of tokens, shape (T,)."""

    sums: np.ndarray
    lengths: np.ndarray

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def means_G(self) -> np.ndarray:
        """Return the gain at each setting in nats a token."""
        means_G: np.ndarray = self.sums.sum(axis=0) / self.tokens
        return means_G

    def error(self, setting: int, other: int | None = None) -> float | None:
        """Return the standard error of a setting's mean, or of what it is above another one's; None
        where there is one text.

        A text's tokens are not independent of each other, and texts are: it is that of a ratio of
        sums over texts (Cochran 1977, section 6.4). All texts of a label have the same private
        prompts, whose choice it leaves out.
        """
        if (texts := len(self.lengths)) < 2:
            return None
        sums_T = self.sums[:, setting]
        if other is not None:
            sums_T = sums_T - self.sums[:, other]
        left_T = sums_T - sums_T.sum() / self.tokens * self.lengths
        return math.sqrt(texts / (texts - 1) * float(left_T @ left_T)) / self.tokens


def measure(
    engine: TransformersEngine,
    mechanism: PrivateToken,
    template: PromptTemplate,
    texts: Mapping[str, tuple[Sequence[str], Sequence[str]]],
    most_tokens: tuple[int, int],
    clip_bounds: Sequence[float],
    temperatures: Sequence[float],
    on_text: Callable[[int], None] = lambda done: None,
) -> Gains:
    """Return the gains at each clip bound and, within it, each temperature. `texts` holds each
    label's rows, `mechanism.batch_size` of them, and held-out texts. `most_tokens` are those of a
    row's text, and of a held-out text, whose first tokens count, up to one that ends a text; a text
    that has none is left out. Raises EngineError where the model fails or its logits are no
    numbers."""
    max_prompt_tokens, max_tokens = most_tokens
    room = engine.context_length - max_tokens
    done: list[Mapping[str, Any]] = []

    def groups() -> Iterator[LockstepGroup]:
        for label, (rows, held_out) in texts.items():
            examples = shown_examples(engine, template, label, label, room)
            public = template.public_prompt(label, examples)
            shown = [engine.truncate(row, max_prompt_tokens) for row in rows]
            private = [
                encode_private(engine, template, row, label, examples, room) for row in shown
            ]
            for number, text in enumerate(held_out):
                ids = engine.ids(continuation(public.prefix, text))[:max_tokens]
                if not ids:
                    continue
                grid = {"clip_bounds": list(clip_bounds), "temperatures": list(temperatures)}
                arguments = {"mechanism": asdict(mechanism), "tokens": ids, **grid}
                yield LockstepGroup(
                    group_id=f"{label}/{number}",
                    private_prompts=tuple(private),
                    public_prompt=engine.encode(public),
                    selector=SelectorSpec(METER, arguments),
                    max_tokens=len(ids),
                )

    for result in engine.decode_lockstep(groups()):
        done.append(result.state)
        on_text(len(done))
    sums_TG = np.array([state["sums"] for state in done])
    if not np.isfinite(sums_TG).all():
        raise EngineError("the model's logits are no numbers; engine.dtype may be too narrow")
    return Gains(sums_TG, np.array([state["tokens"] for state in done]))


def continuation(prefix: str, text: str) -> str:
    """Return what the model would write after an answer's `prefix` to give this text: a prefix may
    open the text itself, as "{" does a JSON record, or a quotation."""
    opening = prefix.rsplit("\n", 1)[-1]
    if text.startswith(opening):
        return text.removeprefix(opening)
    return text if opening[-1] in "\"'([{ " else f" {text}"


def sampled(
    texts: Mapping[str, Sequence[str]], rows: int, held_out: int
) -> dict[str, tuple[list[str], list[str]]]:
    """Draw each label's rows and held-out texts, all of them different texts. The draw is seeded:
    the texts are public, and the same question gets the same answer."""
    rng = random.Random(0)
    drawn = {label: rng.sample(found, rows + held_out) for label, found in texts.items()}
    return {label: (found[:rows], found[rows:]) for label, found in drawn.items()}
