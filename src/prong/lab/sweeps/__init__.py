"""Sweeps: many settings of an experiment, tried by as many processes and machines as there are."""
