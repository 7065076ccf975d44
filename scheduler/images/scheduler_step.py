"""The arithmetic of a denoising step: what x' is given x and the model's velocity v, and how likely it was.

Flow matching (Lipman et al., 2023, arXiv:2210.02747; rectified flow: Liu et al., 2023, arXiv:2209.03003): x =
(1 - sigma) x0 + sigma x1 with x1 noise, so v = x1 - x0, x0 = x - sigma v and x1 = x + (1 - sigma) v. sigma
falls from 1 to 0; dt = sigma' - sigma is negative. Every step is Gaussian around a mean that is linear in x
and v:

    x' = a x + b v + std noise

    ode    a = 1                         b = dt                                          std = 0
    sde    a = 1 + s² dt / (2 sigma)     b = (1 + s² (1 - sigma) / (2 sigma)) dt         std = s sqrt(-dt)
           with s = eta sqrt(sigma / (1 - sigma)); sigma[1] in place of sigma in the denominator where sigma
           is 1
    dance  a = 1 + eta² dt / (2 sigma)   b = (1 + eta² (1 - sigma) / (2 sigma)) dt       std = eta sqrt(-dt)
    cps    a = 1 - sigma' + c            b = (1 - sigma) c - sigma (1 - sigma')          std = sigma' sin(eta
    pi / 2)
           with c = sqrt(sigma'² - std²)

ode is the Euler step of diffusers' FlowMatchEulerDiscreteScheduler. sde: Flow-GRPO (Liu et al., 2025,
arXiv:2505.05470), where the coefficients are those of its sampler. dance: DanceGRPO (Xue et al., 2025,
arXiv:2505.07818), whose correction dt eta²/2 (x - (1 - sigma) x0) / sigma² is resolved for x and v above.
cps: coefficients preserving sampling (Flow-CPS, 2025, arXiv:2509.05952).

Invariants:
- Coefficients are float64 on the host, from sigmas that are float32 exactly; x' and log-probabilities are
  float32. Rows of a batch may have any sigmas.
- A step whose std is 0 (ode, a step outside the window, the last one of cps) has no density: its
  log-probability is 0.
- Noise is a function of (seed, sample, step) and of nothing else, so a sample that begins again, in whatever
  batch, gets the same noise.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...io_struct import SdeParams

INITIAL = -1
"""The step of the noise that a sample begins with."""
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, slots=True)
class Coefficients:
    a: float
    b: float
    std: float


def coefficients(sde: SdeParams, sigmas: np.ndarray, step: int) -> Coefficients:
    """Return those of step ``step`` on the grid ``sigmas`` (float32 [steps + 1], falling to 0)."""
    sigma, after = float(sigmas[step]), float(sigmas[step + 1])
    dt, eta = after - sigma, sde.noise_level
    if sde.type == "ode" or eta == 0.0 or (sde.steps is not None and step not in sde.steps):
        return Coefficients(1.0, dt, 0.0)
    if sde.type == "cps":
        std = after * math.sin(eta * math.pi / 2)
        c = math.sqrt(max(after**2 - std**2, 0.0))
        return Coefficients(1 - after + c, (1 - sigma) * c - sigma * (1 - after), std)
    s = eta
    if sde.type == "sde":
        s = eta * math.sqrt(sigma / (1 - (float(sigmas[1]) if sigma == 1.0 else sigma)))
    drift = s * s / (2 * sigma)
    return Coefficients(1 + drift * dt, (1 + drift * (1 - sigma)) * dt, s * math.sqrt(-dt))


def advance(x: Tensor, v: Tensor, rows: list[Coefficients], noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``(x', mean)``, float32, of ``x``, ``v`` [rows, …] and standard normal ``noise``, if any."""
    x, v = x.float(), v.float()
    values = [[getattr(row, name) for row in rows] for name in ("a", "b", "std")]
    shape = (3, -1, *[1] * (x.dim() - 1))
    a, b, std = torch.tensor(values, dtype=torch.float32, device=x.device).view(shape)
    mean = a * x + b * v
    return (mean if noise is None else mean + std * noise), mean


def log_prob(after: Tensor, mean: Tensor, std: float, sde: SdeParams) -> Tensor:
    """Return the log-probability of one row's x' (float32 scalar), as ``sde`` defines it; 0 if ``std`` is."""
    if std == 0.0:
        return torch.zeros((), dtype=torch.float32, device=after.device)
    difference = after.double() - mean  # the square of a small std is 0 in float32
    if sde.log_prob_form == "density":
        squares = (difference / std).square() / 2 + (math.log(std) + _LOG_SQRT_2PI)
    else:
        squares = difference.square()
    return -(squares.sum() if sde.log_prob == "sum" else squares.mean()).float()


def noise_of(seed: int, sample: int, step: int, shape: tuple[int, ...]) -> Tensor:
    """Return normal noise on the host: Philox (Salmon et al., 2011), key (seed, sample), counter step."""
    bits = np.random.Philox(key=np.array([seed, sample], np.uint64), counter=[0, 0, 0, step - INITIAL])
    return torch.from_numpy(np.random.Generator(bits).standard_normal(shape, dtype=np.float32))


def problem_of(sigmas: list[float]) -> str | None:
    """Return why these cannot be the sigmas before each step, or None."""
    if not all(0.0 < sigma <= 1.0 for sigma in sigmas):
        return "must be in (0, 1]"
    exact = np.asarray(sigmas, np.float32)
    if exact[-1] == 0.0 or not (np.diff(exact) < 0).all():
        return "must fall from each to the next, in float32"
    return None
