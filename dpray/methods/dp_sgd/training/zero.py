"""`ZeroTrainer` makes a rank's part of the steps with DeepSpeed ZeRO, wherever the ranks come from:
Ray Train (`ranks.py`) or torchrun. It needs torch and DeepSpeed, and no Ray.

DeepSpeed's engine sums the gradients over ranks and shows each rank's partition of the sum to that
rank's optimizer only, so a hook adds the noise right before the optimizer's step. Everything in
DeepSpeed that would look at the gradients by itself is off: its clipping, its gradient norm, its
loss scale.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from dpray.mechanisms.randomness import new_key
from dpray.methods.dp_sgd.training.clipped_loss import Losses, MicroBatch, PerExampleLoss
from dpray.methods.dp_sgd.training.model import deepspeed_on_stderr, own_part
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep, TrainingText
from dpray.methods.dp_sgd.training.training import ReferenceTrainer, T

BUCKET = 50_000_000
"""The elements of the gradient that are summed over ranks in one call; under stage 3 also the most
weights that are gathered ahead, in all."""


def shared_key(device: torch.device) -> str:
    """Return a `new_key()` of rank 0 to all ranks; it is in no configuration, log or file."""
    keys = [new_key()]
    dist.broadcast_object_list(keys, src=0, device=device)
    return keys[0]


def zero_config(stage: int) -> dict[str, object]:
    """Return DeepSpeed's configuration. Gradients are summed in float32: a sum rounded to fewer
    bits would move with everybody's gradients, beyond the sensitivity."""
    zero: dict[str, object] = {
        "stage": stage,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET,
    }
    if stage == 2:
        zero["compute_grad_norm"] = False
    else:
        # Layers are given up once they have run. Each module that runs gathers another bucket
        # ahead, so that the sum of all needs a bound too.
        zero |= {
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_max_live_parameters": BUCKET,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }


@contextlib.contextmanager
def loading(stage: int) -> Iterator[None]:
    """Have transformers load a model for a stage of ZeRO. For stage 3 all ranks load together and
    split each parameter into parts, so that one after the other is whole on a rank."""
    if stage == 2:
        yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    with deepspeed_on_stderr():
        config = HfDeepSpeedConfig(zero_config(3))  # transformers looks whether it is alive
        yield
        del config


class ZeroTrainer(ReferenceTrainer):
    """A trainer on one rank of an initialised process group.

    Claim: every coordinate of the weights gets its noise once a step. It is in one rank's
    partition, and every rank has a noise key of its own.
    """

    def __init__(
        self,
        step: DpSgdStep,
        settings: TrainingSettings,
        loss: PerExampleLoss,
        device: torch.device,
    ) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._stage = settings.zero_stage
        super().__init__(step, settings, loss, new_key(), device)
        with deepspeed_on_stderr() as deepspeed:
            self._engine, *_ = deepspeed.initialize(
                model=self._loss, optimizer=self._optimizer, config=zero_config(self._stage)
            )
        self._engine.eval()

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def forward(self, *batch: torch.Tensor) -> Losses:
        # DeepSpeed gives up what a backward pass left whole only after its own `backward`. The one
        # that makes the norms is not its own: without this the embeddings stay whole, and other
        # weights are gathered ahead next to them.
        if self._stage == 3:
            self._engine.optimizer.parameter_offload.release_backward_leftovers()
        losses: Losses = self._engine(*batch)
        return losses

    def may_vary_rows(self, full: int) -> bool:
        return False  # all ranks would have to try a shape together

    def accumulate(self, texts: Sequence[TrainingText], shape: tuple[int, int], last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        with self._loss.clipped(
            MicroBatch.of(texts, *shape).to(self._device),
            self._step.clip_norm,
            self.ranks / self._step.expected_batch_size,  # the engine averages over ranks
            forward=self.forward,
        ) as clipped:
            self._engine.backward(clipped, scale_wrt_gas=False)

    def add_noise(self) -> None:
        """Have the optimizer add the noise right before it makes a step in `update`. Under stage 3
        the engine hands it this rank's partitions one by one, each with a step of its own."""

        def add(optimizer: Optimizer, args: object, kwargs: object) -> None:
            self._noise.add_to(optimizer)

        self._hook = self._optimizer.register_step_pre_hook(add)

    def update(self) -> None:
        self._engine.step()
        self._hook.remove()
        self._noise.check(-(-self._coordinates // self.ranks))

    def close(self) -> None:
        self._engine.destroy()

    def _stepped(self) -> Sequence[torch.Tensor]:
        if self._stage == 3:  # its engine hands this rank's partitions to the optimizer one by one
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        return super()._stepped()

    def _mark_moments_initialised(self) -> None:
        if self._stage == 2:
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _weight(self, parameter: torch.Tensor) -> torch.Tensor:
        with deepspeed_on_stderr() as deepspeed, deepspeed.zero.GatheredParameters(parameter):
            return parameter.detach().cpu().clone()

    def _moment(self, parameter: torch.Tensor, kind: str) -> torch.Tensor:
        with deepspeed_on_stderr() as deepspeed:
            moment: torch.Tensor = deepspeed.utils.safe_get_full_optimizer_state(parameter, kind)
        return moment

    def _put_moment(self, parameter: torch.Tensor, kind: str, moment: torch.Tensor) -> None:
        with deepspeed_on_stderr() as deepspeed:
            if self._stage == 2:
                deepspeed.utils.safe_set_full_optimizer_state(parameter, moment, kind)
                return
            mine = own_part(parameter, moment, self.rank)
            deepspeed.utils.safe_set_local_optimizer_state(parameter, mine, kind)
