"""The mathematics: statistics of inputs, whitenings, and what moves between coordinates. Pure functions."""
