"""A language model has three methods: `encode`, `generate` and `decode_lockstep`.

Engines know nothing of privacy. In lockstep decoding every row of a group (some private prompts and
one public prompt) is continued with the SAME token at every step, which a `TokenSelector` chooses
from the rows' logits. The selector is built from a `SelectorSpec`, a dotted name and plain values,
so that it can travel in a request to a worker process: if a model is split over several ranks,
every rank builds the same selector and draws the same token.

Legend of shape suffixes: S private rows of a group, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from dpray.engines.finite_rows import highest
from dpray.engines.schema.schema import Schema
from dpray.extras import torch
from dpray.types import Json, ReadOnlyJson
from dpray.types import Prompt as Prompt

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FinishReason = Literal["stop", "length", "exhausted"]


@dataclass(frozen=True)
class PlainPrompt(Prompt):
    """A prompt that is the beginning of a text, for models that were tuned on such texts: there is
    no chat template, and nothing between the start token (the model's bos, or eos if it has none)
    and `user`."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters: `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off. With a
    `schema`, a text has that form, and ends within `max_tokens`; `stop` is not used then."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    schema: Schema | None = None


Prompts = Sequence[Prompt]

Samplings = Sequence[Sampling]
"""One `Sampling` for each prompt."""


@dataclass(frozen=True)
class Completion:
    """A generated text, without the stop string; its lengths are in tokens. `finish_reason` is
    "stop" or, for a text that `max_tokens` cut, "length"; an endpoint may have others."""

    text: str = field(repr=False)
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str = field(default="", compare=False)


OnCompletion = Callable[[int, Completion], None]
"""Called with a prompt's position and its completion as soon as it is finished, so that it can be
stored before the others are done. Calls come in any order, one at a time, perhaps in another
thread."""


@dataclass(frozen=True)
class HostSync:
    """A selection needs a value that the device computes. `compute` takes the `part` of each
    selection of the step that has the same `compute`, and returns a row for each; `resume` goes on
    with this selection's row, on the host."""

    part: Any
    compute: Callable[[list[Any]], torch.Tensor]
    resume: Callable[[torch.Tensor], Selected]


@dataclass(frozen=True)
class Selected:
    """A selection has ended with the token that continues every row. None ends the text, which
    stays unfinished."""

    token: int | None


@dataclass(frozen=True)
class Failed:
    """A selection has ended with an error."""

    error: Exception


Selection: TypeAlias = HostSync | Selected | Failed


class GroupLogits(NamedTuple):
    """The logits of a group's rows at one position, of the tokens that the model can read:
    `private` of shape (S, V), `public` of shape (V,). `highest` has the highest logit of each
    private row, float32: NaN for a row that is not finite, or once was not in this text. Such a row
    counts for nothing."""

    private: torch.Tensor
    highest: torch.Tensor
    public: torch.Tensor


class TokenSelector(Protocol):
    """Chooses the next token of a group."""

    def add(self, logits: GroupLogits) -> None:
        """Add up a part of the group's rows. An engine that cannot hold all of them computes them
        in parts, in any order, and calls this for each part of a position but the last."""
        ...

    def select(self, logits: GroupLogits) -> Selection:
        """Select the token of this position, up to what the device computes for all groups of a
        step. Of the private rows, `logits` has those that `add` was not given, or none. It is
        called exactly once for every position."""
        ...

    def state(self) -> Json:
        """Return what the batch's next text continues from, as plain JSON values."""
        ...


def select_tokens(selections: Sequence[Selection]) -> list[Selected | Failed]:
    """Bring the selections of one step to their ends, side by side: what they need is computed in
    one call, and copied to the host at once. If that fails, the device does not say whose it was.
    """
    ends: dict[int, Selected | Failed] = {}
    together: defaultdict[Callable[..., torch.Tensor], dict[int, HostSync]] = defaultdict(dict)
    for i, each in enumerate(selections):
        if isinstance(each, HostSync):
            together[each.compute][i] = each
        else:
            ends[i] = each
    for compute, syncs in together.items():
        try:
            rows = compute([sync.part for sync in syncs.values()]).cpu()
        except Exception as error:
            ends |= dict.fromkeys(syncs, Failed(error))
            continue
        for (i, sync), row in zip(syncs.items(), rows, strict=True):
            try:
                ends[i] = sync.resume(row)
            except Exception as error:
                ends[i] = Failed(error)
    return [ends[i] for i in range(len(selections))]


def select_token(
    selector: TokenSelector,
    logits_private_SV: torch.Tensor,
    logits_public_V: torch.Tensor,
    highest_S: torch.Tensor | None = None,
) -> int | None:
    """Return the token that the selector chooses for a group by itself; raise what it raises.
    `highest_S` is by default that of rows which were finite before."""
    if highest_S is None:
        highest_S = highest(logits_private_SV)
    logits = GroupLogits(logits_private_SV, highest_S, logits_public_V)
    [end] = select_tokens([selector.select(logits)])
    if isinstance(end, Failed):
        raise end.error
    return end.token


_resolved = cache(resolve_name)


@dataclass(frozen=True)
class SelectorSpec:
    """Describes the `TokenSelector` to build: `factory` is "package.module:callable" inside dpray,
    called with `arguments` (plain JSON values) by name."""

    factory: str
    arguments: ReadOnlyJson = field(repr=False)

    def build(self) -> TokenSelector:
        if not self.factory.startswith(("dpray.", "tests.")):
            raise ValueError(f"a selector has to be part of dpray, not {self.factory}")
        selector: TokenSelector = _resolved(self.factory)(**self.arguments)
        return selector


@dataclass(frozen=True)
class LockstepGroup:
    """A text is decoded from the token ids of its private prompts (none for an empty batch) and of
    the public one, which may differ in length. The last `written` tokens of the public prompt are
    the text's own: it goes on."""

    group_id: str
    private_prompts: tuple[tuple[int, ...], ...] = field(repr=False)
    public_prompt: tuple[int, ...] = field(repr=False)
    selector: SelectorSpec = field(repr=False)
    max_tokens: int
    stop: tuple[str, ...] = ()
    written: int = 0

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Return the prompts of all rows, the public one last."""
        return (*self.private_prompts, self.public_prompt)


@dataclass(frozen=True)
class LockstepResult:
    """`text` lacks the eos token or stop string, and has what was `written` of it before; that is
    not in `token_ids`. `finish_reason` is "exhausted" if the selector returned None; `state` is the
    selector's."""

    group_id: str
    text: str = field(repr=False)
    token_ids: tuple[int, ...] = field(repr=False)
    finish_reason: FinishReason
    state: ReadOnlyJson = field(repr=False)


Following = Callable[[LockstepResult], LockstepGroup | None]
"""Takes a finished text, and returns the next text of the same rows if there is one; its prompts
may be others. An engine calls it once for every text, before it yields the text."""


def nothing_follows(result: LockstepResult) -> None:
    """Every group is one text."""


class TextGenerator(Protocol):
    """Generates texts, wherever its model runs."""

    def generate(
        self, prompts: Prompts, samplings: Samplings, on_completion: OnCompletion | None = None
    ) -> list[Completion]:
        """Return the completions in the order of the prompts.

        An exception of `on_completion` ends the call. Raises EngineError if any prompt has no
        answer, after `on_completion` was called for those that have."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Engine(TextGenerator, Protocol):
    """Runs the model in dpray's own processes, by vLLM or transformers."""

    @property
    def context_length(self) -> int: ...

    @property
    def shares_public_pass(self) -> bool:
        """Return whether a public row is computed in passes that hold private rows, too."""
        ...

    def rows_at_once(self, tokens: int) -> int:
        """Return how many rows of `tokens` tokens each, prompt and text, the engine holds at once.
        A larger group is decoded in parts, which takes longer and draws the same tokens."""
        ...

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of the whole prompt, with bos and chat template."""
        ...

    def truncate(self, text: str, max_tokens: int) -> str:
        """Return the longest prefix of `text` that tokenizes to at most `max_tokens` tokens, a
        function of `text` only, in time bounded by `max_tokens` however long the text is."""
        ...

    def decode_lockstep(
        self, groups: Iterable[LockstepGroup], following: Following = nothing_follows
    ) -> Generator[LockstepResult]:
        """Decode every group, and the texts `following` it; any number of groups may run side by
        side. Yield each text when it is finished. `groups` is consumed lazily:
        one is taken when there is room for it. A group may have any number of rows. An error of
        theirs is raised as it is, and so is EngineError if the rows of a group cannot be kept
        together; what is under way then is given up, as it is when the generator is closed."""
        ...


Embeddings: TypeAlias = "npt.NDArray[np.float32]"
"""L2-normalised vectors of texts, shape (number of texts, dimension)."""


class Embedder(Protocol):
    def embed(self, texts: Sequence[str]) -> Embeddings: ...


class EngineError(RuntimeError):
    """A model cannot be loaded or run. The message never holds a prompt."""


class LoadFailed(EngineError):
    """An engine cannot be loaded: nothing was drawn with it."""


class EndpointBusy(EngineError):
    """An endpoint has no time for a call, fails by itself, or is lost during it: the same call may
    succeed later."""


class DeviceLost(EngineError):
    """A device or a process of the engine is gone, which no prompt and no draw can cause."""


class SelectorFailed(EngineError):
    """A token selector raised."""


class OutOfMemory(EngineError):
    """The model's work does not fit the memory, and how much it needs depends on the prompts."""


_NO_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory", "ALLOC_FAILED")
"""These words are in the messages of CUDA, of torch's CPU allocator, of the system and of cuBLAS,
also if a worker process of vLLM repeats them in an error of its own."""


HARDWARE_ERRORS = (214, 220)
"""The numbers that CUDA gives to an uncorrectable error of a GPU's memory (ECC) and of its link to
another one (NVLink); `torch.AcceleratorError` has them as `error_code`. Only hardware causes these.
A failed assertion of a kernel is not among them: an index out of range may be a record's."""


def failure_name(error: BaseException) -> str:
    """Return the name of an error's class; `OutOfMemory` or `DeviceLost` if it, or its cause, is
    that."""
    cause: BaseException | None = error
    while cause is not None:
        is_device = isinstance(cause, torch.AcceleratorError)
        broken = is_device and getattr(cause, "error_code", None) in HARDWARE_ERRORS
        if broken or isinstance(cause, DeviceLost):
            return DeviceLost.__name__
        out = isinstance(cause, MemoryError | torch.OutOfMemoryError | OutOfMemory)
        # Only these classes come from a device or the system. Other messages may quote a prompt.
        system = isinstance(cause, RuntimeError | OSError)
        if out or (system and any(words in str(cause) for words in _NO_MEMORY)):
            return OutOfMemory.__name__
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__


def engine_error(doing: str, error: BaseException) -> EngineError:
    """Make the error to raise in place of a library's, whose message may quote a prompt."""
    return _named_error(doing, failure_name(error))


def _named_error(doing: str, name: str) -> EngineError:
    """Make the error of a `failure_name`, of the class with that name if there is one."""
    kinds = {kind.__name__: kind for kind in (OutOfMemory, DeviceLost)}
    return kinds.get(name, EngineError)(f"{doing} ({name})")


def selector_error(name: str) -> EngineError:
    """Make the error to raise for the `failure_name` of a selector. On a GPU, errors of the model's
    own kernels surface in the selector, which is the first to wait for them."""
    if name in (OutOfMemory.__name__, DeviceLost.__name__, "AcceleratorError"):
        return _named_error("the device failed", name)
    return SelectorFailed(f"the token selector failed ({name})")
