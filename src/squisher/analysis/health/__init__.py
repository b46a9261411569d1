"""Can this importance be trusted, and for what: statistics of its values, and diagnoses in plain sentences."""

from .diagnoses import Diagnosis, Row, effective_steps
from .examining import Health, diagnose, examine

__all__ = ["Diagnosis", "Health", "Row", "diagnose", "effective_steps", "examine"]
