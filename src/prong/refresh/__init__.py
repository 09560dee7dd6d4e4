"""When and from what whitenings are estimated anew while an optimizer trains, and what that changes."""
