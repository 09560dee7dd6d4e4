"""The Fisher matrix of a model: exact or sampled, whole or by blocks, its Kronecker factors and its spectrum.

In the canonical parameters or in whitened coordinates. Models come out as they went in. docs/fisher.md has examples.
"""

from prong.analysis.fisher.kronecker import Factors, factors
from prong.analysis.fisher.matrices import Operator, blocks, dense, slices
from prong.analysis.fisher.spectra import Extremes, Spectrum, extreme_eigenvalues, spectrum

__all__ = ["Extremes", "Factors", "Operator", "Spectrum", "blocks", "dense", "extreme_eigenvalues"]
__all__ += ["factors", "slices", "spectrum"]
