"""Every rank of `test_zero.py` runs `rank_main`, in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer

from dpray.ledger.ledger import NullLedger
from dpray.mechanisms.randomness import generator
from dpray.methods.dp_sgd.algorithm import DpSgd, Units, fine_tune
from dpray.methods.dp_sgd.training.clipped_loss import PerExampleLoss
from dpray.methods.dp_sgd.training.ghost_norms import NoNormRule
from dpray.methods.dp_sgd.training.journal import Journal, TrainingState, shard_of
from dpray.methods.dp_sgd.training.model import check_norms, load_loss, put_weights
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep, TrainingText
from dpray.methods.dp_sgd.training.training import GradientNoise
from tests.methods.dp_sgd.training.states import state_of, weights_of
from tests.methods.dp_sgd.training.tiny_gradients import gpt2, llama, lora, texts

STAGES = (2, 3)
TUNINGS = ("full", "lora")
SAMPLING_KEY = "5a" * 32
SIGMA, C, B = 1.3, 0.5, 4.0
STD = SIGMA * C / B


def poisoned_lora() -> Any:
    """Return adapters on a frozen model in which token 96 makes a text's loss not a number."""
    model = lora(llama())
    with torch.no_grad():
        model.get_input_embeddings().weight[96] = torch.inf
    return model


MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "llama_lora": poisoned_lora}


CASES: tuple[tuple[str, Any, Any], ...] = (
    ("gpt2", "adamw", "float32"),
    ("llama_lora", "sgd", "float32"),
    ("llama_lora", "sgd", "bfloat16"),
)
"""Model, optimizer, precision."""


def plan(sigma: float, optimizer: Any = "sgd", stage: Any = 2) -> DpSgd:
    step = DpSgdStep(
        sampling_probability=0.2,
        noise_multiplier=sigma,
        clip_norm=C,
        expected_batch_size=B,
    )
    rate = 1.0 if optimizer == "sgd" else 0.01
    settings = TrainingSettings(
        micro_batch_size=1, learning_rate=rate, optimizer=optimizer, zero_stage=stage
    )
    return DpSgd(step, 4, settings)


def units() -> Units:
    """Return units of which the key above draws batches of 5, 3, 2 and 5; the loss of one is not
    finite in `llama_lora`."""
    bad = TrainingText((5, 96, 7, 8, 9), 0)
    return [[bad], *([text] for text in texts(17))]


def steps(trainer: Any, optimizer: Any, start: int, end: int) -> None:
    """Make steps almost without noise. AdamW gets an eps that keeps rounding errors small."""
    if optimizer == "adamw":
        of_trainer: Optimizer = trainer._optimizer
        for group in of_trainer.param_groups:
            group["eps"] = 1e-3
    drawn = generator(SAMPLING_KEY)
    until = replace(plan(1e-9, optimizer), steps=end)
    silent = Silent()
    fine_tune(replace(until, steps=start), units(), silent, drawn)
    fine_tune(until, units(), trainer, drawn, start=start)


class Silent:
    """Does nothing with the batches, which are drawn nevertheless."""

    rank, ranks = 0, 1

    def may_vary_rows(self, full: int) -> bool:
        return False

    def accumulate(
        self, texts: Sequence[TrainingText], shape: tuple[int, int], last: bool
    ) -> None: ...

    def add_noise(self) -> None: ...

    def update(self) -> None: ...


def rank_main(rank: int, ranks: int, port: int, folder: Path) -> None:
    """Save, for every stage and model, the weights after four steps, and a step of noise alone."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for stage in STAGES:
        for case in CASES:
            saved = _trained(folder / f"state-{stage}-{'-'.join(case)}", stage, *case)
            torch.save(saved, folder / f"{stage}-{'-'.join(case)}-{rank}.pt")
        torch.save(_noise_alone(stage), folder / f"{stage}-noise-{rank}.pt")
    for tuning in TUNINGS:
        saved = _trained_in_parts(folder, tuning)
        torch.save(saved, folder / f"3-parts-{tuning}-{rank}.pt")
        share = _most_whole(str(folder / "deep"), tuning)
        (folder / f"most-whole-{tuning}-{rank}").write_text(str(share))
    (folder / f"refused-{rank}").write_text(_refused(str(folder / "base")))
    dist.destroy_process_group()


def stored(trainer: Any, folder: Path, steps: int) -> TrainingState:
    """Store the state in shards, as a training does, and return it as the next start reads it."""
    journal = Journal(NullLedger(), "run", "attempt", str(folder), steps, steps)
    shard = shard_of(trainer.tensors(), trainer.rank, trainer.ranks)
    shards = trainer.gather(journal.write(0, trainer.rank, shard))
    if trainer.rank == 0:
        journal.publish(0, steps - 1, shards)
    trainer.gather(None)
    state = journal.latest(trainer.rank, trainer.ranks)
    assert state is not None and len(shards) == trainer.ranks
    whole = state_of(trainer, steps)
    kinds = [(state.weights, whole.weights)]
    kinds += [(state.moments[kind], moments) for kind, moments in whole.moments.items()]
    for found, expected in kinds:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    return replace(state, weights={name: state.weights[name] for name in whole.weights})


def _trained(
    folder: Path, stage: int, name: str, optimizer: Any, precision: Any
) -> dict[str, torch.Tensor]:
    """Return the weights after four steps; those of AdamW by two trainers, the second one made from
    the state that the first one left."""
    from dpray.methods.dp_sgd.training.zero import ZeroTrainer

    state: TrainingState | None = None
    halves = ((0, 2), (2, 4)) if optimizer == "adamw" else ((0, 4),)
    for start, end in halves:
        loss = PerExampleLoss(MODELS[name](), precision, two_passes=stage == 3).eval()
        if state is not None:
            put_weights(loss, state.weights)
        ours = plan(1e-9, optimizer, stage)
        trainer = ZeroTrainer(ours.mechanism, ours.settings, loss, torch.device("cpu"))
        if state is not None:
            trainer.restore(state)
        steps(trainer, optimizer, start, end)
        state = stored(trainer, folder, end)
        trainer.close()
    assert state is not None
    return dict(state.weights)


def in_parts(tuning: Any) -> DpSgd:
    """Return the plan of the training of a model that is loaded in parts."""
    ours = plan(1e-9, "adamw", stage=3)
    return replace(ours, settings=ours.settings.model_copy(update={"tuning": tuning}))


def _trained_in_parts(folder: Path, tuning: str) -> dict[str, torch.Tensor]:
    """Return the weights after four steps, made by two trainers like those of AdamW above."""
    from dpray.methods.dp_sgd.training.zero import ZeroTrainer, loading

    ours, state = in_parts(tuning), None
    for start, end in ((0, 2), (2, 4)):
        loss = load_loss(str(folder / "base"), ours.settings, loading(3))
        base = [p for name, p in loss.named_parameters() if "lora_" not in name]
        assert base and all(hasattr(p, "ds_id") and p.numel() == 0 for p in base)
        if state is not None:
            put_weights(loss, state.weights)
        trainer = ZeroTrainer(ours.mechanism, ours.settings, loss, torch.device("cpu"))
        if state is not None:
            trainer.restore(state)
        steps(trainer, "adamw", start, end)
        state = stored(trainer, folder / f"state-{tuning}", end)
        trainer.close()
    assert state is not None
    return dict(state.weights)


def deep_llama() -> Any:
    """Return a model of 28 matrices, each large enough for DeepSpeed to part it, between two that
    are ten times as large."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=3200,
        hidden_size=320,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=5,
    )
    return LlamaForCausalLM(config)


