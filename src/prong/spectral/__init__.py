"""Uses of the spectrum of a layer's inputs: dropout of directions, and compression of trained networks."""

from prong.spectral.dropout import dropout_, keep_probabilities

__all__ = ["dropout_", "keep_probabilities"]
