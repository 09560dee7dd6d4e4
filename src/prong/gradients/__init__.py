"""Whitening of backpropagated gradients, on top of that of inputs."""
