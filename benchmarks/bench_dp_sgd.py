"""Per-example clipping beside plain training and Opacus: examples a second, and peak memory.

    python -m benchmarks.bench_dp_sgd [--examples 32] [--length 128] [--micro-batch 8]
        [--size small]

A GPT-2-small-shaped and a Llama-shaped model with random weights, all of them trained or LoRA of
rank 8; texts of one length. Every way runs in a process of its own, on the GPU where there is one,
and turns micro-batches into one clipped sum of gradients: noise and optimizer, once a logical
batch, are not in it. Memory is the most the process had beyond what it had before the model was
made (on a GPU: the most that was allocated). The embeddings are not tied, as Opacus would take the
norms of tied ones for those of two parameters. Prints Markdown, the targets first.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import typer

from dpray.methods.dp_sgd.training.clipped_loss import IGNORED, MicroBatch, PerExampleLoss
from dpray.methods.dp_sgd.training.settings import Precision
from dpray.methods.dp_sgd.training.step import TrainingText

MODELS = ("gpt2", "llama")
TUNINGS = ("full", "lora")
TARGETS = """Targets: as many examples a second as Opacus ghost clipping; 0.6 of plain training,
0.8 with LoRA; at most 1.2 times its memory.
"""

GPT2: dict[str, dict[str, Any]] = {
    "tiny": {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 500},
    "small": {},
    "large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
}


def _llama(vocabulary: int, width: int, inner: int, layers: int, heads: int, keys: int) -> Any:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
    }


LLAMA: dict[str, dict[str, Any]] = {
    "tiny": _llama(500, 64, 176, 2, 2, 2),
    "small": _llama(32_000, 640, 1760, 12, 20, 20),
    "large": _llama(128_256, 2048, 8192, 16, 32, 8),
}

Step = Callable[[MicroBatch], None]
"""Adds what a micro-batch brings to the parameters' gradients."""


def make_model(kind: str, tuning: str, size: str) -> Any:
    """Make a model with random weights: "tiny" ones try the script, "small" ones have 163 M (GPT-2
    small with its own head) and 110 M parameters (Llama), "large" ones 0.84 and 1.5 billion (the
    shapes of GPT-2 large and of Llama 3.2 1B)."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        none: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(tie_word_embeddings=False, **none, **GPT2[size])
        model: Any = GPT2LMHeadModel(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=1024, **LLAMA[size]))
    if tuning == "lora":
        adapters = LoraConfig(
            task_type="CAUSAL_LM", r=8, target_modules="all-linear", fan_in_fan_out=kind == "gpt2"
        )
        model = get_peft_model(model, adapters)
    return model.eval()


def losses(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Mean loss of each example, (B,)."""
    logits = logits_of(model, batch)
    of_tokens = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="none"
    )
    return of_tokens.view(len(batch.ids), -1).mean(1)


