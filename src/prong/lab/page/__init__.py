"""`prong report`: what runs came to, as a page, as figures, and claim by claim."""
