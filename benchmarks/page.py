"""Puts the committed results into the documents: the tables of docs/how-it-is-fast.md and the README's.

python -m benchmarks.page
"""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from .harness import RESULTS

ROOT = Path(__file__).parents[1]
MODELS = {"mlp": "MLP", "cnn": "CNN", "encoder": "encoder", "decoder": "decoder", "vit": "ViT"}
OURS = {
    "squisher data": "**squisher**, empirical, first call",
    "squisher data again": "**squisher**, empirical, later calls",
    "squisher exact": "**squisher**, exact",
}
WRONG = 1e-3
"""A result that is off by more than this, relative to the largest entry, is no Fisher diagonal."""


def read(name: str) -> dict[str, Any]:
    """Return a benchmark's document."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def fisher() -> str:
    """Return the table of every method on every network, as a multiple of a plain forward and backward pass."""
    results = read("fisher")["results"]
    methods = [m for m in dict.fromkeys(r["method"] for r in results) if m != "plain"]
    cells = {(r["method"], r["model"]): _fisher_cell(r) for r in results}
    return _by_model("method", {m: m for m in methods}, cells)


def _by_model(heading: str, methods: dict[str, str], cells: dict[tuple[str, str], str]) -> str:
    """Return a row for each method under its label; networks that were not measured are left out."""
    models = {key: label for key, label in MODELS.items() if any(model == key for _, model in cells)}
    rows = [[label, *(cells.get((method, model), "") for model in models)] for method, label in methods.items()]
    return _table([heading, *models.values()], rows)


def fisher_steady() -> str:
    """Return the multiple without the fixed cost of a call."""
    results = [r for r in read("fisher")["results"] if r["method"].startswith("squisher") and "steady_ratio" in r]
    methods = list(dict.fromkeys(r["method"] for r in results))
    cells = {(r["method"], r["model"]): f"{r['steady_ratio']:.2f}×" for r in results}
    return _by_model("method", {m: m for m in methods}, cells)


def fisher_memory() -> str:
    """Return our peak extra memory relative to plain training's."""
    results = [r for r in read("fisher")["results"] if r["method"].startswith("squisher") and "memory_ratio" in r]
    methods = list(dict.fromkeys(r["method"] for r in results))
    cells = {(r["method"], r["model"]): f"{r['memory_ratio']:.2f}×" for r in results}
    return _by_model("method", {m: m for m in methods}, cells)


def fisher_growth() -> str:
    """Return the table of the multiple by the size of the problem."""
    rows = []
    for entry in read("fisher_growth")["growth"]:
        setting = ", ".join(f"{key} {value}" for key, value in entry["settings"].items())
        rows.append([entry["with"], entry["method"], setting, _fisher_cell(entry), f"{entry.get('seconds', 0):.2f} s"])
    return _table(["with", "method", "setting", "× plain", "time"], rows)


def families() -> str:
    """Return the table of Hugging Face models: which are measured all at once and inside a training step, and why others are not."""
    document = read("families")
    rows = []
    for does in dict.fromkeys(row["does"] for row in document["families"].values()):
        own = {name: row for name, row in document["families"].items() if row["does"] == does}
        left = [f"{name} ({row['why']})" for name, row in own.items() if row["method"] != "fast"]
        outside = [name for name, row in own.items() if row["step"]["method"] == "refused"]
        outside += [f"{name} (but {len(row['step']['left'])})" for name, row in own.items() if row["step"].get("left")]
        at_once = ", ".join(name for name, row in own.items() if row["method"] == "fast")
        rows.append([does, at_once, "; ".join(left), ", ".join(outside)])
    measured = [e for row in document["families"].values() for e in (row["error"], row["step"].get("error", 0.0))]
    head = [f"transformers {document['environment']['transformers']}", "at once", "by the loop, and why"]
    table = _table([*head, "not in a training step, or all but some parameters"], rows)
    return f"{table}\n\nLargest difference from the definition, relative to a parameter's largest entry: {max(measured):.0e}."


def merge() -> str:
    """Return the table of merging 300M parameters, beside a copy and mergekit."""
    rows = []
    for kind, part in read("merge")["types"].items():
        for name, case in part["cases"].items():
            seconds = f"{case['seconds']:.1f} s", f"{case['process_seconds']:.1f} s"
            rows.append([kind, name, *seconds, f"{case['relative_to_copy']:.2f}×", f"{case['extra_mb']:.0f} MB"])
    return _table(["type", "job", "time", "with imports", "of a copy", "extra memory"], rows)


