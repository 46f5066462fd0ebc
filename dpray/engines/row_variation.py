"""`row_variation` tests whether a row's logits depend on the rows that share its forward pass.

Private prediction's sensitivity c / s is that of rows whose logits are functions of their own
prompt. Kernels satisfy that up to their rounding, which depends on the shape of the whole pass and
is measured here with public prompts, on the device and in the precision that decode.

Some models do not satisfy it at all. LongRoPE, as transformers computes it, turns all rows of a
pass by other angles if one of them is long; other layers count positions from the padding on. Such
a model is refused.

So are mixtures of experts, unless their kernels are invariant to the batch (`refuse_experts`). How
many rows an expert gets follows from all rows of a pass, and with it the last bits of each. Where
two experts nearly tie for a token, these bits decide which one computes it, and the row's logits
move by far more. Public prompts do not show that either.

So are quantised models whose rows may depend on each other. Quantised weights are the same for
every row, but quantised activations have a scale: if it is the largest number of a whole pass, one
row with large numbers makes the others coarse, or 0. Public prompts do not show that, so only
methods that are known to work row by row are accepted (`refuse_shared_scales`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from dpray.engines.base import (
    Engine,
    EngineError,
    Following,
    GroupLogits,
    HostSync,
    LockstepGroup,
    LockstepResult,
    Prompt,
    Selected,
    Selection,
    SelectorSpec,
    nothing_follows,
)
from dpray.extras import Late, torch
from dpray.types import InputError, Json, ReadOnlyJson

# A driver and the workers that read import this module, and need no torch.
if TYPE_CHECKING:
    import transformers
else:
    transformers = Late("transformers")

POSITIONS = 3
FIRST_ROW = 80
"""The words of the first row: more than a block of a prefix cache."""
LONG_ROW = 320
"""The words of another first row: for many keys attention has other tiles."""
PREFILLS = (1, 2, 5, 9, 10, 13, 17, 22, 33, 64, 65, 129, 257)
"""The tokens of prompts that are computed next to the long row, one at every second of its
positions: an engine may begin a step before it sees that a group is finished. FlashAttention 3
changes its tile, on Hopper, where the longest query of a pass has more than 64 tokens, counted once
for each query head of a key-value head."""
SOME = 8
"""The rows of a group around the long row, and the groups next to its own."""
ROW_NAME = "row"
"""The name of the groups whose rows are compared."""
LARGEST_SHARE = 0.05
"""The rounding of all rows of a batch together moves its average by at most this share of what one
record moves it. On a GPU in float32, where a row moves by 2e-4, that is s 255 with c 2."""

QUANTISATION = ("quantization_config", "compression_config")
"""The keys of a configuration that say how a model is quantised."""

WEIGHTS_ALONE = {"awq", "gptq", "hqq", "mxfp4"}
"""Methods that quantise weights, or activations by small blocks of a row."""

BY_ROWS = {"token", "group", "tensor_group"}
"""Strategies of compressed-tensors whose scales are those of a row or of parts of it."""
_EXPERTS = re.compile(r"(?:\w+_)?n(?:um)?_(?:\w+_)?experts")

LOGITS_COMPARED = 1024
"""The number of a row's logits that are compared, spread over the vocabulary."""


