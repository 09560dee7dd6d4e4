"""Convolutions, whitened across feature maps: every position of the padded map is a sample of its channels."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from prong.layers.base import Explicit, Implicit, WhitenedLayer, canonical_property
from prong.layers.natural import Convolution, activation_space_is_cheaper
from prong.layers.site import Inputs, Kind, Site


def thin(rows: Tensor, examples: int, max_positions: int | None) -> Tensor:
    """At most `max_positions` evenly spaced rows per example, of rows (groups, rows, in)."""
    if max_positions is None or rows.shape[1] <= max_positions * examples:
        return rows
    stride = math.ceil(rows.shape[1] / (max_positions * examples))
    while math.gcd(stride, rows.shape[1] // examples) > 1:  # or it would visit the same columns of every map
        stride += 1
    return rows[:, ::stride]


class ConvKind(Kind):
    """Any stride, padding, padding mode, dilation and number of groups; transposed ones, too.

    The raw map is padded first and centred and whitened after; padding the whitened map would change the function
    at the borders. Padded zeros are therefore samples like any others, and are counted without being made.

    Of transposed ones the mean's share of the output depends on the position, so nothing is centred; nor padded, as
    their padding is of the output.
    """

    padding_mode: Any
    kernel_size: tuple[int, ...]
    _reversed_padding_repeated_twice: list[int]

    def centred(self, site: Site) -> bool:  # noqa: D102
        return not site.layout.transposed and super().centred(site)

    @property
    def channels_at(self) -> int:  # noqa: D102
        return -1 - len(self.kernel_size)

    def maps(self, h: Tensor) -> int:
        """How many maps there are in a batch, or in what is a single one."""
        return h.shape[0] if h.dim() == len(self.kernel_size) + 2 else 1

    def input_rows(self, site: Site, h: Tensor) -> Inputs:  # noqa: D102
        examples, zeros = self.maps(h), 0.0
        if self.padding_mode == "zeros":
            zeros = float(self.positions(site, h) - math.prod(h.shape[-len(self.kernel_size) :])) * examples
        else:
            h = self.pad(site, h)
        rows = site.layout.rows(h, self.channels_at)
        kept = thin(rows, examples, self.max_positions)
        return Inputs(kept, zeros * kept.shape[1] / max(rows.shape[1], 1), examples)

    def positions(self, site: Site, h: Tensor) -> int:
        """Positions of one padded map."""
        spatial = h.shape[-len(self.kernel_size) :]
        if site.layout.transposed:
            return math.prod(spatial)
        padding = self._reversed_padding_repeated_twice
        return math.prod([n + padding[2 * i] + padding[2 * i + 1] for i, n in enumerate(reversed(spatial))])

    def pad(self, site: Site, h: Tensor) -> Tensor:
        """The map with its padding around it."""
        if site.layout.transposed:
            return h
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(h, self._reversed_padding_repeated_twice, mode=mode)


class ConvLayer(ConvKind, WhitenedLayer):
    """What convolutions of both forms share."""

    def forward(self, h: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: D102
        (site,) = self.sites
        self.observe(site, h)
        return self.watch(site, self.convolve(site, h, output_size))

    def convolve(self, site: Site, h: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Torch's own convolution, of a transposed layer to an output of this size."""
        if site.layout.transposed:
            return self.unpadded(site, h, output_size)(h, *self.effective(site))
        layer: Any = self
        z: Tensor = layer._conv_forward(h, *self.effective(site))
        return z

    def unpadded(self, site: Site, h: Tensor, output_size: list[int] | None) -> Convolution:
        """The convolution of maps that are padded already."""
        layer: Any = self
        none = (0,) * len(self.kernel_size)
        if not site.layout.transposed:
            return Convolution(site.layout, layer.stride, layer.dilation, none, none)
        output_padding = layer._output_padding(
            h, output_size, layer.stride, layer.padding, layer.kernel_size, len(none), layer.dilation
        )
        return Convolution(site.layout, layer.stride, layer.dilation, layer.padding, tuple(output_padding))


class ImplicitConv(Implicit, ConvLayer):
    """Convolutions with natural gradients: of few positions, their inputs are whitened; of many, their gradients."""

    def convolve(self, site: Site, h: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: D102
        positions = self.positions(site, h) * self.maps(h)
        if not self.naturally(site) or not activation_space_is_cheaper(site.layout, positions):
            return super().convolve(site, h, output_size)
        operation, h = self.unpadded(site, h, output_size), self.pad(site, h)
        if h.dim() == len(self.kernel_size) + 2:
            return self.natural(site, operation, h)
        return self.natural(site, operation, h.unsqueeze(0)).squeeze(0)


class ExplicitConv(Explicit, ConvLayer):
    """Convolutions in whitened coordinates."""

    weight = canonical_property("weight")
    bias = canonical_property("bias")

    def convolve(self, site: Site, h: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: D102
        if not self.drops(site):
            return super().convolve(site, h, output_size)
        x = self.whitened(site, self.pad(site, h), len(self.kernel_size))
        return self.unpadded(site, h, output_size)(x, *self.pair(site))


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
for _form, _plain in product((ImplicitConv, ExplicitConv), CONVOLUTIONS):
    _name = _form.__name__.replace("Conv", _plain.__name__)  # ImplicitConv1d and so on, by which they are pickled
    globals()[_name] = type(_name, (_form, _plain), {"plain": _plain, "__module__": __name__})
