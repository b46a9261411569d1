"""Every way to the squared gradients of each example that the benchmark knows: ours, the plain ones, and the peers.

A method is prepared once (a peer may change its copy of the model) and then called with batches; it returns the mean of squares by
parameter name, or None where there is nothing to compare (the plain training step).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import Case

__all__ = ["METHODS", "OURS", "PEERS", "Batches", "Run", "plain", "reference"]

Batches = list[tuple[Tensor, Tensor]]
Run = Callable[[Batches], Mapping[str, Tensor] | None]


def plain(case: Case, model: nn.Module) -> Run:
    """Return the training pass: forward, loss, backward."""

    def run(batches: Batches) -> None:
        for x, y in batches:
            for p in model.parameters():
                p.grad = None
            case.loss(model, x, y).backward()
        for p in model.parameters():
            p.grad = None

    return run


def reference(case: Case, model: nn.Module, batches: Batches, exact: bool = False) -> dict[str, Tensor]:
    """Return the Fisher by its definition, in double precision, one example at a time, without any library."""
    model = model.double()
    parameters = dict(model.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    examples = 0
    for x, y in batches:
        for n in range(x.shape[0]):
            examples += 1
            one = x[n : n + 1].double() if x.is_floating_point() else x[n : n + 1]
            if exact:
                logs = model(one).log_softmax(-1)[0]
                terms = [logs[c] * logs[c].detach().exp().sqrt() for c in range(logs.numel())]
            else:
                terms = [case.loss(model, one, y[n : n + 1])]
            for term in terms:
                for name, g in zip(
                    parameters, torch.autograd.grad(term, list(parameters.values()), retain_graph=exact), strict=True
                ):
                    total[name] += g**2
    model.float()
    return {name: t / examples for name, t in total.items()}


def loop(case: Case, model: nn.Module) -> Run:
    """Return the pass over batches of one, as in papers."""

    def run(batches: Batches) -> dict[str, Tensor]:
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for x, y in batches:
            for n in range(x.shape[0]):
                for p in model.parameters():
                    p.grad = None
                case.loss(model, x[n : n + 1], y[n : n + 1]).backward()
                for name, p in model.named_parameters():
                    if p.grad is not None:
                        total[name].addcmul_(p.grad, p.grad)
        return _mean(total, batches)

    return run


def vmap(case: Case, model: nn.Module) -> Run:
    """Return the pass of torch.func: vmap over grad, in chunks of eight examples."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(weights: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, (weights, buffers), (x[None],))
        return F.cross_entropy(logits.flatten(0, -2), y[None].flatten(), reduction="sum")

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def run(batches: Batches) -> dict[str, Tensor]:
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for x, y in batches:
            for i in range(0, x.shape[0], 8):
                for name, g in gradients(parameters, x[i : i + 8], y[i : i + 8]).items():
                    total[name] += g.square().sum(0)
        return _mean(total, batches)

    return run


def ours(again: bool = False, **settings: Any) -> Callable[[Case, nn.Module], Run]:
    """Return the pass of `squisher.fisher` with these settings; without `again` every call is a first one, with its proof."""

    def prepare(case: Case, model: nn.Module) -> Run:
        import squisher

        fisher = squisher.fisher  # resolved on first use: not inside what is measured

        def run(batches: Batches) -> Mapping[str, Tensor]:
            if not again:
                with torch.no_grad():
                    next(model.parameters()).view(-1)[:1].mul_(1)  # the same values, but changed
            return fisher(model, batches, likelihood=case.likelihood, **settings)

        return run

    return prepare


def _mean(total: Mapping[str, Tensor], batches: Batches) -> dict[str, Tensor]:
    examples = sum(x.shape[0] for x, _ in batches)
    return {name: t / examples for name, t in total.items()}


# -- peers -------------------------------------------------------------------------------------------------------------


def backpack(case: Case, model: nn.Module) -> Run:
    """Return the pass of BackPACK: SumGradSquared."""
    from backpack import backpack as extension
    from backpack import extend
    from backpack.extensions import SumGradSquared

    # Residual networks need its converter, which rewrites additions as modules.
    model = extend(model, use_converter=case.name != "mlp")
    loss = extend(nn.CrossEntropyLoss(reduction="sum"))

    def run(batches: Batches) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for x, y in batches:
            model.zero_grad()
            with extension(SumGradSquared()):
                loss(model(x), y).backward()
            for name, p in model.named_parameters():
                total[name] = total.get(name, 0) + p.sum_grad_squared
        return _mean(total, batches)

    return run


