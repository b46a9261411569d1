"""The optimizers of other libraries whose keys look like Adam's, RMSprop's or Adagrad's but mean something else.

pytorch_optimizer, timm, schedulefree, prodigyopt, dadaptation, galore_torch, came_pytorch, adam_mini, transformers: each row
was compared with the average recomputed in double precision from recorded gradients (tests/recycle/test_optimizer_zoo.py).
"""

from __future__ import annotations

from .rows import (
    Accumulator,
    Group,
    betas,
    coupled,
    known,
    value,
)

__all__ = ["OTHERS"]

_FACTORED = "It is factored: rank one per matrix."
_EPS = "It averages g² + eps."
_SCALED = (
    "The optimizer squares d·g; this was divided by the square of the last d, which overstates the newest gradients against "
    "older ones where d was still growing."
)
_ONES = "Its average started at one; what is left of that is subtracted, which costs digits while few steps have been taken."


def _pytorch_optimizer_lamb(group: Group) -> bool:
    return "weight_decouple" in group and not group["weight_decouple"]


_REFUSED: tuple[Accumulator, ...] = (
    known("SOAP", "exp_avg_sq Q", refusal="keeps its squared gradient in a rotated basis, so it belongs to no single weight"),
    known("GaLore", "projector", classes="", refusal="keeps the square of a projected gradient here, not a value per weight"),
    known("Shampoo", "pre_cond", refusal="keeps matrices, not a value per weight", classes="Shampoo ScalableShampoo"),
    known("Shampoo", "pre_cond_0", refusal="keeps matrices, not a value per weight", classes=""),
    known("Kron", "momentum_buffer Q", refusal="keeps matrices, not a value per weight"),
    known("Adan", "exp_avg_diff", refusal="averages the square of g + (1−β₂)·(g − previous g), not of g"),
    known("Adan", "m v n prev_grad", refusal="averages the square of g + (1−β₂)·(g − previous g), not of g"),
    known("AdaBelief", "exp_avg_var", without="exp_grad_norm", classes="AdaBelief Aida",
          refusal="averages (g − its mean)², the variance around a moving mean, not g²"),
    known("Sophia", "hessian_moment", refusal="keeps an estimate of the Hessian, not of g²", classes="SophiaH SophiaG Sophia"),
    known("AdaHessian", "exp_hessian_diag_sq", refusal="keeps an estimate of the Hessian, not of g²", classes="AdaHessian Adahessian"),
    known("IVON", "", group="hess", refusal="keeps a Hessian estimate at perturbed weights, not an average of g²"),
    known("Yogi", "exp_avg_sq", group="initial_accumulator", refusal="changes its accumulator by sign, so it is no average of g²"),
    known("Ano", "exp_avg_sq", class_only=True, refusal="changes its accumulator by sign, so it is no average of g²"),
    known("Adam-mini", "vmean", refusal="keeps one value per block here, not one per weight", classes=""),
    known("Adam-mini", "v_mean", refusal="keeps one value per block here, not one per weight", classes=""),
    known("NovoGrad", "grads_ema", refusal="keeps one value per tensor, not one per weight"),
    known("Amos", "exp_avg_sq decay", refusal="keeps one value per tensor, not one per weight"),
    known("Nero", "exp_avg_sq scale", refusal="keeps one value per neuron, not one per weight"),
    known("SM3", "accumulator_0", refusal="keeps maxima of rows and columns, not a value per weight"),
    known("SWATS", "momentum_buffer exp_avg2", refusal="has gone over to SGD and no longer averages the squared gradient"),
    known("AdaMuon", "momentum_buffer exp_avg_sq", refusal="squares an orthogonalised momentum, not the gradient"),
    known("Ranger", "exp_avg_sq slow_buffer", refusal="squares the gradient of a matrix after subtracting its mean"),
    known("Ranger21", "variance_ma", refusal="squares the gradient after clipping it and subtracting its mean"),
    known("AdaGC", "exp_avg_sq gamma", refusal="squares the gradient after clipping each tensor on its own, so that tensors differ in scale"),
    known("StableSPAM", "exp_avg_sq m_norm_t", refusal="squares a gradient that was divided by a moving norm"),
    known("SPAM or SaRA", "exp_avg_sq mask", classes="SPAM SaRA", refusal="keeps values of a changing part of the weights only"),
    known("GrokFastAdamW", "exp_avg_sq grok_exp_avg", refusal="squares the gradient plus a multiple of its moving average"),
    known("MARS", "exp_avg_sq last_grad", refusal="squares a combination of this and the previous gradient"),
    known("AdaSmooth", "exp_avg_sq prev_param", refusal="averages with a decay of its own for each weight"),
    known("AdaShift", "exp_avg_sq grad_queue", refusal="squares the largest of several older gradients"),
    known("MADGRAD", "grad_sum_sq", refusal="weights every squared gradient by the learning rate and the step"),
    known("FlashAdamW", "exp_avg_sq::quantized", refusal="keeps its state in a code of its own, which is not read"),
)  # fmt: skip

