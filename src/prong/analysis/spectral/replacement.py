"""The best low-rank replacements of a layer on its own inputs, in float64.

A layer computes `z = W h + b` on inputs of mean c and covariance Sigma. Of a convolution, h is a patch: W is
(out, taps * in), taps first, and c and Sigma are those of patches.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from prong.analysis.spectral.allocation import Option, Plan
from prong.analysis.spectral.probing import Compressible
from prong.core.moments import Moments
from prong.layers.site import Layout

Criterion = Literal["outputs", "weights"]
ROUNDING = 1e-14  # relative, in float64
RIDGE = 1e-12  # relative to the mean variance: which directions come first where none has variance


class Ranked(NamedTuple):
    """Output directions, and what a layer loses by having only the first k of them."""

    A: Tensor  # (rows, r) with orthonormal columns
    errors: Tensor  # (r + 1,): errors[k] = E||(W - A_k A_k^T W)(h - c)||^2


def rank_outputs(W: Tensor, Sigma: Tensor) -> Ranked:
    """The output directions whose first k give the best replacement of W of rank k, for every k at once.

        E||W (h - c) - W_k (h - c)||^2 = ||W Sigma^1/2 - W_k Sigma^1/2||^2

    is least for W_k = A_k A_k^T W with W Sigma^1/2 = A S B^T (Eckart and Young; docs/spectral.md): A has the
    eigenvectors of W Sigma W^T, the covariance of z. Where all of W's rank is kept, A A^T W = W, whatever Sigma is.

    Shapes: W (out, in), Sigma (in, in); r = min(out, in).
    """
    W, Sigma = W.double(), Sigma.double()
    if W.shape[0] <= W.shape[1]:
        A = torch.linalg.eigh(W @ Sigma @ W.mT).eigenvectors.flip(-1)
    else:
        lam, E = torch.linalg.eigh(Sigma)
        ridge = RIDGE * float(lam.mean()) or RIDGE  # A then spans all that W reaches
        A = torch.linalg.svd(W @ (E * (lam.clamp(min=0) + ridge).sqrt()), full_matrices=False).U
    projected = A.mT @ W
    squares = ((projected @ Sigma) * projected).sum(-1).clamp(min=0)
    return Ranked(A, torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)]))


def rank_inputs(W: Tensor, Sigma: Tensor, taps: int) -> Ranked:
    """Directions for a replacement of a convolution by one over k maps, after a 1 x 1 convolution to these.

    With M the taps of W on top of each other, (out * taps, in), the replacement is M_k = A_k A_k^T M. A is that of
    `rank_outputs` for M and the mean of Sigma's diagonal blocks, which would be best if inputs at different taps were
    uncorrelated. They are not, so the errors are computed from all of Sigma:

        errors[k] = sum_{i, j >= k} G_ij        G_ij = sum_{t, s} (A_t^T A_s)_ij (Q Sigma_ts Q^T)_ij        Q = A^T M

    Shapes: W (out, taps * in), Sigma (taps * in, taps * in); A (out * taps, r) with outputs first.
    """
    W, Sigma = W.double(), Sigma.double()
    out, features = W.shape[0], W.shape[1] // taps
    blocks = Sigma.reshape(taps, features, taps, features)
    M = W.reshape(out * taps, features)
    A = rank_outputs(M, torch.einsum("tatb->ab", blocks) / taps).A
    Q = A.mT @ M
    per_tap = A.reshape(out, taps, -1).unbind(1)
    G = A.new_zeros(A.shape[1], A.shape[1])
    for t, s in itertools.product(range(taps), repeat=2):
        G += (per_tap[t].mT @ per_tap[s]) * (Q @ blocks[t, :, s] @ Q.mT)
    sums = G.flip(0, 1).cumsum(0).cumsum(1).diagonal().clamp(min=0).flip(0)
    return Ranked(A, torch.cat([sums, sums.new_zeros(1)]))


def factors(W: Tensor, A: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(first, second), shapes (k, in) and (out, k), whose product second @ first is A_k A_k^T W."""
    return A[:, :k].mT @ W.double(), A[:, :k]


def expected_error(D: Tensor, shift: Tensor | None, c: Tensor, Sigma: Tensor) -> float:
    """E||D h - shift||^2 = tr D Sigma D^T + ||D c - shift||^2: what a change of W by -D and of b by shift does to z.

    Shapes: D (out, in), shift (out,), c (in,), Sigma (in, in).
    """
    D, c, Sigma = D.double(), c.double(), Sigma.double()
    mean = D @ c if shift is None else D @ c - shift.double()
    return float(((D @ Sigma) * D).sum().clamp(min=0) + mean.square().sum())


