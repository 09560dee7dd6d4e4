"""Muon's rule, for matrices and for kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from prong.core.moments import has_bfloat16


class OrthogonalMomentum(Optimizer):
    """Muon's rule: `W -= lr sqrt(max(1, out / in)) msgn(momentum)`, for matrices, and for kernels as matrices.

    The momentum is Nesterov's, the decay decoupled.
    """

    def __init__(self, params: Any, lr: float | Tensor, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        if not (lr >= 0 and 0 <= momentum < 1 and weight_decay >= 0):
            raise ValueError(f"none of these is negative, and momentum is less than 1; got {defaults}")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one update."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                average = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(average, group["momentum"]).flatten(1)
                size = math.sqrt(max(1.0, update.shape[0] / update.shape[1]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * size * msgn(update).to(p.dtype).view(p.shape))


def msgn(G: Tensor, steps: int = 5) -> Tensor:
    """Roughly the orthogonal factor U V^T of G = U S V^T, by Newton and Schulz's iteration (Jordan et al. 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.to(torch.bfloat16 if G.dtype == torch.float32 and has_bfloat16(G.device) else G.dtype)
    X = X.mT if G.shape[0] > G.shape[1] else X
    X = X / X.norm().clamp(min=1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if G.shape[0] > G.shape[1] else X
