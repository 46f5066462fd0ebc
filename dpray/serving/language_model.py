"""The LLM's endpoints use Ray's own OpenAI ingress as a library, which imports vLLM.

The gateway has checked the API key, the body's length and the limits; `requests` checks the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel
from ray.serve.handle import DeploymentHandle
from ray.serve.llm.ingress import OpenAiIngress
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from starlette.responses import Response

from dpray.serving.errors import model_not_found
from dpray.serving.gateway import Endpoint
from dpray.serving.requests import ChatCall, CompletionCall, checked, wrong_key

R = TypeVar("R", bound=BaseModel)


class LanguageModel:
    """Answers by the deployment behind `handle`, which clients call `name`."""

    def __init__(self, handle: DeploymentHandle, name: str) -> None:
        self._name = name
        # The cards of its model list are not used: the gateway lists the embedder too.
        cards: dict[str, Any] = {name: None}
        self._ingress = OpenAiIngress(llm_deployments={name: handle}, model_cards=cards)

    @property
    def endpoints(self) -> Mapping[str, Endpoint]:
        return {"/v1/chat/completions": self.chat, "/v1/completions": self.complete}

    async def chat(self, body: dict[str, Any], salt: str) -> Response:
        self._check_model(body)
        request = _request(ChatCompletionRequest, checked(ChatCall, body), salt)
        return await self._answered(self._ingress.chat, request)

    async def complete(self, body: dict[str, Any], salt: str) -> Response:
        self._check_model(body)
        request = _request(CompletionRequest, checked(CompletionCall, body), salt)
        return await self._answered(self._ingress.completions, request)

    def _check_model(self, body: dict[str, Any]) -> None:
        if body.get("model") != self._name:
            raise model_not_found([self._name])

    async def _answered(self, answer: Any, request: BaseModel) -> Response:
        # Without the HTTP request: its headers, with the key, stay in this process.
        response: Response = await answer(request, None)
        return response


def _request(kind: type[R], body: dict[str, Any], salt: str) -> R:
    """Make vLLM's request of a checked body; vLLM validates the rules between two keys."""
    try:
        return kind.model_validate(body | {"cache_salt": salt})
    except Exception as error:
        # Its message may quote what it refuses; its parameter is one of vLLM's own names.
        key = getattr(error, "parameter", None)
        raise wrong_key(key if key in body else "", "not valid with the other keys") from None
