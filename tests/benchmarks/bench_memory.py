"""This script counts the bytes that a parameter takes on each rank in DP-SGD under ZeRO, by kind,
and says what follows for the largest model.

    python -m tests.benchmarks.bench_memory [--only full] [--layers 3] [--width 384]

Llamas with random weights are trained on the CPU for two steps of two micro-batches, on one rank
and on two. The bytes are those of all tensors that Python can reach, by their storages: exact, and
the same on a GPU. The difference between a model of 1 block and one of `layers` is divided by that
of their parameters, so that buckets, embeddings and activations fall out. Under stage 3 a thread
looks every 2 ms how many bytes of the parameters are whole on a rank, from before the model is
loaded until after the last step. Prints Markdown, three tables for each tuning when it is measured
(some five minutes on two busy cores); the second table is arithmetic.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer

from dpray.methods.dp_sgd.training import ranks as zero
from dpray.methods.dp_sgd.training.model import deepspeed_on_stderr, load_loss
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep, TrainingText
from dpray.methods.dp_sgd.training.training import shape_of

STEP = DpSgdStep(0.5, 1.0, 1.0, 4.0)
KINDS = ("weights", "optimizer", "sum between", "sum within")
FREE = 60e9
"""Bytes of a GPU of 80 GB for what grows with the parameters; the rest is for activations, the
buckets, and the largest layer, which is whole while it runs."""
GPUS = (1, 8, 64, 512)

Bytes = dict[str, float]
Case = tuple[int, int, str]
"""Ranks, stage, and which of the two models."""


def make_model(folder: Path, width: int, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def size_of(tensors: Any) -> float:
    """Bytes of the tensors' storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return float(sum(storages.values()))


def all_tensors() -> list[torch.Tensor]:
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return found + [each.grad for each in found if each.is_leaf and each.grad is not None]


def weights_of(loss: Any) -> list[Any]:
    own = list(loss.parameters())
    return own + [p.ds_tensor for p in own if hasattr(p, "ds_id")]


@contextmanager
def watching(found: Bytes) -> Iterator[None]:
    """Keep the most bytes, of the parameters that DeepSpeed parts, that were whole at once."""
    from deepspeed.runtime.zero.partition_parameters import Init

    made: list[Any] = []
    convert, ended = Init._convert_to_deepspeed_param, threading.Event()

    def noted(init: Any, parameter: Any) -> None:
        made.append(parameter)
        convert(init, parameter)

    def look() -> None:
        while not ended.wait(0.002):
            found["whole"] = max(found.get("whole", 0.0), size_of(list(made)))

    Init._convert_to_deepspeed_param = noted
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        Init._convert_to_deepspeed_param = convert


def measure(folder: str, tuning: Any, stage: Any) -> Bytes:
    """The bytes of each kind on this rank."""
    found, before = Bytes(), size_of(all_tensors())
    settings = TrainingSettings(tuning=tuning, zero_stage=stage)
    with watching(found) if stage == 3 else nullcontext():
        began = time.perf_counter()
        loss: Any = load_loss(folder, settings, zero.loading(stage))
        trainer: Any = zero.ZeroTrainer(STEP, settings, loss, torch.device("cpu"))
        found["seconds"] = time.perf_counter() - began
        backward = trainer._engine.backward

        def moments() -> list[torch.Tensor]:
            states = trainer._optimizer.state.values()
            return [each for state in states for each in state.values()]

        def rest() -> float:
            return size_of(all_tensors()) - before - size_of([*weights_of(loss), *moments()])

        def backward_after_a_look(*given: Any, **named: Any) -> None:
            found["sum within"] = rest()
            backward(*given, **named)

        trainer._engine.backward = backward_after_a_look
        for _ in range(2):
            for last in (False, True):
                trainer.accumulate([TrainingText((5, 6, 7, 8), 0)] * 2, (2, 9), last)
            found["sum between"] = rest()
            trainer.add_noise()
            trainer.update()
        found["weights"], found["optimizer"] = size_of(weights_of(loss)), size_of(moments())
        sizes = [shape_of(p).numel() for p in loss.parameters()]
        found["parameters"], found["largest"] = sum(sizes), max(sizes)
    trainer.close()
    return found


def rank_main(rank: int, ranks: int, port: int, folder: str, tuning: str) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    zero.BUCKET = 500_000  # elements: fewer than the models have
    with deepspeed_on_stderr():
        pass
    found: dict[Case, Bytes] = {}
    for stage in (2, 3):  # 3 last: it leaves another linear function behind
        for model in ("small", "large"):
            found[ranks, stage, model] = measure(f"{folder}/{model}", tuning, stage)
    if rank == 0:
        torch.save(found, f"{folder}/{ranks}.pt")
    dist.destroy_process_group()


def main(only: str = "", layers: int = 3, width: int = 384) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "small", width, 1)
        make_model(Path(folder) / "large", width, layers)
        for tuning in ("full", "lora"):
            if only in tuning:
                show(tuning, found_on_ranks(folder, tuning))


def found_on_ranks(folder: str, tuning: str) -> dict[Case, Bytes]:
    found: dict[Case, Bytes] = {}
    for ranks in (1, 2):
        place = (ranks, 29_400 + os.getpid() % 500, folder, tuning)
        torch.multiprocessing.start_processes(rank_main, place, nprocs=ranks)
        found |= torch.load(f"{folder}/{ranks}.pt")
    return found


def show(tuning: str, found: dict[Case, Bytes]) -> None:
    """Print the tables of a tuning."""

    def of_each(ranks: int, stage: int) -> list[float]:
        small, large = (found[ranks, stage, model] for model in ("small", "large"))
        more = large["parameters"] - small["parameters"]
        return [(large[kind] - small[kind]) / more for kind in KINDS]

    print("| tuning | stage | ranks | weights | optimizer | sum between | sum within | in all |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    lines = []
    for stage in (2, 3):
        in_all = []
        for ranks in (1, 2):
            weights, optimizer, between, within = of_each(ranks, stage)
            in_all.append(weights + optimizer + max(between, within))
            numbers = (weights, optimizer, between, within, in_all[-1])
            cells = " | ".join(f"{each:#.3g}" for each in numbers)
            print(f"| {tuning} | {stage} | {ranks} | {cells} |")
        shared = 2 * (in_all[0] - in_all[1])  # in_all is whole + shared / ranks
        whole = in_all[0] - shared
        most = " | ".join(f"{FREE / (whole + shared / gpus) / 1e9:,.1f}" for gpus in GPUS)
        lines.append(f"| {tuning} | {stage} | {whole:.2f} + {shared:.2f} / GPUs | {most} |")
    print(f"\n| tuning | stage | bytes | {' | '.join(f'{gpus} GPUs' for gpus in GPUS)} |")
    print("|---|---|---|---:|---:|---:|---:|")
    print("\n".join(lines))
    # On one rank a weight is whole without being gathered.
    large = found[2, 3, "large"]
    sizes = (4 * large["parameters"], large["whole"], 4 * large["largest"])
    print("\n| tuning | the model, MB | most whole at once, MB | largest parameter, MB |")
    print("|---|---:|---:|---:|")
    print(f"| {tuning} | {' | '.join(f'{each / 1e6:,.1f}' for each in sizes)} |\n", flush=True)


if __name__ == "__main__":
    typer.run(main)
