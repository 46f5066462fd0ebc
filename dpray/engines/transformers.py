"""The transformers engine decodes one group at a time, on a CPU or a GPU.

A model computes several rows in a pass, and a public row by itself.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import math
import secrets
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import DynamicLayer

from dpray.config.sections import EngineConfig
from dpray.engines.base import (
    Completion,
    EngineError,
    Following,
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
    selector_error,
)
from dpray.engines.finite_rows import FiniteRows, highest
from dpray.engines.float32 import without_tf32
from dpray.engines.kv_cache import CHOICE, CHOICE_OF_LOGIT, bytes_per_token, cpu_cache_bytes
from dpray.engines.model_path import resolve_model
from dpray.engines.schema.token_mask import TokenMask
from dpray.engines.text import TextCodec, readable_tokens
from dpray.engines.weights import load_whole
from dpray.types import InputError

TOKENS_KEPT = 8192
"""The most tokens of prompts whose prefills `PublicPass` keeps. A document's later sections have
prompts that never come again."""

TokenIds = tuple[tuple[int, ...], ...]
"""It has the token ids of several prompts."""


def load_model(folder: str, dtype: str, device: torch.device) -> Any:
    """Load the model in evaluation mode. Raises InputError if its weights are not those of its
    configuration, EngineError if it cannot be loaded."""
    without_tf32()
    try:
        loaded = load_whole(folder, dtype)
    except InputError:
        raise
    except Exception as error:  # damaged files raise errors of many classes
        raise EngineError(f"cannot load {folder} ({type(error).__name__})") from error
    return loaded.to(device).eval()


def left_padded(
    prompts: Sequence[tuple[int, ...]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask, both of shape (rows, longest prompt)."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


@dataclass
class Rows:
    """Rows after their prompts: KV cache, attention mask, and first logits, float32, shape
    (rows, V)."""

    cache: Any
    mask: torch.Tensor
    logits: torch.Tensor

    def rewind(self) -> None:
        """Forget the tokens after the prompts."""
        self.cache.crop(-(self.cache.get_seq_length() - self.mask.shape[1]))

    @property
    def can_rewind(self) -> bool:
        return all(type(layer) is DynamicLayer for layer in self.cache.layers)


@functools.cache
def cache_argument(model: type) -> str:
    """Return the name by which a model takes its KV cache.

    transformers 5.24 calls it `cache`, and 5.40 will refuse `past_key_values`, its older name.
    """
    parameters = inspect.signature(model.forward).parameters  # type: ignore[attr-defined]
    return "cache" if "cache" in parameters else "past_key_values"


def readable(model: Any) -> int:
    """Return the number of tokens that the model has embeddings for; logits are cut to these."""
    embedded: int = model.get_input_embeddings().weight.shape[0]
    return min(embedded, readable_tokens(model.config.get_text_config()))


@torch.inference_mode()
def prefill(model: Any, prompts: Sequence[tuple[int, ...]], device: torch.device) -> Rows:
    """Compute the prompts' rows in one forward pass."""
    ids, mask = left_padded(prompts, device)
    cache = DynamicCache(config=model.config)
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        logits_to_keep=1,
        **{cache_argument(model.__class__): cache},
    )
    return Rows(cache, mask, output.logits[:, -1, : readable(model)].float())


@torch.inference_mode()
def advance(model: Any, rows: Rows, tokens: Sequence[int]) -> torch.Tensor:
    """Compute the rows' logits after `tokens`, the same for all; only the last token is new."""
    count = rows.mask.shape[0]
    grown = rows.mask.new_ones(count, len(tokens))
    output = model(
        input_ids=rows.mask.new_full((count, 1), tokens[-1]),
        attention_mask=torch.cat([rows.mask, grown], dim=1),
        position_ids=rows.mask.sum(1, keepdim=True) + len(tokens) - 1,
        **{cache_argument(model.__class__): rows.cache},
    )
    logits: torch.Tensor = output.logits[:, -1, : readable(model)].float()
    return logits


