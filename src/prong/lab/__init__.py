"""The paper's experiments: data, models, training, experiments and benchmarks (install with `prong[lab]`)."""
