"""The LLM's endpoints over Ray's own OpenAI ingress, used as a library.

Imports vLLM. The gateway has checked key, length and number before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ray.serve.handle import DeploymentHandle
from ray.serve.llm.ingress import OpenAiIngress
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from starlette.responses import Response

from dpray.orchestration.serving.errors import ApiError, model_not_found
from dpray.orchestration.serving.gateway import Endpoint

R = TypeVar("R", bound=BaseModel)


class LanguageModel:
    """The deployment behind `handle`, called `name`."""

    def __init__(self, handle: DeploymentHandle, name: str) -> None:
        self._name = name
        # The cards of its model list are not used: the gateway lists the embedder too.
        cards: dict[str, Any] = {name: None}
        self._ingress = OpenAiIngress(llm_deployments={name: handle}, model_cards=cards)

    @property
    def endpoints(self) -> Mapping[str, Endpoint]:
        return {"/v1/chat/completions": self.chat, "/v1/completions": self.complete}

    async def chat(self, body: dict[str, Any], salt: str) -> Response:
        check_texts_only(body)
        request = self._request(ChatCompletionRequest, body, salt)
        return await self._answered(self._ingress.chat, request)

    async def complete(self, body: dict[str, Any], salt: str) -> Response:
        request = self._request(CompletionRequest, body, salt)
        return await self._answered(self._ingress.completions, request)

    def _request(self, kind: type[R], body: dict[str, Any], salt: str) -> R:
        if body.get("model") != self._name:
            raise model_not_found([self._name])
        try:
            return kind.model_validate(body | {"cache_salt": salt})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            raise _invalid(kind, first["loc"]) from None
        except Exception:
            # vLLM's validators raise errors of their own, which quote what they refuse.
            raise _invalid(kind, ()) from None

    async def _answered(self, answer: Any, request: BaseModel) -> Response:
        # Without the HTTP request: its headers, with the key, stay in this process.
        response: Response = await answer(request, None)
        return response


def check_texts_only(body: dict[str, Any]) -> None:
    """Raises ApiError for a message with anything but text: an image's address would have the
    server fetch it."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else []:
            if not (isinstance(part, dict) and part.get("type") == "text"):
                raise ApiError(400, "messages: text only", "invalid_value", "messages")


def _invalid(kind: type[BaseModel], place: tuple[int | str, ...]) -> ApiError:
    """Names the wrong key where it is one of the API's, not one that the caller made up."""
    key = str(place[0]) if place and place[0] in kind.model_fields else None
    message = f"{key}: not valid" if key else "the request is not valid"
    return ApiError(400, message, "invalid_value", key)
