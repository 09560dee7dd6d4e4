"""Uses of the spectrum of a layer's inputs: dropout of directions, and compression of trained networks."""

from prong.analysis.spectral.compression import compress
from prong.analysis.spectral.dropout import dropout_, keep_probabilities
from prong.analysis.spectral.report import Layer, Report

__all__ = ["Layer", "Report", "compress", "dropout_", "keep_probabilities"]
