"""PRONG on several workers: statistics are added up, factorisations shared out, and all end with the same bits.

Nothing has to be called: where `torch.distributed` is initialised, prong's optimizers, `prong.attach`, `prong.refresh_`
and `prong.initialize_` work together over all ranks, or over the `process_group` they are given.
"""

from prong.distributed.checkpoint import Checkpoint
from prong.distributed.workers import Workers

__all__ = ["Checkpoint", "Workers"]