def nngeometry(case: Case, model: nn.Module) -> Run:
    """Return the pass of NNGeometry: a diagonal matrix of the loss's gradients."""
    from nngeometry.backend import TorchHooksJacobianBackend
    from nngeometry.object import PMatDiag

    def losses(*batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")[:, None]

    backend = TorchHooksJacobianBackend(model=model, function=losses)

    def run(batches: Batches) -> dict[str, Tensor]:
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        data = torch.utils.data.TensorDataset(x, y)
        loader = torch.utils.data.DataLoader(data, batch_size=batches[0][0].shape[0])
        return _unflatten(PMatDiag(generator=backend, examples=loader).get_diag(), model)

    return run


def _unflatten(flat: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Return tensors by name, from one vector in the order of layers, the weight before the bias."""
    out, at = {}, 0
    for name, p in model.named_parameters():
        out[name] = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    return out


def opacus(case: Case, model: nn.Module) -> Run:
    """Return the pass of Opacus: grad_sample squared."""
    from opacus.grad_sample import GradSampleModule

    # It looks at layers in training mode only; these models have no dropout.
    model = GradSampleModule(model.train(), loss_reduction="sum")

    def run(batches: Batches) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for x, y in batches:
            model.zero_grad()
            case.loss(model, x, y).backward()
            for name, p in model._module.named_parameters():
                total[name] = total.get(name, 0) + p.grad_sample.square().sum(0)
                p.grad_sample = None
        return _mean(total, batches)

    return run


def laplace(backend: str) -> Callable[[Case, nn.Module], Run]:
    """Return the pass of laplace-torch with one of its back ends for the empirical Fisher."""

    def prepare(case: Case, model: nn.Module) -> Run:
        import laplace.curvature as curvature

        engine = getattr(curvature, backend)(model, "classification")

        def run(batches: Batches) -> dict[str, Tensor]:
            flat: Any = 0
            for x, y in batches:
                flat = flat + engine.diag(x, y)[1].detach()
            return _mean(_unflatten(flat, model), batches)

        return run

    return prepare


def asdl(case: Case, model: nn.Module) -> Run:
    """Return the pass of ASDL (`asdfghjkl` on PyPI)."""
    from asdl.fisher import FisherConfig, get_fisher_maker
    from asdl.grad_maker import LOSS_CROSS_ENTROPY
    from asdl.matrices import FISHER_EMP, SHAPE_DIAG

    config = FisherConfig(fisher_type=FISHER_EMP, loss_type=LOSS_CROSS_ENTROPY, fisher_shapes=[SHAPE_DIAG], data_size=1)

    def run(batches: Batches) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for x, y in batches:
            maker = get_fisher_maker(model, config)
            output = maker.setup_model_call(model, x)
            maker.setup_loss_call(F.cross_entropy, output.view(-1, output.size(-1)), y.view(-1))
            maker.forward_and_backward()
            for module_name, module in model.named_modules():
                found = getattr(getattr(module, "fisher", None), "diag", None)
                for kind in ("weight", "bias"):
                    value = getattr(found, kind, None)
                    if value is not None:
                        name = f"{module_name}.{kind}"
                        total[name] = total.get(name, 0) + value
                if hasattr(module, "fisher"):
                    del module.fisher
        return _mean(total, batches)

    return run


def curvlinops(case: Case, model: nn.Module) -> Run:
    """Return the pass of curvlinops: one Hutchinson probe of the empirical Fisher."""
    from curvlinops import EFLinearOperator, hutchinson_diag

    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def run(batches: Batches) -> dict[str, Tensor]:
        try:
            operator = EFLinearOperator(model, nn.CrossEntropyLoss(), parameters, batches, check_deterministic=False)
        except (TypeError, AttributeError):  # versions before 3
            operator = EFLinearOperator(
                model, nn.CrossEntropyLoss(), list(parameters.values()), batches, check_deterministic=False
            )
        return _unflatten(torch.as_tensor(hutchinson_diag(operator, 1)), model)

    return run


OURS: dict[str, Callable[[Case, nn.Module], Run]] = {
    "squisher data": ours(),
    "squisher data again": ours(again=True),
    "squisher sampled": ours(labels="sampled"),
    "squisher exact": ours(labels="exact"),
    "squisher per batch": ours(labels="sampled", per="batch"),
}
PEERS: dict[str, Callable[[Case, nn.Module], Run]] = {
    "BackPACK": backpack,
    "NNGeometry": nngeometry,
    "Opacus": opacus,
    "laplace AsdlEF": laplace("AsdlEF"),
    "laplace BackPackEF": laplace("BackPackEF"),
    "laplace CurvlinopsEF": laplace("CurvlinopsEF"),
    "ASDL": asdl,
    "curvlinops Hutchinson": curvlinops,
}
METHODS: dict[str, Callable[[Case, nn.Module], Run]] = {"plain": plain, "loop": loop, "vmap": vmap, **OURS, **PEERS}

warnings.filterwarnings("ignore")  # the peers'
