"""A model is loaded whole or refused.

Libraries fill the weights that a model's files lack with random numbers, and only warn: the texts
of such a model are worth nothing, and the budget would be spent on them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpray.engines.base import EngineError
from dpray.engines.row_variation import QUANTISATION
from dpray.engines.silence import silence_models
from dpray.extras import Late, torch
from dpray.types import InputError

if TYPE_CHECKING:
    import transformers
    from transformers.integrations import deepspeed
    from transformers.utils import hub
else:
    transformers = Late("transformers")
    deepspeed = Late("transformers.integrations.deepspeed")
    hub = Late("transformers.utils.hub")

MOST_NAMED = 3
"""A message names this many weights, and counts them all."""

POOLER = r"(^|\.)pooler\."
"""An encoder's head, which many embedders do not save: sentence-transformers pools by itself."""


def load_whole(folder: str, dtype: str) -> Any:
    """Load a causal language model on the CPU. Weights that are stored in `dtype`, "auto" for any,
    are mapped from their file and take no memory until they are written to.

    Raises InputError that names the weights that are missing, have another shape or are not
    finite, or that the model has no place for, and any error for damaged files.
    """
    model = with_all_weights(transformers.AutoModelForCausalLM, folder, dtype=dtype)
    # Under ZeRO 3 each rank holds parts: the whole was looked at before.
    if not deepspeed.is_deepspeed_zero3_enabled():
        refuse_not_finite(model.named_parameters(), folder)
    return model


def check_weights(folder: str, *, values: bool = True) -> None:
    """Raise InputError as `load_whole` does, for an engine that loads the model by itself, and
    EngineError if the files are damaged. Names and shapes take the files' headers alone; without
    `values`, nothing else is read.

    Unchecked are models that transformers loads in no such way: one that is quantised, whose files
    hold other numbers than its own, and one of an architecture that it has no causal language model
    for. Their engine still refuses files that lack a weight, if it looks for that.
    """
    if not loads_plainly(folder):
        return
    try:
        if values:
            load_whole(folder, "auto")
        else:
            with_all_weights(transformers.AutoModelForCausalLM, folder, device_map="meta")
    except InputError:
        raise
    except Exception as error:  # damaged files raise errors of many classes
        raise EngineError(f"cannot load {folder} ({type(error).__name__})") from error


def loads_plainly(folder: str) -> bool:
    """Return whether transformers has a causal language model of this architecture, whose weights
    are not quantised."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    is_known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return is_known and not any(getattr(config, key, None) for key in QUANTISATION)


def check_embedder(model: Any, folder: str) -> None:
    """Raise InputError if a model of sentence-transformers, loaded from `folder`, lacks weights,
    which the library does not say, or if some are not finite."""
    key, places = "embedder.model", [""]
    listed = hub.cached_file(folder, "modules.json", _raise_exceptions_for_missing_entries=False)
    if listed is not None:
        places = [module["path"] for module in json.loads(Path(listed).read_text())]
    for module, place in zip(model, places, strict=False):
        found = getattr(module, "auto_model", None)
        if isinstance(found, transformers.PreTrainedModel) and found.name_or_path == folder:
            # Without its numbers, it is there a second time.
            empty = {"config": found.config, "subfolder": place, "device_map": "meta"}
            with_all_weights(type(found), folder, key, POOLER, **empty)
    refuse_not_finite(model.named_parameters(), folder, key)


def with_all_weights(
    kind: Any, folder: str, key: str = "engine.model", unused: str | None = None, **options: Any
) -> Any:
    """Load a model of transformers by its class. Weights may be missing whose names `unused`, a
    regular expression, finds. Raises InputError that names `key` and the weights."""
    silence_models()  # transformers prints the names as a table
    model, found = kind.from_pretrained(
        folder,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **options,
    )
    if deepspeed.is_deepspeed_zero3_enabled():
        return model
    missing = {name for name in found["missing_keys"] if not (unused and re.search(unused, name))}
    reshaped = {name for name, *_ in found["mismatched_keys"]}
    modules = {name for name, _ in model.named_modules()} - {"", model.base_model_prefix}
    unknown = {name for name in found["unexpected_keys"] if missing or _is_inside(name, modules)}
    if faults := [
        words + _some(names)
        for names, words in (
            (missing, "lacks weights, which would be random: "),
            (reshaped, "holds weights in another shape than its configuration says: "),
            (unknown, "holds weights that its configuration has no place for: "),
        )
        if names
    ]:
        raise InputError(
            f"{key}: {folder} {'; it '.join(faults)}; save the model again under its own names, "
            "whole, with its adapters merged"
        )
    return model


def refuse_not_finite(
    parameters: Iterable[tuple[str, torch.Tensor]], folder: str, key: str = "engine.model"
) -> None:
    """Raise InputError that names the parameters with NaN or infinity in them."""
    # Numbers of 8 bits have no such test, and come with scales.
    wrong = [
        name
        for name, weight in parameters
        if weight.is_floating_point() and weight.itemsize > 1 and weight.numel()
        # Unlike `isfinite`, it makes no copy of the weights.
        if not all(torch.isfinite(end) for end in weight.detach().aminmax())
    ]
    if wrong:
        raise InputError(
            f"{key}: {folder}: not finite: some weights of {_some(wrong)}; take files that are "
            "not damaged, or an engine.dtype that is wide enough"
        )


def _is_inside(name: str, modules: Collection[str]) -> bool:
    """Return whether a weight lies in one of the modules: a bias or a layer more changes the model.
    What stands next to the language model, such as a vision tower, does not."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in modules for end in range(1, len(parts)))


def _some(names: Collection[str]) -> str:
    """Return a few of the names, which come from a file, with the number of all."""
    shown = [re.sub(r"[^\w.-]", "?", name)[:80] for name in sorted(names)[:MOST_NAMED]]
    more = f" and {len(names) - len(shown):,} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more
