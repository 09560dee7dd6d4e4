"""The one layout to which the weights of every kind of layer are brought: (groups, out, taps, in)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How a weight is stored: (out, in / groups, *kernel), or transposed (in, out / groups, *kernel).

    `taps` is the number of kernel positions, `features` the inputs per group; a linear layer is the case of
    one group and one tap.
    """

    shape: tuple[int, ...]
    groups: int = 1
    transposed: bool = False

    @property
    def features(self) -> int:
        """Inputs per group: the size of a whitening matrix."""
        return self.shape[0] // self.groups if self.transposed else self.shape[1]

    @property
    def outputs(self) -> int:
        """Outputs per group."""
        return self.shape[1] if self.transposed else self.shape[0] // self.groups

    @property
    def taps(self) -> int:
        """Positions of the kernel."""
        return math.prod(self.shape[2:])

    def pack(self, W: Tensor) -> Tensor:
        """The stored weight as (groups, out, taps, in)."""
        if self.transposed:
            return W.reshape(self.groups, self.features, self.outputs, -1).permute(0, 2, 3, 1)
        return W.reshape(self.groups, self.outputs, self.features, -1).transpose(2, 3)

    def unpack(self, X: Tensor) -> Tensor:
        """The inverse of `pack`, contiguous as torch's own weights are."""
        return (X.permute(0, 3, 1, 2) if self.transposed else X.transpose(2, 3)).reshape(self.shape).contiguous()

    def spread(self, s: Tensor) -> Tensor:
        """A number for each input, s (groups, in), shaped so that it multiplies a stored weight."""
        ones = (1,) * len(self.shape[2:])
        if self.transposed:
            return s.reshape(-1, 1, *ones)
        if self.groups == 1:
            return s.reshape(1, -1, *ones)
        return s.repeat_interleave(self.outputs, dim=0).reshape(*self.shape[:2], *ones)

    def pack_bias(self, b: Tensor) -> Tensor:
        """The stored bias as (groups, out)."""
        return b.reshape(self.groups, self.outputs)

    def rows(self, h: Tensor, channels_at: int) -> Tensor:
        """Inputs as (groups, rows, in): every position of every example is a row."""
        h = torch.movedim(h, channels_at, -1).reshape(-1, self.groups, self.features)
        return h.transpose(0, 1)
