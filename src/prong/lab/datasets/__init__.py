"""The data sets that the lab knows: what was published, where it lies, how to get it."""
