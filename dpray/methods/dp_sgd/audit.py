"""The audit of DP-SGD sends canaries with orthogonal gradients through the whole training loop.

The model is a table with one number for each canary. So a canary's gradient lies on a coordinate of
its own and is longer than the clip norm, and the weights show what a step released of it: the worst
case of Nasr et al. (2021). Sampling, per-example norms, clipping, noise and the optimizer's step
are the code that trains. For canaries among the records, `released_losses` evaluates the model that
a run released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dpray.accounting.event import Array
from dpray.config.config import Config
from dpray.engines.model_path import resolve_model
from dpray.extras import Late
from dpray.mechanisms.monte_carlo import Scores, Target
from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.dp_sgd.algorithm import DpSgd, fine_tune
from dpray.methods.dp_sgd.control_codes import control_codes, text_encoder
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.methods.dp_sgd.training.clipped_loss import MicroBatch, PerExampleLoss
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep, TrainingText
from dpray.methods.dp_sgd.training.training import ReferenceTrainer
from dpray.runs.plan import LossesOf

if TYPE_CHECKING:
    import peft
else:
    peft = Late("peft")

MOST_STEPS = 1000
"""The audit makes at most this many steps. Of a longer plan, it audits the claim for this many."""

TOO_LONG = 10.0
"""The length of a canary's gradient before it is clipped, in clip norms."""

MOST_CANARIES = 20_000
"""The most canaries of one training."""

SAME = 1e-6
"""Two steps that release values this near to each other, in clipped gradients, had the same noise.
"""

TEXTS_PER_BATCH = 64


class CanaryTable(nn.Module):
    """A model of one number for each canary. Canary i is the text (i + 1, 0); its loss depends on
    the table's entry i + 1 only."""

    def __init__(self, canaries: int, gradient: float) -> None:
        super().__init__()
        self.table = nn.Embedding(canaries + 1, 1)
        nn.init.zeros_(self.table.weight)
        self.register_buffer("scale", torch.tensor([gradient, -gradient]))

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        # At 0 both tokens are equally likely, and the loss falls by `gradient` a unit.
        return SimpleNamespace(logits=self.table(input_ids) * self.scale)


class CanaryTrainer:
    """A `Trainer` that only records which canaries come at each step."""

    rank, ranks = 0, 1

    def __init__(self) -> None:
        self.batches: list[npt.NDArray[np.int64]] = []
        self._batch: list[int] = []

    def may_vary_rows(self, full: int) -> bool:
        return True

    def accumulate(self, texts: Sequence[TrainingText], shape: tuple[int, int], last: bool) -> None:
        self._batch += [text.ids[0] - 1 for text in texts]

    def add_noise(self) -> None: ...

    def update(self) -> None:
        self.batches.append(np.array(self._batch, dtype=np.int64))
        self._batch = []


def train(
    plan: DpSgd, canaries: int, included: Sequence[int], see: Callable[[Array], None]
) -> None:
    """Train on the included canaries in one process; training on ranks is tested against that.
    `see` gets what each step released of every canary, in units of a clipped gradient; then the
    weights are put back, so that every step begins at 0."""
    mechanism = plan.mechanism
    model = CanaryTable(canaries, TOO_LONG * mechanism.clip_norm)
    loss = PerExampleLoss(model, plan.settings.precision).eval()
    trainer = ReferenceTrainer(mechanism, plan.settings, loss, new_key())
    clipped = mechanism.clip_norm / mechanism.expected_batch_size
    weights = model.table.weight.detach()

    def after_step(t: int) -> bool:
        see(weights.double().numpy()[1:, 0] / clipped)
        weights.zero_()
        return True

    fine_tune(plan, _units(included), trainer, generator(new_key()), after_step=after_step)


def foretell(plan: DpSgd, canaries: int) -> list[npt.NDArray[np.int64]]:
    """Return the batches of another training: what anybody may know about the sampler."""
    rehearsal = CanaryTrainer()
    fine_tune(plan, _units(range(canaries)), rehearsal, generator(new_key()))
    return rehearsal.batches


def _units(included: Sequence[int]) -> list[list[TrainingText]]:
    return [[TrainingText((number + 1, 0), given=1)] for number in included]


def log_ratio(mechanism: DpSgdStep, x_m: Array) -> Array:
    """Return the log-likelihood ratio of one step with the canary's unit to one without it (Abadi
    et al. 2016): `log(1 - q + q e^((2x - 1) / (2 sigma^2)))`."""
    q, sigma = mechanism.sampling_probability, mechanism.noise_multiplier
    joined = np.log(q) + (2 * x_m - 1) / (2 * sigma**2)
    ratio: Array = joined if q == 1 else np.logaddexp(np.log1p(-q), joined)
    return ratio


def training_target(plan: DpSgd) -> Target:
    """Audit one canary, in the data or not. A training with m canaries is m trials, whose sampling
    and noise are assumed to be independent of each other.

    Statistics: the log-likelihood ratio; the sum; the sum over the steps at which the canary came
    in a rehearsal, which is informative only if batches can be predicted; and the number of steps
    that released what the step before did, which is 0 unless their noise is the same.
    """
    plan = _audited(plan)

    def draw(with_unit: bool, trials: int) -> Scores:
        foretold = iter(foretell(plan, trials))
        scores, before = np.zeros((4, trials)), np.full(trials, np.inf)

        def see(x_m: Array) -> None:
            expected = next(foretold)
            scores[3] -= np.abs(x_m - before) < SAME
            before[:] = x_m
            scores[0] += log_ratio(plan.mechanism, x_m)
            scores[1] += x_m
            scores[2, expected] += x_m[expected]

        train(plan, trials, range(trials) if with_unit else (), see)
        return scores

    return Target(
        f"DP-SGD, {plan.steps} steps",
        "one more gradient, longer than the clip norm",
        plan.dp_event,
        draw,
        at_once=MOST_CANARIES,
    )


def _audited(plan: DpSgd) -> DpSgd:
    """Return the plan with plain SGD at rate 1, which shows the noisy mean itself: an optimizer
    only post-processes it."""
    settings = TrainingSettings(optimizer="sgd", learning_rate=1.0, micro_batch_size=512)
    return replace(plan, steps=min(plan.steps, MOST_STEPS), repeats=0, settings=settings)


def released_losses(config: Config, settings: DpSgdSettings, folder: Path) -> LossesOf:
    """Load the model folder, or the adapter's folder, that a run of `config` released, to evaluate
    it. A text's loss is the mean negative log-likelihood of its tokens after its control code."""
    base = resolve_model(config.engine.model)
    lora = settings.tuning == "lora"
    model: Any = AutoModelForCausalLM.from_pretrained(
        base if lora else folder, dtype="float32", trust_remote_code=False
    )
    if lora:
        model = peft.PeftModel.from_pretrained(model, str(folder))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loss = PerExampleLoss(model.requires_grad_(False)).eval().to(device)
    encoder, codes = text_encoder(config.engine, settings), control_codes(config.data, settings)

    def losses(texts: Sequence[str], values: Mapping[str, str]) -> list[float]:
        encoded = [encoder.training_text(codes.code(values), text) for text in texts]
        found: list[float] = []
        with torch.inference_mode():
            for start in range(0, len(encoded), TEXTS_PER_BATCH):
                batch = MicroBatch.of(encoded[start : start + TEXTS_PER_BATCH]).to(device)
                losses_B, _ = loss(batch.ids, batch.mask, batch.labels)
                found += losses_B.tolist()
        return found

    return losses
