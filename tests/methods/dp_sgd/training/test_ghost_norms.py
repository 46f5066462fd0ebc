"""Ghost norms are those of per-example gradients that are formed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dpray.methods.dp_sgd.training import ghost_norms, gradient_parts
from dpray.methods.dp_sgd.training.clipped_loss import MicroBatch, PerExampleLoss, check_norm_rules
from dpray.methods.dp_sgd.training.ghost_norms import GhostNorms, NoNormRule
from dpray.methods.dp_sgd.training.gradient_parts import (
    GradientPart,
    Lookup,
    Outer,
    Whole,
    inner_products,
    squared_norms,
)
from tests.methods.dp_sgd.training.tiny_gradients import (
    VOCABULARY,
    gpt2,
    llama,
    lora,
    plain_gradient,
    texts,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def eager_llama() -> Any:
    model = llama()
    model.set_attn_implementation("eager")
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "gpt2_wide": lambda: gpt2(width=8),  # matrices smaller than T x T: the other way to a product
    "llama": llama,
    "llama_eager": eager_llama,
    "llama_tied": lambda: llama(tied=True),
    "gpt2_lora": lambda: lora(gpt2()),
    "llama_lora": lambda: lora(llama()),
}


@pytest.mark.parametrize("model", MODELS)
def test_norms_are_those_of_the_gradients(model: str) -> None:
    loss = PerExampleLoss(MODELS[model]()).eval()
    batch = texts(5)
    norms = loss.norms(MicroBatch.of(batch), loss)[0]
    plain = torch.stack([plain_gradient(loss.model, text).norm() for text in batch])
    torch.testing.assert_close(norms, plain.double(), rtol=2e-5, atol=0)
    check_norm_rules(loss, VOCABULARY)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_one_trainable_kind_of_layer_at_a_time(name: str) -> None:
    """A wrong rule for a small parameter cannot hide behind the large ones."""
    batch = texts(4, seed=3)
    for part in ("ln_1.weight", "ln_f.bias", "wpe", "c_attn.bias", "layernorm", "q_proj", "norm."):
        model = MODELS[name]()
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(part in parameter_name)
        if not any(p.requires_grad for p in model.parameters()):
            continue
        loss = PerExampleLoss(model).eval()
        plain = torch.stack([plain_gradient(model, text).norm() for text in batch])
        norms = loss.norms(MicroBatch.of(batch), loss)[0]
        torch.testing.assert_close(norms, plain.double(), rtol=5e-5, atol=0)


def dense(part: GradientPart) -> torch.Tensor:
    match part:
        case Outer(left, right):
            return torch.einsum("btm,btn->bmn", left, right)
        case Lookup(ids, row):
            return torch.einsum("btm,btn->bmn", nn.functional.one_hot(ids, 6).float(), row)
        case Whole(gradient):
            return gradient


@pytest.mark.parametrize("positions", [2, 9])
def test_parts_of_one_matrix(positions: int) -> None:
    fixed = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=fixed)

    ids = torch.randint(0, 6, (3, positions), generator=fixed)
    parts: list[GradientPart] = [
        Outer(normal(3, positions, 6), normal(3, positions, 4)),
        Lookup(ids, normal(3, positions, 4)),
        Outer(normal(3, 5, 6), normal(3, 5, 4)),
        Whole(normal(3, 6, 4)),
    ]
    for first in parts:
        for second in parts:
            plain = (dense(first) * dense(second)).sum((1, 2))
            found = inner_products(first, second)
            torch.testing.assert_close(found, plain.double(), rtol=1e-4, atol=1e-4)
    whole = sum((dense(part) for part in parts), torch.zeros(3, 6, 4))
    plain = whole.square().sum((1, 2)).double()
    # A bound is above the norm by 2^-21 of the squared sum of the terms' norms.
    torch.testing.assert_close(squared_norms([parts])[0], plain, rtol=3e-5, atol=0)


def test_a_matrix_that_is_smaller_than_what_it_is_made_of_is_formed() -> None:
    def kinds(model: Any) -> set[type]:
        loss = PerExampleLoss(model).eval()
        recorded = loss.norms(MicroBatch.of(texts(3, longest=6), 3, 7), loss)[1]
        return {type(part) for parts in recorded.all_parts().values() for part in parts}

    assert kinds(lora(llama())) == {Whole}
    assert kinds(llama()) == {Whole, Outer, Lookup}


@pytest.mark.parametrize(("positions", "size"), [(4, 5000), (400, 3)])
def test_a_gradient_whose_terms_cancel_out_is_not_taken_for_a_shorter_one(
    positions: int, size: int
) -> None:
    """Terms come in pairs that differ by a millionth. In float32 the sum of their products is off
    by more than the whole norm, and may be negative."""
    fixed = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, positions, size, generator=fixed) for _ in range(2))
    left[:, 1::2] = left[:, ::2] * (-1 - 1e-6)
    right[:, 1::2] = right[:, ::2]
    # The pairs' sums are exact in float64, and nothing cancels out between pairs.
    pairs, others = left.double()[:, ::2] + left.double()[:, 1::2], right.double()[:, ::2]
    true = ((pairs @ pairs.mT) * (others @ others.mT)).sum((1, 2))
    bound = squared_norms([[Outer(left, right)]])[0]
    terms = (left.double().norm(dim=2) * right.double().norm(dim=2)).sum(1).square()
    assert (bound >= true).all() and (bound <= true + 2.0**-20 * terms).all()
    in_float32 = ((left @ left.mT) * (right @ right.mT)).sum((1, 2))
    assert (in_float32.double() < 0.99 * true).any()


class Logits(nn.Module):
    """Makes a language model of some layers."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.between = between
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, **ignored: Any) -> Any:
        logits = self.head(self.between(self.embedding(input_ids)))
        return type("Output", (), {"logits": logits})


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Flattening(nn.Module):
    """Hands its layer all positions of all examples in one row, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat: torch.Tensor = self.layer(x.reshape(-1, 8))
        return flat.reshape(x.shape)


class Functional(nn.Module):
    """Uses a layer's weight behind its back too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(x)
        return hidden + x @ self.layer.weight


