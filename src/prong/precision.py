"""In which precision sums and factorisations are done."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over values of `dtype` are kept: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def full_precision(like: Tensor) -> AbstractContextManager[object]:
    """Under this, autocast does not round matrix products on the device of `like` to half precision."""
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
