"""Uses of the spectrum of a layer's inputs: dropout of directions, and compression of trained networks."""

from prong.analysis.spectral.compression import Layer, Report, compress
from prong.analysis.spectral.dropout import dropout_, keep_probabilities

__all__ = ["Layer", "Report", "compress", "dropout_", "keep_probabilities"]
