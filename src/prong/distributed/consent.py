"""Steps that all workers make, or none."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from prong.distributed.workers import Workers


class Consent:
    """Asks all workers, before a step, whether everyone's data could be counted; if not, all refuse the step.

    A worker that stopped in the middle of its forward would keep the others waiting, so until then it goes on.

    Args:
        workers: who is asked.
        model: what the optimizer was given as its model.
        optimizer: the optimizer.
        gathering: whether anything is counted at the time, the same for all.
        undo: takes back what was counted for this update.

    Attributes:
        errors: where layers put what they cannot count; None: they raise it at once, with nobody waiting.
    """

    def __init__(
        self,
        workers: Workers,
        model: nn.Module,
        optimizer: Optimizer,
        gathering: Callable[[], bool],
        undo: Callable[[], None],
    ) -> None:
        self.errors: list[FloatingPointError] | None = None if workers.alone else []
        self._workers, self._model, self._optimizer = workers, weakref.ref(model), weakref.ref(optimizer)
        self._gathering, self._undo = gathering, undo

    def ask(self) -> None:
        """Go on, or raise what any worker has to say against it.

        Raises:
            FloatingPointError: some data could not be counted; the message names layer and rank.
            RuntimeError: the model alone is joined, so that a worker without data would not be here to answer.
        """
        if self.errors is None:
            return
        if joined(self._model()) and not joined(self._optimizer()):
            raise RuntimeError(
                "the optimizer's workers exchange statistics too: instead of model.join() use "
                "torch.distributed.algorithms.Join([model, optimizer]), with an optimizer of prong's own"
            )
        if self._gathering() and self._workers.any(bool(self.errors)):
            first = next(iter(self.errors), None)
            self.errors.clear()
            self._undo()
            self._workers.meet(None, first)


def joined(x: object) -> bool:
    """Whether workers may run out of data before others, who then go on without them."""
    return isinstance(x, Joinable) and bool(x._join_config.enable)