class Mixing(nn.Module):
    """Lets examples see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(x + x.mean((0, 1)))
        return hidden


class FalseRMSNorm(nn.Module):
    """Is named like a norm and has another formula."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 2.0))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (Bilinear(), r"between \(Bilinear\).*scale"),
        (nn.LSTM(8, 8), r"between \(LSTM\)"),
        (nn.LayerNorm((3, 8)), r"between \(LayerNorm\)"),
        (nn.BatchNorm1d(8), r"between \(BatchNorm1d\)"),
    ],
)
def test_a_trainable_layer_without_a_rule_is_refused_by_name(layer: nn.Module, named: str) -> None:
    with pytest.raises(NoNormRule, match=named):
        GhostNorms(Logits(layer))


def test_a_frozen_layer_needs_no_rule() -> None:
    model = Logits(Bilinear())
    model.between.requires_grad_(False)
    check_norm_rules(PerExampleLoss(model).eval(), VOCABULARY)


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (Flattening(), "between.layer: the first dimension"),
        (Functional(), "between.layer.weight: its gradient"),
        (Mixing(), "its gradient"),
        (FalseRMSNorm(), "between.weight: its gradient"),
        (nn.Sequential(nn.Dropout(0.5).train()), "its gradient"),
    ],
)
def test_the_check_finds_what_names_cannot_tell(layer: nn.Module, named: str) -> None:
    torch.manual_seed(0)
    loss = PerExampleLoss(Logits(layer)).eval()
    for module in loss.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    with pytest.raises(NoNormRule, match=named):
        check_norm_rules(loss, VOCABULARY)


def test_a_layer_that_is_used_twice() -> None:
    shared = nn.Linear(8, 8)
    torch.manual_seed(0)
    check_norm_rules(PerExampleLoss(Logits(nn.Sequential(shared, nn.Tanh(), shared))).eval(), 97)


