"""Which optimizer keeps its squared gradient where, and what exactly it is: one table.

A file does not say which class wrote it, so a row is recognised by the keys of a parameter's state and of its group; a
live optimizer's class name settles what keys leave open. Rows are tried from top to bottom: the ones whose keys look like
Adam's but mean something else stand above Adam. Rows of other libraries (pytorch_optimizer, timm, schedulefree, prodigyopt,
dadaptation, galore_torch, came_pytorch, adam_mini, transformers) were compared with the average recomputed in double
precision from recorded gradients (tests/recycle/test_optimizer_zoo.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ...importance.facts import Pollution, Spoiler

__all__ = ["FACTORED", "TABLE", "TRACK", "Accumulator", "Group", "number", "says_decoupled"]

Group = Mapping[str, Any]

MOMENTUM = "keeps a moving average of the gradient, whose square is not the average of the squares"
TRACK = (
    "Train with Adam or AdamW, or keep the average yourself: tracker = squisher.Tracker(model), tracker.observe() before "
    "every step, squisher.extract(tracker, model)."
)
_MUON = f"Most models have an AdamW beside it for the other parameters: if saved elsewhere, give that file. {TRACK}"


@dataclass(frozen=True)
class Accumulator:
    """One row: how an optimizer is recognised, and what its accumulator is.

    Attributes:
        optimizer: Its usual name.
        keys: Keys that the state of a parameter must have.
        without: Keys that it must not have.
        group: Keys that its group must have.
        group_without: Keys that its group must not have.
        classes: Class names, for a live optimizer; they settle what the keys leave open.
        class_only: Whether the keys are another optimizer's too, so that only the class can decide.
        key: The accumulator: one key, or the two factors of a factored one.
        meaning: `ema` (exponential moving average from zero), `sum`, `average` (weights sum to one: no correction needed),
            or `none` (nothing that averages squared gradients).
        beta: Where β₂ is, for an `ema`.
        start: Value of the accumulator before the first step.
        scale: What the squared gradients were multiplied by.
        ahead: By how much the step count is ahead of the steps taken.
        l2_inside: Whether weight decay is added to the gradient before it is squared.
        notes: What else is in it; always said.
        refusal: Why it cannot be used, for `none`.
        advice: What to do then.
    """

    optimizer: str
    keys: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    group: frozenset[str] = frozenset()
    group_without: frozenset[str] = frozenset()
    classes: tuple[str, ...] = ()
    class_only: bool = False
    key: tuple[str, ...] = ()
    meaning: str = "none"
    beta: Callable[[Group], float] | None = None
    start: Callable[[Group], float] | None = None
    scale: Callable[[Group], float] | None = None
    ahead: int = 0
    l2_inside: Callable[[Group], bool] | bool = False
    notes: tuple[Pollution, ...] = ()
    refusal: str = ""
    advice: str = TRACK

    def matches(self, state: Collection[str], group: Collection[str]) -> bool:
        """Return whether the keys of a parameter's state and of its group are this optimizer's."""
        has = self.keys.issubset(state) and self.group.issubset(group)
        return has and self.without.isdisjoint(state) and self.group_without.isdisjoint(group)


def row(optimizer: str, keys: str, key: str = "", meaning: str = "none", **more: Any) -> Accumulator:
    """Return a row, with its sets and tuples written as words; its class is called like the optimizer unless said otherwise."""
    for name in ("without", "group", "group_without"):
        more[name] = frozenset(more.get(name, "").split())
    more["classes"] = tuple(more.get("classes", optimizer).split())
    return Accumulator(optimizer, frozenset(keys.split()), key=tuple(key.split()), meaning=meaning, **more)


def number(setting: Any) -> float:
    """Return a hyperparameter, which may be a tensor, also one that is still in a file."""
    load = getattr(setting, "load", None)
    return float(load() if callable(load) else setting)


def betas(position: int) -> Callable[[Group], float]:
    """Return the decay at a position of the group's `betas`."""
    return lambda group: number(group["betas"][position])


