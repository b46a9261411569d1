"""The Hugging Face Hub, both ways: `hf://owner/name[@revision][/file or folder]` is fetched into the Hub's cache; files are uploaded.

Whether the Hub can be reached is checked first, because its client tries for half a minute. What is in the cache is
used without it.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ..errors import ArgumentError, FileError, SquisherError, require
from .json_files import read_object

__all__ = ["Address", "create", "fetch", "fetch_file", "fetch_model", "is_hub_id", "read_text", "upload"]

_SCHEME = re.compile(r"hf:/{1,2}(?!/)")  # pathlib makes one slash of two
_ID = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/pr/\d+|refs/convert/\w+|[\w.-]+))?(?:/(?P<path>[\w ./=+,-]+))?/?"
)
# Not downloaded with a checkpoint: weights are as large as its optimizer state, and names are proven from the config.
_WEIGHTS = re.compile(
    r"(^|/)(model|pytorch_model|tf_model|flax_model|diffusion_pytorch_model|consolidated)[\w.-]*\.(safetensors|bin|h5|msgpack|pth)$"
    r"|\.(gguf|onnx|ot|mlmodel)$|(^|/)layer_\d+-model_\d+-model_states\.pt$"
)
_ALWAYS = re.compile(r"\.json$|(^|/)(training_args\.bin|latest|\.metadata)$")
# nanotron's optimizer files of several stages or tensor-parallel ranks: how they fit together is in the headers of the weights.
_NANOTRON_CUT = re.compile(r"(?P<run>(?:.*/)?)optimizer/optimizer_pp-\d+-of-(?!1_.*tp-\d+-of-1\D)\d+_.*\.pt")
_MODEL = re.compile(
    r"^[^/]+\.(json|txt|model|jinja|py|md)$|^(model|adapter_model|pytorch_model|squisher)[\w.-]*\.(safetensors|bin)$"
)
_STATE = re.compile(
    r"optim|exp_avg_sq|distcp$|mp_rank_\d+_model_states\.pt$|global_step|rng_state|\.ckpt$|\.keras$"
    r"|(^|/)(squisher\.safetensors|(checkpoint|ckpt)[\w.-]*\.(pt|pth|tar))$"
)
_PATIENCE = 5  # seconds until a Hub that does not answer counts as out of reach


class Address(NamedTuple):
    """A repository on the Hub, and a file or folder in it."""

    repo: str
    revision: str | None = None
    path: str = ""

    def __str__(self) -> str:
        return f"hf://{self.repo}{f'@{self.revision}' if self.revision else ''}{f'/{self.path}' if self.path else ''}"

    @classmethod
    def read(cls, source: str | os.PathLike[str]) -> Address:
        """Return an address from its text.

        Raises:
            ArgumentError: It is not an address.
        """
        text = os.fspath(source)
        match = _ID.fullmatch(_SCHEME.sub("", text)) if _SCHEME.match(text) else None
        if match is None or ".." in text:
            raise ArgumentError(
                f"{_SCHEME.sub('hf://', text)} is not an address on the Hub: expected hf://owner/name[@revision][/file or folder]."
            )
        return cls(match["repo"], match["revision"], (match["path"] or "").strip("/"))


def is_hub_id(source: object) -> bool:
    """Return whether a source is an address on the Hub rather than a path."""
    return isinstance(source, (str, os.PathLike)) and bool(_SCHEME.match(str(source)))


def fetch(source: str | os.PathLike[str]) -> Path:
    """Download the files of a checkpoint, without the weights, and return its path.

    Raises:
        SquisherError: huggingface_hub is not installed, or the address is not one.
        FileError: The repository cannot be reached, or holds no optimizer state.
    """
    address = Address.read(source)
    missing = (
        "holds no optimizer state, as most published models do: its files are {}. Ask its authors for a checkpoint with the "
        "optimizer, or for its squisher.safetensors."
    )
    return _download(address, lambda files: _wanted(files, address.path), missing)


def _download(address: Address, choose: Callable[[list[str]], list[str]], missing: str) -> Path:
    """Download the files that `choose` picks, and return the folder; without the Hub, return what is in the cache."""
    with _asking(address) as (hub, local):
        options: dict[str, Any] = {"local_files_only": True}
        if not local:
            files = hub.HfApi().list_repo_files(address.repo, revision=address.revision)
            options = {"allow_patterns": choose(files)}
            if not options["allow_patterns"]:
                raise FileError(f"{address} {missing.format(', '.join(files[:5]) + (' …' if len(files) > 5 else ''))}")
        found = hub.snapshot_download(address.repo, revision=address.revision, **options)
    return Path(found, *PurePosixPath(address.path).parts)


def fetch_file(source: str | os.PathLike[str], name: str) -> Path | None:
    """Download one safetensors file, or an index with all of its shards, and return its path; None if there is no such file.

    Args:
        source: The address of the file, or of a folder that holds it.
        name: What the file is called in a folder.

    Raises:
        SquisherError: huggingface_hub is not installed, or the address is not one.
        FileError: The repository cannot be reached, and the file is not in the cache.
    """
    address = Address.read(source)
    file = address.path if address.path.endswith((".safetensors", ".json")) else f"{address.path}/{name}".strip("/")
    with _asking(address) as (hub, local):
        options = {"revision": address.revision, "local_files_only": local}
        found = None
        for candidate in (file, f"{file}.index.json"):
            try:
                found = Path(hub.hf_hub_download(address.repo, candidate, **options))
                break
            except hub.errors.EntryNotFoundError as error:
                if isinstance(error, hub.errors.LocalEntryNotFoundError) and candidate != file:
                    raise  # whether the Hub has it is not known
        if found is None:
            return None
        if found.name.endswith(".index.json"):
            folder = PurePosixPath(file).parent
            for shard in sorted(set(read_object(found)["weight_map"].values())):
                hub.hf_hub_download(address.repo, str(folder / PurePosixPath(shard).name), **options)
    return found


def fetch_model(source: str | os.PathLike[str]) -> Path:
    """Download a model (weights, configuration, tokenizer) without optimizer states, and return its folder.

    Raises:
        SquisherError: huggingface_hub is not installed, or the address is not one.
        FileError: The repository cannot be reached, or holds no weights.
    """
    address = Address.read(source)
    prefix = f"{address.path}/" if address.path else ""

    def choose(files: list[str]) -> list[str]:
        wanted = [file for file in files if file.startswith(prefix) and _MODEL.search(file.removeprefix(prefix))]
        if any(file.endswith(".safetensors") for file in wanted):
            wanted = [file for file in wanted if not file.endswith(".bin")]
        return wanted if any(file.endswith((".safetensors", ".bin")) for file in wanted) else []

    return _download(address, choose, "holds no weights that can be read: its files are {}.")


def create(address: Address, private: bool) -> None:
    """Make a repository for a model, unless there is one.

    Raises:
        SquisherError: huggingface_hub is not installed.
        FileError: The Hub cannot be reached, or does not allow it.
    """
    with _asking(address, write=True) as (hub, _):
        hub.HfApi().create_repo(address.repo, private=private, exist_ok=True)


def read_text(address: Address, name: str) -> str | None:
    """Return a text file of a repository as it is now; None if there is none.

    Raises:
        FileError: The repository cannot be reached, or there is none.
    """
    with _asking(address, write=True) as (hub, _):
        try:
            found = hub.hf_hub_download(address.repo, name, revision=address.revision)
        except hub.errors.RepositoryNotFoundError as error:
            raise FileError(
                f"There is no repository {address.repo} on the Hub, or your token may not see it: say --create to make it, "
                "or look at the name and at `hf auth whoami`."
            ) from error
        except hub.errors.EntryNotFoundError:
            return None
        return Path(found).read_text("utf-8")


def upload(address: Address, files: Mapping[str, Path | bytes], stale: re.Pattern[str], message: str) -> str:
    """Put files into a repository in one commit, and return the commit's address.

    Args:
        address: The repository, and the revision to commit to.
        files: The files by their path in the repository.
        stale: Other files whose path matches are removed: those of an earlier version.
        message: The message of the commit.

    Raises:
        SquisherError: huggingface_hub is not installed.
        FileError: The repository cannot be reached, does not exist, or may not be written.
    """
    with _asking(address, write=True) as (hub, _):
        api = hub.HfApi()
        present = api.list_repo_files(address.repo, revision=address.revision)
        operations = [
            hub.CommitOperationAdd(
                path_in_repo=name, path_or_fileobj=content if isinstance(content, bytes) else str(content)
            )
            for name, content in files.items()
        ]
        operations += [
            hub.CommitOperationDelete(path_in_repo=name)
            for name in present
            if stale.fullmatch(name) and name not in files
        ]
        return str(
            api.create_commit(address.repo, operations, commit_message=message, revision=address.revision).commit_url
        )


@contextmanager
def _asking(address: Address, write: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yield the Hub's client, and whether only its cache can be used; turn its errors into one message."""
    huggingface_hub = require("huggingface_hub", "hf", str(address))
    for part in ("constants", "errors", "utils"):
        require(f"huggingface_hub.{part}", "hf", str(address))
    reason = _out_of_reach(huggingface_hub)
    bars = huggingface_hub.utils
    quiet = not sys.stderr.isatty() and not bars.are_progress_bars_disabled()
    if quiet:  # a bar is for a terminal
        bars.disable_progress_bars()
    if write and reason:
        raise FileError(f"{address} cannot be reached: {reason}.")
    try:
        yield huggingface_hub, bool(reason)
    except SquisherError:
        raise
    except Exception as error:  # the client raises errors of several libraries
        if reason:
            raise FileError(f"{address} cannot be fetched: {reason}, and it is not in the cache.") from error
        verb = "written" if write else "fetched"
        raise FileError(f"{address} cannot be {verb}: {_why(huggingface_hub.errors, address, error)}") from error
    finally:
        if quiet:
            bars.enable_progress_bars()


