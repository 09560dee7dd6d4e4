"""Parameters that are spread over workers (`torch.distributed.fsdp.fully_shard`): what works with them, and what not.

Forward and backward passes of such a model see whole weights, so implicit layers need nothing special: natural
gradients are spread like any others, and SGD's step is elementwise. Between updates each worker has rows of a weight.
Whitened coordinates mix what is in a row and not rows with each other, so W = V U is done for each worker's rows by
itself, unless a layout has its inputs in rows (transposed layers) or several matrices in one (grouped ones).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether each worker holds a part of this tensor."""
    return hasattr(tensor, "placements")  # a DTensor, whose class takes long to import


def local(tensor: Tensor) -> Tensor:
    """This worker's part of a tensor."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
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


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; all workers call this."""
    complete: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return complete


def by_rows(tensor: Tensor) -> bool:
    """Whether workers hold consecutive rows of a tensor, if they hold parts of it."""
    placements = getattr(tensor, "placements", ())
    return all(p.is_replicate() or (type(p).__name__ == "Shard" and p.dim == 0) for p in placements)


def rows_of(tensor: Tensor) -> slice:
    """The rows that this worker holds."""
    start, stop = 0, tensor.shape[0]
    for dim, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_shard():
            mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
            each = -(-(stop - start) // mesh.size(dim))
            start = min(stop, start + each * mesh.get_local_rank(dim))
            stop = min(stop, start + each)
    return slice(start, stop)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before it was sharded."""
    kind = type(module)
    return kind.__mro__[2] if hasattr(kind, "unshard") and kind.__name__.startswith("FSDP") else kind


def check_unsharded(model: nn.Module, what: str, cure: str) -> None:
    """Refuse what needs whole weights between updates, where some are sharded."""
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise ValueError(f"{what} needs whole weights between updates, but {name!r} is sharded; {cure}")


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules whose parameters come together for forwards: FSDPModules."""
    return [module for module in model.modules() if hasattr(module, "unshard") and hasattr(module, "reshard")]


def reshard_(modules: Iterable[Any]) -> None:
    """Let layers hold the sharded parameters that optimizers know, and not whole ones that a forward has left."""
    for module in modules:
        module.reshard()
