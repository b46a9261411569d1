"""What pages are made of: tables, figures, and the parts that stand between marks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["COLOURS", "Parts", "fill", "save", "subplots", "table"]

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#56B4E9",
    "#CC79A7",
    "#E69F00",
    "#000000",
    "#999999",
)  # told apart by colour-blind people too


@dataclass(frozen=True)
class Parts:
    """What a page takes from results: whole blocks, and numbers inside sentences, by name."""

    blocks: Mapping[str, str]
    words: Mapping[str, str] = field(default_factory=dict)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def fill(text: str, parts: Parts) -> str:
    """Return the text with all its blocks and numbers replaced by those made from JSON.

    A block stands between `<!-- NAME -->` and `<!-- end -->`; a number inside a sentence is `<!--=KEY-->…<!---->`.

    Raises:
        SystemExit: A mark asks for what there is not, or a block has no mark.
    """
    used = set()

    def block(match: re.Match[str]) -> str:
        used.add(match[1])
        return f"<!-- {match[1]} -->\n{parts.blocks[match[1]]}\n<!-- end -->"

    def word(match: re.Match[str]) -> str:
        if match[1] not in parts.words:
            raise SystemExit(f"The page asks for {match[1]!r}, which the results do not have.")
        return f"<!--={match[1]}-->{parts.words[match[1]]}<!---->"

    text = re.sub(r"<!--=(.+?)-->.*?<!---->", word, text)
    names = "|".join(re.escape(name) for name in parts.blocks)
    text = re.sub(rf"<!-- ({names}) -->.*?<!-- end -->", block, text, flags=re.DOTALL)
    if missing := set(parts.blocks) - used:
        raise SystemExit(f"The page has no marks for {', '.join(sorted(missing))}.")
    return text


def subplots(count: int, size: tuple[float, float], rows: int = 1) -> tuple[Any, list[Any]]:
    """Return a figure with this many panels, in one row or in several."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, -(-count // rows), figsize=size, squeeze=False)
    for axis in axes.flat:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:count])


def save(figure: Any, path: Path) -> None:
    """Write a figure, the same bytes every time."""
    from matplotlib import pyplot

    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)
