"""What dpray asks of a language model: `encode`, `generate` and `decode_lockstep`.

Engines know nothing of privacy. In lockstep decoding every row of a group (a number of private
prompts and one public prompt) is continued with the SAME token at every step; which token, a
`TokenSelector` says, that is handed the rows' logits. The selector is built from a `SelectorSpec`,
plain numbers and a dotted name, so that it can travel in a request to a worker process: where a
model is split over several ranks, every rank builds the same selector and draws the same token.

Legend of shape suffixes: S private rows of a group, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from dpray.types import Prompt as Prompt

FinishReason = Literal["stop", "length", "exhausted"]


@dataclass(frozen=True)
class PlainPrompt(Prompt):
    """The beginning of a text: no chat template, and nothing between its start token (the model's
    bos, or eos where it has none) and `user`. For models that were tuned on such texts."""


@dataclass(frozen=True)
class Sampling:
    """Ordinary sampling parameters; `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 are off."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """One generated text (without the stop string) and its lengths in tokens."""

    text: str = field(repr=False)
    prompt_tokens: int
    completion_tokens: int
    finish_reason: Literal["stop", "length"]


OnCompletion = Callable[[int, Completion], None]
"""Handed a prompt's position and its completion as each finishes, in any order, one at a time but
perhaps in another thread; so that it can be kept before the others are done."""


def sampling_of_each(
    prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling]
) -> list[Sampling]:
    """The sampling parameters of each prompt, where one may stand for all."""
    if isinstance(sampling, Sampling):
        return [sampling] * len(prompts)
    if len(sampling) != len(prompts):
        raise ValueError(f"{len(sampling)} sampling parameters for {len(prompts)} prompts")
    return list(sampling)


class TokenSelector(Protocol):
    """Chooses the next token of a group."""

    def select(self, logits_private_SV: torch.Tensor, logits_public_V: torch.Tensor) -> int | None:
        """The token every row is continued with, or None: stop now, the text stays unfinished.

        `logits_private_SV` may have no rows. Called exactly once for every position.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What the caller needs to go on after this text: plain JSON values."""
        ...


@dataclass(frozen=True)
class SelectorSpec:
    """How to build a `TokenSelector`: `factory` is "package.module:callable" inside dpray, called
    with `arguments` (plain JSON values) by name."""

    factory: str
    arguments: Mapping[str, Any] = field(repr=False)

    def build(self) -> TokenSelector:
        module, _, name = self.factory.partition(":")
        if not (module == "dpray" or module.startswith("dpray.") or module.startswith("tests.")):
            raise ValueError(f"a selector has to be part of dpray, not {self.factory}")
        selector: TokenSelector = getattr(importlib.import_module(module), name)(**self.arguments)
        return selector


@dataclass(frozen=True)
class LockstepGroup:
    """One text to decode: token ids of the private prompts (none for an empty batch) and of the
    public one, which differ in length."""

    group_id: str
    private_prompts: tuple[tuple[int, ...], ...] = field(repr=False)
    public_prompt: tuple[int, ...] = field(repr=False)
    selector: SelectorSpec = field(repr=False)
    max_tokens: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class LockstepResult:
    """`text` is what was decoded before the eos token or stop string; `finish_reason` is
    `exhausted`     where the selector answered None. `state` is the selector's."""

    group_id: str
    text: str = field(repr=False)
    token_ids: tuple[int, ...] = field(repr=False)
    finish_reason: FinishReason
    state: Mapping[str, Any] = field(repr=False)


class TextGenerator(Protocol):
    """Writes texts, wherever its model is."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling],
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        """Texts in the order of the prompts; `sampling` is one for all or one for each.

        What `on_completion` raises ends the call. Raises `EngineError` where any prompt has no
        answer; what was finished by then has been handed to `on_completion`."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Engine(TextGenerator, Protocol):
    """A language model. Backends: vllm, transformers, openai (which only generates)."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of the whole prompt, bos and chat template included."""
        ...

    def truncate(self, text: str, max_tokens: int) -> str:
        """The longest prefix of `text` that tokenizes to at most `max_tokens` tokens, decided from
        `text` alone, in time bounded by `max_tokens` however long the text is."""
        ...

    def decode_lockstep(
        self,
        groups: Iterable[LockstepGroup],
        then: Callable[[LockstepResult], LockstepGroup | None],
    ) -> None:
        """Decode every group; `then` gets each result as it finishes and answers with a group to
        decode next (the batch's next text) or None. Groups may be run side by side in any number;
        `groups` is consumed lazily. Raises `EngineError` when a group cannot be kept whole."""
        ...


class Embedder(Protocol):
    """Turns texts into L2-normalised float32 vectors, shape (number of texts, dimension)."""

    def embed(self, texts: Sequence[str]) -> Any: ...


class EngineError(RuntimeError):
    """A model that cannot be loaded or run. The message never holds a prompt."""


class SelectorFailed(EngineError):
    """A token selector raised. It may have drawn before, so its text must not be drawn anew."""


class OutOfMemory(EngineError):
    """The model's work does not fit the memory; how much it needs depends on the prompts."""


class Unsupported(EngineError):
    """The backend cannot do this at all (an API has no logits to aggregate)."""


_NO_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory", "ALLOC_FAILED")
"""In the messages of CUDA, of torch's CPU allocator, of the system and of cuBLAS; also where a
worker process of vLLM repeats them in an error of its own."""


def failure_name(error: BaseException) -> str:
    """Return the name of an error's class, or `OutOfMemory` where it, or its cause, says so."""
    cause: BaseException | None = error
    while cause is not None:
        out = isinstance(cause, MemoryError | torch.OutOfMemoryError | OutOfMemory)
        # These alone come from a device or the system. Other messages may quote a prompt, and what
        # a text says must not decide whether its batch is repeated.
        system = isinstance(cause, RuntimeError | OSError)
        if out or (system and any(words in str(cause) for words in _NO_MEMORY)):
            return OutOfMemory.__name__
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__


def engine_error(doing: str, error: BaseException) -> EngineError:
    """Make the error to raise for one of a model's library, whose message may quote a prompt."""
    return _named_error(doing, failure_name(error))


def _named_error(doing: str, name: str) -> EngineError:
    """Make the error of a `failure_name`: only want of memory has a class of its own."""
    kind = OutOfMemory if name == OutOfMemory.__name__ else EngineError
    return kind(f"{doing} ({name})")


def selector_error(name: str) -> EngineError:
    """Make the error to raise for a `failure_name` that a selector met with. On a GPU, errors of
    the model's own kernels come up in the selector, which is the first to wait for them."""
    if name in (OutOfMemory.__name__, "AcceleratorError"):
        return _named_error("the device failed", name)
    return SelectorFailed(f"the token selector failed ({name})")


def may_be_repeated(error: BaseException | None) -> bool:
    """Say whether an engine failed in a way that tells nothing of what was drawn, nor of how much
    memory the prompts need."""
    return isinstance(error, EngineError) and not isinstance(error, SelectorFailed | OutOfMemory)