class RowProbe:
    """Keeps the logits of the first row and of the public one, as a `TokenSelector`, and continues
    with a fixed token. In a group without private rows the public row is the first one."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.logits: list[list[float]] = []
        self.public: list[list[float]] = []
        self.added: torch.Tensor | None = None

    def add(self, logits: GroupLogits) -> None:
        """Keep the row: only a group of one row comes in parts, if the engine holds one at once."""
        self.added = logits.private[0]

    def select(self, logits: GroupLogits) -> Selection:
        first_V = logits.public if self.added is None else self.added
        row_V = first_V if len(logits.private) == 0 else logits.private[0]
        kept_2V = row_V.new_empty(2, len(row_V))
        kept_2V[0], kept_2V[1] = row_V, logits.public
        kept = kept_2V[:, :: max(1, len(row_V) // LOGITS_COMPARED)].float()
        return HostSync(kept, torch.stack, self._keep)

    def _keep(self, logits_2T: torch.Tensor) -> Selected:
        row, public = logits_2T
        self.logits.append(row.tolist())
        self.public.append(public.tolist())
        return Selected(self.token)

    def state(self) -> Json:
        return {"logits": self.logits, "public": self.public}


@dataclass(frozen=True)
class _Trial:
    """A group whose first row is compared, and what is decoded at the same time. `is_ahead` says
    that its prompts have one token more than those of the row by itself."""

    group: LockstepGroup
    beside: tuple[LockstepGroup, ...] = ()
    following: Following = nothing_follows
    is_ahead: bool = False


def row_variation(engine: Engine, rows: int, longest: int = 0) -> float:
    """Measure the largest change of a row's logits, in nats; 0.0 if no bit changed.

    A row of 80 words is computed alone, then next to up to `rows - 1` shorter rows (fewer if the
    engine holds fewer), as the public row of an empty group, next to one of `longest` tokens, the
    most that a row may have (0: next to no such row), and then with its last token in its prompt,
    as in a batch in parts. A row of more than 300 tokens is computed alone, next to some shorter
    rows, next to other groups, and decoded while prompts of many lengths are computed. An engine
    that has a prefix cache takes all but the first rows from it.

    The public row of each of these groups is compared too. If it shares the private rows' passes,
    it is one of the rows. If it does not, no bit of it may change.

    Raises EngineError if a logit is not a number, or if a public row changed that is computed by
    itself.
    """
    shared, changes = engine.shares_public_pass, [0.0]
    for trials in (_of_short_row(engine, rows, longest), _of_long_row(engine, rows)):
        alone = _decoded(engine, next(trials))
        row, public = alone["logits"], alone["public"]
        if shared:
            changes.append(_change(public, row))
        for trial in trials:
            found = _decoded(engine, trial)
            if shared or trial.group.private_prompts:
                changes.append(_change(found["logits"], row, trial.is_ahead))
            if shared:
                changes.append(_change(found["public"], row, trial.is_ahead))
            elif not trial.is_ahead and _change(found["public"], public) > 0.0:
                raise EngineError(
                    "the logits of a public row that is computed by itself moved with private "
                    "rows: no token may be drawn by them; take another engine.model"
                )
    return max(changes)


_measured: WeakKeyDictionary[Engine, dict[tuple[int, int], float]] = WeakKeyDictionary()


def row_variation_once(engine: Engine, rows: int, longest: int) -> float:
    """Return the engine's `row_variation`, measured at the first call: an engine is tried before
    the charge, and may decode after it."""
    found = _measured.setdefault(engine, {})
    if (rows, longest) not in found:
        found[rows, longest] = row_variation(engine, rows, longest)
    return found[rows, longest]


def refuse_dependence(variation: float, share: float, dtype: str, exact: bool = False) -> None:
    """Raise InputError for a `row_variation` with which the sensitivity c / s does not hold: one
    that moves a batch's average by more than `LARGEST_SHARE` of it. `share` is what it does to this
    mechanism (`PrivateToken.share_of_rounding`). `exact`: public rows that share passes with
    private ones decide which tokens may be drawn, so no bit of theirs may move.
    Proof: docs/privacy.md, section 7.3.
    """
    if exact and variation > 0.0:
        raise InputError(
            f"engine.model: the logits of a row moved by up to {variation:.1e} with the other rows "
            "of its forward pass, by kernels that vLLM calls invariant to the batch. With "
            "method.candidates, method.public_gate or method.end_tokens public logits decide which "
            "tokens may be drawn, and no private row may move a bit of them: take engine.kind "
            "transformers, or a model that is not quantised"
        )
    if share > LARGEST_SHARE:
        raise InputError(
            f"engine.model: the logits of a row moved by up to {variation:.1e} with the other rows "
            f"of its forward pass, in {dtype}: all rows of a batch together by {share:.2g} times "
            f"what one record moves it, where {LARGEST_SHARE:g} is allowed: the sensitivity c / s "
            "does not hold. Take engine.dtype float32, another model, engine.kind vllm or a "
            "smaller method.max_prompt_tokens"
        )


def rounding_warnings(dtype: str, variation: float | None = None) -> list[str]:
    """Warn that rounding may exceed the sensitivity c / s: by the `row_variation` that was measured
    where the model ran, or, before a run, if the model computes in 16 bits."""
    if variation is None and dtype != "float32":
        return [
            f"engine.dtype {dtype}: a model that computes in 16 bits lets a row's logits depend, "
            "in their last bits, on the other rows of its forward pass. Unless the kernels prevent "
            "it, that is more than the sensitivity c / s allows, and the run is refused when its "
            "model is loaded; take float32"
        ]
    if variation:
        return [
            f"a row's logits moved by up to {variation:.1e} with the other rows of its forward "
            f"pass, in {dtype} (measured with public prompts where the model ran): the "
            "sensitivity c / s is claimed up to that, which is "
            f"{LARGEST_SHARE:.0%} of it at most"
        ]
    return []


def _decoded(engine: Engine, trial: _Trial) -> ReadOnlyJson:
    """Return the `RowProbe`'s state once the trial's own group is decoded."""
    groups = [trial.group, *trial.beside]
    with closing(engine.decode_lockstep(groups, trial.following)) as results:
        return next(result.state for result in results if result.group_id == ROW_NAME)


def _change(logits: list[list[float]], alone: list[list[float]], is_ahead: bool = False) -> float:
    """Return the largest difference at the same positions. Raises EngineError if a logit is not a
    number."""
    other, same = np.array(logits), np.array(alone)
    other, same = (other[:-1], same[1:]) if is_ahead else (other, same)
    shared = min(len(other), len(same))
    other, same = other[:shared], same[:shared]
    with np.errstate(invalid="ignore"):  # the difference of two infinities
        change = np.where(other == same, 0.0, np.abs(other - same)).max(initial=0.0)
    if not np.isfinite(change):
        raise EngineError("the model's logits are no numbers; engine.dtype may be too narrow")
    return float(change)


def _probed(
    prompts: tuple[tuple[int, ...], ...],
    public: tuple[int, ...],
    positions: int = POSITIONS,
    name: str = ROW_NAME,
) -> LockstepGroup:
    spec = SelectorSpec("dpray.engines.row_variation:RowProbe", {"token": public[-1]})
    return LockstepGroup(name, prompts, public, spec, positions)


def _of_words(engine: Engine, words: int) -> tuple[int, ...]:
    return engine.encode(Prompt(" ".join(["a"] * words)))


def _shorter(engine: Engine, rows: int) -> tuple[tuple[int, ...], ...]:
    """Return prompts of up to 32 words for the rows after a first one, which has more."""
    words = min(32, (engine.context_length - POSITIONS) // 8)
    return tuple(_of_words(engine, 1 + 7 * row % words) for row in range(1, rows))


def _of_short_row(engine: Engine, rows: int, most: int) -> Iterator[_Trial]:
    """Yield the row alone, in groups of growing size, in none, next to a row of `most` tokens, and
    again with the token that these continue with."""
    first = _of_words(engine, min(FIRST_ROW, 3 * ((engine.context_length - POSITIONS) // 8)))
    prompts = (first, *_shorter(engine, rows))
    longest = max(map(len, prompts)) + 1
    rows = max(1, min(rows, engine.rows_at_once(longest + POSITIONS) - 1))
    for size in sorted({1, *(size for size in (2, 8, 33) if size < rows), rows}):
        yield _Trial(_probed(prompts[:size], first))
    yield _Trial(_probed((), first))
    most = min(most, engine.context_length) - POSITIONS
    while most > longest and engine.rows_at_once(most + POSITIONS) < 3:
        most -= most // 8  # in parts the two would not share a pass
    if most > longest:
        last = first + (first[-1],) * (most - len(first))
        yield _Trial(_probed((first, last), first))
    longer = tuple((*prompt, first[-1]) for prompt in prompts)
    for size in sorted({1, rows}):
        yield _Trial(_probed(longer[:size], longer[0]), is_ahead=True)


def _of_long_row(engine: Engine, rows: int) -> Iterator[_Trial]:
    """Yield the row alone, decoded while prompts of growing length are computed, among some rows,
    in no group's private rows, and next to other groups."""
    positions = 2 * len(PREFILLS)
    room = engine.context_length - positions
    first = _of_words(engine, min(LONG_ROW, room * 5 // 8))
    yield _Trial(_probed((first,), first, positions))
    prefills = _prefills(engine)

    def following(result: LockstepResult) -> LockstepGroup | None:
        return None if result.group_id == ROW_NAME else next(prefills, None)

    yield _Trial(_probed((first,), first, positions), (next(prefills),), following)
    shorter = _shorter(engine, max(1, min(SOME, engine.rows_at_once(len(first) + POSITIONS) - 1)))
    yield _Trial(_probed((first, *shorter[: rows - 1]), first))
    yield _Trial(_probed((), first))
    others = [_probed((row,), row, name=f"other {i}") for i, row in enumerate(shorter)]
    yield _Trial(_probed((first,), first), tuple(others))


def _prefills(engine: Engine) -> Iterator[LockstepGroup]:
    """Yield empty groups of one position. Their prompts begin with different tokens, so that no
    prefix cache has a part of them."""
    tokens = list(dict.fromkeys(engine.encode(Prompt("a b c d e f g h i j k l m n o p"))))
    for number, length in enumerate(PREFILLS):
        if length < engine.context_length:
            prompt = (tokens[number % len(tokens)],) * length
            yield _probed((), prompt, 1, f"prefill {number}")


def _configurations(model: str) -> tuple[Any, Any]:
    """Return the configuration of a model, and that of the part that reads texts."""
    try:
        config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
        return config, config.get_text_config()
    except Exception as error:  # damaged files raise errors of many classes
        raise InputError(
            f"engine.model: cannot read a configuration from {model} ({type(error).__name__})"
        ) from None


def has_experts(model: str) -> bool:
    """Return whether the folder, or the hub's name, is of a mixture of experts, by the keys of its
    configuration that count them, such as `num_local_experts`."""
    whole, _ = _configurations(model)
    return _counts_experts(whole.to_dict())  # the part that reads texts is in it


def _counts_experts(config: Mapping[Any, object]) -> bool:
    for key, value in config.items():
        if isinstance(value, Mapping) and _counts_experts(value):
            return True
        if _EXPERTS.fullmatch(str(key)) and isinstance(value, int) and value > 1:
            return True
    return False


def refuse_experts(model: str) -> None:
    """Raise InputError for a mixture of experts, whose rows may depend on each other."""
    if has_experts(model):
        raise InputError(
            f"engine.model: {model} is a mixture of experts. Where two experts nearly tie for a "
            "token, a record could decide which one the rows of others get; take a dense model, or "
            "for private prediction engine.kind vllm on an NVIDIA GPU of compute capability 8.0 or "
            "higher"
        )


def refuse_shared_scales(model: str) -> None:
    """Raise InputError for the folder, or the hub's name, of a model whose activations may be
    quantised by scales that rows share."""
    for part in _configurations(model):
        for key in QUANTISATION:
            found = getattr(part, key, None)
            if found and not works_by_rows(found):
                raise InputError(
                    f"engine.model: {key} of {model} may quantise activations by a scale of the "
                    "whole pass, so that a record would move the rows of others; take a model "
                    "that is not quantised, or its weights only (GPTQ, AWQ)"
                )


def works_by_rows(quantization: object) -> bool:
    """Return whether each row of a model that is quantised like this is computed by itself, as far
    as is known."""
    if not isinstance(quantization, Mapping):
        return False
    method = quantization.get("quant_method")
    if method == "bitsandbytes":
        # With 8 bits, columns with a large number in any row are computed otherwise for all rows.
        return quantization.get("load_in_4bit") is True and not quantization.get("load_in_8bit")
    if method == "fp8":
        is_static = quantization.get("activation_scheme") == "static"
        return is_static or bool(quantization.get("weight_block_size"))
    if method == "compressed-tensors":
        return _groups_work_by_rows(quantization)
    return isinstance(method, str) and method in WEIGHTS_ALONE


def _groups_work_by_rows(quantization: Mapping[str, object]) -> bool:
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return False
    activations = [quantization.get("kv_cache_scheme")]
    for group in groups.values():
        if not isinstance(group, Mapping):
            return False
        activations += [group.get("input_activations"), group.get("output_activations")]
    return all(each is None or _is_by_rows(each) for each in activations)


def _is_by_rows(scheme: object) -> bool:
    if not isinstance(scheme, Mapping):
        return False
    return scheme.get("dynamic") is False or scheme.get("strategy") in BY_ROWS
