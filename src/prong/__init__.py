"""Natural Neural Networks for PyTorch: whitened layers, PRONG and PRONG+ (Desjardins et al., NIPS 2015)."""

from prong import accuracy as accuracy
from prong import distributed as distributed
from prong import fisher as fisher
from prong import mirror as mirror
from prong import monitor as monitor
from prong import spectral as spectral
from prong.initialization import fan_in_, initialize_
from prong.injection import fold_, ordinary_gradients, whiten_
from prong.optimizer import PRONG
from prong.refresh import refresh_
from prong.schedule import Refresher
from prong.summaries import summary

__version__ = "0.1.0.dev0"

__all__ = [
    "PRONG",
    "Refresher",
    "fan_in_",
    "fold_",
    "initialize_",
    "ordinary_gradients",
    "refresh_",
    "summary",
    "whiten_",
]
