"""The paper's experiments: data, models, training, demo and benchmark (install with `prong[lab]`)."""
