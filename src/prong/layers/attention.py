"""nn.MultiheadAttention: the input projections of queries, keys and values are three sites of one layer.

The output projection is a layer of its own (`out_proj`), with whose weights attention computes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prong.layers.base import Explicit, Implicit, WhitenedLayer, canonical_property
from prong.layers.natural import Linear, activation_space_is_cheaper
from prong.layers.site import Kind, Layout, Site


class _Projection:
    """What torch's forward reads of an output projection."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias


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
    return {"out_proj": _Projection(weight=identity, bias=None), "training": True, "dropout": dropout}


class TappedMultiheadAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention, but that somebody may look at the inputs of its output projection."""

    tap: Kind | None

    def forward(self, *args: Any, **options: Any) -> Any:  # noqa: D102
        if self.tap is None or not self.tap.sites[0].listening:
            return super().forward(*args, **options)
        W, b = self.out_proj.weight, self.out_proj.bias
        plain_forward: Any = nn.MultiheadAttention.forward
        z, weights = plain_forward(_View(self, **_without_projection(self, W)), *args, **options)
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
        for j, site in enumerate(self.sites):
            for i, other in enumerate(self.sites[:j]):
                if site.window is None or other.window is None:
                    continue
                if inputs[i] is inputs[j] and site.window.empty and other.window.empty:
                    site.window = other.window
                elif inputs[i] is not inputs[j] and site.window is other.window:
                    site.window = site.window.parted()


class AttentionLayer(AttentionKind, WhitenedLayer):
    """Attention computed by torch, on projections of our own."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:  # noqa: D102
        out = self.out_proj if isinstance(self.out_proj, WhitenedLayer) else None
        self.observe_inputs((query, key, value))
        out_site = None if out is None else out.sites[0]
        out_pair = (self.out_proj.weight, self.out_proj.bias) if out is None else out.effective(out.sites[0])
        W_out, b_out = out_pair
        detour = any(site.outputs is not None for site in self.sites) or self.few_tokens((query, key, value))
        listening = out_site is not None and (out_site.listening or out_site.outputs is not None)
        examples_at = 1 if query.dim() == 3 and not self.batch_first else 0
        replaced: dict[str, Any] = {}
        inputs = (query, key, value)
        if detour:
            # Project here, where gradients can be seen or be cheaper, and let torch's own projections be the identity.
            inputs = tuple(  # type: ignore[assignment]
                self.watch(site, self.project(site, h), examples_at=examples_at)
                for site, h in zip(self.sites, inputs, strict=True)
            )
            identity = torch.eye(self.embed_dim, dtype=inputs[0].dtype, device=query.device)
            replaced |= dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), identity)
            replaced |= {"in_proj_weight": None, "in_proj_bias": None, "_qkv_same_embed_dim": False}
        else:
            replaced |= self._input_projections([self.effective(site) for site in self.sites])
        if detour or listening:
            replaced |= _without_projection(self, W_out)
        if not listening:
            replaced["out_proj"] = _Projection(weight=W_out, bias=b_out)
        plain_forward: Any = nn.MultiheadAttention.forward
        z, weights = plain_forward(_View(self, **replaced), *inputs, *args, **options)
        if listening and out is not None and out_site is not None:
            out.observe(out_site, z)
            z = out.watch(out_site, F.linear(z, W_out, b_out), examples_at=examples_at)
        return z, weights

    def project(self, site: Site, h: Tensor) -> Tensor:
        """A site's projection of its inputs."""
        return F.linear(h, *self.effective(site))

    def few_tokens(self, inputs: tuple[Tensor, ...]) -> bool:
        """Whether there are so few that projecting them twice, once by the identity, is worth it."""
        return False

    def _input_projections(self, projections: list[tuple[Tensor, Tensor | None]]) -> dict[str, Any]:
        weights = [W for W, _ in projections]
        biases = [b for _, b in projections if b is not None]
        bias = torch.cat(biases) if biases else None
        if self._qkv_same_embed_dim:
            return {"in_proj_weight": torch.cat(weights), "in_proj_bias": bias}
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        return {"in_proj_weight": None, "in_proj_bias": bias, **dict(zip(names, weights, strict=True))}


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
