"""The DP-KPS paper's classifier has three fully connected layers on embeddings, with or without
Deep CORAL (Nagesh et al. 2025, Section 3.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from dpray.evaluation.downstream import Embedded, Fit

WIDTHS = (256, 128)
EPOCHS = 10
BATCH = 64
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Network:
    """A trained network; `classes` are the labels of its outputs."""

    layers: nn.Sequential
    mean: torch.Tensor
    scale: float
    classes: np.ndarray

    def predict(self, vectors: np.ndarray) -> np.ndarray:
        """Return the most likely label of each row."""
        with torch.inference_mode():
            scores = self.layers(self.scaled(vectors))
        found: np.ndarray = self.classes[scores.argmax(dim=1).numpy()]
        return found

    def scaled(self, vectors: np.ndarray) -> torch.Tensor:
        return (torch.from_numpy(np.asarray(vectors, dtype=np.float32)) - self.mean) * self.scale


def three_layer_network(
    train: Embedded, target_vectors: np.ndarray | None = None, seed: int = 0
) -> Network:
    """Train three fully connected layers on frozen embeddings, by Adam on the cross-entropy (Nagesh
    et al. 2025, Section 3.1, who also fine-tune the embedding model below them and state no
    widths). The same `seed` gives the same network.

    `target_vectors`, shape (records, dimension), are unlabelled embeddings of the texts that the
    network is meant for: with them, each step adds the distance of Deep CORAL (`coral`) between the
    last hidden features of its batch and those of as many target vectors. Sun and Saenko (2016)
    take the outputs instead, which costs several points of accuracy on AG News; at the features it
    costs none.

    Raises ValueError for fewer than two labels.
    """
    classes, labels = np.unique(train.labels, return_inverse=True)
    if len(classes) < 2:
        raise ValueError("a classifier needs two labels")
    generator = torch.Generator().manual_seed(seed)
    layers = _layers((train.vectors.shape[1], *WIDTHS, len(classes)), generator)
    mean_D = torch.from_numpy(train.vectors.mean(axis=0, dtype=np.float64)).float()
    # One scale for all coordinates: the layers' inputs have variance 1 on average.
    scale = 1.0 / max(float(train.vectors.std(axis=0, dtype=np.float64).mean()), 1e-6)
    network = Network(layers, mean_D, scale, classes)
    target_MD = None if target_vectors is None else network.scaled(target_vectors)
    with _one_thread():
        _fit(layers, network.scaled(train.vectors), torch.from_numpy(labels), target_MD, generator)
    return network


NETWORKS: Mapping[str, Fit] = {
    "3-layer network on embeddings": lambda train, _, seed: three_layer_network(train, None, seed),
    "3-layer network with Deep CORAL": three_layer_network,
}


def coral(a_NC: torch.Tensor, b_MC: torch.Tensor) -> torch.Tensor:
    """Return `|C_a - C_b|_F^2 / (4 d^2)` of the covariances of two batches of d features (Sun and
    Saenko 2016, Eq. 1 to 3), of two rows or more each."""
    return (a_NC.T.cov() - b_MC.T.cov()).square().sum() / (4 * a_NC.shape[1] ** 2)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Give torch one thread: on a busy machine, threads waiting for one another made these small
    steps eight times slower, and one thread always adds up in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fit(
    layers: nn.Sequential,
    x_ND: torch.Tensor,
    y_N: torch.Tensor,
    target_MD: torch.Tensor | None,
    generator: torch.Generator,
) -> None:
    optimizer = torch.optim.Adam(layers.parameters(), LEARNING_RATE)
    body, head = layers[:-1], layers[-1]
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x_ND), generator=generator).split(BATCH):
            features = body(x_ND[rows])
            loss = nn.functional.cross_entropy(head(features), y_N[rows])
            if target_MD is not None and min(len(rows), len(target_MD)) > 1:
                drawn = torch.randint(len(target_MD), (BATCH,), generator=generator)
                loss = loss + coral(features, body(target_MD[drawn]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def _layers(widths: tuple[int, ...], generator: torch.Generator) -> nn.Sequential:
    """Make linear layers with ReLU between them, He's uniform weights and zero biases."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
        nn.init.kaiming_uniform_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])
