"""How far two importances agree: in rank, in scale, and on which entries matter most.

Everything is computed on the stored values of the parameters that both have; convert with `imp.as_fisher()` first where
the two scales should be compared. Up to `EXACT_LIMIT` common entries everything is exact. Beyond, values are
read in pieces and memory stays bounded: ranks are mid-ranks of the values rounded to the upper 16 bits of their float32
(relative resolution 2⁻⁷; a histogram of 32,768 bins holds all ranks), and so is the median ratio. Overlaps are exact at
any size.
"""

from .comparing import EXACT_LIMIT, FRACTIONS, Agreement, Row, compare
from .overlap import Overlap

__all__ = ["EXACT_LIMIT", "FRACTIONS", "Agreement", "Overlap", "Row", "compare"]
