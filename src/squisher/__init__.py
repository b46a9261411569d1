"""Which parameters of a trained network matter: measured, or recycled from the optimizer."""

__version__ = "0.1.0"