def value(name: str) -> Callable[[Group], float]:
    """Return the decay under a key of the group."""
    return lambda group: number(group[name])


_SAID = (
    "decoupled_weight_decay",
    "weight_decouple",
    "decouple",
    "decoupled_decay",
    "decoupled",
    "decouple_weight_decay",
    "decouple_wd",
)
_DECOUPLED = ("caution", "correct_bias")  # keys of timm's and of transformers' own optimizers, which all decouple it


def says_decoupled(group: Group) -> bool:
    """Return whether a group records if weight decay is decoupled; classes differ in it, and no file names the class."""
    return any(key in group for key in (*_SAID, *_DECOUPLED))


def coupled(group: Group) -> bool:
    """Return whether weight decay may have been added to the gradient before it was squared."""
    for key in _SAID:
        if key in group:
            return not group[key]
    return not says_decoupled(group)


FACTORED = Pollution(Spoiler.FACTORED, note="It is factored: rank one per matrix.")
_EPS = Pollution(Spoiler.EPSILON, note="It averages g² + eps.")
_SCALED = Pollution(
    Spoiler.STEP_SIZE,
    note="The optimizer squares d·g; this was divided by the square of the last d. While d still grew, older gradients count for "
    "less, and all values are too small by one factor that is not recorded: the order holds, the scale does not.",
)
_ONES = Pollution(
    Spoiler.START,
    note="Its average started at one; what is left of that is subtracted, which costs digits while few steps have been taken.",
)
_EXTRAPOLATED = Pollution(Spoiler.OTHER_WEIGHTS, note="Its gradients are taken at extrapolated weights.")
_CLIPS = Pollution(
    Spoiler.CLIPPING,
    note="The optimizer itself clips the gradients at max_grad_norm before it squares them (pytorch_optimizer: if told so).",
)
_SPARSE = Pollution(Spoiler.SPARSE, note="Rows without a gradient do not decay, and their step counts are not kept.")
_OWN = Pollution(
    Spoiler.UNCERTAIN,
    note="The class is not known: m and v are taken for Adam's by their names, and the count t for the steps taken, which some "
    "scripts begin at one.",
)


