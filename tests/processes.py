"""Run a function in several processes that talk over gloo."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_together(worker: Callable[..., Any], folder: Path, *arguments: Any, count: int = 2) -> list[Any]:
    """Return what `worker(rank, *arguments)` returns in each of `count` processes; an error in one is raised here.

    Args:
        worker: a function of a module, so that the processes can import it.
        folder: an empty one, where the processes meet and leave what they return.
    """
    with patch.dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"):
        mp.spawn(_process, (worker, str(folder), count, arguments), nprocs=count)
    return [torch.load(folder / f"returned-{rank}.pt", weights_only=False) for rank in range(count)]


def _process(rank: int, worker: Callable[..., Any], folder: str, count: int, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=count, timeout=timedelta(seconds=100))
    torch.save(worker(rank, *arguments), f"{folder}/returned-{rank}.pt")
    if dist.is_initialized():
        dist.barrier()
    # Not through the interpreter's end: about one time in fifty, torch aborts there ("terminate called without an
    # active exception") when threads of gloo are still about.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
