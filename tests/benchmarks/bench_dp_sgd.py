"""Per-example clipping beside plain training and Opacus: examples a second, and peak memory.

    python -m tests.benchmarks.bench_dp_sgd [--examples 32] [--length 128] [--micro-batch 8]

A GPT-2-small-shaped and a Llama-shaped model with random weights, all of them trained or LoRA of
rank 8; texts of one length. Every way runs in a process of its own, on the GPU where there is one,
and turns micro-batches into one clipped sum of gradients: noise and optimizer, once a logical
batch, are not in it. Memory is the most the process had beyond what it had before the model was
made (on a GPU: the most that was allocated). The embeddings are not tied, as Opacus would take the
norms of tied ones for those of two parameters. Prints Markdown, the targets first.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import typer

from dpray.training.clipped_loss import IGNORED, MicroBatch, PerExampleLoss
from dpray.training.step import TrainingText

MODELS = ("gpt2", "llama")
TUNINGS = ("full", "lora")
TARGETS = """Targets: as many examples a second as Opacus ghost clipping; 0.6 of plain training,
0.8 with LoRA; at most 1.2 times its memory.
"""

Step = Callable[[MicroBatch], None]
"""Adds what a micro-batch brings to the parameters' gradients."""


def make_model(kind: str, tuning: str, tiny: bool) -> Any:
    """GPT-2 small with its own head: 163 M parameters; Llama: 110 M; `tiny`: to try the script."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        shape = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 500} if tiny else {}
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model: Any = GPT2LMHeadModel(GPT2Config(tie_word_embeddings=False, **none, **shape))
    else:
        width, layers, vocabulary = (64, 2, 500) if tiny else (640, 12, 32_000)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            max_position_embeddings=1024,
        )
        model = LlamaForCausalLM(config)
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


def plain(model: Any) -> Step:
    return lambda batch: losses(model, batch).sum().backward()


def dpray(model: Any, two_passes: bool = False) -> Step:
    loss = PerExampleLoss(model).eval()

    def step(batch: MicroBatch) -> None:
        with loss.clipped(batch, 1.0, two_passes=two_passes) as clipped:
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
}


def measure(
    kind: str, tuning: str, way: str, examples: int, length: int, size: int, tiny: bool
) -> tuple[float, float]:
    """Examples a second and GiB."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for each in MODELS:  # so that what the libraries take is not counted
        plain(make_model(each, tuning, True))(batch_of(2, 8, 500))
    before = peak(device)
    model = make_model(kind, tuning, tiny).to(device)
    step = WAYS[way](model)
    batch = batch_of(size, length, model.config.vocab_size).to(device)
    step(batch)
    began = time.perf_counter()
    for _ in range(examples // size):
        step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    return examples // size * size / took, peak(device) - before


def batch_of(size: int, length: int, vocabulary: int) -> MicroBatch:
    fixed = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocabulary, (size, length), generator=fixed).tolist()
    batch = MicroBatch.of([TrainingText(tuple(row), 1) for row in ids])
    assert (batch.labels[:, 1:] != IGNORED).all()
    return batch


def peak(device: torch.device) -> float:
    """GiB: of this process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(
    examples: int = 32, length: int = 128, micro_batch: int = 8, only: str = "", tiny: bool = False
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
                    settings = (kind, tuning, way, examples, length, micro_batch, tiny)
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
