"""The IDX files in which MNIST is published."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

IMAGES = 2051  # magic numbers: unsigned bytes in three dimensions, and in one
LABELS = 2049


def read_idx(path: Path, magic: int) -> Tensor:
    """The array in an IDX file, gzipped if its name ends in .gz, as uint8 in the shape that its header gives.

    Header: magic number, then one length per dimension, all big-endian uint32.

    Raises:
        ValueError: not a file of that kind, corrupt, truncated, or longer than its header says.
    """
    content = _content(path)
    dimensions = magic & 0xFF
    start = 4 * (1 + dimensions)
    if len(content) < start:
        raise ValueError(f"{path} is truncated: {len(content)} bytes are fewer than its header of {start}")
    found, *shape = struct.unpack(f">{1 + dimensions}I", content[:start])
    if found != magic:
        raise ValueError(f"{path} is not the file expected here: magic number {found}, expected {magic}")
    held, promised = len(content) - start, math.prod(shape)
    if held != promised:
        size = " x ".join(map(str, shape))
        fault = "truncated" if held < promised else "too long"
        raise ValueError(f"{path} is {fault}: its header promises {size} = {promised} values, it holds {held}")
    if promised == 0:
        raise ValueError(f"{path} is empty: its header says {shape}")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).reshape(shape)


def _content(path: Path) -> bytearray:
    """All bytes of a file, unzipped."""
    if path.suffix != ".gz":
        return bytearray(path.read_bytes())
    try:
        with gzip.open(path) as file:
            return bytearray(file.read())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is corrupt and cannot be unzipped: {error}") from error
