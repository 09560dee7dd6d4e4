"""The race: every method tuned alike, and then timed to given errors."""
