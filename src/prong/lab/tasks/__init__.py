"""What is trained: a model, its data, its loss, and how far it has come."""
