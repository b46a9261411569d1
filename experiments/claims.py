"""What the paper claims, as comparisons that a document of results can answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.page import Comparison

__all__ = ["CLAIMS", "Claim", "judge"]


@dataclass(frozen=True)
class Claim:
    """A claim about two methods of one setting.

    Attributes:
        text: The claim.
        setting: The module's name.
        first: The method that is said to be better (or as good).
        second: The other one; "baseline" stands for the setting's own.
        alike: Whether it says "as good as" instead of "better than".
        case: The case it is about; None for the average of the main ones.
    """

    text: str
    setting: str
    first: str
    second: str
    alike: bool = False
    case: str | None = None

    @property
    def where(self) -> str:
        """The setting, and the case if it is about one."""
        return self.setting if self.case is None else f"{self.setting}, {self.case}"


_PLAIN = ("merging", "ubgm", "pruning", "fish", "embedding", "ewc", "ewc_permuted")

CLAIMS: tuple[Claim, ...] = (
    *(Claim("The Squisher is better than the Fisher-free baseline", s, "squisher", "baseline") for s in _PLAIN),
    *(Claim("The Fisher is better than the Fisher-free baseline", s, "fisher", "baseline") for s in _PLAIN),
    *(Claim("The Squisher is as good as the Fisher", s, "squisher", "fisher", alike=True) for s in _PLAIN),
    *(
        Claim(f"At one learning rate for all, the {m.title()}'s mask is better than a random one", "fish", m, "baseline", case="average, one rate")
        for m in ("squisher", "fisher")
    ),
    *(
        Claim("Rescaling is needed", s, "squisher", "squisher (without rescaling)")
        for s in ("ewc", "ewc_permuted", "merging", "ubgm")
    ),
    *(Claim("β₂ = 0.999 is better than 0.95", s, "squisher", "squisher (β₂ = 0.95)") for s in ("merging", "ewc")),
    *(Claim("The joint Fisher is as good as the Fisher", s, "joint", "fisher", alike=True) for s in _PLAIN),
    Claim("With the last checkpoints the Squisher is better than the Fisher", "merging", "squisher", "fisher"),
    Claim(
        "With the best checkpoints the Fisher is better than the Squisher", "merging", "fisher", "squisher",
        case="average, best checkpoint",
    ),
    *(
        Claim("Early in training the Squisher is not yet as good: the Fisher is better", "merging", "fisher", "squisher", case=case)
        for case in ("average, short training", "MNIST rotations: average, short training")
    ),
    Claim(
        "After a shorter training of the base the Squisher is as good as the Fisher", "pruning", "squisher", "fisher",
        alike=True, case="75% pruned, base 10 epochs",
    ),
)  # fmt: skip


def judge(claim: Claim, found: Sequence[Comparison]) -> tuple[str, str]:
    """The verdict and the numbers behind it; two empty strings where the methods were not run.

    "Better than" holds if the paired difference's interval is above 0, in part if only its mean is, else it does not hold.
    "As good as" asks two things: that the first is not clearly worse (the interval reaches 0), and that it keeps at least half
    of what the second gains over the baseline. Both: it holds; one: in part; none: it does not hold. Where a case has no baseline, the
    first question decides.
    """
    comparison = next((c for c in found if c.name == claim.setting), None)
    if comparison is None:
        return "", ""
    second = comparison.baseline if claim.second == "baseline" else claim.second
    cases = comparison.main_cases if claim.case is None else (claim.case,)
    if any(method not in comparison.values.get(case, {}) for case in cases for method in (claim.first, second)):
        return "", ""
    gap = comparison.difference(claim.first, second, claim.case)
    numbers = f"{gap} over {gap.count} seeds"
    if not claim.alike:
        return ("holds" if gap.low > 0 else "holds in part" if gap.value > 0 else "does not hold"), numbers
    if any(comparison.baseline not in comparison.values[case] for case in cases):
        return ("holds" if gap.high >= 0 else "does not hold"), numbers  # nothing says how much there was to lose
    gain = comparison.difference(second, comparison.baseline, claim.case).value
    answers = (gap.high >= 0, gap.value >= 0 or -gap.value <= gain / 2)
    return ("does not hold", "holds in part", "holds")[sum(answers)], numbers
