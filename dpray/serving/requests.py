"""Each endpoint has keys with types and bounds; any other key is refused.

vLLM's own request classes ignore unknown keys, and know many that cost the server far more than the
caller or reach into it: a grammar to compile, the address of an image to fetch, a chat template,
tensors, another caller's cache, a place at the front of the queue. They get only the keys below.
A body is bounded, in bytes and in entries, before anything is made of it.
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request

from dpray.serving.errors import ApiError

MAX_N = 16
"""The most answers to a prompt."""
MAX_SEQUENCES = 128
"""The most answers to a request: prompts times n."""
MAX_BIASES = 1024
"""The most tokens with a bias in a request."""
_COMPLETION_TOKENS = 16
"""A completion without `max_tokens` has this many; a chat has what the context holds."""
_INT64 = 2**63
_KEY = re.compile(r"[a-z][a-z0-9_]{0,39}")
# Possessive, and an end that may be missing: linear in any body.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


class Room(NamedTuple):
    """A replica's room for requests: the tokens of an LLM, the texts of an embedder."""

    size: int
    part: int
    """The least that a sequence takes."""
    smallest: int
    """The room that a request may have in any case: a sequence of the whole context, or a text."""


class _Checked(BaseModel):
    """Converts no types: "1" is not a number. A null counts as an absent key."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _few_biases(value: object) -> object:
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
    BeforeValidator(_as_list),
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
        """Return the tokens of all sequences, or the least that they take if that is more.

        A token has at least one byte: the bytes of a prompt are an upper bound of its tokens, which
        only the model counts. No sequence is longer than the context, which is `room.smallest`.
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
    def _without_empty_keys(cls, message: object) -> object:
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
        list[str], BeforeValidator(_as_list), Field(min_length=1, max_length=MAX_SEQUENCES)
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
        BeforeValidator(_as_list),
        Field(min_length=1),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: None = None
    user: _User | None = None

    def cost(self, room: Room) -> int:
        return len(self.input)


Call = ChatCall | CompletionCall | EmbeddingCall


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Read a body of JSON. Raises ApiError 413 as soon as more than `max_bytes` have arrived, and
    408 for a body that is not complete after `seconds`."""
    # A browser asks for permission before a page sends this type to another site, and nothing here
    # grants it.
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError(415, "the body has to be application/json", "unsupported_media_type")
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    message = f"the body is longer than {max_bytes} bytes"
                    raise ApiError(413, message, "request_too_large")
    except TimeoutError:
        message = f"the body did not arrive within {seconds:g} seconds"
        raise ApiError(408, message, "request_too_slow") from None
    return bytes(body)


def has_few_entries(body: bytes, most: int) -> bool:
    """Return whether a JSON text has at most `most` entries in all its lists and objects.

    Each has a comma or an opening bracket before it, and at most two strings. An empty list counts
    as an entry. Nothing is parsed: 75,000 entries take a millisecond instead of a hundred.
    """
    if _marks(body) <= most:
        return True
    # A lower bound of the quotes that are no part of a text.
    if body.count(b'"') - body.count(b'\\"') > 4 * most:
        return False
    return _marks(_STRING.sub(b"", body)) <= most


def _marks(text: bytes) -> int:
    return sum(map(text.count, (b",", b"[", b"{")))


def checked(kind: type[Call], body: bytes, max_entries: int) -> Call:
    """Return the request. Raises ApiError that names the first key that is of a wrong type, out of
    bounds or unknown, and quotes no value."""
    if not has_few_entries(body, max_entries):
        message = f"the body has more than {max_entries} entries in its lists and objects"
        raise ApiError(413, message, "request_too_large")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if not first["loc"] and first["type"] != "value_error":
        raise ApiError(400, "the body is not a JSON object", "invalid_json")
    unknown = first["type"] == "extra_forbidden"
    message = "there is no such key here" if unknown else first["msg"]
    key = first["loc"][0] if first["loc"] else "n"
    raise _wrong_key(str(key), message.removeprefix("Value error, "))


def checked_cost(call: Call, room: Room, most: int) -> int:
    """Return what a request costs. Raises ApiError for one that costs more than a caller's share,
    and would wait for ever."""
    cost = call.cost(room)
    if cost <= most:
        return cost
    if isinstance(call, EmbeddingCall):
        raise _wrong_key("input", f"at most {most} texts in one request on this server")
    if cost % room.part == 0:
        raise _wrong_key("n", f"prompts times n is at most {most // room.part} on this server")
    message = (
        f"a request has at most {most} tokens on this server, in its prompts (a token for each "
        "byte) and the max_tokens of its prompts times n answers"
    )
    raise _wrong_key("max_tokens", message)


def _wrong_key(key: str, message: str) -> ApiError:
    """Make a 400 for `key`, unless it may be a caller's words."""
    if not _KEY.fullmatch(key):
        return ApiError(400, f"the request: {message}", "invalid_value")
    return ApiError(400, f"{key}: {message}", "invalid_value", key)
