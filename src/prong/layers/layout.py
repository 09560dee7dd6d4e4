"""The one layout to which the weights of every kind of layer are brought: (groups, out, taps, in)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How a weight is stored: (out, in / groups, *kernel), or transposed (in, out / groups, *kernel).

    `taps` is the number of kernel positions, `inputs` the inputs per group; a linear layer is the case of
    one group and one tap. With a `block`, the inputs of a group are whitened in contiguous blocks of at most so many,
    as if each were a group of its own: `matrices` blocks of `features` inputs, the last of a group filled up with
    zeros, which have no variance and no weight.
    """

    shape: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    block: int | None = None

    @property
    def inputs(self) -> int:
        """Inputs per group."""
        return self.shape[0] // self.groups if self.transposed else self.shape[1]

    @property
    def blocks(self) -> int:
        """Blocks per group."""
        return 1 if self.block is None else max(1, -(-self.inputs // self.block))

    @property
    def features(self) -> int:
        """Inputs per block: the size of a whitening matrix."""
        return -(-self.inputs // self.blocks)

    @property
    def matrices(self) -> int:
        """Blocks of all groups: the number of whitening matrices."""
        return self.groups * self.blocks

    @property
    def channels(self) -> int:
        """Inputs of all groups."""
        return self.groups * self.inputs

    @property
    def outputs(self) -> int:
        """Outputs per group."""
        return self.shape[1] if self.transposed else self.shape[0] // self.groups

    @property
    def taps(self) -> int:
        """Positions of the kernel."""
        return math.prod(self.shape[2:])

    @property
    def by_rows(self) -> bool:
        """Whether each row of the weight is that of one output, whatever the others are."""
        return self.groups == 1 and not self.transposed

    @property
    def whole(self) -> Layout:
        """The same without blocks."""
        return self if self.block is None else replace(self, block=None)

    def pack(self, W: Tensor) -> Tensor:
        """The stored weight as (matrices, out, taps, in)."""
        if self.transposed:
            packed = W.reshape(self.groups, self.inputs, self.outputs, self.taps).permute(0, 2, 3, 1)
        else:
            packed = W.reshape(self.groups, self.outputs, self.inputs, self.taps).transpose(2, 3)
        return self._split(packed)

    def unpack(self, X: Tensor, like: Tensor | None = None) -> Tensor:
        """The inverse of `pack`, contiguous as torch's own weights are; or laid out in memory as `like` is."""
        X = self._join(X)
        W = (X.permute(0, 3, 1, 2) if self.transposed else X.transpose(2, 3)).reshape(self.shape)
        return W if like is not None and W.stride() == like.stride() else W.contiguous()

    def spread(self, s: Tensor) -> Tensor:
        """A number for each input, s (groups, in), shaped so that it multiplies a stored weight."""
        ones = (1,) * len(self.shape[2:])
        if self.transposed:
            return s.reshape(-1, 1, *ones)
        if self.groups == 1:
            return s.reshape(1, -1, *ones)
        return s.repeat_interleave(self.outputs, dim=0).reshape(*self.shape[:2], *ones)

    def pack_bias(self, b: Tensor) -> Tensor:
        """The stored bias as (groups, out): blocks of one group share it."""
        return b.reshape(self.groups, self.outputs)

    def rows(self, h: Tensor, channels_at: int) -> Tensor:
        """Inputs as (matrices, rows, in): every position of every example is a row."""
        h = torch.movedim(h, channels_at, -1).reshape(-1, self.groups, self.inputs)
        return self._split(h.transpose(0, 1))

    def unrow(self, rows: Tensor) -> Tensor:
        """The inverse of `rows`, with positions and examples still one dimension: (rows, channels)."""
        whole = self._join(rows)
        return whole[0] if self.groups == 1 else whole.transpose(0, 1).flatten(1)

    def in_a_row(self, c: Tensor) -> Tensor:
        """A number for each input, c (matrices, in), as (channels,)."""
        return self._join(c).reshape(-1)

    def per_matrix(self, x: Tensor) -> Tensor:
        """What groups have one of each, (groups, ...), as (matrices, ...)."""
        return x if self.blocks == 1 else x.repeat_interleave(self.blocks, dim=0)

    def assembled(self, M: Tensor) -> Tensor:
        """The block-diagonal matrices (groups, in, in) of blocks M (matrices, in, in)."""
        if self.blocks == 1:
            return M
        whole = [torch.block_diag(*part) for part in M.reshape(self.groups, self.blocks, *M.shape[1:])]  # type: ignore[no-untyped-call]
        return torch.stack(whole)[:, : self.inputs, : self.inputs]

    def _split(self, X: Tensor) -> Tensor:
        """(groups, ..., all inputs) as (matrices, ..., those of a block)."""
        if self.blocks == 1:
            return X
        missing = self.blocks * self.features - self.inputs
        X = F.pad(X, (0, missing)) if missing else X
        return X.reshape(*X.shape[:-1], self.blocks, self.features).movedim(-2, 1).flatten(0, 1)

    def _join(self, X: Tensor) -> Tensor:
        """The inverse of `_split`."""
        if self.blocks == 1:
            return X
        return X.reshape(self.groups, self.blocks, *X.shape[1:]).movedim(1, -2).flatten(-2)[..., : self.inputs]
