"""Sums of squares by parameter, in memory from the first addition on; on the parameters' device, or on another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Elsewhere", "Sums", "add_square"]


@torch.no_grad()
def add_square(total: Tensor, gradient: Tensor) -> None:
    """Add the square of a gradient, computed in the type of the total."""
    gradient = (gradient.to_dense() if gradient.is_sparse else gradient).to(total.dtype)
    total.addcmul_(gradient, gradient)


class Sums(dict[str, Tensor]):
    """Zeros of each parameter's shape, made when first asked for.

    So the fast way's sums, the loop's sums and the loop's gradients are never all in memory at once during a proof.

    Args:
        parameters: by name.
        dtype: at least of the sums; never coarser than single precision or than the parameter.
        device: where they are; by default where each parameter is.

    Attributes:
        spare: sums of the same form that are no longer needed, whose memory is used again.
    """

    def __init__(self, parameters: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | None = None):
        super().__init__()
        self.parameters, self.dtype, self.device = parameters, dtype, device
        self.spare: dict[str, Tensor] = {}

    def __missing__(self, name: str) -> Tensor:
        spare, like = self.spare.pop(name, None), self.parameters[name]
        form = (like.shape, self.dtype_of(name), self.device or like.device)
        fits = spare is not None and (spare.shape, spare.dtype, spare.device) == form
        self[name] = spare.zero_() if spare is not None and fits else self._zeros(name, self.device)
        return self[name]

    def _zeros(self, name: str, device: torch.device | None) -> Tensor:
        return torch.zeros_like(
            self.parameters[name],
            dtype=self.dtype_of(name),
            device=device,
            requires_grad=False,
            memory_format=torch.contiguous_format,
        )

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type in which this parameter's squares are added up."""
        return torch.promote_types(torch.promote_types(self.parameters[name].dtype, torch.float32), self.dtype)

    def complete(self) -> dict[str, Tensor]:
        """Return the sums of all parameters in their order; zeros where nothing was added."""
        return {name: self[name] for name in self.parameters}


class Elsewhere(Sums):
    """What an engine adds to when the sums are on another device: zeros for one parameter at a time.

    They are sent over as soon as another parameter is asked for. From an accelerator the copy goes through pinned memory on a stream
    of its own and is added when the next one is sent, so that the backward pass goes on meanwhile. Only for adding: what is in the
    sums is read from them, after `finish`.

    Args:
        sums: where it all goes.
    """

    def __init__(self, sums: Sums):
        super().__init__(sums.parameters, sums.dtype)
        self.sums = sums
        self._current: tuple[str, Tensor] | None = None
        self._coming: tuple[str, Tensor, Any] | None = None

    def __bool__(self) -> bool:
        return True  # never scratch memory for a proof

    def __getitem__(self, name: str) -> Tensor:
        if self._current is None or self._current[0] != name:
            self._send()
            self._current = (name, self._zeros(name, None))
        return self._current[1]

    def __setitem__(self, name: str, value: Tensor) -> None:
        if self._current is None or value is not self._current[1]:  # `sums[name] += ...` puts back what it was given
            self[name].add_(value)

    @torch.no_grad()
    def _send(self) -> None:
        if self._current is None:
            return
        (name, value), self._current = self._current, None
        self._receive()
        if value.device.type != "cuda":
            self.sums[name].add_(value.to(self.sums[name].device))
            return
        stream = torch.cuda.Stream(value.device)
        stream.wait_stream(torch.cuda.current_stream(value.device))
        with torch.cuda.stream(stream):
            pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
        value.record_stream(stream)
        self._coming = (name, pinned, stream.record_event())

    def _receive(self) -> None:
        if self._coming is not None:
            name, pinned, event = self._coming
            self._coming = None
            event.synchronize()
            self.sums[name].add_(pinned)

    def finish(self) -> None:
        """Wait until everything has arrived."""
        self._send()
        self._receive()
