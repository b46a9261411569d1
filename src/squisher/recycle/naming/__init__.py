"""From the index of an optimizer state to the name of a parameter."""
