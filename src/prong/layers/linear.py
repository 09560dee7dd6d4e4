"""nn.Linear, and the output projection of attention, which is one."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from prong.layers.base import Explicit, Implicit, canonical_property
from prong.layers.natural import Linear, activation_space_is_cheaper


class ImplicitLinear(Implicit, nn.Linear):
    """nn.Linear with natural gradients."""

    plain = nn.Linear

    def forward(self, h: Tensor) -> Tensor:  # noqa: D102
        (site,) = self.sites
        self.observe(site, h)
        if self.naturally(site) and activation_space_is_cheaper(site.layout, h.numel() // max(h.shape[-1], 1)):
            return self.watch(site, self.natural(site, Linear(site.layout), h))
        return self.watch(site, F.linear(h, *self.effective(site)))


class ExplicitLinear(Explicit, nn.Linear):
    """z = V U (h - c) + d."""

    plain = nn.Linear
    weight = canonical_property("weight")
    bias = canonical_property("bias")

    def forward(self, h: Tensor) -> Tensor:  # noqa: D102
        (site,) = self.sites
        self.observe(site, h)
        V, d = self.pair(site)
        if self.drops(site):
            return self.watch(site, F.linear(self.whitened(site, h), V, d))
        if site.whitening is not None and h.numel() // max(h.shape[-1], 1) < V.shape[0]:
            # Fewer rows than outputs: whitening the activations costs less than forming W = V U.
            U, c = site.whitening.U, site.whitening.c
            assert U is not None
            x = F.linear(h.to(U.dtype) if c is None else h - c[0], U[0])
            return self.watch(site, F.linear(x.to(V.dtype), V, d))
        W, b = self.effective(site)
        return self.watch(site, F.linear(h, W, b))


class ImplicitOutProjection(ImplicitLinear, NonDynamicallyQuantizableLinear):
    """Attention's output projection: attention computes with its weights and never calls it."""

    plain = NonDynamicallyQuantizableLinear


class ExplicitOutProjection(ExplicitLinear, NonDynamicallyQuantizableLinear):
    """Attention's output projection in whitened coordinates."""

    plain = NonDynamicallyQuantizableLinear