def logits_of(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Return the logits of all positions but the last, shape (B, T - 1, V)."""
    positions = torch.arange(batch.ids.shape[1], device=batch.ids.device).repeat(len(batch.ids), 1)
    found: torch.Tensor = model(
        input_ids=batch.ids, attention_mask=batch.mask, position_ids=positions, use_cache=False
    ).logits
    return found[:, :-1]


def plain(model: Any, precision: Precision = "float32") -> Step:
    def step(batch: MicroBatch) -> None:
        low = precision == "bfloat16"
        with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=low):
            loss = losses(model, batch).sum()
        loss.backward()

    return step


def dpray(model: Any, two_passes: bool = False, precision: Precision = "float32") -> Step:
    loss = PerExampleLoss(model, precision, two_passes).eval()

    def step(batch: MicroBatch) -> None:
        with loss.clipped(batch, 1.0) as clipped:
            clipped.backward()

    return step


def opacus_per_sample(model: Any) -> Step:
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model.train(), strict=False, loss_reduction="sum")
    trained = [p for p in wrapped.parameters() if p.requires_grad]

    def step(batch: MicroBatch) -> None:
        losses(wrapped, batch).sum().backward()
        with torch.no_grad():
            samples = [p.grad_sample for p in trained]  # type: ignore[attr-defined]
            norms = torch.stack([s.flatten(1).norm(dim=1) for s in samples]).norm(dim=0)
            weights = (1.0 / norms).clamp(max=1.0)
            for p, sample in zip(trained, samples, strict=True):
                clipped = torch.einsum("b,b...->...", weights, sample)
                p.summed = clipped + getattr(p, "summed", 0.0)  # type: ignore[attr-defined]
        wrapped.zero_grad()

    return step


def opacus_ghost(model: Any) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        model.train(),
        strict=False,
        loss_reduction="sum",
        max_grad_norm=1.0,
        use_ghost_clipping=True,
    )
    trained = [p for p in wrapped.parameters() if p.requires_grad]

    # The two passes of opacus.utils.fast_gradient_clipping_utils.
    def step(batch: MicroBatch) -> None:
        of_examples = losses(wrapped, batch)
        of_examples.sum().backward(retain_graph=True)
        wrapped.zero_grad()
        weights = wrapped.get_clipping_coef()
        wrapped.disable_hooks()
        (weights * of_examples).sum().backward()
        wrapped.enable_hooks()
        for p in trained:
            p.summed = p.grad + getattr(p, "summed", 0.0)  # type: ignore[attr-defined]
        wrapped.zero_grad()

    return step


WAYS: dict[str, Callable[[Any], Step]] = {
    "plain training": plain,
    "dpray": dpray,
    "dpray, two passes": lambda model: dpray(model, two_passes=True),
    "Opacus ghost clipping": opacus_ghost,
    "Opacus per-sample": opacus_per_sample,
    "plain training, bfloat16": partial(plain, precision="bfloat16"),
    "dpray, bfloat16": partial(dpray, precision="bfloat16"),
}


def measure(
    kind: str, tuning: str, way: str, examples: int, length: int, rows: int, size: str
) -> tuple[float, float]:
    """Return examples a second and GiB, in micro-batches of `rows` examples."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for each in MODELS:  # so that what the libraries take is not counted
        plain(make_model(each, tuning, "tiny"))(batch_of(2, 8, 500))
    if device.type == "cuda":
        gc.collect()  # another way's model
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = peak(device)
    with device:
        model = make_model(kind, tuning, size).to(device)
    step = WAYS[way](model)
    batch = batch_of(rows, length, model.config.vocab_size).to(device)
    step(batch)
    _wait(device)
    began = time.perf_counter()
    for _ in range(examples // rows):
        step(batch)
    _wait(device)
    took = time.perf_counter() - began
    return examples // rows * rows / took, peak(device) - before


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def batch_of(rows: int, length: int, vocabulary: int) -> MicroBatch:
    fixed = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocabulary, (rows, length), generator=fixed).tolist()
    batch = MicroBatch.of([TrainingText(tuple(row), 1) for row in ids])
    assert (batch.labels[:, 1:] != IGNORED).all()
    return batch


def peak(device: torch.device) -> float:
    """GiB: of this process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(
    examples: int = 32, length: int = 128, micro_batch: int = 8, only: str = "", size: str = "small"
) -> None:
    spawn = multiprocessing.get_context("spawn")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{TARGETS}\n{name}, {length} tokens, micro-batches of {micro_batch}\n")
    print("| model | trained | way | examples a second | of plain | GiB | of plain |")
    print("|---|---|---|---:|---:|---:|---:|")
    for kind in MODELS:
        for tuning in TUNINGS:
            rows: dict[str, tuple[float, float]] = {}
            for way in WAYS:
                if only not in f"{kind} {tuning}":
                    continue
                with spawn.Pool(1) as pool:
                    settings = (kind, tuning, way, examples, length, micro_batch, size)
                    rows[way] = speed, memory = pool.apply(measure, settings)
                speed_ratio, memory_ratio = (
                    mine / other
                    for mine, other in zip((speed, memory), rows["plain training"], strict=True)
                )
                print(
                    f"| {kind} | {tuning} | {way} | {speed:.2f} | {speed_ratio:.2f} | {memory:.2f} "
                    f"| {memory_ratio:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    typer.run(main)
