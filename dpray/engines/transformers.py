"""The transformers engine decodes groups on a CPU, one at a time, or on a GPU, side by side.

A model computes several rows in a pass, and a public row by itself. On a GPU passes have a fixed
shape and are replayed (`dpray.engines.lanes`). On a CPU there is nothing to replay, and memory for
the longest rows is dear: passes grow with their text there.
"""

from __future__ import annotations

import gc
import math
import secrets
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from dpray.config.sections import EngineConfig
from dpray.engines.base import (
    Completion,
    EngineError,
    Failed,
    Following,
    GroupLogits,
    LockstepGroup,
    LockstepResult,
    OnCompletion,
    Prompts,
    Sampling,
    Samplings,
    engine_error,
    failure_name,
    nothing_follows,
    select_token,
    select_tokens,
    selector_error,
)
from dpray.engines.finite_rows import highest, remember_together
from dpray.engines.fixed_pass import Capture, as_graph
from dpray.engines.kv_cache import CHOICE, CHOICE_OF_LOGIT, bytes_per_token, cpu_cache_bytes
from dpray.engines.lanes import Lanes, Text, lanes_for
from dpray.engines.model_path import resolve_model
from dpray.engines.passes import (
    PrefilledRows,
    TokenIds,
    advance,
    left_padded,
    load_model,
    prefill,
    readable,
)
from dpray.engines.schema.token_mask import TokenMask
from dpray.engines.text import TextCodec

MOST_LANES = 8
"""The most groups that a GPU decodes side by side. With more rows a pass is no faster for each."""

COLUMN_STEP = 64
"""The tokens of a lane's row are a multiple of this: kernels of attention read masks so."""


class AllowedTokens(LogitsProcessor):
    """Leaves each row the tokens that its mask allows."""

    def __init__(self, masks: Sequence[TokenMask]) -> None:
        self._masks = masks
        self._is_first = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self._is_first:
            for mask, token in zip(self._masks, input_ids[:, -1].tolist(), strict=True):
                if mask.ending:  # a row that has ended is padded until all have
                    mask.take(token)
        self._is_first = False
        allowed = torch.from_numpy(np.stack([mask.choices for mask in self._masks]))
        forbidden = torch.ones(scores.shape, dtype=torch.bool)
        forbidden[:, : allowed.shape[1]] = ~allowed
        return scores.masked_fill(forbidden.to(scores.device), -math.inf)