def _out_of_reach(hub: Any) -> str:
    """Return why the Hub cannot be asked; empty if it can."""
    if hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    endpoint = urllib.parse.urlsplit(hub.constants.ENDPOINT)
    proxy = urllib.request.getproxies().get(endpoint.scheme)
    if proxy and not urllib.request.proxy_bypass(endpoint.hostname or ""):
        endpoint = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=_PATIENCE).close()
    except OSError as error:
        return f"{endpoint.hostname} does not answer ({error.strerror or error})"
    return ""


def _wanted(files: list[str], folder: str) -> list[str]:
    """Return the files of a checkpoint to download: its optimizer states with their descriptions; none without a state."""
    prefix = f"{folder.strip('/')}/" if folder else ""
    below = [file for file in files if file.startswith(prefix) and not _WEIGHTS.search(file)]
    named = [file for file in files if file == folder.strip("/")]
    if named:
        return named
    states = [file for file in below if _STATE.search(file)]
    runs = {match["run"] for file in states if (match := _NANOTRON_CUT.fullmatch(file))}
    beside = [f for f in files if any(f.startswith((f"{run}model/", f"{run}model_config.json")) for run in runs)]
    return list(dict.fromkeys([*states, *(file for file in below if _ALWAYS.search(file)), *beside])) if states else []


def _why(errors: Any, address: Address, error: Exception) -> str:
    """Return the message for an error of the Hub's client."""
    if isinstance(error, errors.GatedRepoError):  # which is a RepositoryNotFoundError too
        return f"{address.repo} is gated: agree to its terms on its page, and log in with `hf auth login`."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no repository {address.repo}, or it is private: look at the name, and log in with `hf auth login`."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{address.repo} has no revision {address.revision}."
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
