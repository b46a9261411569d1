"""Resume an interrupted measurement: its sums so far are kept in a file beside the result.

The file says which measurement it belongs to: the settings, the model, and the batches that are in the sums. The next call reads those
batches again without measuring them; what differs is refused. It is written now and then, whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, FileError, SquisherError
from ..storage import safetensors
from ..storage.atomic import check_target
from ..storage.tensors import shape_of

__all__ = ["Unfinished"]

SECONDS = 60.0
"""Time between two writes, which is what an interruption may lose at most."""
_SAMPLED = 4096
_KEPT = {"settings": dict, "examples": int, "units": int, "reached": list, "coverage": dict, "noted": dict, "data": str}


class Unfinished:
    """The file with the sums so far.

    Args:
        path: Where it is, or will be.
        settings: What decides the result beside model and data; plain types.
        parameters: Those that are measured, by name.

    Attributes:
        examples: How many examples are in the sums of an earlier run.
        units: Units in them.
        reached: Parameters that had a gradient.
        coverage: How they were measured.
        noted: What else was noted about the estimator.

    Raises:
        ArgumentError: The name does not end in `.safetensors`.
        FileError: The file is something else, or there is no folder to put it into.
        SquisherError: It is of another measurement.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any], parameters: Mapping[str, Tensor]):
        self.path = Path(path)
        if self.path.suffix != ".safetensors":  # known now, not when the first sums are written
            raise ArgumentError(f"{str(path)!r} does not end in .safetensors; choose such a name.", "unfinished")
        check_target(self.path, overwrite=True)
        self.settings = json.loads(json.dumps({**settings, "model": _mark_of(parameters)}))
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.examples = self.units = 0
        self.reached: set[str] = set()
        self.coverage: dict[str, Any] = {}
        self.noted: dict[str, Any] = {}
        self._data = hashlib.sha256()
        self._saved, self._written = time.monotonic(), 0
        self._stop = False
        self._earlier: dict[str, Any] = {}
        self._sums: Mapping[str, Tensor] = {}
        if self.path.is_file():
            self._open()

    def _open(self) -> None:
        # Sums and what they are must be of one writing: another process may replace the file meanwhile, which this mapping notices.
        self._sums, metadata = safetensors.open_archive(self.path)
        earlier = (metadata or {}).get("unfinished")
        if not isinstance(earlier, dict) or not all(isinstance(earlier.get(k), t) for k, t in _KEPT.items()):
            raise self._something_else()
        self._earlier = earlier
        theirs = self._earlier["settings"]
        differing = sorted(key for key in {*theirs, *self.settings} if theirs.get(key) != self.settings.get(key))
        if differing:
            said = "; ".join(f"{k}: {_short(theirs.get(k))}, now {_short(self.settings.get(k))}" for k in differing)
            raise SquisherError(
                f"{self.path} keeps an unfinished measurement with other settings ({said}). Go on with the same ones, or "
                "remove that file to begin anew."
            )
        self.examples, self.units = self._earlier["examples"], self._earlier["units"]
        self._written = self.examples
        self.reached = set(self._earlier["reached"])
        fits = all(self._shapes.get(name) == shape_of(self._sums, name) for name in self._sums)
        if not fits or not self.reached.issubset(self._sums):
            raise self._something_else()
        self.coverage, self.noted = self._earlier["coverage"], self._earlier["noted"]

    def fill(self, sums: Mapping[str, Tensor]) -> None:
        """Put the sums of the earlier run into ours.

        Raises:
            SquisherError: Another process has replaced them since they were looked at.
        """
        for name, total in self._sums.items():
            sums[name].copy_(total)
        self._sums = {}

    def is_done(self, done: int, tensors: Iterable[Tensor]) -> bool:
        """Note the next batch, and return whether it is in the sums already.

        Args:
            done: Examples before it.
            tensors: The batch.

        Raises:
            SquisherError: These are not the batches that are in the sums.
        """
        if done == self.examples and self._earlier and self._data.hexdigest() != self._earlier["data"]:
            self._refuse_data()
        for t in tensors:
            self._data.update(f"{tuple(t.shape)} {t.dtype};".encode())
            self._data.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return done < self.examples

    def check_end(self, done: int) -> None:
        """Compare the data where they end.

        Raises:
            SquisherError: They end before the earlier run did.
        """
        if done < self.examples or (
            done == self.examples and self._earlier and self._data.hexdigest() != self._earlier["data"]
        ):
            self._refuse_data()

    def _something_else(self) -> FileError:
        return FileError(
            f"{self.path} is where the sums of an unfinished measurement are kept, and holds something else. Move that file away."
        )

    def _refuse_data(self) -> None:
        raise SquisherError(
            f"{self.path} keeps an unfinished measurement of other data: its first {self.examples} examples, or how they are "
            "batched, are not these. Give the same data, or remove that file to begin anew."
        )

    def keep(
        self,
        sums: Mapping[str, Tensor],
        examples: int,
        units: int,
        reached: Iterable[str],
        coverage: Mapping[str, Any],
        noted: Mapping[str, Any],
        now: bool = False,
    ) -> None:
        """Write the sums if it is time for it, or `now`.

        Raises:
            KeyboardInterrupt: The user asked to stop while the batch was measured; the sums are written.
        """
        now = now or self._stop
        if examples <= self._written or (not now and time.monotonic() - self._saved < SECONDS):
            return
        state = {
            "settings": self.settings,
            "examples": examples,
            "units": units,
            "reached": sorted(reached),
            "coverage": coverage,
            "noted": noted,
            "data": self._data.hexdigest(),
        }
        safetensors.save(self.path, dict(sums), {"unfinished": state}, shard_bytes=1 << 62)
        self._saved, self._written = time.monotonic(), examples
        if self._stop:
            raise KeyboardInterrupt

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, Ctrl-C stops after the batch that is being measured, with its sums written; a second one stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)

        def ask(number: int, frame: Any) -> None:
            self._stop = True
            signal.signal(signal.SIGINT, before)

        signal.signal(signal.SIGINT, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _mark_of(parameters: Mapping[str, Tensor]) -> str:
    """Return a hash of names, shapes and some thousand entries of each parameter."""
    digest = hashlib.sha256()
    for name, parameter in parameters.items():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype};".encode())
        some = parameter.detach().reshape(-1)[:: max(1, parameter.numel() // _SAMPLED)].cpu().contiguous()
        digest.update(some.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else f"{text[:17]}..."
