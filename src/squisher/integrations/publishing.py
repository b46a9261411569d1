"""An importance beside its model on the Hub: the file, and one section of the model card that says what it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ..errors import FileError, SquisherError
from ..importance import FILE_NAME, Importance, load
from ..storage import hub, safetensors
from ..storage.json_files import read_object
from ..storage.tensors import numel_of

__all__ = ["Publication", "card_section", "prepare", "with_section"]

_BEGIN, _END = "<!-- squisher: begin -->", "<!-- squisher: end -->"
_SECTION = re.compile(re.escape(_BEGIN) + r".*?" + re.escape(_END) + r"\n?", re.DOTALL)
_OURS = re.compile(r"squisher(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_CARD = "README.md"


class Publication(NamedTuple):
    """What would be put where.

    Attributes:
        address: The repository.
        files: Path in the repository, and the file here.
        section: The section of the model card.
    """

    address: hub.Address
    files: dict[str, Path]
    section: str

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files.values())

    def push(self, create: bool = False, private: bool = False) -> str:
        """Put the files and the section into the repository, in one commit, and return the commit's address.

        Everything else there stays as it is, but files of an earlier importance that this one does not have.

        Args:
            create: Make the repository first, if there is none.
            private: Whether a new one is private.

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
    """Return what publishing an importance file would do; nothing is asked of the Hub.

    Args:
        file: An importance file, the index of a sharded one, or a folder that holds one.
        address: `hf://owner/name[@revision][/folder]`.

    Raises:
        SquisherError: The address is none, or this is no importance.
    """
    target = hub.Address.read(address)
    if target.path.endswith((".safetensors", ".json")):
        raise SquisherError(f"{target}: the file is called {FILE_NAME} there; give the repository, or a folder in it.")
    if hub.is_hub_id(file):
        raise SquisherError(f"{hub.Address.read(file)} is published already: give a file on this machine.")
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
    """Return a model card with the section: replaced where it is, or at the end; everything else as it was."""
    text = f"{_BEGIN}\n{section.strip()}\n{_END}\n"
    if card is None:
        return text
    if _SECTION.search(card):
        return _SECTION.sub(lambda _: text, card, count=1)
    return f"{card.rstrip()}\n\n{text}"


def card_section(importance: Importance, address: hub.Address, size: int) -> str:
    """Return the section: what the file is, how it was made, how to use it."""
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
    facts = {
        "made from": optimizer.get("class") and f"{optimizer['class']}, β₂ {optimizer.get('beta2')}",
        "labels": estimator.get("labels"),
        "examples": p.examples and f"{p.examples:,}",
        "optimizer steps": steps and f"{steps:,}",
        "batch size": p.batch_size and f"{p.batch_size:g}",
        "loss": p.loss_reduction,
        "values": f"{total:,} in {len(importance)} tensors, {size / 1e6:,.1f} MB",
        "codec": codec and _codec_text(codec),
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


def _codec_text(codec: object) -> str:
    said = [str(codec)]
    if getattr(codec, "spearman", None) is not None:
        said.append(f"rank correlation with the exact values {codec.spearman:.4f}")  # type: ignore[attr-defined]
    return ", ".join(said)


def is_sharded(file: Path) -> bool:
    """Whether a file that was saved under this name became shards."""
    return not file.exists() and safetensors.exists(file)