_REFUSED: tuple[Accumulator, ...] = (
    row("SOAP", "exp_avg_sq Q", refusal="keeps its squared gradient in a rotated basis, so it belongs to no single weight"),
    row("GaLore", "projector", classes="", refusal="keeps the square of a projected gradient here, not a value per weight"),
    row("Shampoo", "pre_cond", refusal="keeps matrices, not a value per weight", classes="Shampoo ScalableShampoo"),
    row("Shampoo", "precond_0", refusal="keeps matrices, not a value per weight", classes=""),
    row("Shampoo", "pre_cond_0", refusal="keeps matrices, not a value per weight", classes=""),
    row("Distributed Shampoo", "block_0", classes="DistributedShampoo",
          refusal="keeps an average of g² only where it grafts from Adam, RMSprop or AdaGrad, and that in blocks, which are put together where "
                  "the file has the parameters' names and their shapes are known",
          advice="Build it from model.named_parameters(), save it whole (of all ranks), and save the weights beside it or give --model."),
    row("Kron", "momentum_buffer Q", refusal="keeps matrices, not a value per weight"),
    row("Adan", "exp_avg_diff", refusal="averages the square of g + (1−β₂)·(g − previous g), not of g"),
    row("Adan", "m v n prev_grad", refusal="averages the square of g + (1−β₂)·(g − previous g), not of g"),
    row("AdaBelief", "exp_avg_var", without="exp_grad_norm", classes="AdaBelief Aida",
          refusal="averages (g − its mean)², the variance around a moving mean, not g²"),
    row("Sophia", "hessian_moment", refusal="keeps an estimate of the Hessian, not of g²", classes="SophiaH SophiaG Sophia"),
    row("AdaHessian", "exp_hessian_diag_sq", refusal="keeps an estimate of the Hessian, not of g²", classes="AdaHessian Adahessian"),
    row("IVON", "", group="hess", refusal="keeps a Hessian estimate at perturbed weights, not an average of g²"),
    row("Yogi", "exp_avg_sq", group="initial_accumulator", refusal="changes its accumulator by sign, so it is no average of g²"),
    row("Ano", "exp_avg_sq", class_only=True, refusal="changes its accumulator by sign, so it is no average of g²"),
    row("Adam-mini", "vmean", refusal="keeps one value per block here, not one per weight", classes=""),
    row("Adam-mini", "v_mean", refusal="keeps one value per block here, not one per weight", classes=""),
    row("NovoGrad", "grads_ema", refusal="keeps one value per tensor, not one per weight"),
    row("Amos", "exp_avg_sq decay", refusal="keeps one value per tensor, not one per weight"),
    row("Nero", "exp_avg_sq scale", refusal="keeps one value per neuron, not one per weight"),
    row("SM3", "accumulator_0", refusal="keeps maxima of rows and columns, not a value per weight"),
    row("SWATS", "momentum_buffer exp_avg2", refusal="has gone over to SGD and no longer averages the squared gradient"),
    row("AdaMuon", "momentum_buffer exp_avg_sq", refusal="squares an orthogonalised momentum, not the gradient"),
    row("Ranger", "exp_avg_sq slow_buffer", refusal="squares the gradient of a matrix after subtracting its mean"),
    row("Ranger21", "variance_ma", refusal="squares the gradient after clipping it and subtracting its mean"),
    row("AdaGC", "exp_avg_sq gamma", refusal="squares the gradient after clipping each tensor on its own, so that tensors differ in scale"),
    row("StableSPAM", "exp_avg_sq m_norm_t", refusal="squares a gradient that was divided by a moving norm"),
    row("SPAM or SaRA", "exp_avg_sq mask", classes="SPAM SaRA", refusal="keeps values of a changing part of the weights only"),
    row("GrokFastAdamW", "exp_avg_sq grok_exp_avg", refusal="squares the gradient plus a multiple of its moving average"),
    row("MARS", "exp_avg_sq last_grad", refusal="squares a combination of this and the previous gradient"),
    row("AdaSmooth", "exp_avg_sq prev_param", refusal="averages with a decay of its own for each weight"),
    row("AdaShift", "exp_avg_sq grad_queue", refusal="squares the largest of several older gradients"),
    row("MADGRAD", "grad_sum_sq", refusal="weights every squared gradient by the learning rate and the step"),
)  # fmt: skip

_FACTORS: tuple[Accumulator, ...] = (
    row("CAME", "exp_avg_sq_row exp_avg_sq_col exp_avg_res_row", "exp_avg_sq_row exp_avg_sq_col", "ema", beta=betas(1),
          notes=(FACTORED, _EPS)),
    row("CAME", "exp_avg_sq RMS", "exp_avg_sq", "ema", group="betas clip_threshold", beta=betas(1), notes=(_EPS,)),
    row("Adafactor", "exp_avg_sq_row exp_avg_sq_col", "exp_avg_sq_row exp_avg_sq_col", "average", classes="", notes=(FACTORED, _EPS)),
    row("Adafactor", "exp_avg_sq_r exp_avg_sq_c", "exp_avg_sq_r exp_avg_sq_c", "average", classes="", notes=(FACTORED, _EPS)),
    row("AdaTAM", "exp_avg_sq s", "exp_avg_sq", "ema", group="decay_rate betas", beta=betas(1), l2_inside=coupled),
    row("Adafactor", "exp_avg_sq", "exp_avg_sq", "average", group="decay_rate", classes="", notes=(_EPS,)),
    row("Adafactor", "exp_avg_sq", "exp_avg_sq", "average", group="relative_step", classes="", notes=(_EPS,)),
)  # fmt: skip

