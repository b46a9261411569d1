"""What a user sees when something is wrong.

Every message says what was being done, what was found, what was expected, and what to do about it.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Iterable
from numbers import Real
from typing import Any

__all__ = [
    "ArgumentError", "FileError", "NamingError", "NoAccumulatorError", "ScaleError", "SquisherError", "SquisherWarning", "check_choice",
    "check_fraction", "check_positive", "near", "require",
]  # fmt: skip


class SquisherError(Exception):
    """Every error that a user can cause; the children below only say which kind it is."""


class ArgumentError(SquisherError):
    """A value of an argument that is wrong whatever the files hold; on the command line it is wrong usage.

    Attributes:
        problem: The message, without the argument that it begins with.
        argument: The argument's name in Python, if the message begins with it; the command line puts its option there.
    """

    def __init__(self, problem: str, argument: str = ""):
        super().__init__(f"{argument} {problem}" if argument else problem)
        self.problem, self.argument = problem, argument


class FileError(SquisherError):
    """A file that is missing, damaged, half-written, hostile, or of a format that is not read."""


class NamingError(SquisherError):
    """Parameter names that are missing, repeated, do not match, or cannot be proven."""


class NoAccumulatorError(SquisherError):
    """An optimizer (state) that keeps no average of the squared gradient.

    Attributes:
        what: What was found, without the advice that the message ends with.
    """

    def __init__(self, what: str, advice: str = ""):
        super().__init__(f"{what}. {advice}" if advice else what)
        self.what = what


class ScaleError(SquisherError):
    """Importances whose scales are unknown or differ."""


class SquisherWarning(UserWarning):
    """Something that is probably not what the user wants, but is not an error."""


def require(package: str, extra: str, what: str) -> Any:
    """Return an imported package of one of the extras.

    Args:
        package: Its import name.
        extra: The extra of ours that installs it.
        what: What needs it, to begin the message with.

    Raises:
        SquisherError: It is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise SquisherError(f"{what} needs {package}: pip install 'torch-squisher[{extra}]'.") from error


def near(name: str, candidates: Iterable[str], count: int = 3) -> str:
    """Return a clause that names the closest candidates, to be put at the end of a message; empty where none is close."""
    close = difflib.get_close_matches(name, list(candidates), n=count, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""


def check_choice(what: str, value: Any, allowed: Collection[str]) -> None:
    """Refuse a value that is not one of the allowed ones.

    Args:
        what: What the value is for: the name of a parameter or an option.
        value: What the user gave.
        allowed: The values that exist.

    Raises:
        ArgumentError: The message lists the allowed values and those that come near.
    """
    if value not in allowed:
        *most, last = allowed
        known = f"{', '.join(most)} or {last}" if most else last
        raise ArgumentError(f"is {known}, not {value!r}.{near(str(value), allowed)}", what)


def check_positive(what: str, value: Any) -> None:
    """Refuse a value that is not a positive finite number.

    Raises:
        ArgumentError: The message says what was given.
    """
    if not _is_number(value) or not 0 < value < float("inf"):
        raise ArgumentError(f"is a positive number, not {value!r}.", what)


def check_fraction(what: str, value: Any, of: str) -> None:
    """Refuse a value that is not a number from 0 to 1.

    Args:
        what: The name of the parameter or option.
        value: What the user gave.
        of: What it is a fraction of, for the message: "of entries to keep".

    Raises:
        ArgumentError: The message says what was given.
    """
    if not _is_number(value) or not 0 <= value <= 1:
        raise ArgumentError(f"is the fraction {of}, from 0 to 1, not {value!r}.", what)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
