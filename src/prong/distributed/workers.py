"""The processes that train one model together, and the few ways in which they talk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")
# Told as they are, or as the first of these that they are a kind of.
KINDS: tuple[type[Exception], ...] = (
    FloatingPointError,
    ArithmeticError,
    torch.linalg.LinAlgError,  # type: ignore[attr-defined]
    MemoryError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile, or the model itself."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get("_orig_mod")
    return model if inner is None else unwrapped(inner)


def eager_name(name: str) -> str:
    """The name that a parameter or module has without torch.compile."""
    return name.replace("_orig_mod.", "")


class Workers:
    """The ranks of a process group; or this process alone, for whom everything below is free.

    Every worker must make every call, in the same order. None of them depends on a worker's own data.

    Attributes:
        rank: which of them this process is.
        size: how many there are.
        alone: whether there is nobody to talk to.
        device: where they talk.
        group: torch's own name for them; None is the default group.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.size, self.device, self.group = rank, size, device, group
        self.alone = size == 1

    @classmethod
    def of(cls, model: nn.Module, group: dist.ProcessGroup | None = None) -> Workers:
        """Those who train this model.

        Without a group given, it is that of the model, if that is wrapped in DistributedDataParallel; or the default
        group, where `torch.distributed` is initialised.

        Raises:
            ValueError: a group that this process is not in.
        """
        if group is None and isinstance(model, DistributedDataParallel):
            group = model.process_group
        initialised = dist.is_available() and dist.is_initialized()
        if group is not None and (not initialised or dist.get_rank(group) < 0):
            raise ValueError(
                "this process is not in the process group that was given; make the optimizer on the group's ranks only"
            )
        if not initialised:
            return ALONE
        if group is dist.group.WORLD:
            group = None  # by name: whoever keeps the default group keeps its threads, also when it has been destroyed
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        return cls(dist.get_rank(group), dist.get_world_size(group), device, group)

    def any(self, flag: bool) -> bool:
        """Whether it is so for any worker."""
        return self.total({"flag": float(flag)})["flag"] > 0

    def total(self, numbers: dict[str, float]) -> dict[str, float]:
        """These numbers, added up over all workers."""
        if self.alone:
            return numbers
        told = torch.tensor(list(numbers.values()), dtype=torch.float64, device=self.device)
        self.sum_([told])()
        return dict(zip(numbers, told.tolist(), strict=True))

    def sum_(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to add up these tensors over all workers, in place; they are ready once the result has been called.

        One all-reduce for all tensors of a dtype and device.
        """
        return self._in_buckets(tensors, lambda flat: dist.all_reduce(flat, group=self.group, async_op=True))

    def broadcast_(self, tensors: Sequence[Tensor], rank: int = 0) -> Callable[[], None]:
        """Begin to give everyone the values that one rank has, in place; see `sum_`."""
        return self._in_buckets(
            tensors, lambda flat: dist.broadcast(flat, group=self.group, group_src=rank, async_op=True)
        )

    def meet(self, value: T, error: Exception | None = None) -> list[T]:
        """What every worker has to say, by rank. If any has an error instead, all raise it.

        Raises:
            Exception: of the kind that the first failed worker had, naming ranks.
        """
        if self.alone:
            if error is not None:
                raise error
            return [value]
        told: list[Any] = [None] * self.size
        kind = next((kind for kind in KINDS if isinstance(error, kind)), RuntimeError)
        mine = (value, None if error is None else (kind, str(error)))
        dist.all_gather_object(told, mine, group=self.group)
        failed = [(rank, failure) for rank, (_, failure) in enumerate(told) if failure is not None]
        if failed:
            message = "; ".join(f"on rank {rank}: {text}" for rank, (_, text) in failed[:4])
            more = f"; and on {len(failed) - 4} more ranks" if len(failed) > 4 else ""
            raise failed[0][1][0](message + more) from error
        return [said for said, _ in told]

    @contextmanager
    def together(self) -> Iterator[None]:
        """What any worker raises in here, all raise when they leave it. Nobody talks in here."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            if self.alone:
                raise
            error = caught
        if not self.alone:
            self.meet(None, error)

    def _in_buckets(self, tensors: Sequence[Tensor], collective: Callable[[Tensor], Any]) -> Callable[[], None]:
        if self.alone or not tensors:
            return lambda: None
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        under_way = []
        for bucket in alike.values():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            under_way.append((bucket, flat, collective(flat)))

        def finish() -> None:
            with torch.no_grad():
                for bucket, flat, work in under_way:
                    work.wait()
                    parts = torch.split(flat, [tensor.numel() for tensor in bucket])
                    for tensor, part in zip(bucket, parts, strict=True):
                        tensor.copy_(part.view(tensor.shape))

        return finish


ALONE = Workers()
