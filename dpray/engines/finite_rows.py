"""A row of logits that is not finite counts for nothing, from there to the end of its text.

A model may overflow, to an infinity or to NaN. Which rows do so depends on their prompts. So the
rule is on a row by itself, and looks at all of its logits.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpray.extras import torch


class FiniteRows:
    """Remembers which of a text's `rows` were finite at every position so far.

    A row is a function of its prompt and the tokens drawn in this text, and so is what is
    remembered. The batch's next text begins with a `FiniteRows` of its own.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        # A finite number, or NaN once a row was not finite.
        self.past_S = torch.zeros(rows, device=device)

    def remember(
        self, highest_S: torch.Tensor, rows: slice | list[int] = slice(None)
    ) -> torch.Tensor:
        """Return the `highest` logit of each of these `rows` at this position, and NaN also for a
        row that once was not finite in this text."""
        highest_S = highest_S.add(self.past_S[rows], alpha=0)
        self.past_S[rows] = highest_S
        return highest_S


def remember_together(
    finite: Sequence[FiniteRows], highest_GS: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Return what `remember` does for all rows of each, in as many operations as for one."""
    past_N = torch.cat([each.past_S for each in finite])
    highest_N = torch.cat(list(highest_GS)).add(past_N, alpha=0)
    found: Sequence[torch.Tensor] = highest_N.split([len(each.past_S) for each in finite])
    for each, past_S in zip(finite, found, strict=True):
        each.past_S = past_S
    return found


def highest(logits_SV: torch.Tensor) -> torch.Tensor:
    """Return each row's highest logit, float32, of shape (S,); NaN if it is infinite, or any logit
    of the row is NaN.

    A maximum that is finite says of every logit of its row that it is a number and below infinity:
    it is NaN if any is NaN, +inf if any is, and -inf only if all are. Some of -inf leave a row
    finite: such a token is masked. Every float16 and bfloat16 is a float32, so none overflows here.
    """
    top_S = logits_SV.amax(dim=-1).float()
    return top_S.add(top_S, alpha=0)  # 0 x is 0, or NaN if x is not finite
