"""Cases as data: kinds of layers with their options, attention, small models; and slow obvious versions of their math.

Everything is float64 and small. A `LayerSpec` prints as what it is, so a failing property names its layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

FORMS = ("implicit", "explicit")  # of layers that are whitened themselves
VIEWS = ("auto", "materialised")  # where layers stay plain, and their optimizer sees to it
PROPERTY = settings(max_examples=30, deadline=None, derandomize=True)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}  # float64 algebra
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def assert_close(actual: Any, expected: Any, what: str = "", **tolerance: float) -> None:
    """Equal up to float64 rounding; says what differs, where and by how much."""
    torch.testing.assert_close(actual, expected, **(CLOSE | tolerance), msg=lambda text: f"{what}: {text}")


def assert_identical(actual: Any, expected: Any, what: str = "") -> None:
    """Equal to the bit."""
    assert_close(actual, expected, what, rtol=0, atol=0)


@dataclass(frozen=True)
class LayerSpec:
    """A kind of layer, its constructor's arguments, the spatial size of its inputs and arguments of its forward."""

    kind: type[nn.Module]
    arguments: dict[str, Any]
    spatial: tuple[int, ...] = ()
    call: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.arguments.items())
        return f"{self.kind.__name__}({arguments}) on {self.spatial} {self.call or ''}".rstrip()

    @property
    def channels(self) -> int:
        return self.arguments.get("in_features") or self.arguments["in_channels"]

    def build(self) -> nn.Module:
        return self.kind(**self.arguments).double()

    def sample(self, examples: int) -> Tensor:
        """Inputs with correlated channels and a mean, so that whitening has something to do."""
        mix = torch.randn(self.channels, self.channels) + 0.5 * torch.eye(self.channels)
        h = torch.randn(examples, *self.spatial, self.channels) @ mix + torch.randn(self.channels)
        return h.movedim(-1, 1).double() if self.spatial else h.double()


# Strategies -----------------------------------------------------------------------------------------------------------


def linear_specs() -> st.SearchStrategy[LayerSpec]:
    return st.builds(
        lambda i, o, bias: LayerSpec(nn.Linear, {"in_features": i, "out_features": o, "bias": bias}),
        st.integers(1, 5),
        st.integers(1, 6),
        st.booleans(),
    )


@st.composite
def conv_specs(draw: st.DrawFn) -> LayerSpec:
    dims = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3))
    per_dimension = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(dims))  # noqa: E731
    padding: Any = draw(st.sampled_from(["numbers", "same", "valid"]))
    if padding == "numbers":
        padding = per_dimension(0, 2)
    arguments = {
        "in_channels": groups * draw(st.integers(1, 2)),
        "out_channels": groups * draw(st.integers(1, 3)),
        "kernel_size": per_dimension(1, 3),
        "stride": 1 if padding == "same" else per_dimension(1, 2),
        "padding": padding,
        "dilation": per_dimension(1, 2),
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding_mode": draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
    }
    return LayerSpec(CONVOLUTIONS[dims - 1], arguments, per_dimension(5, 6 if dims < 3 else 5))


@st.composite
def transposed_specs(draw: st.DrawFn) -> LayerSpec:
    dims = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3))
    per_dimension = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(dims))  # noqa: E731
    stride, dilation, kernel = per_dimension(1, 3), per_dimension(1, 2), per_dimension(1, 3)
    spatial, padding = per_dimension(3, 4), per_dimension(0, 1)
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    by_call = draw(st.booleans())  # the same thing can be said in the constructor or in the call
    arguments = {
        "in_channels": groups * draw(st.integers(1, 2)),
        "out_channels": groups * draw(st.integers(1, 3)),
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "output_padding": 0 if by_call else extra,
        "groups": groups,
        "bias": draw(st.booleans()),
        "dilation": dilation,
    }
    call = {}
    if by_call:
        extra = tuple(min(e, s - 1) for e, s in zip(extra, stride, strict=True))
        call["output_size"] = [
            (n - 1) * s - 2 * p + d * (k - 1) + 1 + e
            for n, s, p, d, k, e in zip(spatial, stride, padding, dilation, kernel, extra, strict=True)
        ]
    return LayerSpec(TRANSPOSED[dims - 1], arguments, spatial, call)


