"""Writes every table, figure, verdict and number in docs/ that comes from the experiments, from the committed documents.

python -m experiments.pages        # make results
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from experiments import ewc_tables, examples, findings, ota, pruning_weights, quantization, strengths, trust, unlearning
from experiments.comparison import RESULTS
from experiments.page_parts import Parts, fill

DOCS = Path(__file__).parents[1] / "docs"
PAGES: dict[str, tuple[Callable[[Path, Path], Parts], ...]] = {
    "results.md": (findings.parts, examples.numbers),
    "results-tables.md": (findings.appendix,),
    "continual-learning.md": (ewc_tables.parts, strengths.parts),
    "pruning.md": (pruning_weights.parts,),
    "when-to-trust-it.md": (trust.parts, examples.parts),
    "merging.md": (ota.parts,),
    "quantize.md": (quantization.parts,),
    "unlearn.md": (unlearning.parts,),
}
"""By page: what makes its parts from a folder of documents, and draws its figures into a folder of images."""


def parts(name: str, documents: Path, images: Path) -> Parts:
    """Return all parts of a page."""
    made = [make(documents, images) for make in PAGES[name]]
    blocks = {key: value for one in made for key, value in one.blocks.items()}
    return Parts(blocks, {key: value for one in made for key, value in one.words.items()})


def main() -> None:
    """Fill the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args()
    for name in PAGES:
        page = options.docs / name
        page.write_text(fill(page.read_text(), parts(name, options.documents, options.docs / "images")))
        print(page)


if __name__ == "__main__":
    main()
