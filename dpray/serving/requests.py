"""Each endpoint has keys with types and bounds; any other key is refused.

vLLM's own request classes ignore unknown keys, and know many that cost the server far more than the
caller or reach into it: a grammar to compile, the address of an image to fetch, a chat template,
tensors, another caller's cache, a place at the front of the queue. They get only the keys below.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from dpray.serving.errors import ApiError

MAX_N = 16
"""The most answers to a prompt."""
MAX_SEQUENCES = 128
"""The most answers to a request: prompts times n."""
MAX_INPUTS = 2048
"""The most texts in a request for embeddings."""
MAX_BIASES = 1024
"""The most tokens with a bias in a request."""
_COMPLETION_TOKENS = 16
"""A completion without `max_tokens` has this many; a chat has what the context holds."""
_INT64 = 2**63
_KEY = re.compile(r"[a-z][a-z0-9_]{0,39}")


class Room(NamedTuple):
    """A replica's room for requests: the tokens of an LLM, the texts of an embedder."""

    size: int
    part: int
    """The least that a sequence takes, or the most texts that a request embeds at a time."""
    smallest: int
    """What each request may take: one sequence of the whole context, or one part of the texts."""


class _Checked(BaseModel):
    """Converts no types: "1" is not a number. A null counts as an absent key."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _few_biases(value: Any) -> Any:
    # pydantic counts the entries of an object after it has checked each of them.
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} tokens")
    return value


# vLLM refuses more than the model's context; this bound is that of its integers.
_Tokens = Annotated[int, Field(ge=1, lt=2**31)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_User = Annotated[str, Field(max_length=256)]
_Stop = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]],
    BeforeValidator(_listed),
    Field(max_length=4),
]
_Biases = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_few_biases),
]


class _StreamOptions(_Checked):
    include_usage: bool | None = None


class Generation(_Checked):
    """The keys of both ways to generate."""

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: _Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    logit_bias: _Biases | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: _Stop | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: _User | None = None

    def prompts(self) -> list[str]:
        raise NotImplementedError

    def answer_tokens(self) -> int | None:
        """Return the most tokens of an answer, None for what the context holds."""
        raise NotImplementedError

    def cost(self, room: Room) -> int:
        """Return the tokens of all sequences, or their least where that is more.

        A token has at least one byte: the bytes of a prompt are an upper bound of its tokens, which
        the model alone counts. No sequence is longer than the context, which is `room.smallest`.
        """
        n, context = self.n or 1, room.smallest
        answers = n * min(self.answer_tokens() or context, context)
        prompts = self.prompts()
        tokens = sum(min(len(each.encode()) + answers, n * context) for each in prompts)
        return max(tokens, len(prompts) * n * room.part)


class _TextPart(_Checked):
    type: Literal["text"]
    text: str


class _Message(_Checked):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[_TextPart], Field(max_length=256)]
    name: Annotated[str, Field(max_length=64)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_keys(cls, message: Any) -> Any:
        # An answer's message has them, and clients send it back: `"tool_calls": []`.
        if not isinstance(message, dict):
            return message
        return {key: value for key, value in message.items() if value not in (None, [])}

    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatCall(Generation):
    """The keys of `/v1/chat/completions`."""

    messages: Annotated[list[_Message], Field(min_length=1, max_length=256)]
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def prompts(self) -> list[str]:
        return ["".join(message.text() for message in self.messages)]

    def answer_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionCall(Generation):
    """The keys of `/v1/completions`; prompts are texts, never token ids or tensors."""

    prompt: Annotated[
        list[str], BeforeValidator(_listed), Field(min_length=1, max_length=MAX_SEQUENCES)
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _few_sequences(self) -> CompletionCall:
        if len(self.prompt) * (self.n or 1) > MAX_SEQUENCES:
            raise ValueError(f"prompts times n is at most {MAX_SEQUENCES}")
        return self

    def prompts(self) -> list[str]:
        return self.prompt

    def answer_tokens(self) -> int:
        return self.max_tokens or _COMPLETION_TOKENS


class EmbeddingCall(_Checked):
    """The keys of `/v1/embeddings`; token ids would be of another vocabulary."""

    model: str
    input: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        BeforeValidator(_listed),
        Field(min_length=1, max_length=MAX_INPUTS),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: None = None
    user: _User | None = None

    def cost(self, room: Room) -> int:
        """Return how many texts are embedded at a time."""
        return min(len(self.input), room.part)


Call = ChatCall | CompletionCall | EmbeddingCall


def checked(kind: type[Call], body: dict[str, Any]) -> Call:
    """Return the request. Raises ApiError that names the first key that is unknown, of a wrong type
    or out of bounds, and quotes no value."""
    for key in body:
        if key not in kind.model_fields:
            raise wrong_key(key, "there is no such key here")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
    first = errors[0]
    # A message's content is a text or a list of parts: the deepest error is about the one sent.
    if first["loc"][0:1] == ("messages",):
        same = [each for each in errors if each["loc"][:3] == first["loc"][:3]]
        first = max(same, key=lambda each: len(each["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        raise wrong_key("n", message)
    if first["type"] == "extra_forbidden":
        message = "there is no such key here"
    raise wrong_key(str(first["loc"][0]), message, first["loc"][1:3])


def checked_cost(call: Call, room: Room, most: int) -> int:
    """Return what a request costs. Raises ApiError for one that costs more than a caller's share,
    and would wait for ever."""
    cost = call.cost(room)
    if cost <= most:
        return cost
    if cost % room.part == 0:
        raise wrong_key("n", f"prompts times n is at most {most // room.part} on this server")
    message = (
        f"a request has at most {most} tokens on this server, in its prompts (a token for each "
        "byte) and the max_tokens of its prompts times n answers"
    )
    raise wrong_key("max_tokens", message)


def wrong_key(key: str, message: str, inner: tuple[int | str, ...] = ()) -> ApiError:
    """Make a 400 for `key`, at `inner` of its value, without names that may be a caller's words."""
    if not _KEY.fullmatch(key):
        return ApiError(400, f"the request: {message}", "invalid_value")
    place = key
    for step in inner if key == "messages" else ():
        if isinstance(step, int):
            place += f"[{step}]"
        elif _KEY.fullmatch(step):
            place += f".{step}"
    return ApiError(400, f"{place}: {message}", "invalid_value", key)
