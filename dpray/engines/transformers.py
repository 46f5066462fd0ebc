"""The transformers engine decodes one group at a time, on a CPU or a GPU."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Any

import torch
from transformers import StoppingCriteria

from dpray.config.sections import EngineConfig
from dpray.engines.base import (
    Completion,
    EngineError,
    FinishReason,
    Lockstep,
    LockstepGroup,
    LockstepResult,
    OnCompletion,
    Prompts,
    Sampling,
    Samplings,
    engine_error,
    failure_name,
    select_token,
    selector_error,
)
from dpray.engines.kv_cache import bytes_per_token, cpu_cache_bytes
from dpray.engines.model_path import resolve_model
from dpray.engines.rows import Rows, advance, left_padded, load_model, prefill
from dpray.engines.text import TextCodec, cut_at_stop

TokenIds = tuple[tuple[int, ...], ...]
"""It has the token ids of several prompts."""


class TransformersEngine(TextCodec):
    """Is an `Engine` that runs an `AutoModelForCausalLM`.

    `device` "auto" is the first GPU where there is one. At most `max_rows` rows go through the
    model at a time. A group's public row goes through by itself, so that its logits are a function
    of public values (see `PublicPass`).

    Rows keep their KV cache while `rows_at_once` allows it: on a CPU `engine.kv_cache_gib`, which
    defaults to what `group` needs (the rows of a typical group, and the tokens of each), on a GPU
    what `engine.gpu_memory_utilization` leaves beside the model. The other rows of a larger group
    are computed anew, in parts, for every token.
    """

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
        dtype = str(self._model.dtype).removeprefix("torch.")
        self._bytes_per_token = bytes_per_token(self._model.config.get_text_config(), dtype)
        self._cache_bytes = self._room(config, group[0] * group[1] * self._bytes_per_token)
        self._prefilled: tuple[TokenIds, list[Rows]] | None = None

    def _room(self, config: EngineConfig, needed: int) -> int:
        """Return the bytes that all KV caches may take."""
        if self._device.type != "cuda":
            return cpu_cache_bytes(config, needed)
        total = torch.cuda.get_device_properties(self._device).total_memory
        left = config.gpu_memory_utilization * total - torch.cuda.memory_allocated(self._device)
        # A pass needs room beside the caches that it grows.
        return int(left * 0.75)

    def rows_at_once(self, tokens: int) -> int:
        return max(2, self._cache_bytes // (tokens * self._bytes_per_token))

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
        in `max_tokens` alone, and the longest prompt with the most new tokens fits the context."""

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
        options: dict[str, Any] = {"do_sample": sampling.temperature > 0}
        if sampling.temperature > 0:
            options |= {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
            }
        if sampling.stop:
            options["stopping_criteria"] = [_StopStrings(self, prompts, sampling.stop)]
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
                **options,
            )
        new_ids = output[:, ids.shape[1] :].tolist()
        return [
            self.completion(prompt, row[: each.max_tokens], each)
            for prompt, row, each in zip(prompts, new_ids, samplings, strict=True)
        ]

    def decode_lockstep(self, groups: Iterable[LockstepGroup]) -> Lockstep:
        try:
            for first in groups:
                group: LockstepGroup | None = first
                while group is not None:
                    group = yield self._decoded(group)
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
        logits = [part.logits for part in rows]
        tokens: list[int] = []
        reason: FinishReason = "length"
        text = None
        while text is None and len(tokens) < group.max_tokens:
            if tokens:
                logits = [advance(self._model, part, tokens) for part in rows]
            *private, public = logits
            for part in parts:
                longer = [(*prompt, *tokens) for prompt in part]
                added = prefill(self._model, longer, self._device).logits
                with _selecting():
                    selector.add(added, public[0])
            with _selecting():
                private_SV = torch.cat([*private, public[:0]])
                token = select_token(selector, private_SV, public[0])
            if token is None:
                reason = "exhausted"
                break
            tokens.append(token)
            text = self.ended(group.public_prompt, tokens, group.stop)
        if text is None:
            text = self.text(group.public_prompt, tokens)
        else:
            reason = "stop"
        return LockstepResult(group.group_id, text, tuple(tokens), reason, selector.state())

    def _split(self, group: LockstepGroup) -> tuple[TokenIds, list[TokenIds]]:
        """Return the private prompts whose rows keep their KV cache, and the parts in which the
        others are computed for every token; the cache of one part fits beside the kept ones."""
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


class _StopStrings(StoppingCriteria):
    """Ends a row whose new text holds a stop string."""

    def __init__(
        self, codec: TextCodec, prompts: list[tuple[int, ...]], stop: tuple[str, ...]
    ) -> None:
        self.codec, self.prompts, self.stop = codec, prompts, stop
        self.start = max(map(len, prompts))

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        texts = (
            self.codec.text(prompt, ids)
            for prompt, ids in zip(self.prompts, input_ids[:, self.start :].tolist(), strict=True)
        )
        stopped = [cut_at_stop(text, self.stop) is not None for text in texts]
        return torch.tensor(stopped, device=input_ids.device)
