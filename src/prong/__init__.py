"""Any optimizer in whitened coordinates, and Natural Neural Networks (Desjardins et al., NIPS 2015), for PyTorch."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from prong import distributed as distributed
from prong.model.summary import summary
from prong.model.whiten import fold_, ordinary_gradients, whiten_
from prong.optimizers import PRONG, AdamW, Muon, attach
from prong.options import Absolute, Auto, Every, Explicit, Implicit, Materialised, Never, OnDrift, WhitenOutputs
from prong.refresh.apply import refresh_
from prong.refresh.initialize import fan_in_, initialize_

if TYPE_CHECKING:
    from prong.analysis import accuracy as accuracy
    from prong.analysis import fisher as fisher
    from prong.analysis import mirror as mirror
    from prong.analysis import monitor as monitor
    from prong.analysis import spectral as spectral

__version__ = "0.1.0.dev0"

__all__ = [
    "PRONG",
    "Absolute",
    "AdamW",
    "Auto",
    "Every",
    "Explicit",
    "Implicit",
    "Materialised",
    "Muon",
    "Never",
    "OnDrift",
    "WhitenOutputs",
    "attach",
    "fan_in_",
    "fold_",
    "initialize_",
    "ordinary_gradients",
    "refresh_",
    "summary",
    "whiten_",
]

ANALYSES = ("accuracy", "fisher", "mirror", "monitor", "spectral")


def __getattr__(name: str) -> ModuleType:
    """`prong.fisher`, `prong.monitor` and the like, imported when they are asked for."""
    if name in ANALYSES:
        return import_module(f"prong.analysis.{name}")
    raise AttributeError(f"module 'prong' has no attribute {name!r}")
