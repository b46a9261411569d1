"""What the paper claims, and what we ask besides, as comparisons that a document of results can answer.

The rule was fixed before it was applied: two-sided t tests on differences paired by seed, Holm's correction over all claims of one
source, and for "as good as" a margin of one point. A claim is not testable here where the Fisher itself gains nothing over the
baseline, or where the stand-in is too weak to tell methods apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from experiments.comparison import Comparison
from experiments.spread import Difference, holm

__all__ = ["CLAIMS", "Claim", "Judged", "Note", "Verdict", "judge"]

MARGIN = 1.0
"""Points of accuracy, score or NDCG by which "as good as" may be behind."""

LEVEL = 0.05


class Verdict(Enum):
    """What the data say of a claim."""

    HOLDS = "holds"
    IN_PART = "holds before the correction"
    OPEN = "not decided"
    AGAINST = "points the other way"
    FAILS = "does not hold"
    NOT_TESTABLE = "not testable here"


class Note(Enum):
    """What must be known beside a verdict."""

    NONE = ""
    ROWS = "all seeds share a few hundred test rows, whose choice is not in the interval"
    NO_GAIN = "the Fisher itself gains nothing clear over the baseline"
    WEAK = "the stand-in is too weak to tell methods apart"


@dataclass(frozen=True)
class Claim:
    """A claim about two methods of one setting.

    Attributes:
        text: The claim.
        setting: The name of a `Comparison`.
        first: The method that is said to be better (or as good).
        second: The other one; "baseline" stands for the setting's own.
        alike: Whether it says "as good as" instead of "better than".
        case: The case it is about; None for the average of the main ones.
        ours: Whether we ask it; otherwise the paper says so.
    """

    text: str
    setting: str
    first: str
    second: str
    alike: bool = False
    case: str | None = None
    ours: bool = False


class Judged(NamedTuple):
    """A claim with its verdict and the numbers behind it."""

    claim: Claim
    where: str
    verdict: Verdict
    gap: Difference
    p: float
    """After the correction."""
    note: Note


_EWC = tuple(f"ewc/{b}-{s}" for b in ("split", "permuted", "cifar") for s in ("task", "domain", "class"))
_MERGING = ("merging/eight", "merging/eight-upper", "merging/eight-generative", "merging")
_UBGM = ("ubgm/mpnet", "ubgm/upper", "ubgm")
_FISH = ("fish/glue", "fish/glue-upper", "fish")
_ALL = (
    *_MERGING,
    *_UBGM,
    "pruning/cifar10",
    "pruning",
    *_FISH,
    "embedding_text",
    "embedding",
    *_EWC,
    "ewc/permuted-check",
    "ewc/permuted-reduced",
)
_EWC_TASK = ("ewc/split-task", "ewc/permuted-task", "ewc/permuted-check", "ewc/cifar-task")

CLAIMS: tuple[Claim, ...] = (
    *(Claim("The Squisher is better than the Fisher-free baseline", s, "squisher", "baseline") for s in _ALL),
    *(Claim("The Fisher is better than the Fisher-free baseline", s, "fisher", "baseline") for s in _ALL),
    *(Claim("The Squisher is as good as the Fisher", s, "squisher", "fisher", alike=True) for s in _ALL),
    *(
        Claim(f"At one learning rate for all, the {m.title()}'s mask is better than a random one", s, m, "baseline", case="average, one rate")
        for s in _FISH
        for m in ("squisher", "fisher")
    ),
    *(Claim(f"The {m.title()} is better than the identity matrix", s, m, "identity") for m in ("squisher", "fisher") for s in _EWC_TASK),
    *(Claim("Rescaling is needed", s, "squisher", "squisher (without rescaling)") for s in _EWC_TASK),
    *(Claim("β₂ = 0.999 is better than 0.95", s, "squisher", "squisher (β₂ = 0.95)") for s in _EWC_TASK),
    *(Claim("The joint Fisher is as good as the Fisher", s, "joint", "fisher", alike=True) for s in _EWC_TASK),
    *(Claim("With the last checkpoints the Squisher is better than the Fisher", s, "squisher", "fisher") for s in _MERGING),
    *(
        Claim(f"With the best checkpoints the {who} is better than the Squisher", s, m, "squisher", case="average, best checkpoint")
        for s, m, who in (*((s, "fisher", "Fisher") for s in _MERGING[:-1]), ("merging", "fisher (exact)", "exact Fisher"))
    ),
    *(
        Claim("After a shorter training of the base the Squisher is as good as OrthoReg's form of the Fisher", s, "squisher", "fisher (OrthoReg)", alike=True, case="75% pruned, base 10 epochs")
        for s in ("pruning/cifar10", "pruning")
    ),
    *(Claim("Bias correction changes the merge for the better", s, "squisher", "squisher (without bias correction)", ours=True) for s in (*_MERGING, *_UBGM)),
    *(Claim("β₂ = 0.999 is better than 0.95", s, "squisher", "squisher (β₂ = 0.95)", ours=True) for s in _MERGING),
    *(Claim("With an absolute floor of 1e-8 the Squisher's merge is better than the plain average", s, "squisher (floor 1e-8)", "baseline", ours=True) for s in _MERGING),
    *(Claim("The joint Fisher is as good as the Fisher", s, "joint", "fisher", alike=True, ours=True) for s in (*_MERGING, *_UBGM, "embedding")),
    *(
        Claim("Early in training the exact Fisher is better than the Squisher", "merging", "fisher (exact)", "squisher", case=case, ours=True)
        for case in ("average, short training", "MNIST rotations: average, short training")
    ),
    *(Claim("Tracking the data's gradients alone is better than Adam's own state", s, "squisher (tracked)", "squisher", ours=True) for s in _EWC),
    *(Claim("Decoupled, the Squisher is as good as in the gradient", s, "squisher (decoupled)", "squisher", alike=True, ours=True) for s in _EWC),
    *(Claim("The paper's N·v, unsearched, is as good as a λ that was searched for", s, "squisher (N·v)", "squisher", alike=True, ours=True) for s in _EWC),
)  # fmt: skip


def judge(found: Sequence[Comparison], claims: Sequence[Claim] = CLAIMS) -> list[Judged]:
    """Return every claim that the results can answer, with its verdict; the paper's and ours are two families of tests."""
    by_name = {c.name: c for c in found}
    asked = [(claim, by_name[claim.setting]) for claim in claims if _answered(claim, by_name.get(claim.setting))]
    out = []
    for ours in (False, True):
        family = [(claim, c) for claim, c in asked if claim.ours is ours]
        gaps = [c.difference(claim.first, _second(claim, c), claim.case) for claim, c in family]
        raw = [gap.p(-MARGIN if claim.alike else 0.0) for (claim, _), gap in zip(family, gaps, strict=True)]
        for (claim, c), gap, p, corrected in zip(family, gaps, raw, holm(raw), strict=True):
            verdict, note = _verdict(claim, c, gap, p, corrected)
            where = c.title if claim.case is None else f"{c.title}, {claim.case}"
            out.append(Judged(claim, where, verdict, gap, corrected, note))
    return out


