"""The paper's experiments, each a list of runs."""
