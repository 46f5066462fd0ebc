"""This module lets vLLM's workers decode in lockstep.

`LockstepProcessor` sees the logits of the whole batch at every step. It gathers each group's rows,
lets the selectors of all groups draw a token each, on the logits' device, and forces it on the
group's rows. vLLM has two model runners; `first_runner` and `second_runner` put the processor where
each of them looks for one. A group that is not whole (a row missing, preempted, prefilled in part,
or with another history than the others) is never sampled: its rows are ended, and
`LockstepWorker.lockstep_finish` reports it to the engine. With tensor parallelism every rank does
all of this with the same numbers.

If public logits decide which tokens may be drawn, or from which rows, the selector gets them from
a pass of their own (`PublicPass`), unless the kernels are invariant to the batch.

A row that is not finite counts for nothing, from there to the end of its text (`FiniteRows`), and
its group goes on. Its keys and values may not reach other rows: attention multiplies what it leaves
out by 0, and 0 times NaN is NaN. So vLLM sets a block of its cache to 0 before it gives it to a
row (`needs_kv_cache_zeroing`). Rows that share cached blocks share the tokens in them, and so the
same fate by their own tokens.

A group that does not fit the engine comes in parts (`_PartedGroup`): for every token each of its
rows is a request of its own, for one token, and the selector adds up their logits as they come.
The engine asks for the draw when all rows are in (`LockstepWorker.parts_draw`).

A request belongs to a group by `SamplingParams.extra_args["dpray"]`: `group`, `row`, `size` (rows
of the group, the public one included, which is the last) and `eos`; the public row also carries
its `prompt`, `factory` and `arguments` of the `SelectorSpec`, and whether a string may `stop` the
text. A row of a group in parts has `group`, `row` and the position `at` which it is added.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import vllm
from vllm import envs
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import KVCacheConfig

from dpray.engines.base import (
    EngineError,
    Failed,
    GroupLogits,
    Selected,
    Selection,
    SelectorSpec,
    TokenSelector,
    failure_name,
    select_tokens,
)
from dpray.engines.finite_rows import FiniteRows, highest, remember_together
from dpray.engines.float32 import without_tf32
from dpray.engines.passes import PrefilledRows, PublicPass, load_model
from dpray.types import Json

Fate = Literal["running", "exhausted", "broken", "failed"]

# All processes of vLLM import this module before they load a model. vLLM clears blocks of its cache
# for some models by itself.
without_tf32()
KVCacheConfig.needs_kv_cache_zeroing = property(lambda config: True)  # type: ignore[method-assign, assignment]


@dataclass(eq=False, kw_only=True)
class _Text:
    """The tokens of a group's text, and its fate."""

    size: int
    finite: FiniteRows
    public_row: PrefilledRows | None = None
    tokens: list[int] = field(default_factory=list)
    fate: Fate = "running"
    error: str = ""

    def note(self, end: Selected | Failed) -> None:
        """Note the selector's token, or its error. The engine raises the error later: raised
        here, it would leave vLLM's scheduler in a broken state."""
        if isinstance(end, Failed):
            self.fate, self.error = "failed", failure_name(end.error)
        elif end.token is None:
            self.fate = "exhausted"
        else:
            self.tokens.append(end.token)

    def report(self) -> dict[str, object]:
        return {"tokens": self.tokens, "fate": self.fate, "error": self.error}


@dataclass(eq=False, kw_only=True)
class _Group(_Text):
    """A group of `size` rows, the public one included, and their places in the present batch.
    `private` is where its private rows are, in the logits that `_selections` looks at."""

    eos: int
    ends: frozenset[int]
    max_tokens: int
    spec: SelectorSpec | None = None
    public_prompt: tuple[int, ...] = ()
    may_stop: bool = False
    selector: TokenSelector | None = None
    rows: dict[int, Any] = field(default_factory=dict)
    """Each row's output or slot, as the model runner keeps it."""
    earlier: dict[int, Json] = field(default_factory=dict)
    """The selector's state before it drew the token of a position."""
    complete: bool = False
    indices: list[int] = field(default_factory=list)
    private: slice = field(default_factory=lambda: slice(0))

    @property
    def draws(self) -> bool:
        """Return whether a token comes next. vLLM may compute the rows of a text that is over once
        more."""
        over = len(self.tokens) >= self.max_tokens or not self.ends.isdisjoint(self.tokens[-1:])
        return self.fate == "running" and not over

    def remember_state(self) -> None:
        if self.may_stop and self.selector is not None:
            self.earlier[len(self.tokens)] = copy.deepcopy(self.selector.state())

    def end(self, length: int | None) -> Json:
        """Return the selector's state at the text's end. If a stop string ended the text after
        `length` tokens, whatever was selected after them is thrown away, also a failure.
        Proof: docs/privacy.md, section 2.6."""
        if length is not None and length <= len(self.tokens):
            del self.tokens[length:]
            self.fate, self.error = "running", ""
            if length in self.earlier:
                return self.earlier[length]
        return {} if self.selector is None else self.selector.state()