def layer_specs() -> st.SearchStrategy[LayerSpec]:
    return st.one_of(linear_specs(), conv_specs(), transposed_specs())


# One of each kind, for tests that need no sweep of options.
SPECS = {
    "linear": LayerSpec(nn.Linear, {"in_features": 4, "out_features": 6}),
    "linear_no_bias": LayerSpec(nn.Linear, {"in_features": 4, "out_features": 3, "bias": False}),
    "conv1d": LayerSpec(nn.Conv1d, {"in_channels": 3, "out_channels": 2, "kernel_size": 3, "padding": 1}, (7,)),
    "conv2d": LayerSpec(
        nn.Conv2d,
        {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "stride": 2, "padding": 1, "groups": 2},
        (5, 6),
    ),
    "conv3d": LayerSpec(nn.Conv3d, {"in_channels": 2, "out_channels": 3, "kernel_size": 2, "bias": False}, (3, 4, 3)),
    "transposed1d": LayerSpec(nn.ConvTranspose1d, {"in_channels": 3, "out_channels": 2, "kernel_size": 3}, (5,)),
    "transposed2d": LayerSpec(
        nn.ConvTranspose2d, {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "stride": 2, "groups": 2}, (4, 3)
    ),
    "transposed3d": LayerSpec(
        nn.ConvTranspose3d, {"in_channels": 2, "out_channels": 3, "kernel_size": 2, "bias": False}, (3, 2, 3)
    ),
}


# Slow obvious versions ------------------------------------------------------------------------------------------------


def padded(layer: nn.Module, h: Tensor) -> Tensor:
    """The map that a convolution slides over, made explicitly."""
    if not isinstance(layer, CONVOLUTIONS) or layer.padding == "valid":
        return h
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(p, p) for p in layer.padding]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    amounts = [amount for pair in reversed(sides) for amount in pair]
    return F.pad(h, amounts, mode=mode) if any(amounts) else h


def samples_of(layer: nn.Module, h: Tensor) -> list[Tensor]:
    """Per group, the samples (rows, in) among this layer's inputs: every position of the padded map is one."""
    if isinstance(layer, nn.Linear):
        return [h.reshape(-1, h.shape[-1])]
    rows = padded(layer, h).movedim(1, -1)
    return [group.reshape(-1, group.shape[-1]) for group in rows.chunk(layer.groups, dim=-1)]