class Drawable(LogitsProcessor):
    """Makes logits drawable that a model overflowed at: no token of a text can end a run."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.nan_to_num(nan=0.0, posinf=1e4, neginf=-math.inf)


class TransformersEngine(TextCodec):
    """An `Engine` that runs an `AutoModelForCausalLM`.

    `device` "auto" is the first GPU if there is one. At most `max_rows` rows go through the
    model at a time. A group's public row goes through by itself, so that its logits are a function
    of public values (see `PublicPass`).

    `group` has the rows of a group of usual size, the public one included, and the most tokens of
    each. These are public, and so are the passes in which up to `lanes` groups are decoded side by
    side: by default several on a GPU, and none on a CPU. `capture` makes what repeats such a pass.

    Rows keep their KV cache while `rows_at_once` allows it: on a CPU `engine.kv_cache_gib`, which
    defaults to what `group` needs, on a GPU what `engine.gpu_memory_utilization` leaves next to the
    model. The other rows of a larger group are computed again, in parts, for every token.
    """

    shares_public_pass = False

    def __init__(
        self,
        config: EngineConfig,
        *,
        device: str = "auto",
        max_rows: int = 256,
        group: tuple[int, int] = (0, 0),
        lanes: int | None = None,
        capture: Capture = as_graph,
    ) -> None:
        model = resolve_model(config.model)
        super().__init__(model, config.max_model_len)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        self._max_rows = max_rows
        self._model: Any = load_model(
            model, config.dtype_on(gpu=self._device.type != "cpu"), self._device
        )
        # A run says how its tokens are drawn, not the model's own file: with a penalty for words
        # that come again, calls would answer otherwise than vLLM does.
        self._model.generation_config = GenerationConfig()
        self.readable = readable(self._model)
        dtype = str(self._model.dtype).removeprefix("torch.")
        self._bytes_per_token = bytes_per_token(self._model.config.get_text_config(), dtype)
        # On a GPU: its first logits and the present ones, and what a choice makes of these.
        per_logit = 2 * 4 + CHOICE_OF_LOGIT if self._device.type == "cuda" else 0
        self._bytes_per_row = per_logit * self.readable
        self._cache_bytes = self._room(config, group[0] * group[1] * self._bytes_per_token)
        self._prefilled: tuple[TokenIds, list[PrefilledRows]] | None = None
        most = (MOST_LANES if self._device.type == "cuda" else 0) if lanes is None else lanes
        self._lanes = self._made_lanes(most, *group, capture) if most and group[0] > 1 else None

    @torch.inference_mode()
    def _made_lanes(self, most: int, rows: int, tokens: int, capture: Capture) -> Lanes | None:
        """Make lanes of three quarters of the memory for KV caches, at most. What grows keeps the
        rest. All of it is decided by public numbers."""
        columns = -(-tokens // COLUMN_STEP) * COLUMN_STEP
        held = self._growing_rows(columns)
        count = min(most, (held - held // 4) // rows)
        made = lanes_for(self._model, count, rows - 1, columns, capture) if count else None
        if made is not None:
            of_row = columns * self._bytes_per_token + self._bytes_per_row
            self._cache_bytes -= count * rows * of_row
        return made

    def _room(self, config: EngineConfig, needed: int) -> int:
        """Return the bytes that all KV caches may take."""
        if self._device.type != "cuda":
            return cpu_cache_bytes(config, needed)
        total = torch.cuda.get_device_properties(self._device).total_memory
        left = config.gpu_memory_utilization * total - torch.cuda.memory_allocated(self._device)
        # A pass needs room next to the caches that it grows.
        return int(left * 0.75) - CHOICE

    def rows_at_once(self, tokens: int) -> int:
        if self._lanes is not None and tokens <= self._lanes.columns:
            return self._lanes.rows + 1
        return self._growing_rows(tokens)

    def _growing_rows(self, tokens: int) -> int:
        """Return how many rows of `tokens` tokens each fit next to the lanes."""
        return max(2, self._cache_bytes // (tokens * self._bytes_per_token + self._bytes_per_row))

    def close(self) -> None:
        self._model = self._prefilled = self._lanes = None
        gc.collect()

    def generate(
        self, prompts: Prompts, samplings: Samplings, on_completion: OnCompletion | None = None
    ) -> list[Completion]:
        encoded = self.encoded(prompts, samplings)
        completions: dict[int, Completion] = {}
        for chosen in self._batches(encoded, samplings):
            answers = self._generate([encoded[i] for i in chosen], [samplings[i] for i in chosen])
            for i, answer in zip(chosen, answers, strict=True):
                completions[i] = answer
                if on_completion is not None:
                    on_completion(i, answer)
        return [completions[i] for i in range(len(encoded))]

    def _batches(self, encoded: list[tuple[int, ...]], samplings: Samplings) -> Iterator[list[int]]:
        """Yield the positions of prompts that go through the model together: their sampling differs
        in `max_tokens` only, and the longest prompt with the most new tokens fits the context."""

        def key(i: int) -> tuple[Any, ...]:
            return astuple(replace(samplings[i], max_tokens=0))

        def order(i: int) -> tuple[Any, ...]:
            return (key(i), samplings[i].max_tokens, len(encoded[i]))

        batch: list[int] = []
        prompt_tokens = 0
        for i in sorted(range(len(encoded)), key=order):
            prompt_tokens = max(prompt_tokens, len(encoded[i]))
            fits = prompt_tokens + samplings[i].max_tokens <= self.context_length
            if batch and not (fits and len(batch) < self._max_rows and key(i) == key(batch[0])):
                yield batch
                batch, prompt_tokens = [], len(encoded[i])
            batch.append(i)
        if batch:
            yield batch

    @torch.inference_mode()
    def _generate(
        self, prompts: list[tuple[int, ...]], samplings: list[Sampling]
    ) -> list[Completion]:
        """Complete one batch; every row is computed as long as the longest, and cut."""
        ids, mask = left_padded(prompts, self._device)
        sampling = samplings[-1]  # the one of most tokens
        logits = self._model.config.get_text_config().vocab_size
        options: dict[str, object] = {
            "do_sample": sampling.temperature > 0,
            "suppress_tokens": list(range(self.readable, logits)) or None,
        }
        if sampling.temperature > 0:
            options |= {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
            }
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            # transformers draws from the global generator, whose default seed is a constant
            torch.manual_seed(secrets.randbits(63))
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=sampling.max_tokens,
                eos_token_id=list(self.eos_ids),
                pad_token_id=self.eos_ids[0],
                logits_processor=self._processors(sampling, len(prompts)),
                **options,
            )
        new_ids = output[:, ids.shape[1] :].tolist()
        return [
            self.completion(prompt, row[: each.max_tokens], each)
            for prompt, row, each in zip(prompts, new_ids, samplings, strict=True)
        ]

    def _processors(self, sampling: Sampling, rows: int) -> LogitsProcessorList:
        processors: list[LogitsProcessor] = [Drawable()]
        if sampling.schema is not None:
            masks = [self.mask(sampling.schema, sampling.max_tokens) for _ in range(rows)]
            processors.append(AllowedTokens(masks))
        return LogitsProcessorList(processors)

    def decode_lockstep(
        self, groups: Iterable[LockstepGroup], following: Following = nothing_follows
    ) -> Generator[LockstepResult]:
        try:
            if self._lanes is not None:
                yield from self._side_by_side(self._lanes, iter(groups), following)
            for group in groups if self._lanes is None else ():
                yield from self._one_by_one(group, following)
        finally:
            self._prefilled = None

    def _one_by_one(self, first: LockstepGroup, following: Following) -> Generator[LockstepResult]:
        group: LockstepGroup | None = first
        while group is not None:
            with _computing():
                result = self._decoded(group)
            group = following(result)
            yield result

    def _side_by_side(
        self, lanes: Lanes, groups: Iterator[LockstepGroup], following: Following
    ) -> Generator[LockstepResult]:
        """Decode a group in each lane. One whose public row is too long is decoded by itself, while
        the others wait."""
        texts: dict[int, Text] = {}
        while True:
            for lane in range(lanes.count):
                while lane not in texts and (group := next(groups, None)) is not None:
                    if lanes.holds(group):
                        texts[lane] = self._begun(lanes, lane, group)
                    else:
                        yield from self._one_by_one(group, following)
            if not texts:
                return
            self._draw_tokens(lanes, texts)
            for lane, text in list(texts.items()):
                if not text.is_over:
                    continue
                del texts[lane]
                result = self._result(text)
                after = following(result)
                if after is not None and lanes.holds(after):
                    texts[lane] = self._begun(lanes, lane, after)
                yield result
                if after is not None and lane not in texts:
                    yield from self._one_by_one(after, following)

    @torch.inference_mode()
    def _begun(self, lanes: Lanes, lane: int, group: LockstepGroup) -> Text:
        with _computing():
            longest = max(map(len, group.prompts))
            self.check_length(longest, group.max_tokens)
            kept, rest = lanes.split(group)
            size = min(self._max_rows, self._growing_rows(longest + group.max_tokens))
            parts = [rest[i : i + size] for i in range(0, len(rest), size)]
            text = self._text(group, kept, parts)
            # Next to the lanes, prompts have the room of what grows, whatever their lengths.
            most = min(self._max_rows, self._growing_rows(lanes.columns))
            lanes.start(lane, kept, group.public_prompt, most)
        return text

    @torch.inference_mode()
    def _draw_tokens(self, lanes: Lanes, texts: dict[int, Text]) -> None:
        """Draw the next token of each text that is not over, all of them in one call."""
        texts = {lane: text for lane, text in texts.items() if not text.is_over}
        with _computing():
            lanes.step(texts)
            for lane, text in texts.items():
                self._add_parts(text, lanes.public.logits[lane])
            logits_NV = lanes.private.logits
            rows_G = [lanes.rows_of(lane, text.kept) for lane, text in texts.items()]
            with _selecting():
                highest_N = highest(logits_NV)
                highest_GS = remember_together(
                    [text.finite for text in texts.values()], [highest_N[rows] for rows in rows_G]
                )
                each = zip(texts.items(), rows_G, highest_GS, strict=True)
                ends = select_tokens(
                    [
                        text.selector.select(
                            GroupLogits(logits_NV[rows], highest_S, lanes.public.logits[lane])
                        )
                        for (lane, text), rows, highest_S in each
                    ]
                )
            for text, end in zip(texts.values(), ends, strict=True):
                if isinstance(end, Failed):
                    raise selector_error(failure_name(end.error)) from end.error
                self._note(text, end.token)

    @torch.inference_mode()
    def _decoded(self, group: LockstepGroup) -> LockstepResult:
        self.check_length(max(map(len, group.prompts)), group.max_tokens)
        text = self._text(group, *self._split(group))
        rows = self._prefill(text.kept, group.public_prompt)
        logits = [part.logits for part in rows]
        while not text.is_over:
            if text.tokens:
                logits = [advance(self._model, part, text.tokens) for part in rows]
            *private, public = logits
            self._add_parts(text, public[0])
            with _selecting():
                private_SV = torch.cat([*private, public[:0]])
                highest_S = text.finite.remember(highest(private_SV))
                token = select_token(text.selector, private_SV, public[0], highest_S)
            self._note(text, token)
        return self._result(text)

    def _text(self, group: LockstepGroup, kept: TokenIds, parts: Sequence[TokenIds]) -> Text:
        with _selecting():
            selector = group.selector.build()
        text = Text(group, selector, kept, parts, self._device)
        text.is_over = self.is_over(group, [])
        return text

    def _add_parts(self, text: Text, public_V: torch.Tensor) -> None:
        """Compute the rows that are not kept, and add them up."""
        done = 0
        for part in text.parts:
            longer = [(*prompt, *text.tokens) for prompt in part]
            added = prefill(self._model, longer, self._device).logits
            with _selecting():
                its_rows = slice(done, done := done + len(part))
                highest_S = text.finite_parts.remember(highest(added), its_rows)
                text.selector.add(GroupLogits(added, highest_S, public_V))

    def _note(self, text: Text, token: int | None) -> None:
        if token is None:
            text.is_over = text.is_exhausted = True
            return
        text.tokens.append(token)
        text.is_over = self.is_over(text.group, text.tokens)

    def _result(self, text: Text) -> LockstepResult:
        state = text.selector.state()
        return self.result(text.group, text.tokens, text.is_exhausted, state)

    def _split(self, group: LockstepGroup) -> tuple[TokenIds, list[TokenIds]]:
        """Return the private prompts whose rows keep their KV cache, and the parts in which the
        others are computed for every token; the cache of one part fits next to the kept ones."""
        private = group.private_prompts
        held = self._growing_rows(max(map(len, group.prompts)) + group.max_tokens) - 1
        if len(private) <= held:
            return private, []
        size = min(self._max_rows, max(1, held // 4))
        kept = max(0, held - size)
        return private[:kept], [private[i : i + size] for i in range(kept, len(private), size)]

    def _prefill(self, private: TokenIds, public: tuple[int, ...]) -> list[PrefilledRows]:
        """Compute the private rows after their prompts, then the public one by itself; both are
        kept for the batch's next text, which has the same prompts."""
        prompts = (*private, public)
        if self._prefilled is not None and self._prefilled[0] == prompts:
            for part in self._prefilled[1]:
                part.rewind()
            return self._prefilled[1]
        self._prefilled = None
        parts = [private[i : i + self._max_rows] for i in range(0, len(private), self._max_rows)]
        rows = [prefill(self._model, part, self._device) for part in (*parts, (public,))]
        if all(part.can_rewind for part in rows):
            self._prefilled = (prompts, rows)
        return rows


@contextmanager
def _selecting() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise selector_error(failure_name(error)) from error


@contextmanager
def _computing() -> Iterator[None]:
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # its message may quote a prompt
        raise engine_error("the model failed in a step", error) from None
