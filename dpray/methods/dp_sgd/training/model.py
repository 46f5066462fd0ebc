"""`load_loss` loads the model that is fine-tuned, `save_model` saves it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dpray.engines.float32 import without_tf32
from dpray.engines.kept_state import refuse_kept_state
from dpray.engines.model_path import resolve_model
from dpray.engines.row_variation import refuse_experts, refuse_shared_scales
from dpray.engines.weights import load_whole, refuse_not_finite
from dpray.extras import Late
from dpray.methods.dp_sgd.training.clipped_loss import Forward, PerExampleLoss, check_norm_rules
from dpray.methods.dp_sgd.training.settings import TrainingSettings

if TYPE_CHECKING:
    import peft
else:
    peft = Late("peft")

ADAPTER = "adapter"

ATTENTION = "dpray"
"""The name under which transformers finds `attention`."""


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute torch's attention, on a CPU in float32: with bfloat16 its backward pass takes four
    times as long there."""
    if query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    with torch.autocast("cpu", enabled=False):
        return sdpa_attention_forward(
            module, query.float(), key.float(), value.float(), attention_mask, **options
        )


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def load_loss(
    folder: str,
    settings: TrainingSettings,
    loading: AbstractContextManager[Any] = contextlib.nullcontext(),
    few_layers: bool = False,
) -> PerExampleLoss:
    """Load the model in `folder` with float32 weights, as per-example losses; dropout is off. It is
    whole and on the CPU, unless `loading`, which is entered meanwhile, makes partitions of it. With
    `few_layers` the weights stay mapped from their files until `keep_few_layers` has left out most.

    Raises NoNormRule if a trainable layer has no rule for the norms of its gradients, InputError
    if weights are missing or not finite, or if rows depend on each other by what they are quantised
    with, by a state that the model keeps or by its experts.
    """
    refuse_shared_scales(resolve_model(folder))
    refuse_experts(resolve_model(folder))
    refuse_kept_state(resolve_model(folder))
    # The clipped sums are bounded for float32 products and sums (docs/privacy.md, 5.2).
    without_tf32()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with loading:
        model = load_whole(resolve_model(folder), "auto" if few_layers else "float32")
    if few_layers:
        keep_few_layers(model)
        model.float()
    if settings.precision == "bfloat16" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION)
    model = with_adapters(model, settings)
    held = ((name, held_part(parameter)) for name, parameter in model.named_parameters())
    refuse_not_finite(held, folder)
    in_parts = any(hasattr(parameter, "ds_tensor") for parameter in model.parameters())
    return PerExampleLoss(model, settings.precision, two_passes=in_parts).eval()


def keep_few_layers(model: Any) -> None:
    """Leave out a model's last layers. The first ones stay, up to one of each kind, and two at
    least: layers are of a kind if their modules are, in their settings and shapes."""
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    for parent in list(model.modules()):
        for name, layers in list(parent.named_children()):
            if isinstance(layers, nn.ModuleList) and len(layers) == len(types):
                kinds = [(kind, *_form(layer)) for kind, layer in zip(types, layers, strict=True)]
                setattr(parent, name, layers[: max(2, 1 + max(map(kinds.index, kinds)))])


def _form(layer: nn.Module) -> Iterator[object]:
    for name, module in layer.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, int | str)}
        yield name, type(module), {key: plain[key] for key in plain if key != "layer_idx"}
    yield {name: weight.shape for name, weight in layer.named_parameters()}


def put_weights(loss: PerExampleLoss, weights: Mapping[str, torch.Tensor]) -> None:
    """Give the model these weights, by their names in `trainable_parameters`, before any engine
    runs it. A rank that holds a part of a parameter takes its part."""
    with torch.no_grad():
        for name, parameter in loss.trainable_parameters().items():
            part = getattr(parameter, "ds_tensor", None)
            if part is None:
                parameter.copy_(weights[name])
            else:
                part.copy_(own_part(parameter, weights[name], torch.distributed.get_rank()))


def held_part(parameter: Any) -> torch.Tensor:
    """Return the weights of a parameter that this rank holds: all, or its part under ZeRO 3 without
    the padding of the last ranks, whose memory was never written."""
    part: torch.Tensor | None = getattr(parameter, "ds_tensor", None)
    if part is None:
        whole: torch.Tensor = parameter
        return whole
    before = part.numel() * torch.distributed.get_rank()
    return part.flatten()[: max(0, parameter.ds_numel - before)]


def own_part(parameter: Any, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the part of `whole`, which is shaped like the parameter, that a rank holds under ZeRO
    3: parts are equally long, in the order of the ranks, and the last ones are padded."""
    length = parameter.ds_tensor.ds_numel
    mine = whole.reshape(-1)[length * rank : length * (rank + 1)]
    return torch.nn.functional.pad(mine, (0, length - len(mine)))


def check_norms(loss: PerExampleLoss, forward: Forward) -> None:
    """Check the rules for norms on the loaded model; `forward` runs `loss`. Raises NoNormRule."""
    model: Any = loss.model
    check_norm_rules(loss, model.config.get_text_config().vocab_size, forward)


def save_model(
    base: str,
    settings: TrainingSettings,
    weights: Mapping[str, torch.Tensor],
    folder: Path,
    base_name: str,
) -> None:
    """Save the fine-tuned model as a plain folder with its tokenizer. Adapters are merged, in
    float32; they are also saved by themselves, with the tokenizer, in the folder `ADAPTER`, and
    call the model they belong to `base_name`.

    `weights` are the trained ones by their names in `PerExampleLoss.trainable_parameters`.
    """
    lora = settings.tuning == "lora"
    model = with_adapters(load_whole(resolve_model(base), "float32" if lora else "auto"), settings)
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():  # a name that is not the model's is a KeyError
        parameters[name].data = weight.detach()
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(base), trust_remote_code=False)
    with deepspeed_on_stderr():
        if lora:
            for adapters in model.peft_config.values():
                adapters.base_model_name_or_path = base_name
            # No embeddings are tuned; to see that, PEFT would look for the model at its name.
            model.save_pretrained(folder / ADAPTER, save_embedding_layers=False)
            (folder / ADAPTER / "README.md").unlink(missing_ok=True)  # of PEFT; names a place
            tokenizer.save_pretrained(folder / ADAPTER)
            model = model.merge_and_unload()
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def with_adapters(model: Any, settings: TrainingSettings) -> Any:
    """Return the model with the adapters that are trained, or as it is if all of it is."""
    if settings.tuning == "full":
        return model
    adapters = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]
        target_modules="all-linear",
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
    )
    # The adapters' random start is public, and the same on every rank.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(model, adapters)


def is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextlib.contextmanager
def deepspeed_on_stderr() -> Iterator[Any]:
    """Import `deepspeed` and send its prints to the standard error: the standard output is the
    command's. Enter it around everything that imports DeepSpeed, as saving a transformers model
    does."""
    with contextlib.redirect_stdout(sys.stderr):
        logger = logging.getLogger("DeepSpeed")
        # Importing DeepSpeed resets its logger's level and warns of a machine without a GPU.
        logger.addFilter(is_error)
        import deepspeed

        # A helper for CPU ranks that would be compiled at the first start: gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        yield deepspeed
