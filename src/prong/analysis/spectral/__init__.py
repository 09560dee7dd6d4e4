"""Uses of the spectrum of a layer's inputs: dropout of directions, and compression of trained networks."""

from prong.analysis.spectral.compression import compress as compress
from prong.analysis.spectral.dropout import dropout_ as dropout_
from prong.analysis.spectral.dropout import keep_probabilities as keep_probabilities
from prong.analysis.spectral.report import Layer as Layer
from prong.analysis.spectral.report import Report as Report