class PublicPass:
    """Computes the logits of public prompts in forward passes that hold one row each.

    The shape of such a pass is a function of the prompt and of the tokens drawn so far, which are
    public. So the logits are too, to the last bit: a set of candidates cut out by them is the same
    whatever else is in the batch, and so is the public gate's answer. In a pass shared with private
    rows the last bits move with these rows, and a token at the edge of the set flips in or out: a
    loss without bound.
    Proof: docs/privacy.md, sections 2.4 and 2.9.
    """

    def __init__(self, model: object, device: torch.device) -> None:
        self._model, self._device = model, device
        self._prompts: dict[tuple[int, ...], Rows] = {}

    def start(self, prompt: tuple[int, ...]) -> Rows:
        """Return the prompt's row, a copy of a prefill that is kept for the next text."""
        if prompt not in self._prompts:
            while self._prompts and sum(map(len, self._prompts)) + len(prompt) > TOKENS_KEPT:
                del self._prompts[next(iter(self._prompts))]
            self._prompts[prompt] = prefill(self._model, [prompt], self._device)
        return copy.deepcopy(self._prompts[prompt])

    def logits(self, row: Rows, tokens: Sequence[int]) -> torch.Tensor:
        """Return the next token's logits after `tokens`, float32, shape (V,). Call it once at every
        position, in order."""
        return advance(self._model, row, tokens)[0] if tokens else row.logits[0]


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

    Rows keep their KV cache while `rows_at_once` allows it: on a CPU `engine.kv_cache_gib`, which
    defaults to what `group` needs (the rows of a typical group, and the tokens of each), on a GPU
    what `engine.gpu_memory_utilization` leaves next to the model. The other rows of a larger group
    are computed again, in parts, for every token.
    """

    shares_public_pass = False

    def __init__(
        self,
        config: EngineConfig,
        *,
        device: str = "auto",
        max_rows: int = 256,
        group: tuple[int, int] = (0, 0),
    ) -> None:
        model = resolve_model(config.model)
        super().__init__(model, config.max_model_len)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        self._max_rows = max_rows
        self._model: Any = load_model(model, config.dtype, self._device)
        self.readable = readable(self._model)
        dtype = str(self._model.dtype).removeprefix("torch.")
        self._bytes_per_token = bytes_per_token(self._model.config.get_text_config(), dtype)
        # On a GPU: its first logits and the present ones, and what a choice makes of these.
        per_logit = 2 * 4 + CHOICE_OF_LOGIT if self._device.type == "cuda" else 0
        self._bytes_per_row = per_logit * self.readable
        self._cache_bytes = self._room(config, group[0] * group[1] * self._bytes_per_token)
        self._prefilled: tuple[TokenIds, list[Rows]] | None = None

    def _room(self, config: EngineConfig, needed: int) -> int:
        """Return the bytes that all KV caches may take."""
        if self._device.type != "cuda":
            return cpu_cache_bytes(config, needed)
        total = torch.cuda.get_device_properties(self._device).total_memory
        left = config.gpu_memory_utilization * total - torch.cuda.memory_allocated(self._device)
        # A pass needs room next to the caches that it grows.
        return int(left * 0.75) - CHOICE

    def rows_at_once(self, tokens: int) -> int:
        return max(2, self._cache_bytes // (tokens * self._bytes_per_token + self._bytes_per_row))

    def close(self) -> None:
        self._model = self._prefilled = None
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
            for first in groups:
                group: LockstepGroup | None = first
                while group is not None:
                    result = self._decoded(group)
                    group = following(result)
                    yield result
        finally:
            self._prefilled = None

    def _decoded(self, group: LockstepGroup) -> LockstepResult:
        try:
            return self._decode_group(group)
        except EngineError:
            raise
        except Exception as error:  # its message may quote a prompt
            raise engine_error("the model failed in a step", error) from None

    @torch.inference_mode()
    def _decode_group(self, group: LockstepGroup) -> LockstepResult:
        self.check_length(max(map(len, group.prompts)), group.max_tokens)
        with _selecting():
            selector = group.selector.build()
        kept, parts = self._split(group)
        rows = self._prefill(kept, group.public_prompt)
        finite = FiniteRows(len(group.private_prompts), self._device)
        logits = [part.logits for part in rows]
        tokens: list[int] = []
        token: int | None = None
        while not self.is_over(group, tokens):
            if tokens:
                logits = [advance(self._model, part, tokens) for part in rows]
            *private, public = logits
            done = len(kept)
            for part in parts:
                longer = [(*prompt, *tokens) for prompt in part]
                added = prefill(self._model, longer, self._device).logits
                with _selecting():
                    its_rows = slice(done, done := done + len(part))
                    highest_S = finite.remember(highest(added), its_rows)
                    selector.add(added, highest_S, public[0])
            with _selecting():
                private_SV = torch.cat([*private, public[:0]])
                highest_S = finite.remember(highest(private_SV), slice(len(kept)))
                token = select_token(selector, private_SV, public[0], highest_S)
            if token is None:
                break
            tokens.append(token)
        return self.result(group, tokens, token is None, selector.state())

    def _split(self, group: LockstepGroup) -> tuple[TokenIds, list[TokenIds]]:
        """Return the private prompts whose rows keep their KV cache, and the parts in which the
        others are computed for every token; the cache of one part fits next to the kept ones."""
        private = group.private_prompts
        held = self.rows_at_once(max(map(len, group.prompts)) + group.max_tokens) - 1
        if len(private) <= held:
            return private, []
        size = min(self._max_rows, max(1, held // 4))
        kept = max(0, held - size)
        return private[:kept], [private[i : i + size] for i in range(kept, len(private), size)]

    def _prefill(self, private: TokenIds, public: tuple[int, ...]) -> list[Rows]:
        """Compute the private rows after their prompts, then the public one by itself; both are
        kept for the batch's next text, which has the same prompts."""
        prompts = (*private, public)
        if self._prefilled is not None and self._prefilled[0] == prompts:
            for part in self._prefilled[1]:
                part.rewind()
            return self._prefilled[1]
        self._prefilled = None
        chunks = [private[i : i + self._max_rows] for i in range(0, len(private), self._max_rows)]
        rows = [prefill(self._model, chunk, self._device) for chunk in (*chunks, (public,))]
        if all(part.can_rewind for part in rows):
            self._prefilled = (prompts, rows)
        return rows


@contextmanager
def _selecting() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise selector_error(failure_name(error)) from error
