"""The LLM's endpoints use Ray's own OpenAI ingress as a library, which imports vLLM.

The gateway has checked the API key and the body's size; `requests` checks the body.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from ray.serve.handle import DeploymentHandle
from ray.serve.llm.ingress import OpenAiIngress
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from starlette.responses import Response

from dpray.serving.costs import check_cost, generation_cost
from dpray.serving.errors import model_not_found
from dpray.serving.gateway import Caller, Endpoint
from dpray.serving.places import FairPlaces
from dpray.serving.requests import ChatCall, CompletionCall, checked, wrong_key


def llm_endpoints(
    handle: DeploymentHandle, name: str, context: int, places: FairPlaces
) -> dict[str, Endpoint]:
    """Return endpoints that the deployment behind `handle` answers, which clients call `name`. A
    request holds its `places` until its answer, or the stream of it, has ended."""
    # The cards of its model list are not used: the gateway lists the embedder too.
    cards: dict[str, Any] = {name: None}
    ingress = OpenAiIngress(llm_deployments={name: handle}, model_cards=cards)

    def endpoint(call: Any, kind: type[BaseModel], answer: Any) -> Endpoint:
        async def answered(body: dict[str, Any], caller: Caller) -> Response:
            if body.get("model") != name:
                raise model_not_found([name])
            request = checked(call, body)
            cost = generation_cost(request, context)
            check_cost(cost, places.largest)
            await caller.held.enter_async_context(places.place(caller.name, cost))
            # Without the HTTP request: its headers, with the key, stay in this process.
            response: Response = await answer(_request(kind, request, caller.salt), None)
            return response

        return answered

    return {
        "/v1/chat/completions": endpoint(ChatCall, ChatCompletionRequest, ingress.chat),
        "/v1/completions": endpoint(CompletionCall, CompletionRequest, ingress.completions),
    }


def _request(kind: type[BaseModel], body: dict[str, Any], salt: str) -> BaseModel:
    """Make vLLM's request of a checked body; vLLM validates the rules between two keys."""
    try:
        return kind.model_validate(body | {"cache_salt": salt})
    except Exception as error:
        # Its message may quote what it refuses; its parameter is one of vLLM's own names.
        key = getattr(error, "parameter", None)
        raise wrong_key(key if key in body else "", "not valid with the other keys") from None
