"""Parameters that are spread over workers (`torch.distributed.fsdp.fully_shard`): what works with them, and what not.

Forward and backward passes of such a model see whole weights, so implicit layers need nothing special: natural
gradients are spread like any others, and SGD's step is elementwise. What reads or multiplies weights between updates
cannot work.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether each worker holds a part of this tensor."""
    return hasattr(tensor, "placements")  # a DTensor, whose class takes long to import


def local(tensor: Tensor) -> Tensor:
    """This worker's part of a tensor."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[operator]
    return part


def spread_like(part: Tensor, like: Tensor) -> Tensor:
    """The tensor of which every worker has a part, spread as another is."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor  # which takes long to import

    whole: Any = like
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def by_rows(tensor: Tensor) -> bool:
    """Whether workers hold rows of a tensor, if they hold parts of it."""
    placements = getattr(tensor, "placements", ())
    return all(placement.is_replicate() or placement.is_shard(0) for placement in placements)


def check_unsharded(model: nn.Module, what: str, cure: str) -> None:
    """Refuse what needs whole weights between updates.

    Raises:
        ValueError: some parameters are sharded.
    """
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise ValueError(f"{what} needs whole weights between updates, but {name!r} is sharded; {cure}")


def reshard_(model: nn.Module) -> None:
    """Let layers hold the sharded parameters that optimizers know, and not whole ones that a forward has left."""
    module: Any
    for module in model.modules():
        if hasattr(module, "unshard") and hasattr(module, "reshard"):  # an FSDPModule
            module.reshard()
