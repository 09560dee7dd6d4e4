"""What is done to a model: put whitened layers in, take them out, list them, initialise them."""