def _most_whole(folder: str, tuning: Any) -> float:
    """Return the largest share of the parted weights that this rank had whole or was gathering at
    once, from the loading of the model to the end of a step. A weight that the graph of a backward
    pass keeps alive counts, though the parameter has given it up."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    from dpray.methods.dp_sgd.training import zero

    ours, most = in_parts(tuning), 0
    bucket, zero.BUCKET = zero.BUCKET, 100_000
    loss: Any = load_loss(folder, ours.settings, zero.loading(3))
    gathered: dict[int, tuple[StorageWeakRef, int]] = {}

    def parted() -> list[Any]:
        return [p for p in loss.parameters() if not getattr(p, "ds_persist", True)]

    def look(*_: object) -> None:
        nonlocal most
        coming = 0
        for parameter in parted():
            storage, part = parameter.untyped_storage(), parameter.ds_tensor.untyped_storage()
            if storage._cdata == part._cdata:  # on one rank
                continue
            if parameter.numel():
                gathered[storage._cdata] = StorageWeakRef(storage), parameter.ds_numel
            elif parameter.ds_status == ZeroParamStatus.INFLIGHT:
                coming += parameter.ds_numel
        held = sum(size for storage, size in gathered.values() if not storage.expired())
        most = max(most, held + coming)

    watched = register_module_forward_hook(look)
    trainer = zero.ZeroTrainer(ours.mechanism, ours.settings, loss, torch.device("cpu"))
    for parameter in loss.trainable_parameters().values():
        parameter.register_hook(look)
    trainer.accumulate([TrainingText((5, 6, 7, 8), 0)] * 2, (2, 7), last=True)
    trainer.add_noise()
    trainer.update()
    watched.remove()
    trainer.close()
    zero.BUCKET = bucket
    return most / sum(p.ds_numel for p in parted())


def _refused(folder: str) -> str:
    """Return why a model is refused whose last norm's weight is used outside it too."""
    from dpray.methods.dp_sgd.training.zero import ZeroTrainer, loading

    ours = in_parts("full")
    loss: Any = load_loss(folder, ours.settings, loading(3))
    norm = loss.model.transformer.ln_f
    norm.register_forward_hook(lambda layer, given, output: output + layer.weight)
    trainer = ZeroTrainer(ours.mechanism, ours.settings, loss, torch.device("cpu"))
    with pytest.raises(NoNormRule) as refused:
        check_norms(loss, trainer.forward)
    return f"model.{refused.value}"


def _noise_alone(stage: int) -> dict[str, torch.Tensor]:
    """Return how far one step on an empty batch moved the weights, and what this rank drew."""
    from dpray.methods.dp_sgd.training.zero import ZeroTrainer

    loss = PerExampleLoss(gpt2(), two_passes=stage == 3).eval()
    ours = plan(SIGMA, stage=stage)
    trainer = ZeroTrainer(ours.mechanism, ours.settings, loss, torch.device("cpu"))
    before = flat(weights_of(trainer))
    drawn: list[torch.Tensor] = []
    add = GradientNoise.add_

    def listening(noise: GradientNoise, gradient: torch.Tensor) -> None:
        without = gradient.clone()
        add(noise, gradient)
        drawn.append((gradient - without).reshape(-1))

    GradientNoise.add_ = listening  # type: ignore[method-assign]
    trainer.accumulate((), (1, 2), last=True)
    trainer.add_noise()
    trainer.update()
    GradientNoise.add_ = add  # type: ignore[method-assign]
    moved = flat(weights_of(trainer)) - before
    trainer.close()
    return {"moved": moved, "drawn": torch.cat(drawn)}


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weight.reshape(-1) for weight in weights.values()])
