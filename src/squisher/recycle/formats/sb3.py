"""stable-baselines3 archives: torch files inside a zip, one for the policy and one for each of its optimizers.

`policy.pth` keeps the module order. `actor.optimizer` trains what is named `actor.…`, `critic.optimizer` what is named
`critic.…`, `policy.optimizer` everything; targets (`critic_target.…`) are never trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import FileError
from ...importance.facts import Pollution, RunFacts
from ...storage.byte_range import ByteRange
from ...storage.json_files import parse_json
from ...storage.torch_files import read, zip_entries
from ..optimizers import is_tensor
from ..states import Candidate, Found, OptimizerState, Options, Source
from .torch_file import candidates_of, find_optimizers, optimizer_state

__all__ = ["is_sb3", "read_sb3"]

_LARGEST = 1 << 28  # bytes of settings
_HINT = "Give the names in the optimizer's order with --names FILE (names=[...]), and which optimizer with --optimizer K (optimizer=K)."


def is_sb3(path: Path) -> bool:
    """Return whether a file is a zip archive with a policy in it."""
    try:
        return ByteRange.of(path).read(0, 4) == b"PK\x03\x04" and "policy.pth" in zip_entries(path)
    except FileError:
        return False


def read_sb3(path: Path, options: Options) -> Found:
    """Read the optimizers of a stable-baselines3 archive.

    Raises:
        FileError: It is damaged, or was saved without its optimizers.
    """
    entries = zip_entries(path)
    policy = read(entries["policy.pth"])
    if not isinstance(policy, dict):
        raise FileError(f"policy.pth in {path} holds no weights by name.")
    candidates, tied = candidates_of({n: t for n, t in policy.items() if isinstance(n, str) and is_tensor(t)})
    trained = [c for c in candidates if not re.search(r"_target(\.|$)", c.name.partition(".")[0])]
    settings = _settings(entries)
    optimizers = []
    for name, span in entries.items():
        match = re.fullmatch(r"(?:(policy|actor|critic)\.optimizer|(\w+)_optimizer)\.pth", name)
        if match is None:
            continue
        for _, value in find_optimizers(read(span)):
            state = optimizer_state(value, name.removesuffix(".pth"))
            models = _own(match[1], match[2], trained, entries)
            if match[1] == "policy" and _has_targets(state, candidates, trained):
                models = [("policy.pth with its target networks", candidates)]
            if not settings and options.optimizer_class is None and any("square_avg" in e.state for e in state.entries):
                raise FileError(
                    f"The settings (data) in {path} cannot be read, and only they tell whether the average of its RMSprop began at zero or at "
                    "one: say --optimizer-class RMSprop or RMSpropTFLike (optimizer_class=...)."
                )
            optimizers.append(_with_class(replace(state, models=models), settings))
    if not optimizers:
        raise FileError(f"{path} holds a policy but no optimizer: was it saved with exclude=['policy.optimizer']?")
    facts = replace(_facts(settings), tied=tied)
    return Found(optimizers, [("policy.pth", trained)], facts, hint=_HINT, vouched=True)


def _has_targets(state: OptimizerState, every: list[Candidate], trained: list[Candidate]) -> bool:
    """Return whether a DQN's optimizer was given the target network too (before 2.3), which no gradient ever reaches."""
    if len(state.entries) != len(every) or len(every) == len(trained):
        return False
    known = {c.name for c in trained}
    return all(bool(entry.state) == (c.name in known) for entry, c in zip(state.entries, every, strict=True))


def _own(
    module: str | None, variable: str | None, trained: list[Candidate], entries: Mapping[str, ByteRange]
) -> list[Source]:
    """Return what names an optimizer's parameters: the policy, one of its modules, or a variable beside it (`ent_coef_optimizer`)."""
    if variable is not None:
        loose = read(entries["pytorch_variables.pth"]) if "pytorch_variables.pth" in entries else {}
        tensors = [(str(n), t) for n, t in loose.items() if is_tensor(t)] if isinstance(loose, dict) else []
        found = [Candidate(name, tuple(tensor.shape)) for name, tensor in tensors if name.endswith(variable)]
        return [("pytorch_variables.pth", found)]
    if module == "policy":
        return [("policy.pth", trained)]
    return [(f"{module} in policy.pth", [c for c in trained if c.name.startswith(f"{module}.")])]


def _settings(entries: Mapping[str, ByteRange]) -> dict[str, Any]:
    """Return what `data` says in plain JSON; the pickles in it are left alone."""
    if "data" not in entries or entries["data"].length > _LARGEST:
        return {}
    try:
        data = parse_json(entries["data"].read(), "data")
    except FileError:
        return {}
    return data if isinstance(data, dict) else {}


def _with_class(state: OptimizerState, settings: Mapping[str, Any]) -> OptimizerState:
    """Add the class of the policy's optimizers, by which RMSpropTFLike, whose average starts at one, differs from RMSprop."""
    policy = settings.get("policy_kwargs")
    said = policy.get("optimizer_class") if isinstance(policy, dict) else None
    match = re.search(r"([A-Za-z_]\w*)'>$", said) if isinstance(said, str) else None
    if match is None or not state.place.endswith(".optimizer"):
        return state
    return replace(state, class_name=match[1])


def _facts(settings: Mapping[str, Any]) -> RunFacts:
    norm = settings.get("max_grad_norm")
    if not isinstance(norm, (int, float)) or isinstance(norm, bool):
        return RunFacts()
    return RunFacts(pollution=(Pollution.clipping(norm),), after_clipping=True)