def plain(name: str, relative: str | None) -> str:
    """Return the table of a benchmark whose cases are a flat list."""
    rows = []
    for case, numbers in read(name)["cases"].items():
        row = [case, f"{numbers['seconds']:.2f} s", f"{numbers['extra_mb']:.0f} MB"]
        rows.append(row + ([f"{numbers[relative]:.2f}×"] if relative else []))
    return _table(["case", "time", "extra memory", *(["relative"] if relative else [])], rows)


def ewc() -> str:
    """Return the table of a step of continual learning."""
    cases = read("ewc")["cases"]
    ways = list(dict.fromkeys(way for case in cases.values() for way in case["ways"]))
    rows = [
        [
            way,
            *(
                f"{case['ways'][way]['relative_to_plain']:.2f}×" if way in case["ways"] else ""
                for case in cases.values()
            ),
        ]
        for way in ways
    ]
    return _table(["a step, of a plain one", *cases], rows)


def readme() -> str:
    """Return the README's table."""
    cells = {(r["method"], r["model"]): _fisher_cell(r) for r in read("fisher")["results"]}
    methods = dict(OURS)
    methods |= {peer: peer for peer in ("loop", "vmap", "BackPACK", "NNGeometry", "ASDL", "Opacus")}
    measured = {method for method, _ in cells}
    shown = {method: label for method, label in methods.items() if method in measured}
    return _by_model("Fisher diagonal, × a plain forward and backward", shown, cells)


KINDS = {"state alone": "state and weights", "earlier weights too": "and earlier weights"}


def naming() -> str:
    """Return the table of runs: how many names the values prove, and how many wrong ones were refused."""
    rows = []
    for run, found in read("naming")["runs"].items():
        ways = [found[kind] for kind in KINDS]
        wrong = [[sum(kind[key] for kind in way["wrong"].values()) for key in ("refused", "tried")] for way in ways]
        cells = [f"{way['proven']} of {way['parameters']}" for way in ways]
        cells += [f"{refused} of {tried}" for refused, tried in wrong]
        guess = "yes" if any(way["order_refused"] for way in ways) else ""
        rows.append([run.replace("_", " "), *cells, str(sum(way["right_refused"] for way in ways)), guess])
    head = [*(f"proven: {kind}" for kind in KINDS.values()), *(f"wrong refused: {kind}" for kind in KINDS.values())]
    return _table(["run", *head, "right refused", "wants `--in-order`"], rows)


def naming_scripts() -> str:
    """Return the outcomes of the scripts made to mislead, by the order of the parameters and the optimizer's state."""
    outcomes = ("right", "refused", "wrong")
    counts = read("naming_scripts")["counts"]
    return _table(
        ["scripts", *outcomes], [[kind, *(str(own.get(o, 0)) for o in outcomes)] for kind, own in counts.items()]
    )


