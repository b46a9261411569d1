"""What `--plot FILE` draws: the report's own charts of one importance, of two, of several tasks, and of a selection."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..analysis.agreement import Agreement
from ..analysis.health import Health
from ..importance import Importance
from .atlas import grid, place
from .data import depth_of
from .heat import clustered, heat_map
from .pairs import agreement_data
from .pictures import Panel, write_picture
from .scales import Axis
from .single import atlas_chart, depth_chart, distribution_chart, layer_bars, share_chart
from .svg import Series
from .together import density_chart, layer_chart, overlap_chart, similarity_chart

__all__ = ["plot_agreement", "plot_importance", "plot_similarities", "plot_sparsity"]

Path = str | os.PathLike[str]


def plot_importance(importance: Importance, health: Health, path: Path) -> None:
    """Draw how the values of an importance are distributed, and where they lie in the network.

    Args:
        importance: Names the picture.
        health: What `examine` found.
        path: An `.svg` or `.png` file.
    """
    p, depth = importance.provenance, depth_of(health)
    what = "Fisher" if p.kind == "fisher" else f"Squisher of {(p.optimizer or {}).get('class', 'an optimizer')}"
    atlas = grid(
        [place(row.name) for row in health.rows],
        "mean",
        [row.values.mean for row in health.rows],
        [row.values.numel for row in health.rows],
    )
    panels = [
        Panel("What each layer holds", share_chart(depth)),
        Panel("Distribution of the values", distribution_chart(health.totals.to_dict())[0]),
        Panel("Layers and kinds of parameters", atlas_chart(atlas, "")),
        Panel("Depth profile", depth_chart(depth)),
    ]
    write_picture(path, f"{what}: {health.totals.numel:,} values in {len(health.rows):,} parameters", panels)


def plot_agreement(
    agreement: Agreement,
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    path: Path,
    names: tuple[str, str] = ("A", "B"),
) -> None:
    """Draw two importances against each other: entry against entry, the overlap of the largest, ranks per layer.

    Args:
        agreement: What `compare(a, b)` returned.
        a: The first importance; read once more, in chunks.
        b: The second.
        path: An `.svg` or `.png` file.
        names: What to call them.
    """
    sides = [side if isinstance(side, Importance) else Importance(side) for side in (a, b)]
    data = {"a": names[0], "b": names[1], **agreement_data(agreement, *sides)}
    panels = [
        Panel("Entry against entry", density_chart(data, "")),
        Panel("Do they agree on what matters most?", overlap_chart(data)),
        Panel("Rank correlation per layer", layer_chart(data["layers"])),
    ]
    write_picture(path, f"{names[0]} and {names[1]}: {agreement.numel:,} entries in common", panels)


def plot_similarities(names: Sequence[str], distances: Tensor, path: Path) -> None:
    """Draw the similarity of tasks (1 − distance) as a map, with like ones side by side.

    Args:
        names: The tasks.
        distances: Between them, symmetric.
        path: An `.svg` or `.png` file.
    """
    order = clustered(distances)
    values = (1 - distances[order][:, order]).tolist()
    write_picture(
        path,
        "Similarity of tasks",
        [Panel("1 is the same task", similarity_chart([names[k] for k in order], values, ""))],
    )


def plot_sparsity(counts: Mapping[str, tuple[int, int]], path: Path, what: str) -> None:
    """Draw which share of every layer and of every parameter was chosen (kept, or set to zero).

    Args:
        counts: For each tensor, how many entries were chosen and how many there are.
        path: An `.svg` or `.png` file.
        what: What the chosen ones are, in words.
    """
    places = [place(name) for name in counts]
    layers: dict[str, list[int]] = {}
    for one, (some, size) in zip(places, counts.values(), strict=True):
        total = layers.setdefault(one.layer, [0, 0])
        total[0] += some
        total[1] += size
    shares = [some / size if size else 0.0 for some, size in counts.values()]
    atlas = grid(places, "share", shares, [size for _, size in counts.values()])
    by_layer = [layers[layer][0] / layers[layer][1] if layers[layer][1] else None for layer in atlas["layers"]]
    chosen, entries = (sum(pair[k] for pair in counts.values()) for k in (0, 1))
    label = f"share of the entries {what}"
    bars = layer_bars(
        [Series(what, range(len(by_layer)), by_layer)],
        atlas["labels"],
        Axis(label, 0.0, max([value or 0.0 for value in by_layer] + [1e-9]), kind="share"),
        "Per layer",
        f"The share of each layer's entries that were {what}.",
    )
    parameters = heat_map(
        atlas["share"], atlas["kinds"], atlas["labels"], title="Per parameter", label=label, kind="share",
        description="Rows are kinds of parameters, columns are layers.",
    )  # fmt: skip
    overall = chosen / entries if entries else 0.0
    heading = f"{chosen:,} of {entries:,} entries {what} ({100 * overall:.3g}%)"
    write_picture(path, heading, [Panel("Per layer", bars), Panel("Per parameter", parameters)])
