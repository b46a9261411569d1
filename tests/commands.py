"""Run a command of the command line: in this process, which spares the import of torch, or in a process of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest.mock import patch

SQUISHER = Path(sys.executable).with_name("squisher")


def run(*arguments: Any, cwd: str | os.PathLike[str] | None = None) -> CompletedProcess[str]:
    """Return the status, output and errors of `squisher arguments`, run in this process as the shell would."""
    from squisher.cli import main

    argv = ["squisher", *map(str, arguments)]
    out, err, status, before = io.StringIO(), io.StringIO(), 0, os.getcwd()
    with patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("default")
        try:
            os.chdir(cwd or before)
            main()
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        except Exception:
            status = 1
            traceback.print_exc()
        finally:
            os.chdir(before)
    return CompletedProcess(argv, status, out.getvalue(), err.getvalue())


def run_process(*arguments: Any, cwd: Any = None, environment: dict[str, str] | None = None) -> CompletedProcess[str]:
    """Return the same of a process of its own, for what depends on the process: threads, signals, what is imported."""
    return subprocess.run(
        [SQUISHER, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        check=False,
    )
