"""Reading ahead: the next chunks are read and computed while the current one is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from torch import Tensor

from .named import CHUNK, Computed, chunks_of, numel_of

__all__ = ["Ahead"]

_IN_FLIGHT = 2  # chunks that are being computed, or wait to be written
_AT_ONCE = 2 * CHUNK  # handing a chunk over costs as much as merging a tenth of this


class Ahead(Computed):
    """Some names of a mapping, to be asked for in order; in any other order it is only slower.

    Another thread reads and computes, the caller's has only to write: long calls that leave the interpreter alone. With more
    threads they would wait for one another. The bytes are those of a run without threads; memory is bounded by a few chunks.

    Args:
        tensors: Any mapping. One that computes its tensors may have a method `short_chunks(name, size)`, like `chunks` but free to give
            shorter ones.
        names: The names, in the order in which they will be asked for.
    """

    def __init__(self, tensors: Mapping[str, Tensor], names: Sequence[str]):
        super().__init__(tensors, {name: name for name in names})
        self._tensors = tensors
        self._expected = iter([name for name in names if numel_of(tensors, name)])
        self._next = next(self._expected, None)
        self._chunks = self._ahead()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._chunks.close()

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._name_there(name)]

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[Tensor]:
        """One tensor in flat chunks, in order; they may be shorter than `size`."""
        if name != self._next or size != CHUNK:
            yield from chunks_of(self._tensors, name, size)
            return
        self._next = next(self._expected, None)
        left = numel_of(self._tensors, name)
        while left:
            chunk = next(self._chunks)
            left -= chunk.numel()
            yield from chunk.split(CHUNK)

    def _ahead(self) -> Generator[Tensor, None, None]:
        chunks = (chunk for name in self for chunk in self._chunks_of(name))
        with ThreadPoolExecutor(1) as other:
            waiting = deque(other.submit(next, chunks, None) for _ in range(_IN_FLIGHT))
            try:
                while (chunk := waiting.popleft().result()) is not None:
                    yield chunk
                    waiting.append(other.submit(next, chunks, None))
            finally:
                for future in waiting:
                    future.cancel()

    def _chunks_of(self, name: str) -> Iterator[Tensor]:
        chunks = getattr(self._tensors, "short_chunks", None)
        return chunks(name, _AT_ONCE) if callable(chunks) else chunks_of(self._tensors, name)