_OTHER_MEANING: tuple[Accumulator, ...] = (
    # Weights that sum to one: nothing is left to correct.
    row("ADOPT", "exp_avg_sq", "exp_avg_sq", "average", group="clip_exp", l2_inside=coupled, classes="Adopt"),
    row("ADOPT", "exp_avg_sq step", "exp_avg_sq", "average", group="decouple differentiable", l2_inside=coupled, classes=""),
    row("ADOPT", "exp_avg_sq", "exp_avg_sq", "average", class_only=True, l2_inside=coupled),
    # optimi corrects the decay of each step instead of the average.
    row("StableAdamW (optimi)", "exp_avg_sq eps_sq", "exp_avg_sq", "average", group="kahan_sum", classes=""),
    row("Ranger (optimi)", "exp_avg_sq la_param", "exp_avg_sq", "average", group="kahan_sum", l2_inside=coupled, classes=""),
    row("Adam, AdamW or RAdam (optimi)", "exp_avg_sq", "exp_avg_sq", "average", group="kahan_sum decouple_wd", l2_inside=coupled, classes=""),
    row("StableAdamW", "exp_avg_sq", "exp_avg_sq", "average", group="kahan_sum", l2_inside=coupled),
    # heavyball, too; see `decoded` for its keys.
    row("AdamW (heavyball)", "exp_avg_sq update_by_adam", "exp_avg_sq", "average", classes="AdamW"),
    row("QHAdam", "exp_avg_sq", "exp_avg_sq", "average", group="nus", l2_inside=coupled),
    row("FAdam", "momentum fim", "fim", "average"),
    # The step size that they find is in the square, or is not.
    row("Prodigy", "exp_avg_sq s p0", "exp_avg_sq", "ema", group="d d0", without="step", beta=betas(1), l2_inside=coupled,
          scale=lambda group: number(group["d"]) ** 2, ahead=1, notes=(_SCALED,)),
    row("Prodigy", "exp_avg_sq s p0", "exp_avg_sq", "ema", group="d d0", beta=betas(1), l2_inside=coupled,
          scale=lambda group: number(group["d"]) ** 2, notes=(_SCALED,)),
    row("DAdaptAdam", "exp_avg_sq s", "exp_avg_sq", "ema", group="d growth_rate", beta=betas(1), l2_inside=coupled),
    # Started at one, as TensorFlow's did.
    row("RMSpropTF", "square_avg", "square_avg", "ema", group="alpha lr_in_momentum", beta=value("alpha"), start=lambda group: 1.0,
          l2_inside=coupled, notes=(_ONES,)),
    row("RMSpropTFLike", "square_avg", "square_avg", "ema", group="alpha", beta=value("alpha"), start=lambda group: 1.0,
          l2_inside=True, class_only=True, notes=(_ONES,)),
    # Gradients that are not taken as they are.
    row("ScheduleFree", "z exp_avg_sq", "exp_avg_sq", "ema", group="weight_lr_power", beta=betas(1),
          classes="AdamWScheduleFree RAdamScheduleFree ScheduleFreeAdamW ScheduleFreeRAdam AdamWScheduleFreeReference AdamWScheduleFreeClosure",
          notes=(_EXTRAPOLATED,)),
    row("Lamb", "exp_avg_sq", "exp_avg_sq", "ema", group="betas grad_averaging max_grad_norm", beta=betas(1), l2_inside=lambda group: not group.get("weight_decouple", True),
          classes="Lamb", notes=(_CLIPS,)),
    row("NovoGrad", "exp_avg_sq", group="grad_averaging", refusal="keeps one value per tensor, not one per weight", classes="NvNovoGrad FusedNovoGrad"),
    # Its blocks were put together (`encoded.unblocked`).
    row("Distributed Shampoo, grafting from Adam or RMSprop", "grafted_average", "grafted_average", "ema", beta=value("grafting_beta2"),
          l2_inside=coupled, classes="DistributedShampoo"),
    row("Distributed Shampoo, grafting from AdaGrad", "grafted_sum", "grafted_sum", "sum", l2_inside=coupled, classes="DistributedShampoo"),
    # The plain thing under another name.
    row("AdaNorm", "exp_avg_var exp_grad_norm", "exp_avg_var", "ema", beta=betas(1), l2_inside=coupled),
    row("AdamG", "m v r", "v", "ema", group="betas", beta=betas(1), l2_inside=coupled),
    row("Adam-mini", "m v step", "v", "ema", group="beta2", beta=value("beta2"), classes="Adam_mini"),
    row("AdamW (dion)", "momentum variance", "variance", "ema", group="algorithm beta2", beta=value("beta2"), classes=""),
    row("AdamW beside Muon", "moment1 moment2", "moment2", "ema", group="adamw_betas", beta=lambda group: number(group["adamw_betas"][1]), classes=""),
    row("AdamW beside Muon", "moment1 moment2", "moment2", "ema", group="betas ns_steps", beta=betas(1), classes=""),
    # Training scripts name the moments as the paper does.
    row("Adam or AdamW of a script", "m v", "v", "ema", group="betas", beta=betas(1), l2_inside=coupled, classes="", notes=(_OWN,)),
    row("Adam or AdamW of a script", "m v", "v", "ema", group="beta2", beta=value("beta2"), l2_inside=coupled, classes="", notes=(_OWN,)),
    row("Adam or AdamW of a script", "m v", "v", "ema", group="b2", beta=value("b2"), l2_inside=coupled, classes="", notes=(_OWN,)),
    row("FTRL", "z n", "n", "sum", group="lr_power"),
    row("MSVAG", "exp_avg exp_avg_sq", "exp_avg_sq", "ema", group="beta", beta=value("beta")),
)  # fmt: skip