@dataclass(eq=False, kw_only=True)
class _PartedGroup(_Text):
    """A group of `size` private rows that come in parts. Each row is added exactly once for every
    token, however often vLLM preempts it, and nothing is drawn before all rows are in. `public` are
    the public row's logits at this position."""

    selector: TokenSelector
    public: torch.Tensor | None = None
    positions: dict[int, int] = field(default_factory=dict)
    added: set[int] = field(default_factory=set)

    def add(self, rows: dict[int, int], logits: torch.Tensor) -> None:
        """Add the private rows, given by their places in the pass, that are not added yet."""
        new = {row: index for row, index in rows.items() if row not in self.added}
        if self.fate != "running" or not new:
            return
        assert self.public is not None
        try:
            part = logits[list(new.values())]
            highest_S = self.finite.remember(highest(part), list(new))
            self.selector.add(GroupLogits(part, highest_S, self.public))
        except Exception as error:
            self.note(Failed(error))
        self.added.update(new)

    def draw(self) -> None:
        if self.fate != "running":
            return
        if self.public is None or self.added != set(range(self.size)):
            self.fate = "broken"
            return
        none = self.public.new_empty(0, len(self.public))
        try:
            selection = self.selector.select(GroupLogits(none, none.new_empty(0), self.public))
        except Exception as error:
            selection = Failed(error)
        self.note(*select_tokens([selection]))
        self.public = None
        self.added.clear()


