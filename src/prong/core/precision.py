"""In which precision sums, factorisations and products are done."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def is_half(dtype: torch.dtype) -> bool:
    """Whether a dtype is of lower precision than float32."""
    return torch.finfo(dtype).eps > torch.finfo(torch.float32).eps


CPU = torch.device("cpu")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over values of `dtype` are kept: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def has_bfloat16(device: torch.device = CPU) -> bool:
    """Whether a device has units that multiply in bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def full_precision(like: Tensor) -> AbstractContextManager[object]:
    """Under this, autocast does not round matrix products on the device of `like` to half precision."""
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
