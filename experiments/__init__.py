"""The paper's settings, through the public API of squisher only."""
