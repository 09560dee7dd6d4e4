"""nn.MultiheadAttention: the input projections of queries, keys and values are three sites of one layer.

The output projection is a layer of its own (`out_proj`), with whose weights attention computes.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prong.layers.base import Explicit, Implicit, WhitenedLayer, canonical_property
from prong.layers.natural import Linear, activation_space_is_cheaper
from prong.layers.site import Kind, Layout, Site


class _View:
    """A layer seen with some of its attributes replaced, for torch's own forward to run on."""

    def __init__(self, layer: nn.Module, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _without_projection(layer: Any, weight: Tensor) -> dict[str, Any]:
    """What to replace so that torch's forward gives what its output projection would take."""
    identity = torch.eye(layer.embed_dim, dtype=weight.dtype, device=weight.device)
    # "training": torch's fused path for evaluation knows nothing of this.
    dropout = layer.dropout if layer.training else 0.0
    return {"out_proj": _View(layer.out_proj, weight=identity, bias=None), "training": True, "dropout": dropout}


_forward: Any = nn.MultiheadAttention.forward


class TappedMultiheadAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention, but that somebody may look at the inputs of its output projection."""

    tap: Kind | None

    def forward(self, *args: Any, **options: Any) -> Any:  # noqa: D102
        if self.tap is None or not self.tap.sites[0].listening:
            return super().forward(*args, **options)
        W, b = self.out_proj.weight, self.out_proj.bias
        z, weights = _forward(_View(self, **_without_projection(self, W)), *args, **options)
        self.tap.observe(self.tap.sites[0], z)
        return F.linear(z, W, b), weights

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tap": None}


class AttentionKind(Kind):
    """Input projections, packed in `in_proj_weight` or separate where keys or values have a size of their own."""

    embed_dim: int
    batch_first: bool
    dropout: float
    out_proj: Any
    _qkv_same_embed_dim: bool

    @staticmethod
    def make_sites(module: Any) -> tuple[Site, ...]:  # noqa: D102
        size = module.embed_dim
        bias = None if module.in_proj_bias is None else "in_proj_bias"
        sites = []
        for i, letter in enumerate("qkv"):
            weight = "in_proj_weight" if module._qkv_same_embed_dim else f"{letter}_proj_weight"
            features = {"q": size, "k": module.kdim, "v": module.vdim}[letter]
            sites.append(Site(weight, bias, Layout((size, features)), slice(i * size, (i + 1) * size), letter))
        return tuple(sites)

    def observe_inputs(self, inputs: tuple[Tensor, ...]) -> None:
        """Show queries, keys and values to whoever listens."""
        if any(site.window is not None for site in self.sites):
            self._share_windows(inputs)
        for i, (site, h) in enumerate(zip(self.sites, inputs, strict=True)):
            shared = site.window is not None and any(site.window is other.window for other in self.sites[:i])
            self.observe(site, h, counted=shared)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _share_windows(self, inputs: tuple[Tensor, ...]) -> None:
        """Let sites that see the same tensor, as in self-attention, share one window; part those that no longer do."""
        for (other, g), (site, h) in combinations(zip(self.sites, inputs, strict=True), 2):
            if site.window is None or other.window is None:
                continue
            if g is h and site.window.empty and other.window.empty:
                site.window = other.window
            elif g is not h and site.window is other.window:
                site.window = site.window.parted()


class AttentionLayer(AttentionKind, WhitenedLayer):
    """Attention computed by torch, on projections of our own."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:  # noqa: D102
        self.observe_inputs((query, key, value))
        out = self.out_proj
        site = out.sites[0] if isinstance(out, WhitenedLayer) else None
        W, b = (out.weight, out.bias) if site is None else out.effective(site)
        listening = site is not None and (site.listening or site.outputs is not None)
        inputs: tuple[Tensor, ...] = (query, key, value)
        detour = any(site.outputs is not None for site in self.sites) or self.few_tokens(inputs)
        examples_at = 1 if query.dim() == 3 and not self.batch_first else 0
        replaced = _without_projection(self, W) if detour or listening else {}
        if not listening:
            replaced["out_proj"] = _View(out, weight=W, bias=b)
        if detour:
            # Project here, where gradients can be seen or be cheaper, and let torch's own projections be the identity.
            inputs = tuple(
                self.watch(each, self.project(each, h), examples_at=examples_at)
                for each, h in zip(self.sites, inputs, strict=True)
            )
            weights = [torch.eye(self.embed_dim, dtype=inputs[0].dtype, device=query.device)] * 3
            biases: list[Tensor] = []
        else:
            pairs = [self.effective(each) for each in self.sites]
            weights, biases = [W for W, _ in pairs], [b for _, b in pairs if b is not None]
        replaced["in_proj_bias"] = torch.cat(biases) if biases else None
        if self._qkv_same_embed_dim and not detour:
            replaced["in_proj_weight"] = torch.cat(weights)
        else:
            replaced |= {"in_proj_weight": None, "_qkv_same_embed_dim": False}
            replaced |= zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), weights, strict=True)
        z, attended = _forward(_View(self, **replaced), *inputs, *args, **options)
        if listening:
            out.observe(site, z)
            z = out.watch(site, F.linear(z, W, b), examples_at=examples_at)
        return z, attended

    def project(self, site: Site, h: Tensor) -> Tensor:
        """A site's projection of its inputs."""
        return F.linear(h, *self.effective(site))

    def few_tokens(self, inputs: tuple[Tensor, ...]) -> bool:
        """Whether there are so few that projecting them twice, once by the identity, is worth it."""
        return False


class ImplicitMultiheadAttention(Implicit, AttentionLayer, nn.MultiheadAttention):
    """nn.MultiheadAttention with natural gradients.

    With few tokens its inputs are whitened instead of its gradients. That takes a detour of some four times as many
    products, as torch's attention projects by itself.
    """

    plain = nn.MultiheadAttention

    def few_tokens(self, inputs: tuple[Tensor, ...]) -> bool:  # noqa: D102
        rows = max(h.numel() // max(h.shape[-1], 1) for h in inputs)
        return 4 * rows < self.embed_dim and any(self.naturally(site) for site in self.sites)

    def project(self, site: Site, h: Tensor) -> Tensor:  # noqa: D102
        rows = h.numel() // max(h.shape[-1], 1)
        if not self.naturally(site) or not activation_space_is_cheaper(site.layout, rows):
            return super().project(site, h)
        return self.natural(site, Linear(site.layout), h)


class ExplicitMultiheadAttention(Explicit, AttentionLayer, nn.MultiheadAttention):
    """nn.MultiheadAttention in whitened coordinates."""

    plain = nn.MultiheadAttention
    in_proj_weight = canonical_property("in_proj_weight")
    in_proj_bias = canonical_property("in_proj_bias")
    q_proj_weight = canonical_property("q_proj_weight")
    k_proj_weight = canonical_property("k_proj_weight")
    v_proj_weight = canonical_property("v_proj_weight")
