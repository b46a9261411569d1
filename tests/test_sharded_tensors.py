"""Tensors of one process; those of several are in measure/test_sharded.py."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from squisher import ranks


def test_a_tensor_of_one_process_is_its_own_part():
    tensor = torch.ones(3)
    assert not ranks.is_sharded(tensor)
    assert ranks.local_of(tensor) is ranks.whole(tensor) is ranks.sharded_like(tensor, torch.zeros(3)) is tensor
    ranks.agree_on(None, [tensor])
    with pytest.raises(ValueError, match="here"):
        ranks.agree_on(ValueError("here"), [tensor])


def test_the_tensors_of_several_processes_are_not_imported_for_this():
    code = "import sys, torch\nbefore = set(sys.modules)\nfrom squisher import ranks\nranks.is_sharded(torch.ones(2))\n"
    code += "print([m for m in set(sys.modules) - before if m.startswith('torch.distributed.tensor')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
