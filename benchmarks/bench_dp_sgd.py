"""Per-example clipping beside plain training and Opacus: examples a second, and peak memory.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_dp_sgd [--rounds 3] [--examples 16]
        [--length 128] [--micro-batch 8] [--size small] [--bfloat16] [--only "llama lora"]

A GPT-2-small-shaped and a Llama-shaped model with random weights, all of them trained or LoRA of
rank 8; texts of one length. Every way turns micro-batches into one clipped sum of gradients: noise
and optimizer, once a logical batch, are not in it. The ways take turns, `rounds` times, each time
in a process of its own, on the GPU where there is one; on a CPU the time is the process's own.
Memory is the most the process had beyond what it had before the model was made (on a GPU: the most
that was allocated). The embeddings are not tied, as Opacus would take the norms of tied ones for
those of two parameters. Prints Markdown: examples a second and GiB of plain training, and the
other ways' multiples of them, the medians of the rounds with the least and the most.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
import typer

from dpray.methods.dp_sgd.training.clipped_loss import IGNORED, MicroBatch, PerExampleLoss
from dpray.methods.dp_sgd.training.settings import Precision
from dpray.methods.dp_sgd.training.step import TrainingText

MODELS = ("gpt2", "llama")
TUNINGS = ("full", "lora")
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


def losses(model: Any, batch: MicroBatch, precision: Precision) -> torch.Tensor:
    """Mean loss of each example, (B,)."""
    low = precision == "bfloat16"
    with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=low):
        of_tokens = torch.nn.functional.cross_entropy(
            logits_of(model, batch).flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="none"
        )
    return of_tokens.view(len(batch.ids), -1).mean(1)


def logits_of(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Return the logits of all positions but the last, shape (B, T - 1, V)."""
    positions = torch.arange(batch.ids.shape[1], device=batch.ids.device).repeat(len(batch.ids), 1)
    found: torch.Tensor = model(
        input_ids=batch.ids, attention_mask=batch.mask, position_ids=positions, use_cache=False
    ).logits
    return found[:, :-1]


def plain(model: Any, precision: Precision) -> Step:
    def step(batch: MicroBatch) -> None:
        losses(model, batch, precision).sum().backward()

    return step


def dpray(model: Any, precision: Precision, two_passes: bool = False) -> Step:
    loss = PerExampleLoss(model, precision, two_passes).eval()

    def step(batch: MicroBatch) -> None:
        with loss.clipped(batch, 1.0) as clipped:
            clipped.backward()

    return step


def opacus_per_sample(model: Any, precision: Precision) -> Step:
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model.train(), strict=False, loss_reduction="sum")
    trained = [p for p in wrapped.parameters() if p.requires_grad]

    def step(batch: MicroBatch) -> None:
        losses(wrapped, batch, precision).sum().backward()
        with torch.no_grad():
            samples = [p.grad_sample for p in trained]  # type: ignore[attr-defined]
            norms = torch.stack([s.flatten(1).norm(dim=1) for s in samples]).norm(dim=0)
            weights = (1.0 / norms).clamp(max=1.0)
            for p, sample in zip(trained, samples, strict=True):
                clipped = torch.einsum("b,b...->...", weights, sample)
                p.summed = clipped + getattr(p, "summed", 0.0)  # type: ignore[attr-defined]
        wrapped.zero_grad()

    return step


def opacus_ghost(model: Any, precision: Precision) -> Step:
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
        of_examples = losses(wrapped, batch, precision)
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


WAYS: dict[str, Callable[[Any, Precision], Step]] = {
    "plain training": plain,
    "dpray": dpray,
    "dpray, two passes": partial(dpray, two_passes=True),
    "Opacus ghost clipping": opacus_ghost,
    "Opacus per-sample": opacus_per_sample,
}
LOW = ", bfloat16"
"""Added to the name of a way, which is then in bfloat16 where it may be."""


def measure(
    kind: str, tuning: str, way: str, examples: int, length: int, rows: int, size: str
) -> tuple[float, float]:
    """Return examples a second and GiB, in micro-batches of `rows` examples."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for each in MODELS:  # so that what the libraries take is not counted
        plain(make_model(each, tuning, "tiny"), "float32")(batch_of(2, 8, 500))
    if device.type == "cuda":
        gc.collect()  # another way's model
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = peak(device)
    with device:
        model = make_model(kind, tuning, size).to(device)
    step = WAYS[way.removesuffix(LOW)](model, "bfloat16" if way.endswith(LOW) else "float32")
    batch = batch_of(rows, length, model.config.vocab_size).to(device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    step(batch)
    _wait(device)
    began = clock()
    for _ in range(examples // rows):
        step(batch)
    _wait(device)
    took = clock() - began
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
    rounds: int = 3,
    examples: int = 16,
    length: int = 128,
    micro_batch: int = 8,
    size: str = "small",
    bfloat16: bool = False,
    only: str = "",
) -> None:
    spawn = multiprocessing.get_context("spawn")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{name}, {length} tokens, micro-batches of {micro_batch}, {rounds} rounds\n")
    print(f"| model | trained | {' | '.join(WAYS)} |\n|---|---|{'---|' * len(WAYS)}")
    for kind, tuning in product(MODELS, TUNINGS):
        if only not in f"{kind} {tuning}":
            continue
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _, way in product(range(rounds), WAYS):
            of = way + LOW * bfloat16
            with spawn.Pool(1) as pool:
                settings = (kind, tuning, of, examples, length, micro_batch, size)
                found[way].append(pool.apply(measure, settings))
        of_plain = found.pop("plain training")
        speed, memory = (median(figures) for figures in zip(*of_plain, strict=True))
        cells = [kind, tuning, f"{speed:.2f}, {memory:.2f} GiB"]
        for each in found.values():
            ratios = [mine[0] / other[0] for mine, other in zip(each, of_plain, strict=True)]
            of_memory = median(gib for _, gib in each) / memory
            spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
            cells.append(f"{median(ratios):.2f} {spread}, {of_memory:.2f}")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