class Subject:
    """A layer that may be replaced; `varies` tells whether its outputs do, by more than rounding errors."""

    def __init__(self, layer: Compressible, moments: Moments, criterion: Criterion) -> None:
        self.layer, self.taps = layer, layer.weight[0, 0].numel()
        self.W = Layout(tuple(layer.weight.shape)).pack(layer.weight.detach())[0].flatten(1).double()  # taps first
        centred = layer.bias is not None
        self.c = moments.mean[0] if centred else torch.zeros_like(moments.mean[0])
        self.Sigma = moments.covariance(centred)[0]
        # E||W (h - c)||^2, the variance of its outputs; without a bias their mean square
        self.variance = expected_error(self.W, self.W @ self.c, self.c, self.Sigma)
        rounding = (ROUNDING * self.W.norm() * self.c.norm()).square()  # of the mean, in constant inputs
        self.varies = self.variance > float(rounding)
        self._corrects_bias = centred and criterion == "outputs"
        metric = self.Sigma if criterion == "outputs" else torch.eye(len(self.Sigma)).to(self.Sigma)
        self._ranked: dict[Plan, Ranked] = {"outputs": rank_outputs(self.W, metric)}
        if self.taps > 1:
            self._ranked["inputs"] = rank_inputs(self.W, metric, self.taps)

    def options(self) -> list[Option]:
        """The layer as it is, and every replacement with fewer parameters."""
        out, patch = self.W.shape
        plain = sum(p.numel() for p in self.layer.parameters())
        per_rank = {"outputs": patch + out, "inputs": patch // self.taps + out * self.taps}
        found = [Option("plain", self.full_rank("plain"), plain, 0.0)]
        for plan, ranked in self._ranked.items():
            scale = float(ranked.errors[0]) or 1.0
            for rank, error in enumerate(ranked.errors.tolist()):
                count = rank * per_rank[plan] + (0 if self.layer.bias is None else out)
                if rank > 0 and count < plain:
                    found.append(Option(plan, rank, count, error / scale))
        return found

    def full_rank(self, plan: Plan) -> int:
        """The largest rank by a plan; of the plain layer, that of its weight as a matrix (out, taps * in)."""
        return len(self._ranked["outputs" if plan == "plain" else plan].errors) - 1

    def flops(self, option: Option, at_inputs: float, at_outputs: float) -> float:
        """Additions and multiplications at so many input and output positions."""
        out, patch = self.W.shape
        if option.plan == "inputs":
            return 2 * option.rank * (at_inputs * (patch // self.taps) + at_outputs * out * self.taps)
        return 2 * at_outputs * (out * patch if option.plan == "plain" else option.rank * (patch + out))

    def expected(self, option: Option) -> float:
        """The share of the variance of the outputs that an option loses, from the statistics."""
        if option.plan == "plain":
            return 0.0
        _, _, D, shift = self._factors(option)
        return expected_error(D, shift, self.c, self.Sigma) / self.variance

    def _factors(self, option: Option) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """First and second matrix of `W` or of its taps on top of each other, W - W_k, and (W - W_k) c for the bias."""
        stacked = self.W if option.plan == "outputs" else self.W.reshape(-1, self.W.shape[1] // self.taps)
        first, second = factors(stacked, self._ranked[option.plan].A, option.rank)
        D = self.W - (second @ first).reshape(self.W.shape)
        return first, second, D, D @ self.c if self._corrects_bias else None

    @torch.no_grad()
    def replacement(self, option: Option) -> nn.Module:
        """The two layers of an option that is not the plain one."""
        layer: Any = self.layer
        first, second, _, shift = self._factors(option)
        before, after = {}, {}
        if not isinstance(layer, nn.Linear):
            names = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
            before, after = {name: getattr(layer, name) for name in names}, {"kernel_size": 1}
            before, after = (before, after) if option.plan == "outputs" else (after, before)
        common = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        make: Any = nn.utils.skip_init  # draws no random weights
        pair = (
            make(type(layer), layer.weight.shape[1], option.rank, bias=False, **before, **common),
            make(type(layer), option.rank, len(self.W), bias=layer.bias is not None, **after, **common),
        )
        for module, value in zip(pair, (first, second), strict=True):
            layout = Layout(
                tuple(module.weight.shape)
            )  # values are (out, taps * in), or (out * taps, in) in this order
            module.weight.copy_(layout.unpack(value.reshape(1, layout.outputs, layout.taps, layout.inputs)))
            module.weight.requires_grad_(layer.weight.requires_grad)
        if layer.bias is not None:
            pair[1].bias.copy_(layer.bias if shift is None else layer.bias + shift)
            pair[1].bias.requires_grad_(layer.bias.requires_grad)
        return nn.Sequential(*pair)
