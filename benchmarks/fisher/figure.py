"""The figure of the Fisher benchmark, from its JSON (`python -m benchmarks.fisher.figure`)."""

from __future__ import annotations

import json
from pathlib import Path

from ..harness import RESULTS

__all__ = ["draw"]

RIGHT = 1e-3  # a larger error relative to the definition is drawn as wrong


def draw(path: Path) -> Path:
    """Time relative to a plain training step, one panel a model; what fails is left out, what is wrong is hollow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    results = [r for r in json.loads(path.read_text())["results"] if "ratio" in r and r["method"] != "plain"]
    models = list(dict.fromkeys(r["model"] for r in results))
    figure, panels = plt.subplots(1, max(1, len(models)), figsize=(4.2 * max(1, len(models)), 4), squeeze=False)
    for panel, model in zip(panels[0], models, strict=False):
        rows = sorted((r for r in results if r["model"] == model), key=lambda r: -r["ratio"])
        for place, row in enumerate(rows):
            wrong = (row.get("max_error") or 0.0) > RIGHT
            colour = "#1f6f8b" if row["method"].startswith("squisher") else "#9a9a9a"
            panel.barh(
                place, row["ratio"], color="none" if wrong else colour, edgecolor=colour, hatch="//" if wrong else None
            )
            label = f" {row['ratio']:.2f}" + (" (wrong)" if wrong else "")
            panel.text(row["ratio"], place, label, va="center", fontsize=7)
        panel.set_yticks(range(len(rows)), [r["method"] for r in rows], fontsize=7)
        panel.set_xscale("log")
        panel.axvline(1, color="black", linewidth=0.8)
        panel.margins(x=0.25)
        panel.set_title(model, fontsize=9)
        panel.set_xlabel("time of a plain forward and backward pass", fontsize=7)
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=150, metadata={"Software": None})
    plt.close(figure)
    return target


if __name__ == "__main__":
    draw(RESULTS / "fisher.json")
