"""Both local engines share the tokenizer: the same prompt has the same token ids, and the same ids
the same text, in vLLM and in transformers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from dpray.config.sections import EngineConfig
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
from dpray.engines.model_path import is_at_hand, resolve_model
from dpray.engines.schema.schema import Schema
from dpray.engines.schema.token_mask import TokenMask, Vocabulary, first_mask, fitted
from dpray.engines.silence import silence_models
from dpray.extras import Late
from dpray.types import InputError, Json, is_interruption, valid_unicode

if TYPE_CHECKING:
    import transformers
else:
    transformers = Late("transformers")
llguidance_hf = Late("llguidance.hf")

STAND_IN = "thewordsofthisrequest"

# How far back in a prompt a tokenizer's decoder may look to decide on a leading space.
_DECODER_CONTEXT = 6


class TextCodec:
    """Reads a model's tokenizer, chat template, end-of-sequence ids and context, without weights.

    Raises InputError for a model whose files do not allow it.
    """

    def __init__(self, model: str, max_model_len: int | None) -> None:
        silence_models()
        self.name = model
        try:
            # By default transformers asks at the terminal whether to run a model's own code.
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                model, trust_remote_code=False
            )
            config: Any = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
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
        # Tokens from here on have no embedding: no prompt holds one, and no text draws one.
        self.readable = readable_tokens(self.model_config)
        self.eos_ids: tuple[int, ...] = self._eos_ids(model, self.model_config)
        # The tokens of what is around texts, the same for many.
        self._parts: dict[tuple[str, ...], list[list[int]]] = {}
        self._turns: dict[str, tuple[list[str], bool]] = {}

    def _eos_ids(self, model: str, config: Any) -> tuple[int, ...]:
        """Return the tokenizer's eos first, then those of the configurations."""
        found = [self.tokenizer.eos_token_id, config.eos_token_id]
        with contextlib.suppress(OSError):  # not every model has one
            found.append(transformers.GenerationConfig.from_pretrained(model).eos_token_id)
        tokens = (t for entry in found for t in (entry if isinstance(entry, list) else [entry]))
        ids = tuple(dict.fromkeys(int(t) for t in tokens if t is not None and t < self.readable))
        if not ids:
            raise InputError(f"engine.model: {model} has no end-of-sequence token")
        return ids

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of the whole prompt, with bos and chat template.

        Any text becomes a prompt that the model can read, by a rule on that text. In `user`, names
        of special tokens are ordinary characters. In `prefix`, which is public, they are special
        tokens, as in the chat template. So they are in `system`.
        """
        system, user, prefix = map(valid_unicode, (prompt.system, prompt.user, prompt.prefix))
        if isinstance(prompt, PlainPrompt):
            return (self.start_id, *self.ids(user))
        if self.tokenizer.chat_template is None:
            bos = [] if self.tokenizer.bos_token_id is None else [self.start_id]
            ids = bos + self._framed(user, (system and f"{system}\n\n", f"\n\n{prefix}"))
        else:
            (*before, after), is_stripped = self._turn(system)
            said = user.strip() if is_stripped else user
            ids = self._framed(said, (*before, after + prefix))
        return tuple(ids) or (self.start_id,)

    def _turn(self, system: str) -> tuple[list[str], bool]:
        """Return what the chat template puts around a text after a system turn, and whether it
        strips the text. A template without a system turn has its words before the text."""
        if system not in self._turns:
            turn = None
            with contextlib.suppress(InputError) if system else contextlib.nullcontext():
                turn = self._around([{"role": "system", "content": system}] if system else [])
            if turn is None or system.strip() not in turn[0][0]:
                (first, *rest), is_stripped = self._turn("")
                turn = [f"{first}{system}\n\n", *rest], is_stripped
            self._turns[system] = turn
        return self._turns[system]

    def _around(self, before: list[dict[str, str]]) -> tuple[list[str], bool]:
        """Return what the chat template puts around a text after the turns `before`, and whether it
        strips the text. It sees a stand-in: no private text can make it raise, or choose its
        branches.

        Templates of models that see pictures may take a list of parts, and leave out a plain text.
        Raises InputError for a template that leaves both out, or that cannot be used.
        """
        problem = "leaves the text of a prompt out"
        for form in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
            try:
                bare, spaced = (
                    self.tokenizer.apply_chat_template(
                        [*before, {"role": "user", "content": form(text)}],
                        tokenize=False,
                        add_generation_prompt=True,
                    )
                    for text in (STAND_IN, f" {STAND_IN} ")
                )
            except Exception as error:  # a template may raise anything
                problem = f"cannot be used ({type(error).__name__})"
                continue
            if STAND_IN in bare and STAND_IN in spaced and f"'{STAND_IN}'}}" not in bare:
                return bare.split(STAND_IN), f" {STAND_IN} " not in spaced
        raise InputError(
            f"engine.model: the chat template of {self.name} {problem}; repair it, or take a model "
            "without one"
        )

    def _framed(self, text: str, frame: tuple[str, ...]) -> list[int]:
        """Return the token ids of `text` between the parts of `frame`: encoded as one string, or
        apart if words of `text` would become special tokens."""
        whole = self._tokens(text.join(frame))["input_ids"]
        if frame not in self._parts:
            self._parts[frame] = [self._tokens(part)["input_ids"] for part in frame]
        first, *rest = self._parts[frame]
        unknown = self.tokenizer.unk_token
        names_none = unknown is None or unknown not in text
        if names_none and self._special(whole) == self._special(sum(rest, first)):
            return self._read(whole)
        apart = first + [token for part in rest for token in (*self.ids(text), *part)]
        return self._read(apart)

    def _special(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self._special_ids]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """Return the special tokens, without the one that stands for unknown characters."""
        added = self.tokenizer.added_tokens_decoder.items()
        special = frozenset(token for token, each in added if each.special)
        return special - {self.tokenizer.unk_token_id}

    @property
    def start_id(self) -> int:
        """Return the token that a `PlainPrompt` begins with."""
        bos: int | None = self.tokenizer.bos_token_id
        return self.eos_ids[0] if bos is None or bos >= self.readable else bos

    def truncate(self, text: str, max_tokens: int) -> str:
        """Return the longest prefix of `text` of at most `max_tokens` tokens.

        It looks at the first `max_tokens` times the longest token's length: no prefix that fits is
        longer, so the time does not depend on the length of `text`.
        """
        if max_tokens <= 0:
            return ""
        window = valid_unicode(text[: max_tokens * self._longest_token + 1])
        offsets = self._tokens(window, split=True)["offset_mapping"]
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

    def ended(self, group: LockstepGroup, tokens: list[int]) -> str | None:
        """Return the group's text before the eos token or stop string that the last of `tokens`
        completed, or None if the text goes on."""
        if tokens[-1] in self.eos_ids:
            return self._text_of(group, tokens[:-1])
        return cut_at_stop(self._text_of(group, tokens), group.stop) if group.stop else None

    def _text_of(self, group: LockstepGroup, tokens: list[int]) -> str:
        """Decode a text as a whole: its tokens may part in the middle of a character, or of a stop
        string."""
        begins = len(group.public_prompt) - group.written
        prompt, written = group.public_prompt[:begins], group.public_prompt[begins:]
        return self.text(prompt, [*written, *tokens])

    def is_over(self, group: LockstepGroup, tokens: list[int]) -> bool:
        """Return whether a group's text has ended, or is as long as it may be."""
        if len(tokens) >= group.max_tokens:
            return True
        return bool(tokens) and self.ended(group, tokens) is not None

    def result(
        self, group: LockstepGroup, tokens: list[int], exhausted: bool, state: Json
    ) -> LockstepResult:
        """Make the result of a group's text: one that is over, or that `exhausted` the selector."""
        ended = None
        if not exhausted:
            ended = self.ended(group, tokens)
        text = self._text_of(group, tokens) if ended is None else ended
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
        has_ended = stopped is not None or end < len(ids) or len(ids) < sampling.max_tokens
        reason = "stop" if has_ended else "length"
        return Completion(text, len(prompt_ids), min(end + 1, len(ids)), reason)

    def mask(self, schema: Schema, max_tokens: int) -> TokenMask:
        """Return the mask of a text that begins."""
        return first_mask(schema, self._vocabulary, max_tokens)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self.vocabulary()

    def vocabulary(self, size: int | None = None) -> Vocabulary:
        """Return the tokens for masks; `size` is the length of the logits, by default that of the
        tokens that can be read. Raises InputError if llguidance cannot read the tokenizer."""
        size = size or self.readable
        longest = max(size, 1 + max(self.tokenizer.get_vocab().values()))
        try:
            return Vocabulary(
                llguidance_hf.from_tokenizer(self.tokenizer, longest, self.eos_ids[0]), size
            )
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
        """Return the token ids of a text, in which names of special tokens are characters."""
        ids = self._tokens(text, split=True)["input_ids"]
        return self._read(ids, but=self._special_ids)  # a vocabulary of words has names in it

    def _tokens(self, text: str, split: bool = False) -> Mapping[str, list[Any]]:
        """Return the tokenizer's ids and offsets; none for a text that it refuses. `split` makes
        the names of special tokens ordinary characters."""
        try:
            found: Mapping[str, list[Any]] = self.tokenizer(
                text,
                add_special_tokens=False,
                split_special_tokens=split,
                return_offsets_mapping=True,
                verbose=False,
            )
        except BaseException as error:  # as for a character that has no token
            if is_interruption(error):
                raise
            return {"input_ids": [], "offset_mapping": []}
        return found

    def _read(self, ids: list[int], but: Collection[int] = ()) -> list[int]:
        """Put the token for unknown characters, or none, in the place of tokens that have no
        embedding, and of those in `but`."""
        unknown = self.tokenizer.unk_token_id
        known = [token if token < self.readable and token not in but else unknown for token in ids]
        return [token for token in known if token is not None and token < self.readable]

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()))