def naming_figure() -> str:
    """Return the smallest margin of each run, as an SVG: how far the second best parameter was behind the right one."""
    runs = read("naming")["runs"]
    width, left, row = 640, 170, 18
    height = row * len(runs) + 60
    at = lambda x: left + x * (width - left - 30)  # noqa: E731
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        lines.append(f'<path d="M{at(tick):.0f} 8V{height - 44}" stroke="#ddd"/>')
        lines.append(f'<text x="{at(tick):.0f}" y="{height - 30}" text-anchor="middle">{tick}</text>')
    for k, (run, found) in enumerate(runs.items()):
        y = 18 + k * row
        lines.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{run.replace("_", " ")}</text>')
        for kind, colour, radius in zip(KINDS, ("#1f5f8b", "#d9822b"), (5, 3), strict=True):
            margin = found[kind]["margin"]
            if margin is not None:
                lines.append(f'<circle cx="{at(margin):.1f}" cy="{y}" r="{radius}" fill="{colour}"/>')
        if all(found[kind]["margin"] is None for kind in KINDS):
            lines.append(f'<text x="{at(0) + 6:.0f}" y="{y + 4}" fill="#777">nothing proven: no first moment</text>')
    lines.append(
        f'<text x="{left}" y="{height - 10}">smallest margin in correlation (blue: state and weights; orange: earlier weights '
        "too)</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


MODELS_PUBLISHED = {"7B": 7e9, "70B": 7e10}


def codec_fidelity() -> str:
    """Return how far decoded values are from the exact ones."""
    rows = [
        [
            r["model"],
            str(r["steps"]),
            r["codec"],
            f"{r['bytes_per_entry']:.3f}",
            f"{r['spearman']:.4f}",
            " / ".join(_share(r["overlap"][size]) for size in ("0.005", "0.1", "0.5")),
        ]
        for r in read("codecs")["fidelity"]["rows"]
    ]
    head = [
        "fine-tune of",
        "steps",
        "codec",
        "bytes per entry",
        "rank correlation",
        "overlap of the top 0.5% / 10% / 50%",
    ]
    return _table(head, rows)


CODECS = ("bfloat16", "log8", "rank1", "without importance")


def lost(part: str) -> dict[str, dict[str, list[float]]]:
    """Return the differences to the exact file by application, codec and seed; and the values of the exact file."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for r in read("codecs")[part]["rows"]:
        found.setdefault(r["application"], {}).setdefault(r["codec"], {})[r["seed"]] = r["value"]
    return {
        application: {"exact": list(of["exact"].values())}
        | {codec: [of[codec][k] - of["exact"][k] for k in of["exact"]] for codec in CODECS if codec in of}
        for application, of in found.items()
    }


def codec_applications(part: str) -> str:
    """Return the loss of the applications, paired with the exact file: means over seeds."""
    rows = []
    for application, of in lost(part).items():
        cells = [f"{statistics.fmean(of['exact']):.1f}"]
        for codec in CODECS:
            gaps = of.get(codec)
            spread = f" ± {statistics.stdev(gaps):.1f}" if gaps and len(gaps) > 1 and any(gaps) else ""
            cells.append(f"{statistics.fmean(gaps):+.1f}{spread}" if gaps else "")
        rows.append([application, *cells])
    return _table(["", "exact", *(f"{codec} − exact" for codec in CODECS)], rows)


def codec_masks() -> str:
    """Return the effect of rank1 on a mask, by the importance that it is chosen from."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in read("codecs")["masks"]["rows"]:
        found.setdefault(row["importance"], {}).setdefault(row["codec"], []).append(row["value"])
    rows = []
    for name, of in found.items():
        gaps = [b - a for a, b in zip(of["exact"], of["rank1"], strict=True)]
        rows.append(
            [
                name,
                f"{statistics.fmean(of['exact']):.1f}",
                f"{statistics.fmean(gaps):+.1f} ± {statistics.stdev(gaps):.1f}",
            ]
        )
    return _table(["mask of 2% from", "exact", "rank1 − exact"], rows)


def codec_figure() -> str:
    """Return the loss of every application with every codec, as an SVG: a dot a seed, a bar for the mean."""
    colours = dict(zip(CODECS, ("#888888", "#1f5f8b", "#d9822b", "#b8b8b8"), strict=True))
    width, left, row, gap = 760, 150, 44, 26
    parts = {part: lost(part) for part in ("digits", "sentences") if part in read("codecs")}
    rows = [(part, name, of) for part, found in parts.items() for name, of in found.items() if "embed" not in name]
    height = row * len(rows) + gap + 44
    edge = max(abs(x) for _, _, of in rows for codec in CODECS for x in of.get(codec, [0.0]))
    at = lambda x: left + (x + edge) / (2 * edge) * (width - left - 20)  # noqa: E731
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for k, codec in enumerate(CODECS):
        x = left + 130 * k
        lines.append(f'<circle cx="{x}" cy="14" r="4" fill="{colours[codec]}"/><text x="{x + 9}" y="18">{codec}</text>')
    step = next(n for n in (1, 2, 5, 10, 20, 50) if edge / n <= 6)
    for tick in range(-int(edge // step) * step, int(edge) + 1, step):
        shade = "#555" if tick == 0 else "#e2e2e2"
        lines.append(f'<path d="M{at(tick):.1f} {gap}V{height - 34}" stroke="{shade}"/>')
        lines.append(f'<text x="{at(tick):.1f}" y="{height - 21}" text-anchor="middle">{tick:+d}</text>')
    for k, (part, name, of) in enumerate(rows):
        top = gap + k * row
        lines.append(f'<text x="{left - 10}" y="{top + 20}" text-anchor="end">{name}</text>')
        lines.append(f'<text x="{left - 10}" y="{top + 33}" text-anchor="end" fill="#777">{part}</text>')
        for n, codec in enumerate(CODECS):
            y = top + 10 + 8 * n
            gaps = of.get(codec, [])
            lines += [
                f'<circle cx="{at(x):.1f}" cy="{y}" r="2.5" fill="{colours[codec]}" fill-opacity=".6"/>' for x in gaps
            ]
            if gaps:
                mean = at(statistics.fmean(gaps))
                lines.append(f'<path d="M{mean:.1f} {y - 4}v8" stroke="{colours[codec]}" stroke-width="2.5"/>')
    lines.append(
        f'<text x="{left}" y="{height - 6}">accuracy with the codec − with the exact file, points; a dot a seed</text>'
    )
    return "\n".join([*lines, "</svg>", ""])


def codec_speed() -> str:
    """Return the table of sizes and processor time."""
    found = read("codecs")["speed"]["rows"]
    exact = next(r for r in found if r["codec"] == "exact")
    rows = []
    for r in found:
        cells = [f"{r[key]:.1f}" if key in r else "" for key in ("write_seconds", "read_seconds", "merge_seconds")]
        ratio = f"{r['merge_seconds'] / exact['merge_seconds']:.2f}×" if "merge_seconds" in r else ""
        sizes = [_size(r["bytes"] / r["entries"] * n) for n in MODELS_PUBLISHED.values()]
        rows.append([r["codec"], _size(r["bytes"]), *cells, ratio, *sizes])
    head = [
        "",
        "size",
        "write (s)",
        "read (s)",
        "merge with two (s)",
        "× exact",
        *(f"{n}, extrapolated" for n in MODELS_PUBLISHED),
    ]
    return _table(head, rows)


def _size(number: float) -> str:
    unit, name = (1e9, "GB") if number >= 1e9 else (1e6, "MB")
    return f"{number / unit:,.1f} {name}"


def _share(value: float) -> str:
    return "0 in it" if value != value else f"{value:.3f}"


PARTS = {
    "docs/formats.md": {"naming": naming, "naming scripts": naming_scripts},
    "docs/file-format.md": {
        "codec fidelity": codec_fidelity,
        "codec applications": lambda: codec_applications("digits"),
        "codec applications sentences": lambda: codec_applications("sentences"),
        "codec masks": codec_masks,
        "codec speed": codec_speed,
    },
    "docs/how-it-is-fast.md": {
        "fisher": fisher,
        "fisher steady": fisher_steady,
        "fisher memory": fisher_memory,
        "fisher growth": fisher_growth,
        "families": families,
        "merge": merge,
        "extract": lambda: plain("extract", "relative_to_copy"),
        "archive": lambda: plain("archive", "relative_to_copy"),
        "topk": lambda: plain("topk", None),
        "mask": lambda: plain("mask", "relative_to_plain"),
        "ewc": ewc,
    },
    "README.md": {"readme": readme},
}


def fill(text: str, name: str, content: str) -> str:
    """Return the text with the block between a part's two marks replaced."""
    begin, end = f"<!-- benchmarks: {name} -->", "<!-- end -->"
    head, mark, rest = text.partition(begin)
    if not mark:
        raise SystemExit(f"There is no mark {begin} in the page.")
    return f"{head}{begin}\n{content}\n{end}{rest.partition(end)[2]}"


def _fisher_cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    if "failed" in result:
        return "fails"
    wrong = result.get("max_error") is not None and result["max_error"] > WRONG
    return f"{result['ratio']:.2f}×" + (" (wrong)" if wrong else "")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Fill every page."""
    for page, parts in PARTS.items():
        text = (ROOT / page).read_text()
        for name, make in parts.items():
            text = fill(text, name, make())
        (ROOT / page).write_text(text)
    (ROOT / "docs" / "images" / "naming.svg").write_text(naming_figure())
    (ROOT / "docs" / "images" / "codecs.svg").write_text(codec_figure())
    shutil.copyfile(RESULTS / "fisher.png", ROOT / "docs" / "images" / "fisher.png")


if __name__ == "__main__":
    main()