class InPlace(nn.Module):
    """Adds to a layer's output where it lies. That of a linear layer with a bias is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x *= 2
        hidden: torch.Tensor = self.layer(x)
        hidden += x
        return self.norm(hidden.mul_(2))


class _WithOthers(torch.autograd.Function):
    """Gives a tensor as the second of three outputs, as a fused kernel does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return x.mean(-1), x.clone(), x.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        assert gradients[0] is gradients[2] is None
        return gradients[1]


class Fused(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _WithOthers.apply(super().forward(x))[1]  # type: ignore[no-untyped-call]
        return found


@pytest.mark.parametrize("layer", [InPlace, lambda: nn.Sequential(nn.Linear(8, 8), Fused(8, 8))])
def test_outputs_that_are_changed_in_place_and_one_of_several(layer: Any) -> None:
    torch.manual_seed(0)
    check_norm_rules(PerExampleLoss(Logits(layer())).eval(), VOCABULARY)


def test_embeddings_with_rules_of_their_own_are_refused() -> None:
    model = Logits(nn.Identity())
    model.embedding = nn.Embedding(VOCABULARY, 8, max_norm=1.0)
    with pytest.raises(NoNormRule, match="max_norm"):
        GhostNorms(model)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["gpt2", "llama_lora"])
def test_gathered_gradients_are_those_of_each_parameter(
    model: str, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest ones stay by themselves: they would be in memory twice."""
    loss, batch = PerExampleLoss(MODELS[model](), precision).eval(), MicroBatch.of(texts(3))
    monkeypatch.setattr(ghost_norms, "FORMED_AT_ONCE", 100)
    norms_B, recorded = loss.norms(batch, loss)
    assert recorded.gathered is not None
    assert max(shape.numel() for shape in recorded.gathered.shapes.values()) <= 100
    assert any(isinstance(part, Whole) for parts in recorded.parts.values() for part in parts)
    monkeypatch.setattr(gradient_parts, "FORMED_AT_ONCE", 7)  # columns of the matrix
    squares = recorded.squared_norms()
    assert list(squares) == list(recorded.all_parts()) and len(squares) == len(
        loss.trainable_parameters()
    )
    total_B = torch.stack(list(squares.values())).sum(0)
    torch.testing.assert_close(recorded.norms().square(), total_B, rtol=1e-12, atol=0)
    torch.testing.assert_close(norms_B.square(), total_B, rtol=1e-12, atol=0)
    weight_B = torch.tensor([0.5, 0.25, 1.0])
    for parameter, found in recorded.weighted_sums(weight_B).items():
        plain = gradient_parts.weighted_sum(
            recorded.all_parts()[parameter], weight_B, parameter.detach()
        )
        assert found.shape == parameter.shape
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-7)


def test_what_is_recorded_is_the_gradient_after_all_hooks() -> None:
    """Such a hook may be an engine's. What it makes of the gradient reaches the weight."""
    model = Logits(nn.Linear(8, 8))
    loss, batch = PerExampleLoss(model).eval(), MicroBatch.of(texts(2))
    before = loss.norms(batch, loss)[1].squared_norms()
    weight = model.between.weight

    def tripled(module: Any, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * 3)

    model.between.register_forward_hook(tripled)
    after = loss.norms(batch, loss)[1].squared_norms()
    torch.testing.assert_close(after[weight], 9 * before[weight])  # type: ignore[index]


def test_sums_come_in_one_order_whatever_the_shapes() -> None:
    """Ranks of other lengths form other gradients, and DeepSpeed adds up what comes next on each:
    sums of other parameters were added to each other."""
    loss = PerExampleLoss(gpt2()).eval()

    def order(positions: int) -> tuple[int, list[nn.Parameter]]:
        recorded = loss.norms(MicroBatch.of(texts(2, longest=4), 2, positions), loss)[1]
        formed = sum(not parts for parts in recorded.parts.values())
        return formed, list(recorded.weighted_sums(torch.ones(2)))

    (few, of_short), (many, of_long) = order(5), order(60)
    assert few < many and all(a is b for a, b in zip(of_short, of_long, strict=True))
