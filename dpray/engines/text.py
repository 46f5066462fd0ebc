"""Both local engines share the tokenizer: the same prompt has the same token ids, and the same ids
the same text, in vLLM and in transformers."""

from __future__ import annotations

import contextlib
from functools import cached_property
from typing import Any

from dpray.engines.base import (
    Completion,
    EngineError,
    FinishReason,
    LockstepGroup,
    LockstepResult,
    PlainPrompt,
    Prompt,
    Prompts,
    Sampling,
    Samplings,
)
from dpray.engines.schema import Schema
from dpray.engines.token_mask import TokenMask, Vocabulary, first_mask, fitted
from dpray.types import InputError, valid_unicode

# How far back in a prompt a tokenizer's decoder may look to decide on a leading space.
_DECODER_CONTEXT = 6


class TextCodec:
    """Reads a model's tokenizer, chat template, end-of-sequence ids and context, without weights.

    Raises InputError for a model whose files do not allow it.
    """

    def __init__(self, model: str, max_model_len: int | None) -> None:
        # Imported late: `AutoTokenizer` imports torch, and takes four seconds.
        from transformers import AutoConfig, AutoTokenizer

        try:
            # By default transformers asks at the terminal whether to run a model's own code.
            self.tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
            config: Any = AutoConfig.from_pretrained(model, trust_remote_code=False)
        except Exception as error:  # damaged files raise errors of many classes
            raise InputError(
                f"engine.model: cannot read a tokenizer and a configuration from {model} "
                f"({type(error).__name__})"
            ) from None
        if not self.tokenizer.is_fast:
            raise InputError(f"engine.model: {model} has no fast tokenizer (tokenizer.json)")
        self.model_config: Any = config.get_text_config()
        longest: int = self.model_config.max_position_embeddings
        if max_model_len is not None and max_model_len > longest:
            raise InputError(
                f"engine.max_model_len: {max_model_len} is more than the model's {longest}"
            )
        self.context_length: int = max_model_len or longest
        self.eos_ids: tuple[int, ...] = self._eos_ids(model, self.model_config)

    def _eos_ids(self, model: str, config: Any) -> tuple[int, ...]:
        """Return the tokenizer's eos first, then those of the configurations."""
        from transformers import GenerationConfig

        found = [self.tokenizer.eos_token_id, config.eos_token_id]
        with contextlib.suppress(OSError):  # not every model has one
            found.append(GenerationConfig.from_pretrained(model).eos_token_id)
        tokens = (t for entry in found for t in (entry if isinstance(entry, list) else [entry]))
        ids = tuple(dict.fromkeys(int(token) for token in tokens if token is not None))
        if not ids:
            raise InputError(f"engine.model: {model} has no end-of-sequence token")
        return ids

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of the whole prompt, with bos and chat template."""
        user, prefix = valid_unicode(prompt.user), valid_unicode(prompt.prefix)
        if isinstance(prompt, PlainPrompt):
            return (self.start_id, *self.ids(user))
        if self.tokenizer.chat_template is None:
            bos = self.tokenizer.bos_token_id
            ids = self.ids(f"{user}\n\n{prefix}")
            return tuple(ids) if bos is None else (bos, *ids)
        turn = [{"role": "user", "content": user}]
        opened = self.tokenizer.apply_chat_template(
            turn, tokenize=False, add_generation_prompt=True
        )
        return tuple(self.ids(opened + prefix))

    @property
    def start_id(self) -> int:
        """Return the token that a `PlainPrompt` begins with."""
        bos: int | None = self.tokenizer.bos_token_id
        return self.eos_ids[0] if bos is None else bos

    def truncate(self, text: str, max_tokens: int) -> str:
        """Return the longest prefix of `text` of at most `max_tokens` tokens.

        It looks at the first `max_tokens` times the longest token's length: no prefix that fits is
        longer, so the time does not depend on the length of `text`.
        """
        if max_tokens <= 0:
            return ""
        window = valid_unicode(text[: max_tokens * self._longest_token + 1])
        offsets = self.tokenizer(
            window, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )["offset_mapping"]
        if len(offsets) <= max_tokens:
            return text[: len(window)]
        # Cutting inside a token re-tokenizes its rest, to more tokens or to fewer: search from two
        # tokens beyond downwards for the first cut that fits.
        end = offsets[min(max_tokens + 1, len(offsets) - 1)][1]
        while end and len(self.ids(window[:end])) > max_tokens:
            end -= 1
        return text[:end]

    def first_ids(self, text: str, most: int) -> list[int]:
        """Return the first `most` token ids of a text, in time and memory that do not depend on its
        length."""
        return self.ids(valid_unicode(text[: most * self._longest_token + 1]))[:most]

    def text(self, prompt_ids: tuple[int, ...], ids: list[int]) -> str:
        """Decode `ids` after the prompt, whose end decides whether there is a leading space."""
        context = list(prompt_ids[-_DECODER_CONTEXT:])
        before, both = self._decode(context), self._decode(context + ids)
        return both[len(before) :] if both.startswith(before) else self._decode(ids)

    def ended(
        self, prompt_ids: tuple[int, ...], ids: list[int], stop: tuple[str, ...]
    ) -> str | None:
        """Return the text before the eos token or stop string that the last of `ids` completed, or
        None if the text goes on."""
        if ids[-1] in self.eos_ids:
            return self.text(prompt_ids, ids[:-1])
        return cut_at_stop(self.text(prompt_ids, ids), stop) if stop else None

    def is_over(self, group: LockstepGroup, tokens: list[int]) -> bool:
        """Return whether a group's text has ended, or is as long as it may be."""
        if len(tokens) >= group.max_tokens:
            return True
        return bool(tokens) and self.ended(group.public_prompt, tokens, group.stop) is not None

    def result(
        self, group: LockstepGroup, tokens: list[int], exhausted: bool, state: dict[str, Any]
    ) -> LockstepResult:
        """Make the result of a group's text: one that is over, or that `exhausted` the selector."""
        ended = None
        if not exhausted:
            ended = self.ended(group.public_prompt, tokens, group.stop)
        text = self.text(group.public_prompt, tokens) if ended is None else ended
        reason: FinishReason = "length" if ended is None else "stop"
        return LockstepResult(
            group.group_id, text, tuple(tokens), "exhausted" if exhausted else reason, state
        )

    def completion(
        self, prompt_ids: tuple[int, ...], ids: list[int], sampling: Sampling
    ) -> Completion:
        """Make the completion of generated `ids`, which may go on after the eos token."""
        if sampling.schema is not None:
            ids = fitted(self.mask(sampling.schema, sampling.max_tokens), ids)
        end = next((i for i, token in enumerate(ids) if token in self.eos_ids), len(ids))
        text = self.text(prompt_ids, ids[:end])
        stopped = cut_at_stop(text, sampling.stop) if sampling.schema is None else None
        text = text if stopped is None else stopped
        return Completion(text, len(prompt_ids), min(end + 1, len(ids)))

    def mask(self, schema: Schema, max_tokens: int) -> TokenMask:
        """Return the mask of a text that begins."""
        return first_mask(schema, self._vocabulary, max_tokens)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self.vocabulary()

    def vocabulary(self, size: int | None = None) -> Vocabulary:
        """Return the tokens for masks; `size` is the length of the logits, by default what the
        configuration says. Raises InputError if the tokenizer has more tokens, or llguidance cannot
        read it."""
        from llguidance.hf import from_tokenizer

        size = size or self.model_config.vocab_size
        try:
            return Vocabulary(from_tokenizer(self.tokenizer, size, self.eos_ids[0]))
        except ValueError as error:
            raise InputError(
                f"method.schema: the model's tokenizer does not fit: {error}"
            ) from None

    def check_length(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raise EngineError if the two do not fit the context; the message leaves out the
        prompt's length, which may be that of a private text."""
        if prompt_tokens + max_tokens > self.context_length:
            raise EngineError(
                f"a prompt and {max_tokens} new tokens do not fit the context of "
                f"{self.context_length}: shorten the prompts, lower max_tokens or raise "
                "engine.max_model_len"
            )

    def encoded(self, prompts: Prompts, samplings: Samplings) -> list[tuple[int, ...]]:
        """Return the token ids of each prompt. Raises EngineError if one does not fit the
        context with its new tokens."""
        encoded = [self.encode(prompt) for prompt in prompts]
        for ids, each in zip(encoded, samplings, strict=True):
            self.check_length(len(ids), each.max_tokens)
        return encoded

    def ids(self, text: str) -> list[int]:
        """Return the token ids without special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()))


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str | None:
    """Return `text` up to the earliest stop string, or None if it holds none."""
    ends = [end for end in (text.find(string) for string in stop) if end >= 0]
    return text[: min(ends)] if ends else None
