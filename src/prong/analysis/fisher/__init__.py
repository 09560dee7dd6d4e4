"""The Fisher matrix of a model: exact or sampled, whole or by blocks, its Kronecker factors and its spectrum.

In the canonical parameters or in whitened coordinates. Models come out as they went in. docs/fisher.md has examples.
"""

from prong.analysis.fisher.kronecker import Factors as Factors
from prong.analysis.fisher.kronecker import factors as factors
from prong.analysis.fisher.matrices import Operator as Operator
from prong.analysis.fisher.matrices import blocks as blocks
from prong.analysis.fisher.matrices import dense as dense
from prong.analysis.fisher.matrices import slices as slices
from prong.analysis.fisher.spectra import Extremes as Extremes
from prong.analysis.fisher.spectra import Spectrum as Spectrum
from prong.analysis.fisher.spectra import extreme_eigenvalues as extreme_eigenvalues
from prong.analysis.fisher.spectra import spectrum as spectrum