def _plain(optimizer: str, keys: str = "", group: str = "", **more: Any) -> Accumulator:
    more |= {"group": f"betas {group}", "beta": betas(1), "l2_inside": coupled}
    return row(optimizer, f"exp_avg_sq {keys}", "exp_avg_sq", "ema", **more)


_PLAIN: tuple[Accumulator, ...] = (
    _plain("AdEMAMix", "exp_avg_slow"),
    _plain("SimplifiedAdEMAMix", "num_sum den_sum"),
    _plain("AdaBound", group="final_lr"),
    _plain("Adai", "beta1_prod"),
    _plain("AdaMod", "exp_avg_lr"),
    _plain("AdamP", group="wd_ratio"),
    _plain("AdamWSN", group="subset_size"),
    _plain("AdaPNM", "neg_exp_avg"),
    _plain("DiffGrad", "previous_grad"),
    _plain("DualAdam", group="switch_rate"),
    _plain("EmoNavi", group="use_shadow"),
    _plain("LaProp", "exp_avg_lr_1"),
    _plain("PAdam", group="partial"),
    _plain("SWATS", group="phase"),
    _plain("APOLLO", group="scale_type"),
    _plain("GrokFastAdamW", group="grokfast"),
    _plain("AdamC or AdamS", group="ams_bound fixed_decay"),
    _plain("RAdam or EXAdam (pytorch_optimizer)", group="fixed_decay", classes="RAdam EXAdam", class_only=True),
    # RAdam and EXAdam keep the average itself, ADOPT one that started at the first square, Ano none: the same keys.
    row("pytorch_optimizer's RAdam, EXAdam, ADOPT or Ano", "exp_avg_sq", group="fixed_decay step", classes="", without="step",
          refusal="write the same keys, and what the accumulator is differs between them",
          advice="Say which it was with --optimizer-class ADOPT (optimizer_class='ADOPT')."),
)  # fmt: skip

_OTHERS: tuple[Accumulator, ...] = (*_REFUSED, *_FACTORS, *_OTHER_MEANING, *_PLAIN)
"""Rows that must be tried before torch's."""

