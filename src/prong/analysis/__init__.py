"""Looking at networks and at their whitening; imported when asked for."""
