"""Texts from the tuned model: post-processing, as many as are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpray.engines.base import PlainPrompt, Prompt, Sampling
from dpray.engines.requests import Ask, Request, answered
from dpray.methods.dp_sgd.control_codes import ControlCodes
from dpray.methods.dp_sgd.settings import DpSgdSettings


def write_texts(
    encode: Callable[[Prompt], Sequence[int]],
    ask: Ask,
    settings: DpSgdSettings,
    codes: ControlCodes,
    wanted: Sequence[Mapping[str, str]],
) -> list[str]:
    """A text for the control values of each of `wanted`, "" where the model wrote none.

    The model sees what it was trained on, token for token: the start token and the code. Code and
    text together have at most `max_length` tokens.
    """
    prompts = {code: PlainPrompt(code) for code in map(codes.code, wanted)}
    room = {code: settings.max_length - len(encode(p)) for code, p in prompts.items()}

    def request(number: int, attempt: int) -> Request:
        code = codes.code(wanted[number])
        sampling = Sampling(room[code], settings.temperature, settings.top_k, settings.top_p)
        return Request(f"text-{number}/{attempt}", prompts[code], sampling)

    return answered(ask, request, len(wanted), settings.max_retries, lambda text: False)


def to_record(text: str, values: Mapping[str, str], label: str | None) -> dict[str, Any]:
    """A released record; values of other control columns than the label stand in `control`."""
    control = {column: value for column, value in values.items() if column != label}
    record: dict[str, Any] = {"text": text, "label": values.get(label) if label else None}
    return record | ({"control": control} if control else {})