def moments_of(layer: nn.Module, h: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Per group (c, Sigma): centred only where a bias that is trained can absorb W c at every position."""
    centred = layer.bias is not None and layer.bias.requires_grad and not isinstance(layer, TRANSPOSED)
    moments = []
    for rows in samples_of(layer, h):
        c = rows.mean(0) if centred else torch.zeros_like(rows[0])
        moments.append((c, sum(torch.outer(row - c, row - c) for row in rows) / len(rows)))
    return moments


def blocks(layer: nn.Module, W: Tensor) -> list[Tensor]:
    """Per group, a weight as (out, in, taps)."""
    parts = W.chunk(getattr(layer, "groups", 1), dim=0)
    if isinstance(layer, TRANSPOSED):
        parts = tuple(part.transpose(0, 1) for part in parts)
    return [part.reshape(*part.shape[:2], -1) for part in parts]


def assembled(layer: nn.Module, parts: list[Tensor], like: Tensor) -> Tensor:
    """The inverse of `blocks`."""
    if isinstance(layer, TRANSPOSED):
        parts = [part.transpose(0, 1) for part in parts]
    return torch.cat(parts).reshape(like.shape)


def natural_of_plain(
    layer: nn.Module, gW: Tensor, gb: Tensor | None, moments: list[tuple[Tensor, Tensor]], eps: float
) -> tuple[Tensor, Tensor | None]:
    """nW = (gW - gb c^T)(Sigma + eps I)^-1 tap by tap, nb = gb - sum_taps nW c, from a plain layer's gradients."""
    biases = [None] * len(moments) if gb is None else gb.chunk(len(moments))
    weights, shifted = [], []
    for G, b, (c, Sigma) in zip(blocks(layer, gW), biases, moments, strict=True):
        P = torch.linalg.inv(Sigma + eps * torch.eye(len(Sigma), dtype=Sigma.dtype))
        centred = torch.zeros_like(G[:, :, 0]) if b is None else torch.outer(b, c)
        N = torch.stack([(G[:, :, tap] - centred) @ P for tap in range(G.shape[2])], dim=2)
        weights.append(N)
        shifted.append(None if b is None else b - sum(N[:, :, tap] @ c for tap in range(G.shape[2])))
    return assembled(layer, weights, gW), None if gb is None else torch.cat(shifted)


def canonical_step(layer: Any, gV: Tensor, gd: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What a step (gV, gd) on (V, d) of an explicit layer is on (W, b): gV U and gd - gV U c, tap by tap."""
    (site,) = layer.sites
    groups = getattr(layer, "groups", 1)
    U = site.whitening.U
    c = torch.zeros_like(U[..., 0]) if site.whitening.c is None else site.whitening.c
    biases = [None] * groups if gd is None else gd.chunk(groups)
    weights, shifted = [], []
    for g, (G, b) in enumerate(zip(blocks(layer, gV), biases, strict=True)):
        N = torch.stack([G[:, :, tap] @ U[g] for tap in range(G.shape[2])], dim=2)
        weights.append(N)
        shifted.append(None if b is None else b - N.sum(2) @ c[g])
    return assembled(layer, weights, gV), None if gd is None else torch.cat(shifted)


# Attaching ------------------------------------------------------------------------------------------------------------


def attached(
    model: nn.Module,
    form: str,
    basis: str = "pca",
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **options: Any,
) -> torch.optim.Optimizer:
    """An optimizer that steps in whitened coordinates at rate 1, and refreshes only when it is asked to."""
    import prong

    chosen = {"explicit": prong.Explicit(basis), "materialised": prong.Materialised(basis)}.get(form, form)
    options = {"refresh": prong.Never(), "trust": None, **options}
    return prong.attach(model, kind(model.parameters(), lr=1.0), form=chosen, **options)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> dict[str, Tensor]:
    """What a step along the gradient of a loss takes from the plain parameters; it is made."""
    before = {name: p.clone() for name, p in model.state_dict().items()}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {name: before[name] - p for name, p in model.state_dict().items()}


# Running --------------------------------------------------------------------------------------------------------------


def trained(layer: nn.Module) -> list[Tensor | None]:
    """The trained weight and bias of a layer, whichever form it has."""
    return [layer._parameters.get(a, layer._parameters.get(b)) for a, b in (("weight", "V"), ("bias", "d"))]


def gradients_of(
    module: nn.Module, h: Tensor, call: dict[str, Any] | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """(weight gradient, bias gradient, input gradient) of a curved loss through one layer."""
    h = h.detach().clone().requires_grad_()
    parameters = trained(module)
    wanted = [p for p in parameters if p is not None and p.requires_grad]
    loss = curved(module(h, **(call or {})))
    found = dict(zip(map(id, [h, *wanted]), torch.autograd.grad(loss, [h, *wanted]), strict=True))
    weight, bias = (None if p is None else found.get(id(p)) for p in parameters)
    return weight, bias, found[id(h)]


def curved(z: Tensor) -> Tensor:
    """A loss with curvature, different at every output."""
    weights = torch.linspace(0.5, 1.5, max(z.numel(), 1), dtype=z.dtype)[: z.numel()].view(z.shape)
    return (weights * z.sin()).sum()


def parameter_gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradients by parameter name, without touching `.grad`."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True), strict=True))


def accumulated(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of `.grad` by parameter name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def plain_copy(model: nn.Module) -> nn.Module:
    """A plain torch model with the same function."""
    import prong

    return prong.fold_(copy.deepcopy(model))


# Models ---------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Convolution, batch norm, dropout, a linear layer used twice: what a refresh must leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.2)
        self.mix = nn.Linear(3, 3)
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(self.conv(x)).relu()).mean((2, 3))
        return self.head(self.mix(self.mix(h).tanh()))


@dataclass(frozen=True)
class ModelCase:
    """A model and inputs for it."""

    build: Callable[[], nn.Module]
    sample: Callable[[int], Tensor]


MODELS = {
    "mlp": ModelCase(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double(),
        lambda n: torch.randn(n, 4).double() @ torch.randn(4, 4).double() + 1,
    ),
    "cnn": ModelCase(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.ConvTranspose2d(4, 3, 2), nn.Flatten(), nn.Linear(75, 3)
        ).double(),
        lambda n: torch.randn(n, 2, 4, 4).double() + 1,
    ),
    "net": ModelCase(lambda: Net().double(), lambda n: torch.randn(n, 2, 5, 5).double() + 0.5),
    "transformer": ModelCase(
        lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True).double(),
        lambda n: torch.randn(n, 4, 8).double(),
    ),
}


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of nn.MultiheadAttention, shapes of what it is called with, and options of the call."""

    arguments: dict[str, Any] = field(default_factory=dict)
    cross: bool = False
    batched: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    targets, sources, batch = 3, 4, 2

    def build(self) -> nn.MultiheadAttention:
        layer = nn.MultiheadAttention(**{"embed_dim": 4, "num_heads": 2, **self.arguments}).double()
        for parameter in layer.parameters():  # torch starts biases at zero, where much goes unseen
            nn.init.normal_(parameter, std=0.5)
        return layer

    def sample(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        query = self._tokens(self.targets, 4)
        if not self.cross:
            return query, query, query
        key = self._tokens(self.sources, self.arguments.get("kdim") or 4)
        value = self._tokens(self.sources, self.arguments.get("vdim") or 4)
        return query, key, value

    def _tokens(self, length: int, features: int) -> Tensor:
        shape = (length,) if not self.batched else (length, self.batch)
        if self.batched and self.arguments.get("batch_first"):
            shape = shape[::-1]
        return (torch.randn(*shape, features) @ torch.randn(features, features) + 0.7).double()


def _mask(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    mask = torch.zeros(*shape, dtype=torch.bool)
    mask[..., -1] = True  # nobody looks at the last token; everybody sees another
    return mask if dtype is torch.bool else torch.zeros(shape, dtype=dtype).masked_fill(mask, -1.5)


ATTENTION = {
    "self": AttentionCase(),
    "self_batch_first": AttentionCase({"batch_first": True}),
    "cross": AttentionCase(cross=True),
    "other_key_size": AttentionCase({"kdim": 3}, cross=True),
    "other_sizes": AttentionCase({"kdim": 3, "vdim": 5, "batch_first": True}, cross=True),
    "other_sizes_no_bias": AttentionCase({"kdim": 3, "vdim": 5, "bias": False}, cross=True),
    "unbatched": AttentionCase(batched=False),
    "unbatched_cross": AttentionCase(batched=False, cross=True),
    "no_bias": AttentionCase({"bias": False}),
    "bias_kv": AttentionCase({"add_bias_kv": True}, cross=True),
    "bias_kv_no_bias": AttentionCase({"add_bias_kv": True, "bias": False}),
    "zero_attn": AttentionCase({"add_zero_attn": True}),
    "attn_mask": AttentionCase(options={"attn_mask": _mask(3, 3)}),
    "float_mask": AttentionCase(options={"attn_mask": _mask(3, 3, dtype=torch.float64)}),
    "mask_per_head": AttentionCase(options={"attn_mask": _mask(4, 3, 3)}),
    "key_padding": AttentionCase({"batch_first": True}, options={"key_padding_mask": _mask(2, 3)}),
    "causal": AttentionCase(
        options={"attn_mask": torch.ones(3, 3).triu(1).bool(), "is_causal": True, "need_weights": False}
    ),
    "no_weights": AttentionCase(options={"need_weights": False}),
    "weights_per_head": AttentionCase(options={"average_attn_weights": False}),
    "dropout": AttentionCase({"dropout": 0.4}),
    "dropout_no_weights": AttentionCase({"dropout": 0.4}, options={"need_weights": False}),
}
