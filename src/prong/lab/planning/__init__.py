"""What an update would cost on machines that are not here: `prong plan` and the measurements behind it."""
