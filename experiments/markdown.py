"""What pages are made of: tables, and the parts that stand between marks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Parts", "fill", "table"]


@dataclass(frozen=True)
class Parts:
    """What a page takes from results: whole blocks, and numbers inside sentences, by name."""

    blocks: Mapping[str, str]
    words: Mapping[str, str] = field(default_factory=dict)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def fill(text: str, parts: Parts) -> str:
    """The text with every block and every number in it made anew.

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
