"""Noticing that a forward has failed, wherever in the model."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from prong.layers import in_backward
from prong.layers.base import Owner


class OnFailure:
    """The model's forward hook while statistics are gathered; in a copy of the model it does nothing."""

    def __init__(self, owner: Owner | None = None) -> None:
        self._owner = owner

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        """Tell the owner, if this is called because of an exception."""
        failed = output is None and sys.exc_info()[0] is not None  # torch calls it from its `except`
        if failed and self._owner is not None and not in_backward():  # checkpointing stops forwards by exceptions
            self._owner.undo()

    def __reduce__(self) -> tuple[type[OnFailure], tuple[()]]:
        return OnFailure, ()