TABLE: tuple[Accumulator, ...] = (
    *_OTHERS,
    row("Adamax", "exp_inf", refusal="keeps a decayed maximum of |g|, which is no average of squares"),
    row("Adafactor", "row_var col_var", "row_var col_var", "average", classes="", notes=(FACTORED,)),
    row("Adafactor", "variance", "variance", "average", group="beta2_decay", classes=""),
    # -- bitsandbytes: decay is decoupled in both its Adam and its AdamW, not in its one-state optimizers -----------------
    row("AdEMAMix (bitsandbytes)", "exp_avg_sq state2", "exp_avg_sq", "ema", beta=betas(1), group="betas t_alpha", class_only=True,
         classes="AdEMAMix AdEMAMix8bit AdEMAMix32bit PagedAdEMAMix PagedAdEMAMix8bit PagedAdEMAMix32bit"),
    row("Adam (bitsandbytes)", "exp_avg_sq state2", "exp_avg_sq", "ema", beta=betas(1),
         classes="Adam Adam8bit Adam32bit PagedAdam PagedAdam8bit PagedAdam32bit AdamW AdamW8bit AdamW32bit PagedAdamW PagedAdamW8bit "
                 "PagedAdamW32bit LAMB LAMB8bit LAMB32bit"),
    row("RMSprop (bitsandbytes)", "square_avg state1", "square_avg", "ema", beta=betas(0), l2_inside=True,
         classes="RMSprop RMSprop8bit RMSprop32bit"),
    row("Adagrad (bitsandbytes)", "sum state1", "sum", "sum", l2_inside=True, classes="Adagrad Adagrad8bit Adagrad32bit"),
    row("SGD or Lion (bitsandbytes)", "state1", without="state2 square_avg sum", refusal=MOMENTUM,
         classes="Lion Lion8bit Lion32bit PagedLion PagedLion8bit PagedLion32bit SGD8bit SGD32bit LARS8bit LARS32bit PytorchLARS"),
    # -- Adam's family -------------------------------------------------------------------------------------------------
    row("NAdam", "exp_avg_sq mu_product", "exp_avg_sq", "ema", beta=betas(1), l2_inside=coupled),
    row("SparseAdam", "exp_avg_sq", "exp_avg_sq", "ema", group="betas", beta=betas(1), class_only=True, notes=(_SPARSE,)),
    row("SparseAdam", "exp_avg_sq step", "exp_avg_sq", "ema", group="betas maximize", group_without="weight_decay", beta=betas(1), classes="",
         notes=(_SPARSE,)),
    row("Adam", "exp_avg_sq", "exp_avg_sq", "ema", group="betas", beta=betas(1), l2_inside=coupled,
         classes="Adam AdamW RAdam EXAdam FusedAdam DeepSpeedCPUAdam Tracker"),
    # -- squared-gradient averages without a first moment --------------------------------------------------------------
    row("Adadelta", "square_avg acc_delta", "square_avg", "ema", beta=value("rho"), l2_inside=True),
    row("RMSprop", "square_avg", "square_avg", "ema", group="alpha", beta=value("alpha"), l2_inside=True),
    row("Adagrad", "sum", "sum", "sum", start=lambda group: number(group.get("initial_accumulator_value", 0.0)), l2_inside=True),
    # -- no squared gradient at all ------------------------------------------------------------------------------------
    row("Rprop", "prev step_size", refusal="keeps the sign of the gradient only"),
    row("ASGD", "ax", refusal="keeps an average of the weights, and nothing of the gradient"),
    row("LBFGS", "old_dirs", refusal="keeps past directions, and no average of squares"),
    row("Muon", "", group="ns_steps", refusal=MOMENTUM, advice=_MUON),
    row("Muon", "", group="use_muon", without="exp_avg_sq", refusal=MOMENTUM, advice=_MUON, classes="MuonWithAuxAdam SingleDeviceMuonWithAuxAdam"),
    row("Dion, Muon or Lion (dion)", "momentum", group="algorithm", without="variance", refusal=MOMENTUM, classes=""),
    row("SGD", "momentum_buffer", refusal=MOMENTUM, classes="SGD LARS Lars"),
    row("SGD", "", group="momentum dampening", refusal="keeps nothing of the gradient"),
    row("ZeroRedundancyOptimizer", "", class_only=True, refusal="keeps the state of a parameter on one rank alone",
         advice="Call consolidate_state_dict() on every rank, save state_dict() on the first, and extract from that file."),
    row("Lion", "exp_avg", without="exp_avg_sq", refusal=MOMENTUM, classes="Lion DistributedLion"),
)  # fmt: skip
