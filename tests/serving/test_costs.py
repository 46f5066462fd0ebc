"""What a request costs, what a replica has, and which request is too large for it."""

from __future__ import annotations

from typing import Any

import pytest

from dpray.config.sections import EngineConfig
from dpray.serving.costs import check_cost, embedder_capacity, generation_cost, llm_capacity
from dpray.serving.errors import ApiError
from dpray.serving.places import Cost
from dpray.serving.settings import ServedEmbedder, ServedLLM

USER = {"role": "user", "content": "four"}


@pytest.mark.parametrize(
    ("call", "sequences", "tokens"),
    [
        ({"prompt": ["four"], "max_tokens": 20}, 1, 24),
        ({"prompt": ["four"], "max_tokens": 20, "n": 3}, 3, 64),
        ({"prompt": ["four", "sixsix"], "max_tokens": 20, "n": 3}, 6, 130),
        # OpenAI's default.
        ({"prompt": ["four"]}, 1, 20),
        # Bytes, which are at least as many as tokens.
        ({"prompt": ["\N{GRINNING FACE}"], "max_tokens": 1}, 1, 5),
        # No sequence is longer than the context.
        ({"prompt": ["four"], "max_tokens": 2**31 - 1, "n": 2}, 2, 200),
        ({"prompt": ["a" * 5000], "max_tokens": 7, "n": 2}, 2, 200),
        ({"messages": [USER, USER], "max_tokens": 20, "n": 2}, 2, 48),
        ({"messages": [USER], "max_completion_tokens": 20, "max_tokens": 50}, 1, 24),
        # A chat goes on to the end of the context.
        ({"messages": [USER], "n": 2}, 2, 200),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "four"}] * 2}],
          "max_tokens": 1}, 1, 9),
    ],
)  # fmt: skip
def test_a_request_costs_its_sequences_and_their_tokens(
    call: dict[str, Any], sequences: int, tokens: int
) -> None:
    assert generation_cost(call, context=100) == Cost(1, sequences, tokens)


def test_gateways_share_a_replicas_places_and_each_has_two_of_the_smallest() -> None:
    engine = EngineConfig(model="m", max_num_seqs=32)
    served = ServedLLM(max_ongoing_requests=64)
    assert llm_capacity(engine, served, 100, gateways=1) == Cost(64, 32, 3200)
    assert llm_capacity(engine, served, 100, gateways=2) == Cost(32, 16, 1600)
    few = ServedLLM(max_ongoing_requests=64, max_tokens_in_flight=1000)
    assert llm_capacity(engine, few, 100, gateways=2) == Cost(32, 16, 500)
    assert llm_capacity(engine, few, 1000, gateways=2) == Cost(32, 16, 2000)
    alone = EngineConfig(model="m", max_num_seqs=1)
    assert llm_capacity(alone, served, 100, gateways=1) == Cost(64, 2, 200)
    embedder = ServedEmbedder(max_batch_size=8)
    assert embedder_capacity(embedder, gateways=1) == Cost(64, 16, 0)
    assert embedder_capacity(embedder, gateways=100) == Cost(2, 2, 0)


def test_a_request_that_would_wait_for_ever_is_refused_with_the_limit() -> None:
    largest = Cost(32, 16, 1000)
    check_cost(Cost(1, 16, 1000), largest)
    for cost, key, limit in ((Cost(1, 17, 1), "n", "16"), (Cost(1, 1, 1001), "max_tokens", "1000")):
        with pytest.raises(ApiError, match=limit) as refused:
            check_cost(cost, largest)
        assert (refused.value.status, refused.value.param) == (400, key)