def _second(claim: Claim, c: Comparison) -> str:
    return c.baseline if claim.second == "baseline" else claim.second


def _answered(claim: Claim, c: Comparison | None) -> bool:
    """Return whether both methods were run, on two common seeds at least."""
    if c is None:
        return False
    cases = c.main_cases if claim.case is None else (claim.case,)
    pairs = [[c.values.get(case, {}).get(m, {}) for m in (claim.first, _second(claim, c))] for case in cases]
    return bool(pairs) and all(len(a.keys() & b.keys()) > 1 for a, b in pairs)


def _verdict(claim: Claim, c: Comparison, gap: Difference, p: float, corrected: float) -> tuple[Verdict, Note]:
    if c.too_weak:
        return Verdict.NOT_TESTABLE, Note.WEAK
    if claim.alike and gap.high < -MARGIN:
        verdict = Verdict.FAILS
    elif p >= LEVEL or (claim.alike and gap.value <= -MARGIN):
        verdict = Verdict.OPEN
    elif gap.value > (-MARGIN if claim.alike else 0.0):
        verdict = Verdict.HOLDS if corrected < LEVEL else Verdict.IN_PART
    else:
        verdict = Verdict.FAILS if corrected < LEVEL else Verdict.AGAINST
    nothing = _fisher_gains_nothing(claim, c)
    if nothing and (claim.alike or verdict is Verdict.OPEN):
        return Verdict.NOT_TESTABLE, Note.NO_GAIN
    known = c.rows_known(claim.first, _second(claim, c), claim.case)
    return verdict, Note.ROWS if c.fixed_rows and not known else Note.NONE


def _fisher_gains_nothing(claim: Claim, c: Comparison) -> bool:
    """Return whether a stand-in has nothing to lose: needed for claims about Fisher or baseline."""
    if claim.first.startswith("fisher") and claim.second == "baseline":
        return False  # this is the question itself
    cases = c.main_cases if claim.case is None else (claim.case,)
    if any(m not in c.values[case] for case in cases for m in ("fisher", c.baseline)):
        return False
    return c.difference("fisher", c.baseline, claim.case).low <= 0
