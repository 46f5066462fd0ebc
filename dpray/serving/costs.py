"""A request costs places of a model, of which each replica has some."""

from __future__ import annotations

from typing import Any

from dpray.config.sections import EngineConfig
from dpray.serving.places import Cost
from dpray.serving.requests import wrong_key
from dpray.serving.settings import ServedEmbedder, ServedLLM

_COMPLETION_TOKENS = 16
"""A completion without `max_tokens` has so many; a chat has what the context holds."""


def llm_capacity(engine: EngineConfig, served: ServedLLM, context: int, gateways: int) -> Cost:
    """Return the places of a replica that each gateway gives away: at least two requests of one
    sequence of the whole context."""
    tokens = served.max_tokens_in_flight or engine.max_num_seqs * context
    all_ = Cost(served.max_ongoing_requests, engine.max_num_seqs, tokens)
    requests, sequences, tokens = (each // gateways for each in all_)
    return Cost(max(2, requests), max(2, sequences), max(2 * context, tokens))


def embedder_capacity(served: ServedEmbedder, gateways: int) -> Cost:
    """Return the places of a replica that each gateway gives away: a batch that is embedded and one
    that waits. A text is a sequence; tokens are not counted."""
    texts = 2 * served.max_batch_size
    return Cost(max(2, served.max_ongoing_requests // gateways), max(2, texts // gateways), 0)


def generation_cost(call: dict[str, Any], context: int) -> Cost:
    """Return the cost of a checked request: prompts times n sequences; for each prompt its tokens,
    and n times the tokens of an answer. No sequence is longer than the model's `context`.

    A token has at least one byte: the bytes of a prompt are an upper bound of its tokens, which are
    counted by the model alone.
    """
    if "messages" in call:
        prompts = ["".join(map(_content, call["messages"]))]
        answer = call.get("max_completion_tokens") or call.get("max_tokens") or context
    else:
        prompts, answer = call["prompt"], call.get("max_tokens", _COMPLETION_TOKENS)
    n, answer = call.get("n", 1), min(answer, context)
    tokens = sum(min(len(each.encode()) + n * answer, n * context) for each in prompts)
    return Cost(1, len(prompts) * n, tokens)


def _content(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def check_cost(cost: Cost, largest: Cost) -> None:
    """Raise ApiError for a request that would never get its places."""
    if cost.sequences > largest.sequences:
        raise wrong_key("n", f"prompts times n is at most {largest.sequences} on this server")
    if cost.tokens > largest.tokens:
        message = (
            f"a request has at most {largest.tokens} tokens on this server, in its prompts (a "
            "token for each byte) and the max_tokens of its prompts times n answers"
        )
        raise wrong_key("max_tokens", message)