class LockstepProcessor(ABC):
    """Forces one token on all rows of a group."""

    draws_ahead = False
    """True if a step is under way already when the engine sees the token of the one before it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.groups: dict[str, _Group] = {}
        self.parted: dict[str, _PartedGroup] = {}
        self.public_pass: PublicPass | None = None
        self.readable: int | None = None
        # Rows whose prompt is not prefilled yet, by their place in the batch.
        self.unfinished_prefill = np.zeros(0, dtype=bool)
        self._present: list[_Group] = []
        self._parts: dict[str, dict[int, int]] = {}
        self._rows = torch.empty(0, dtype=torch.long, device=device)
        # The private rows of all groups, one group after the other, if some are not contiguous.
        self._private: torch.Tensor | None = None

    @abstractmethod
    def attach(self, runner: Any) -> None:
        """Connect the processor with the model runner that calls it. Raises EngineError if that
        runner cannot clear blocks of its KV cache."""

    @abstractmethod
    def same_history(self, group: _Group) -> bool:
        """Return whether every row continues with what the selector drew, as far as the host
        knows."""

    @abstractmethod
    def same_end(self, group: _Group) -> bool:
        """Return whether every row was given the text's last token."""

    def _join(self, params: Any, kept: object) -> tuple[str, int] | None:
        """Note a request's row and what the model runner has `kept` of it; return its group and
        number, or None if it has no group."""
        ticket = (params.extra_args or {}).get("dpray")
        if ticket is None:
            return None
        name, row = ticket["group"], ticket["row"]
        if name in self.parted:
            self.parted[name].positions[row] = ticket["at"]
            return name, row
        if name not in self.groups:
            self.groups[name] = _Group(
                size=ticket["size"],
                finite=FiniteRows(ticket["size"] - 1, self.device),
                eos=ticket["eos"],
                ends=frozenset(params.stop_token_ids),
                max_tokens=params.max_tokens,
            )
        group = self.groups[name]
        group.rows[row] = kept
        if "factory" in ticket:
            group.spec = SelectorSpec(ticket["factory"], ticket["arguments"])
            group.public_prompt = tuple(ticket["prompt"])
            group.may_stop = ticket["stop"]
        return name, row

    def _locate(self, members: Mapping[int, tuple[str, int]]) -> None:
        """Find each group's rows in the batch, in the order of their numbers. `members` has the
        group and number of the rows, by their places in the batch."""
        rows: dict[str, list[tuple[int, int]]] = {}
        for index, (name, row) in members.items():
            rows.setdefault(name, []).append((row, index))
        self._present = []
        self._parts = {name: dict(rows.pop(name)) for name in self.parted if name in rows}
        for name, places in rows.items():
            if name not in self.groups:  # its text is over
                continue
            group = self.groups[name]
            places.sort()
            group.complete = [row for row, _ in places] == list(range(group.size))
            group.indices = [index for _, index in places]
            self._present.append(group)
        private = [group.indices[:-1] for group in self._present]
        if all(each == list(range(each[0], each[0] + len(each))) for each in private if each):
            self._private = None
            for group, each in zip(self._present, private, strict=True):
                group.private = slice(each[0], each[0] + len(each)) if each else slice(0)
        else:
            gathered = [index for each in private for index in each]
            self._private = torch.tensor(gathered, dtype=torch.long, device=self.device)
            ends = np.cumsum([len(each) for each in private]).tolist()
            for group, each, end in zip(self._present, private, ends, strict=True):
                group.private = slice(end - len(each), end)
        indices = [index for group in self._present for index in group.indices]
        self._rows = torch.tensor(indices, dtype=torch.long, device=self.device)

    def force(self, logits: torch.Tensor) -> torch.Tensor:
        all_logits, logits = logits, logits[:, : self.readable]
        all_logits[:, logits.shape[1] :] = -torch.inf  # no text draws a token that cannot be read
        for name, places in self._parts.items():
            self._add_parts(self.parted[name], places, logits)
        if not self._present:
            return all_logits
        for group in self._present:
            if group.draws and not self._is_whole(group):
                group.fate = "broken"
        highest_N = highest(logits)
        running = [each for each in self._present if each.draws]
        if self.draws_ahead:
            for each in running:
                each.remember_state()
        if running:
            self._draw_tokens(running, logits, highest_N)
        forced = [
            group.tokens[-1] if group.fate == "running" else group.eos
            for group in self._present
            for _ in group.indices
        ]
        # The rows are decoded greedily, so one infinite logit forces a token. In a row that is not
        # finite it might not be the first highest: all of it is overwritten.
        all_logits[self._rows[highest_N[self._rows].isnan()]] = -torch.inf
        all_logits[self._rows, torch.tensor(forced, device=self.device)] = torch.inf
        return all_logits

    def _add_parts(self, group: _PartedGroup, places: dict[int, int], logits: torch.Tensor) -> None:
        """Add the rows whose prompts are computed. The token that vLLM draws for them is not used:
        each ends its request."""
        position = len(group.tokens)
        whole = {
            row: index
            for row, index in places.items()
            if not self.unfinished_prefill[index] and group.positions[row] == position
        }
        public = whole.pop(group.size, None)
        if public is not None:
            group.public = logits[public].clone()
        else:
            self._add_public(group)
        group.add(whole, logits)

    def _add_public(self, group: _PartedGroup) -> None:
        """Compute the public row by itself, if that is what computes it, once for a position."""
        if group.public is None and self.public_pass and group.public_row:
            group.public = self.public_pass.logits(group.public_row, group.tokens)

    def draw_parted(self, name: str) -> _PartedGroup:
        """Draw the next token of a group in parts, which may have no private row: then nothing came
        before this."""
        group = self.parted[name]
        self._add_public(group)
        group.draw()
        return group

    def _draw_tokens(
        self, groups: list[_Group], logits: torch.Tensor, highest_N: torch.Tensor
    ) -> None:
        selections: Sequence[Selection]
        try:
            selections = self._selections(groups, logits, highest_N)
        except Exception as error:  # the device's, which does not say whose
            selections = [Failed(error)] * len(groups)
        for group, end in zip(groups, select_tokens(selections), strict=True):
            group.note(end)

    def _selections(
        self, groups: list[_Group], logits: torch.Tensor, highest_N: torch.Tensor
    ) -> list[Selection]:
        logits_NV, all_highest_N = logits, highest_N
        if self._private is not None:
            logits_NV = logits.index_select(0, self._private)
            all_highest_N = highest_N.index_select(0, self._private)
        highest_GS = remember_together(
            [group.finite for group in groups], [all_highest_N[group.private] for group in groups]
        )
        return [
            self._select(
                group, GroupLogits(logits_NV[group.private], highest_S, logits[group.indices[-1]])
            )
            for group, highest_S in zip(groups, highest_GS, strict=True)
        ]

    def _is_whole(self, group: _Group) -> bool:
        return (
            group.complete
            and group.spec is not None
            and not self.unfinished_prefill[group.indices].any()
            and self.same_history(group)
        )

    def _select(self, group: _Group, logits: GroupLogits) -> Selection:
        try:
            if group.selector is None:
                assert group.spec is not None
                group.selector = group.spec.build()
                if self.public_pass is not None:
                    group.public_row = self.public_pass.start(group.public_prompt)
            if self.public_pass is not None and group.public_row is not None:
                public_V = self.public_pass.logits(group.public_row, group.tokens)
                logits = logits._replace(public=public_V)
            return group.selector.select(logits)
        except Exception as error:
            return Failed(error)