_FACTORS: tuple[Accumulator, ...] = (
    known("CAME", "exp_avg_sq_row exp_avg_sq_col exp_avg_res_row", "exp_avg_sq_row exp_avg_sq_col", "ema", beta=betas(1),
          notes=(_FACTORED, _EPS)),
    known("Adafactor", "exp_avg_sq_row exp_avg_sq_col", "exp_avg_sq_row exp_avg_sq_col", "average", classes="", notes=(_FACTORED, _EPS)),
    known("Adafactor", "exp_avg_sq_r exp_avg_sq_c", "exp_avg_sq_r exp_avg_sq_c", "average", classes="", notes=(_FACTORED, _EPS)),
    known("AdaTAM", "exp_avg_sq s", "exp_avg_sq", "ema", group="decay_rate betas", beta=betas(1), l2_inside=coupled),
    known("Adafactor", "exp_avg_sq", "exp_avg_sq", "average", group="decay_rate", classes="", notes=(_EPS,)),
    known("Adafactor", "exp_avg_sq", "exp_avg_sq", "average", group="relative_step", classes="", notes=(_EPS,)),
)  # fmt: skip

_OTHER_MEANING: tuple[Accumulator, ...] = (
    # Weights that sum to one: nothing is left to correct.
    known("ADOPT", "exp_avg_sq", "exp_avg_sq", "average", group="clip_exp", l2_inside=coupled, classes="Adopt"),
    known("ADOPT", "exp_avg_sq step", "exp_avg_sq", "average", group="decouple differentiable", l2_inside=coupled, classes=""),
    known("ADOPT", "exp_avg_sq", "exp_avg_sq", "average", class_only=True, l2_inside=coupled),
    known("StableAdamW", "exp_avg_sq", "exp_avg_sq", "average", group="kahan_sum", l2_inside=coupled),
    known("QHAdam", "exp_avg_sq", "exp_avg_sq", "average", group="nus", l2_inside=coupled),
    known("FAdam", "momentum fim", "fim", "average"),
    # The step size that they find is in the square, or is not.
    known("Prodigy", "exp_avg_sq s p0", "exp_avg_sq", "ema", group="d d0", without="step", beta=betas(1), l2_inside=coupled,
          scale=lambda group: float(group["d"]) ** 2, ahead=1, notes=(_SCALED,)),
    known("Prodigy", "exp_avg_sq s p0", "exp_avg_sq", "ema", group="d d0", beta=betas(1), l2_inside=coupled,
          scale=lambda group: float(group["d"]) ** 2, notes=(_SCALED,)),
    known("DAdaptAdam", "exp_avg_sq s", "exp_avg_sq", "ema", group="d growth_rate", beta=betas(1), l2_inside=coupled),
    # Started at one, as TensorFlow's did.
    known("RMSpropTF", "square_avg", "square_avg", "ema", group="alpha lr_in_momentum", beta=value("alpha"), start=lambda group: 1.0,
          l2_inside=coupled, notes=(_ONES,)),
    known("RMSpropTFLike", "square_avg", "square_avg", "ema", group="alpha", beta=value("alpha"), start=lambda group: 1.0,
          l2_inside=True, class_only=True, notes=(_ONES,)),
    # Gradients that are not taken as they are.
    known("ScheduleFree", "z exp_avg_sq", "exp_avg_sq", "ema", group="weight_lr_power", beta=betas(1),
          classes="AdamWScheduleFree RAdamScheduleFree ScheduleFreeAdamW ScheduleFreeRAdam AdamWScheduleFreeReference AdamWScheduleFreeClosure",
          notes=("Its gradients are taken at the extrapolated weights y, not at the averaged ones.",)),
    known("Lamb", "exp_avg_sq", "exp_avg_sq", "ema", group="betas grad_averaging max_grad_norm", beta=betas(1), l2_inside=_pytorch_optimizer_lamb,
          classes="Lamb", notes=("The optimizer itself clips the gradients at max_grad_norm before it squares them (pytorch_optimizer: if told so).",)),
    known("NovoGrad", "exp_avg_sq", group="grad_averaging", refusal="keeps one value per tensor, not one per weight", classes="NvNovoGrad FusedNovoGrad"),
    # The plain thing under another name.
    known("AdaNorm", "exp_avg_var exp_grad_norm", "exp_avg_var", "ema", beta=betas(1), l2_inside=coupled),
    known("AdamG", "m v r", "v", "ema", group="betas", beta=betas(1), l2_inside=coupled),
    known("Adam-mini", "m v", "v", "ema", group="beta2", beta=value("beta2"), classes="Adam_mini"),
    known("FTRL", "z n", "n", "sum", group="lr_power"),
    known("MSVAG", "exp_avg exp_avg_sq", "exp_avg_sq", "ema", group="beta", beta=value("beta")),
)  # fmt: skip


def _plain(optimizer: str, keys: str = "", group: str = "") -> Accumulator:
    return known(
        optimizer, f"exp_avg_sq {keys}", "exp_avg_sq", "ema", group=f"betas {group}", beta=betas(1), l2_inside=coupled
    )


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
    # RAdam and EXAdam keep the average itself, ADOPT one that started at the first square, Ano none: same keys, nothing tells.
    known("pytorch_optimizer's RAdam, EXAdam, ADOPT or Ano", "exp_avg_sq", group="fixed_decay step", classes="", without="step",
          refusal="write the same keys, and what the accumulator is differs between them; extract from the live optimizer, whose "
                  "class tells"),
)  # fmt: skip

OTHERS: tuple[Accumulator, ...] = (*_REFUSED, *_FACTORS, *_OTHER_MEANING, *_PLAIN)
"""Rows that must be tried before torch's own."""