LOADS_NO_MODEL = False
"""The process of `dpray plan`, which loads no model, sets this: tokenizers are then read without
torch."""


def codec_of(model: str, max_model_len: int | None) -> TextCodec:
    """Return the codec of a configured model. Its files are read once as long as they stay the
    same: a comparison of methods asks for them a dozen times."""
    folder = resolve_model(model)
    if LOADS_NO_MODEL:
        _do_without_torch()
    if not os.path.isdir(folder):  # a name on a hub
        return TextCodec(folder, max_model_len)
    files = sorted((file.name, file.stat().st_mtime_ns) for file in os.scandir(folder))
    return _codec_of_folder(folder, max_model_len, tuple(files))


@lru_cache(maxsize=2)
def _codec_of_folder(
    folder: str, max_model_len: int | None, files: tuple[tuple[str, int], ...]
) -> TextCodec:
    return TextCodec(folder, max_model_len)


CHARACTERS_A_TOKEN = 4
"""The characters that count as a token where the tokenizer is not here."""


def token_counter(engine: EngineConfig) -> Callable[[Prompt], int]:
    """Return the function that counts a prompt's tokens, by the model's tokenizer if its files are
    here and can be read, else by `CHARACTERS_A_TOKEN`."""
    if engine.is_local and is_at_hand(engine.model):
        with contextlib.suppress(InputError):  # a run says what is wrong
            codec = codec_of(engine.model, engine.max_model_len)
            return lambda prompt: len(codec.encode(prompt))
    return lambda prompt: -(-len(prompt.system + prompt.user + prompt.prefix) // CHARACTERS_A_TOKEN)


def _do_without_torch() -> None:
    """Let transformers take torch for not installed, unless it is imported already. It then reads
    tokenizers and configurations in one second, not in four, and cannot load a model."""
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # so that `find_spec` finds none
    try:
        from transformers.utils.import_utils import is_torch_available

        is_torch_available()  # it remembers its answer
    finally:
        del sys.modules["torch"]  # other libraries may need it


def has_chat_template(model: str) -> bool:
    """Return whether a model takes messages; True if its tokenizer cannot be read here."""
    try:
        return TextCodec(resolve_model(model), None).tokenizer.chat_template is not None
    except (InputError, AttributeError):  # vLLM serves models whose configuration has no context
        return True


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str | None:
    """Return `text` up to the earliest stop string, or None if it holds none."""
    ends = [end for end in (text.find(string) for string in stop) if end >= 0]
    return text[: min(ends)] if ends else None


def readable_tokens(text_config: Any) -> int:
    """Return the number of tokens that a model has embeddings for. Gemma 3n and 4 have second
    embeddings, of fewer tokens than their logits."""
    tokens: int = text_config.vocab_size
    return min(tokens, getattr(text_config, "vocab_size_per_layer_input", None) or tokens)
