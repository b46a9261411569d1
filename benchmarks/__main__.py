"""Runs every benchmark; each can be run alone, for example with python -m benchmarks.extract."""

from __future__ import annotations

import subprocess
import sys

for name in ("archive", "extract", "merge", "topk", "mask", "fisher", "ewc"):
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
