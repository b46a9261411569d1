"""What a DeepSpeed checkpoint says about its run: parameters in the order of the flat buffers, settings, batch size."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import FileError, NoAccumulatorError
from ...importance.facts import Absence, Pollution, Reason, RunFacts
from ...storage.torch_files import Record, StoredTensor, read
from ..naming.candidates import clean_names, recorded_name
from ..states import Candidate, Source

__all__ = ["MODEL_FILE", "Run"]

MODEL_FILE = re.compile(r"(?:bf16_|fp16_)?(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_LAYER_FILE = re.compile(r"layer_\d+-model_(\d+)-model_states\.pt")
_EXPERTS = re.compile(r"layer_.*expert_.*|expp_rank_.*")  # these have partitions of their own
# Not Muon: some of its groups are Adam's, as the keys of their states show.
_CLASSES = {"lion": "Lion", "sgd": "SGD", "adagrad": "Adagrad"}


class Run:
    """The model states of a checkpoint folder.

    Attributes:
        folder: Where they are.
        shapes: For each group (or sub-group) of the optimizer: live name and shape, in the order of its flat buffer.
        names: Name in the weight file, by live name.
        config: DeepSpeed's configuration.
        content: Everything in the first file.

    Args:
        folder: Where they are.
        stage: Which stage of a pipeline, by the number that DeepSpeed calls its model-parallel rank.
        stages: How many there are.
    """

    def __init__(self, folder: Path, stage: int = 0, stages: int = 1) -> None:
        self.folder = folder
        experts = next((file.name for file in sorted(folder.iterdir()) if _EXPERTS.fullmatch(file.name)), None)
        if experts is not None:
            raise FileError(
                f"The DeepSpeed checkpoint {folder} holds the experts of a mixture, which have partitions of their own ({experts}); only "
                "data-parallel ZeRO is read. Convert it with DeepSpeed to one without, or use squisher.Tracker during training."
            )
        files = {file: int(m["mp"]) for file in sorted(folder.iterdir()) if (m := MODEL_FILE.fullmatch(file.name))}
        main = next((file for file, number in files.items() if number == stage), None)
        if main is None:
            raise FileError(f"{folder} lacks its model states (mp_rank_{stage:02d}_model_states.pt). Get it again.")
        self.content: dict[str, Any] = _content(main)
        steps = {_content(file).get("global_steps") for file in files}
        if len(steps) > 1:
            raise FileError(f"{folder} mixes several checkpoints: its model states are of the steps {_list(steps)}.")
        _refuse_parallel(folder, self.content, stages)
        self.config: dict[str, Any] = _dictionary(self.content.get("ds_config"))
        self.shapes = list(self._groups())
        self.frozen = self._frozen()
        self.shared = {a: n for a, n in _dictionary(self.content.get("shared_params")).items() if isinstance(n, str)}
        live = list(dict.fromkeys([*self.trained, *self.frozen, *self.shared]))
        self.names = dict(zip(live, clean_names([recorded_name(name) for name in live]), strict=True))

    def _frozen(self) -> dict[str, tuple[int, ...]]:
        """Return what was not trained: listed, or (by stage 1) only among the weights."""
        listed = self.content.get("frozen_param_shapes")
        if listed is not None:
            return _shapes(listed)
        shared, buffers = _dictionary(self.content.get("shared_params")), self.content.get("buffer_names") or ()
        others = {*self.trained, *shared, *buffers}
        weights = _dictionary(self.content.get("module"))
        floating = {n: w for n, w in weights.items() if isinstance(w, StoredTensor) and w.dtype.is_floating_point}
        return {name: w.shape for name, w in floating.items() if self.shapes and name not in others and w.numel}

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Live name and shape of every parameter in the optimizer, in the order of the flat buffers."""
        return {name: shape for group in self.shapes for name, shape in group.items()}

    @property
    def zero(self) -> Mapping[str, Any]:
        """The `zero_optimization` section of the configuration."""
        return _dictionary(self.config.get("zero_optimization"))

    def check_tensor_parallel(self, ranks: int) -> None:
        """Refuse a checkpoint that was written by more or other tensor-parallel ranks in each stage than those found.

        Raises:
            FileError: What is on record, or the files of single layers, say otherwise.
        """
        said = _count(_dictionary(self.content.get("checkpoint_parallel_dimensions")).get("tp_degree"))
        layers = [int(m[1]) + 1 for file in self.folder.iterdir() if (m := _LAYER_FILE.fullmatch(file.name))]
        degree = max([said or ranks, *layers])
        if degree != ranks:
            raise FileError(
                f"{self.folder} was written with tensor parallelism of degree {degree}, but holds the states of {ranks} such ranks in "
                "each stage of its pipeline. Get all of its files."
            )

    @property
    def round_robin(self) -> bool:
        """Return whether gradients were dealt out in turns, which only stages 1 and 2 do."""
        return bool(self.zero.get("round_robin_gradients")) and self.zero.get("stage") != 3

    @property
    def in_registration_order(self) -> bool:
        """Return whether every group lists its parameters in the order of the weights, as without round-robin gradients."""
        places = {name: place for place, name in enumerate(_dictionary(self.content.get("module")))}
        orders = [[places.get(name, -1) for name in group] for group in self.shapes]
        return all(order == sorted(order) and -1 not in order for order in orders)

    @property
    def class_name(self) -> str | None:
        """The optimizer's class, where DeepSpeed made it; unknown where the user did."""
        kind, parameters = self._optimizer
        if kind in ("adam", "adamw"):  # DeepSpeed's default makes its Adam an AdamW
            return "AdamW" if kind == "adamw" or parameters.get("adam_w_mode", True) else "Adam"
        if kind is not None and ("onebit" in kind or "zeroone" in kind):
            raise NoAccumulatorError(
                f"DeepSpeed's {self.config['optimizer']['type']} stops updating its squared gradient after a warm-up, so it is no "
                "average up to its step count. Train with Adam or AdamW, or use squisher.Tracker."
            )
        return _CLASSES.get(kind or "")

    def group(self, group: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the hyperparameters of a group; from the configuration where the file has none (elastic checkpoints)."""
        kind, parameters = self._optimizer
        if group is None:
            group = {key: value for key, value in parameters.items() if key in ("betas", "eps", "weight_decay")}
            group.setdefault("betas", (0.9, 0.999) if kind in ("adam", "adamw") else (math.nan, math.nan))
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if self.class_name in ("Adam", "AdamW"):
            settings.setdefault("decoupled_weight_decay", self.class_name == "AdamW")
        return settings

    @property
    def _optimizer(self) -> tuple[str | None, Mapping[str, Any]]:
        said = _dictionary(self.config.get("optimizer"))
        kind = said.get("type")
        return (kind.lower() if isinstance(kind, str) else None), _dictionary(said.get("params"))

    def models(self) -> list[Source]:
        """Return all parameters with their shapes, as what names them."""
        shapes = {**self.trained, **self.frozen}
        listed = [Candidate(self.names[name], shape, live_name=name) for name, shape in shapes.items()]
        return [("DeepSpeed's list of parameters", listed)]

    def facts(self, facts: RunFacts) -> RunFacts:
        """Return what the checkpoint proves about its run.

        How a micro-batch's loss was reduced is not on record, and language models take means over tokens.

        Args:
            facts: What a Trainer's files beside it prove.
        """
        listed = self.content.get("frozen_param_shapes") is not None
        why = Absence(Reason.NOT_IN_OPTIMIZER, "not in the optimizer: frozen, or never given to it")
        if listed:
            why = Absence(Reason.FROZEN, "frozen (requires_grad is False)")
        norm = self.config.get("gradient_clipping")
        if isinstance(norm, (int, float)) and facts.after_clipping is None:
            clipped = (Pollution.clipping(norm),) if norm > 0 else ()
            facts = replace(facts, after_clipping=norm > 0, pollution=(*facts.pollution, *clipped))
        return replace(
            facts,
            batch_size=self._batch_size(facts.batch_size),
            absent={self.names[name]: why for name in self.frozen},
            tied={self.names[a]: self.names[n] for a, n in self.shared.items() if n in self.names},
        )

    def _batch_size(self, beside: float | None) -> float | None:
        """Return the examples per step, if all that is on record agrees, also with what files beside it prove."""
        total = _count(self.config.get("train_batch_size"))
        micro = _count(self.config.get("train_micro_batch_size_per_gpu"))
        world = _count(self.content.get("dp_world_size"))
        # Without it DeepSpeed takes one micro-batch a step.
        accumulated = _count(self.config.get("gradient_accumulation_steps", None if total else 1))
        product = micro * accumulated * world if micro and accumulated and world else None
        said = {n for n in (total, product, beside) if n is not None}
        size = said.pop() if len(said) == 1 else None
        if size is None:
            return None
        steps, samples = self.content.get("global_steps"), self.content.get("global_samples")
        if isinstance(steps, int) and isinstance(samples, int) and steps > 0 and samples != size * steps:
            return None  # it changed during the run
        return size

    def _groups(self) -> Iterator[dict[str, tuple[int, ...]]]:
        listed = self.content.get("param_shapes")
        if listed is None:
            return
        seen: set[str] = set()
        for group in listed if isinstance(listed, list) else [listed]:
            shapes = _shapes(group)
            if seen & set(shapes):
                raise FileError(f"{self.folder} is damaged: it lists {min(seen & set(shapes))!r} twice.")
            seen |= set(shapes)
            yield shapes


def _refuse_parallel(folder: Path, content: Mapping[str, Any], stages: int) -> None:
    degrees = _dictionary(content.get("checkpoint_parallel_dimensions"))
    ranks = [content.get("mp_world_size"), *(degrees.get(key) for key in ("tp_degree", "pp_degree"))]
    if any(isinstance(n, int) and n > stages for n in ranks):
        raise FileError(
            f"The DeepSpeed checkpoint {folder} was written with tensor or pipeline parallelism (degrees {_list(set(ranks))}), but "
            f"holds the states of {stages} such ranks. Get all of its files (zero_pp_rank_*_mp_rank_*_optim_states.pt); a universal "
            "checkpoint of it is not read."
        )


def _content(file: Path) -> dict[str, Any]:
    content = read(file)
    if not isinstance(content, dict):
        raise FileError(f"{file} is not the dictionary that DeepSpeed writes. Get it again.")
    return content


def _shapes(listed: Any) -> dict[str, tuple[int, ...]]:
    for name, shape in _dictionary(listed).items():
        sizes = isinstance(shape, (tuple, list)) and all(isinstance(n, int) for n in shape)
        if not sizes or not isinstance(name, str):
            raise FileError(f"DeepSpeed's list of parameters is damaged at {name!r}. Get the checkpoint again.")
    return {name: tuple(shape) for name, shape in _dictionary(listed).items()}


def _dictionary(value: Any) -> dict[Any, Any]:
    if isinstance(value, Record):
        value = value.mapping or value.attributes
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _list(values: Any) -> str:
    return ", ".join(sorted(map(str, values)))
