"""Exact integer noise for integer counts, by the samplers of `opendp`.

The samplers are those of Canonne, Kamath and Steinke (2020), in integer arithmetic on the exact
rational value of the scale. The bits come from OpenSSL's cryptographic generator inside `opendp`.
The operating system seeds it, and seeds it again after a fork.

`opendp` adds in big integers and then clips the sum to int64, which is post-processing: an extreme
count raises no error that would reveal it. A scale above `MAX_SCALE` is refused, because the noise
itself would be clipped.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from types import ModuleType

import numpy as np
import numpy.typing as npt

INTEGER_NOISE_SOURCE = (
    "exact discrete Laplace and discrete Gaussian samplers of OpenDP (Canonne, Kamath, Steinke "
    "2020, in integer arithmetic: no floating-point caveat), fed by OpenSSL's cryptographic "
    "generator, which the operating system seeds"
)
MAX_SCALE = 2.0**52

Counts = npt.NDArray[np.int64]


def discrete_laplace(counts_N: npt.NDArray[np.integer], scale: float) -> Counts:
    """Return `counts_N` plus independent noise of mass proportional to exp(-|x| / scale), int64.

    Carries no guarantee by itself: with an L1 sensitivity of k it is k/scale-DP, see
    `dpray.accounting.events.DiscreteLaplace`. Raises ValueError for a scale that is not a number
    over 0 and at most `MAX_SCALE` and for a shape other than (N,); TypeError for counts that are
    not integers.

    >>> noisy = discrete_laplace(np.array([12, 0, 7]), scale=2.0)
    >>> noisy.dtype, noisy.shape
    (dtype('int64'), (3,))
    """
    scale, dp = checked_scale(scale), _opendp()
    space = dp.vector_domain(dp.atom_domain(T=dp.i64)), dp.l1_distance(T=dp.i64)
    return _noisy(dp.m.make_laplace(*space, scale=scale), counts_N)


def discrete_gaussian(counts_N: npt.NDArray[np.integer], sigma: float) -> Counts:
    """Return `counts_N` plus independent noise of mass proportional to exp(-x^2 / (2 sigma^2)),
    int64; `sigma` is a standard deviation.

    Carries no guarantee by itself: with an L2 sensitivity of k it is (k/sigma)^2/2-zCDP, see
    `dpray.accounting.events.DiscreteGaussian`. Errors are those of `discrete_laplace`.

    >>> discrete_gaussian(np.array([12, 0, 7]), sigma=1e-3)  # noise that is almost surely 0
    array([12,  0,  7])
    """
    sigma, dp = checked_scale(sigma, "sigma"), _opendp()
    space = dp.vector_domain(dp.atom_domain(T=dp.i64)), dp.l2_distance(T=dp.f64)
    return _noisy(dp.m.make_gaussian(*space, scale=sigma), counts_N)


@functools.cache
def _opendp() -> ModuleType:
    """Import OpenDP only to draw: it brings scikit-learn, and a plan draws nothing."""
    import opendp.prelude as dp

    # The samplers are behind OpenDP's flag for components that its committee has not all vetted.
    dp.enable_features("contrib")
    return dp


def laplace_scale(sensitivity: float, epsilon: float, *, count: int = 1) -> float:
    """Return the Laplace scale at which `count` mechanisms of this L1 sensitivity cost `epsilon`
    together: count * sensitivity / epsilon, rounded so that they never cost more.

    >>> laplace_scale(1, 0.5, count=10)
    20.0
    """
    scale = count * sensitivity / epsilon
    while count * (sensitivity / scale) > epsilon:
        scale = math.nextafter(scale, math.inf)
    return scale


def checked_scale(scale: float, name: str = "scale") -> float:
    """Return the scale as a float. Raises ValueError if no noise can be drawn with it. A mechanism
    checks its scale when it is made, before anything is charged."""
    real = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if not real or not math.isfinite(scale) or not 0 < scale <= MAX_SCALE:
        raise ValueError(f"{name} must be a number over 0 and at most 2^52, got {scale!r}")
    return float(scale)


def _noisy(
    measurement: Callable[[list[int]], list[int]], counts_N: npt.NDArray[np.integer]
) -> Counts:
    counts_N = np.asarray(counts_N)
    if counts_N.ndim != 1:
        raise ValueError(f"counts have the shape (N,), got {counts_N.ndim} dimensions")
    whole = counts_N.astype(np.int64, casting="safe")
    return np.array(measurement(whole.tolist()), dtype=np.int64)
