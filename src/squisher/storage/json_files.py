"""Read JSON from untrusted files: bounded in size and depth, and one clear error for all that can be wrong."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..errors import FileError, NamingError
from .byte_range import ByteRange

__all__ = ["no_duplicates", "parse_json", "read_json", "read_object"]

MAX_BYTES = 100_000_000  # what the safetensors library accepts as a header


def read_json(path: str | os.PathLike[str], hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Read a JSON file.

    Args:
        path: A regular file.
        hook: As `object_pairs_hook` of `json.loads`.

    Raises:
        FileError: It cannot be read, is too long, or is not JSON.
    """
    file = ByteRange.of(path)
    if file.length > MAX_BYTES:
        raise FileError(f"{file.label} is {file.length:,} bytes long; JSON of over {MAX_BYTES:,} bytes is not read.")
    return parse_json(file.read(), file.label, hook)


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON file that holds an object, such as a configuration.

    Raises:
        FileError: It cannot be read, or holds something else.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise FileError(f"{path} is not a JSON object, as a configuration must be.")
    return value


def parse_json(data: bytes | str, label: str, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON in memory.

    Raises:
        FileError: It is not JSON, is nested too deeply, or has numbers of thousands of digits.
        NamingError: From `no_duplicates`.
    """
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        return json.loads(text, object_pairs_hook=hook)
    except NamingError as error:
        raise NamingError(f"{label}: {error}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        raise FileError(f"{label} is not JSON; it is damaged or half-written: get it again.") from error


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dictionary, unless a name appears twice: readers differ in which value they take.

    Raises:
        NamingError: A name appears twice.
    """
    out = dict(pairs)
    if len(out) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise NamingError(f"the name {twice!r} appears twice.")
    return out