def find_processor(runner: Any) -> LockstepProcessor:
    """Return the processor that a model runner of vLLM calls. Raises EngineError for a runner that
    calls none: vLLM itself would draw from private rows."""
    first = getattr(getattr(runner, "input_batch", None), "logitsprocs", None)
    second = getattr(getattr(runner, "sampler", None), "logits_processors", ())
    for each in second if first is None else first.all:
        if isinstance(each, LockstepProcessor):
            return each
    raise EngineError(
        f"engine.kind vllm: {type(runner).__module__}.{type(runner).__name__} of vLLM "
        f"{vllm.__version__} is a model runner that dpray does not know, so no private token could "
        "be drawn; set VLLM_USE_V2_MODEL_RUNNER=0 for vLLM's first runner or 1 for its second, or "
        "take engine.kind transformers"
    )


def attention_names(vllm_config: VllmConfig) -> list[str]:
    """Return the backends of the loaded model's layers, each with its version if it has several."""
    base: Any = AttentionLayerBase  # an abstract one
    layers = get_layers_from_vllm_config(vllm_config, base)
    names = set()
    for layer in layers.values():
        version = getattr(getattr(layer, "impl", None), "vllm_flash_attn_version", None)
        name = layer.get_attn_backend().get_name()
        names.add(name if version is None else f"{name} {version}")
    return sorted(names)


def is_invariant() -> bool:
    """Return whether vLLM's batch-invariant mode is in force. vLLM keeps what its environment said
    when the process loaded its first model, and Triton's attention what it said at its import."""
    triton = sys.modules.get("vllm.v1.attention.ops.triton_unified_attention")
    return bool(envs.VLLM_BATCH_INVARIANT and getattr(triton, "is_batch_invariant", True))


class LockstepWorker:
    """vLLM adds these methods to its worker class; the engine calls them by `collective_rpc`."""

    model_runner: Any

    def _lockstep_processor(self) -> LockstepProcessor:
        return find_processor(self.model_runner)

    def lockstep_start(self, readable: int, public_model: str | None, dtype: str) -> Json:
        """Connect the processor with its model runner; return the shape of the KV cache: `blocks`
        in all, and `block_sizes`, one for each kind of layer; and what computes: the names of
        `attention`, and whether vLLM's batch-`invariant` mode is in force. A runner that cannot be
        used is `refused` instead, with the reason. Logits are cut to those of `readable` tokens.
        `public_model` is the folder of a second copy of the model, which computes public rows by
        themselves."""
        runner = self.model_runner
        try:
            processor = find_processor(runner)
            processor.attach(runner)
        except EngineError as error:  # as an error it might come to the engine as another one
            return {"refused": str(error)}
        processor.readable = readable
        if public_model is not None:
            model = load_model(public_model, dtype, processor.device)
            processor.public_pass = PublicPass(model, processor.device)
        cache = runner.kv_cache_config
        sizes = [group.kv_cache_spec.block_size for group in cache.kv_cache_groups]
        kernels = {"attention": attention_names(runner.vllm_config), "invariant": is_invariant()}
        return {"blocks": cache.num_blocks, "block_sizes": sizes} | kernels

    def lockstep_finish(self, name: str, length: int | None = None) -> dict[str, object]:
        """Return the group's outcome as plain values, and forget the group. `length` is the number
        of tokens of a text that a stop string ended."""
        processor = self._lockstep_processor()
        group = processor.groups.pop(name)
        state = group.end(length)
        if group.fate == "running" and not processor.same_end(group):
            group.fate = "broken"
        return group.report() | {"state": state}

    def parts_start(
        self, name: str, size: int, public_prompt: tuple[int, ...], spec: SelectorSpec
    ) -> dict[str, bool]:
        """Begin a group of `size` private rows, which comes in parts. `public_row` of the answer is
        whether the public row has to come before them, for every token."""
        processor = self._lockstep_processor()
        finite = FiniteRows(size, processor.device)
        group = _PartedGroup(size=size, finite=finite, selector=spec.build())
        if processor.public_pass is not None:
            group.public_row = processor.public_pass.start(public_prompt)
        processor.parted[name] = group
        return {"public_row": group.public_row is None}

    def parts_draw(self, name: str) -> dict[str, object]:
        """Draw the group's next token, if all of its rows are in, and report the group."""
        return self._lockstep_processor().draw_parted(name).report()

    def parts_finish(self, name: str) -> dict[str, object]:
        """Return the selector's state, and forget the group."""
        return self._lockstep_processor().parted.pop(name).selector.state()

    def lockstep_clear(self) -> None:
        """Forget all groups, after their requests were aborted."""
        processor = self._lockstep_processor()
        processor.groups.clear()
        processor.parted.clear()
