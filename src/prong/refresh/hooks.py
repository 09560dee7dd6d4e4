"""Doing something right before an optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def before_step(optimizer: Optimizer, act: Callable[[], None]) -> RemovableHandle:
    """Call `act` before each step, once gradients are there: with a closure, they come to be inside the step."""

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            act()
            return None

        def wrapped() -> Any:
            loss = closure()
            act()
            return loss

        return (args[0], wrapped), {}

    return optimizer.register_step_pre_hook(hook)
