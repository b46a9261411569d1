"""Publish an importance beside its model on the Hub, and write model cards.

Cards hold no path, host or date, so that the same input gives the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from ..errors import ArgumentError, FileError
from ..importance import FILE_NAME, Importance, load
from ..storage import hub
from ..storage.json_files import read_object
from ..storage.tensors import numel_of

__all__ = ["Publication", "card_section", "described", "prepare", "pruning_card", "short_paths", "with_section"]

_BEGIN, _END = "<!-- squisher: begin -->", "<!-- squisher: end -->"
_SECTION = re.compile(re.escape(_BEGIN) + r".*?" + re.escape(_END) + r"\n?", re.DOTALL)
_OURS = re.compile(r"squisher(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_CARD = "README.md"


class Publication(NamedTuple):
    """The files of an importance and their place on the Hub.

    Attributes:
        address: The repository.
        files: The local files by path in the repository.
        section: The section of the model card.
    """

    address: hub.Address
    files: dict[str, Path]
    section: str

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(file.stat().st_size for file in self.files.values())

    def push(self, create: bool = False, private: bool = False) -> str:
        """Upload the files and the section in one commit, and return the commit's address.

        Files of an earlier importance are removed; everything else stays as it is.

        Args:
            create: Whether to make the repository if there is none.
            private: Whether a new repository is private.

        Raises:
            FileError: The repository cannot be reached, does not exist, or may not be written.
        """
        if create:
            hub.create(self.address, private)
        card = hub.read_text(self.address, _CARD)
        folder = f"{self.address.path}/" if self.address.path else ""
        files: dict[str, Path | bytes] = {f"{folder}{name}": file for name, file in self.files.items()}
        files[_CARD] = with_section(card, self.section).encode("utf-8")
        stale = re.compile(re.escape(folder) + _OURS.pattern)
        return hub.upload(self.address, files, stale, "Add the importance of each parameter (squisher.safetensors)")


def prepare(file: Path, address: str) -> Publication:
    """Return what publishing an importance file would upload; the Hub is not contacted.

    Args:
        file: An importance file, the index of a sharded one, or a folder that holds one.
        address: `hf://owner/name[@revision][/folder]`.

    Raises:
        SquisherError: The address is invalid, or the file is no importance.
    """
    target = hub.Address.read(address)
    if target.path.endswith((".safetensors", ".json")):
        raise ArgumentError(f"{target}: the file is called {FILE_NAME} there; give the repository, or a folder in it.")
    if hub.is_hub_id(file):
        raise ArgumentError(f"{hub.Address.read(file)} is published already: give a file on this machine.")
    file = file / FILE_NAME if file.is_dir() else file
    importance = load(file)
    index = file if file.suffix == ".json" else file.with_name(f"{file.name}.index.json")
    if file.suffix != ".json" and file.exists():
        files = {FILE_NAME: file}
    else:
        shards = sorted(set(read_object(index)["weight_map"].values()))
        if not all(_OURS.fullmatch(name) for name in shards):
            raise FileError(f"The shards of {file} are called {shards[0]}, …: save it as {FILE_NAME} to publish it.")
        files = {f"{FILE_NAME}.index.json": index, **{name: index.parent / name for name in shards}}
    return Publication(
        target, files, card_section(importance, target, sum(one.stat().st_size for one in files.values()))
    )


def with_section(card: str | None, section: str) -> str:
    """Return a model card with the section in the place of the old one, or at the end."""
    text = f"{_BEGIN}\n{section.strip()}\n{_END}\n"
    if card is None:
        return text
    if _SECTION.search(card):
        return _SECTION.sub(lambda _: text, card, count=1)
    return f"{card.rstrip()}\n\n{text}"


def card_section(importance: Importance, address: hub.Address, size: int) -> str:
    """Return the section of the model card: what the file is, how it was made, how to use it."""
    p = importance.provenance
    total = sum(numel_of(importance, name) for name in importance)
    what = (
        "an estimate of the diagonal of the Fisher information, measured on data"
        if p.kind == "fisher"
        else "the running average of the squared gradient that the optimizer kept during training (a Squisher)"
    )
    optimizer = p.optimizer or {}
    estimator = p.estimator or {}
    steps = (p.steps or {}).get("max")
    codec = p.codec
    exact = (
        f", rank correlation with the exact values {codec.spearman:.4f}" if codec and codec.spearman is not None else ""
    )
    facts = {
        "made from": optimizer.get("class") and f"{optimizer['class']}, β₂ {optimizer.get('beta2')}",
        "labels": estimator.get("labels"),
        "examples": p.examples and f"{p.examples:,}",
        "optimizer steps": steps and f"{steps:,}",
        "batch size": p.batch_size and f"{p.batch_size:g}",
        "loss": p.loss_reduction,
        "values": f"{total:,} in {len(importance)} tensors, {size / 1e6:,.1f} MB",
        "codec": codec and f"{codec}{exact}",
        "absent": p.absent and f"{len(p.absent)} parameters have none",
    }
    rows = [f"| {name} | {value} |" for name, value in facts.items() if value]
    place = str(hub.Address(address.repo, path=address.path))
    return "\n".join(
        [
            "## Importance of each parameter",
            "",
            f"`{FILE_NAME}` holds, for every parameter of this model, {what}: a non-negative number per entry, larger where the "
            "model is more sensitive. It serves to merge, prune, mask or compare models without their training data.",
            "",
            "| | |",
            "|---|---|",
            *rows,
            "",
            "```python",
            "import squisher  # pip install torch-squisher",
            "",
            f'importance = squisher.load("{place}")',
            "```",
            "",
            "```sh",
            f"squisher inspect {place}",
            f"squisher merge fisher hf://{address.repo} OTHER-MODEL --out merged",
            "```",
        ]
    )


_MOST_ROWS = 200


def pruning_card(
    model: str, settings: Mapping[str, Any], importance: str | None, counts: Mapping[str, tuple[int, int]]
) -> str:
    """Return the README.md of a pruned model.

    Args:
        model: The name of the model before pruning.
        settings: Sparsity or pattern, scope, score.
        importance: The importance that ranked the weights, in words, or None.
        counts: How many entries of each pruned tensor stay, and how many there are.
    """
    kept, total = (sum(pair[k] for pair in counts.values()) for k in (0, 1))
    share = (total - kept) / total if total else 0.0
    lines = ["---", "tags:", "- pruned", "- squisher", "---", "", "# Pruned model", ""]
    lines += [
        f"`{model}`, pruned with torch-squisher {__version__}: {total - kept:,} of {total:,} weights are zero ({share:.2%}).",
        "",
    ]
    lines += ["Settings: " + ", ".join(f"{key} {value}" for key, value in settings.items()) + "."]
    if importance:
        lines += ["", f"Ranked by: {importance}."]
    lines += ["", "The zeros make the model neither smaller nor faster by themselves.", ""]
    lines += ["| tensor | zero | entries |", "|---|---|---|"]
    for name, (stays, size) in list(counts.items())[:_MOST_ROWS]:
        lines.append(f"| `{name}` | {(size - stays) / size if size else 0.0:.1%} | {size:,} |")
    if len(counts) > _MOST_ROWS:
        lines += ["", f"{len(counts) - _MOST_ROWS} more tensors are not listed."]
    return "\n".join(lines) + "\n"


def described(imp: Importance) -> str:
    """Describe an importance in a few words."""
    p = imp.provenance
    if p.kind == "fisher":
        labels = (p.estimator or {}).get("labels")
        parts = ["Fisher", f"{labels} labels" if labels else "", f"{p.examples} examples" if p.examples else ""]
    else:
        steps = (p.steps or {}).get("max")
        name = (p.optimizer or {}).get("class")
        parts = [f"Squisher{f' of {name}' if name else ''}", f"{steps} steps" if steps else ""]
        parts.append(f"batch size {p.batch_size:g}" if p.batch_size else "")
    return ", ".join(part for part in parts if part)


def short_paths(paths: Sequence[Path]) -> list[str]:
    """Return the shortest suffixes of paths that are all different: run-a/final and run-b/final, not final twice.

    A file called squisher.safetensors has the name of its folder. Equal paths have equal names.
    """
    parts = []
    for path in paths:
        kept = [part for part in path.parts if part not in (".", "..", path.anchor)] or [path.resolve().name]
        kept[-1] = kept[-1] if path.is_dir() else Path(kept[-1]).stem
        parts.append(kept[:-1] if path.name == FILE_NAME and len(kept) > 1 else kept)
    different = len({tuple(kept) for kept in parts})
    for depth in range(1, 1 + max(map(len, parts))):
        names = ["/".join(kept[-depth:]) for kept in parts]
        if len(set(names)) == different:
            break
    return names
