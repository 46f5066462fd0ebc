"""Norms and clipped sums are those of the per-sample gradients of Opacus.

Opacus takes the norms of tied embeddings for those of two parameters, so the heads are not tied. It
gives an embedding's padding row a gradient, which torch does not, so no text holds that token. It
wants a row of positions an example, or GPT-2's position embedding has one gradient for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus import GradSampleModule

from dpray.training.clipped_loss import IGNORED, PASS_ROUNDING, MicroBatch, PerExampleLoss
from tests.training.tiny_gradients import clipped_sum, gpt2, llama, lora, texts

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # The first layer's input is token ids.
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]

MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: gpt2(tied=False),
    "llama": llama,
    "gpt2_lora": lambda: lora(gpt2(tied=False)),
    "llama_lora": lambda: lora(llama()),
}

BATCH = [text for text in texts(12) if 0 not in text.ids][:6]


def losses_of(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Return each example's mean negative log-likelihood of its own tokens, shape (B,)."""
    positions_BT = torch.arange(batch.ids.shape[1]).repeat(len(batch.ids), 1)
    logits_BTV = model(
        input_ids=batch.ids, attention_mask=batch.mask, position_ids=positions_BT, use_cache=False
    ).logits[:, :-1]
    labels_BT = batch.labels[:, 1:]
    own_BT = labels_BT != IGNORED
    log_p_BTV = torch.log_softmax(logits_BTV.float(), dim=-1)
    log_p_BT = log_p_BTV.gather(2, labels_BT.clamp(min=0).unsqueeze(2)).squeeze(2)
    return -(log_p_BT * own_BT).sum(1) / own_BT.sum(1)


def gradients_by_opacus(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Return the gradients of all trainable parameters, a row per example: (B, parameters)."""
    wrapped = GradSampleModule(model.train(), strict=False, loss_reduction="sum")
    losses_of(wrapped, batch).sum().backward()
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    return torch.cat([p.grad_sample.flatten(1) for p in trained], dim=1)


def without_dropout(model: Any) -> Any:
    """Opacus takes no model in evaluation mode."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("name", MODELS)
def test_ghost_norms_are_those_of_opacus_gradients(name: str) -> None:
    batch = MicroBatch.of(BATCH)
    gradients = gradients_by_opacus(without_dropout(MODELS[name]()), batch)
    loss = PerExampleLoss(MODELS[name]()).eval()
    norms_B = loss.norms(batch, loss)[0]
    assert norms_B.max() > 1.1 * norms_B.min()
    torch.testing.assert_close(norms_B, gradients.norm(dim=1).double(), rtol=2e-5, atol=0)


@pytest.mark.parametrize("two_passes", [False, True], ids=["one_pass", "two_passes"])
@pytest.mark.parametrize("name", MODELS)
def test_clipped_sums_are_those_of_opacus_gradients(name: str, two_passes: bool) -> None:
    gradients = gradients_by_opacus(without_dropout(MODELS[name]()), MicroBatch.of(BATCH))
    norms_B = gradients.norm(dim=1)
    clip_norm = float(norms_B.median())
    by_opacus = (clip_norm / norms_B).clamp(max=1.0) @ gradients

    loss = PerExampleLoss(MODELS[name]()).eval()
    room = 1 + PASS_ROUNDING["float32"] if two_passes else 1.0
    ours = clipped_sum(loss, BATCH, clip_norm * room, size=4, two_passes=two_passes)

    assert (norms_B > clip_norm).any() and (norms_B < clip_norm).any()
    torch.testing.assert_close(ours, by_opacus, rtol=1e-4, atol=2e-6)
