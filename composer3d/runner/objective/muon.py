"""Muon for the matrices inside blocks and AdamW for everything else, as one optimizer.

Shapes: M rows and N columns of a matrix, E matrices that are stacked in one parameter, as those of experts.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import AdamW

from composer3d import torch_compat
from composer3d.composition import is_matrix, stacked_parameters
from composer3d.errors import PatternError, PluginError
from composer3d.initialisation import place
from composer3d.manifest import search

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d import Composition

__all__ = ["Muon", "group_matrices", "matrices_of"]

Adjustment = Literal["original", "match_rms_adamw"]


class Muon(AdamW):
    """Step groups with `matrices = True` along their orthogonalised momentum, and the others as AdamW does.

    Orthogonalising needs a whole matrix: of a sharded one the update is gathered, every rank orthogonalises it alike
    and keeps its shard, so a run is what `torch.optim.Muon` and AdamW are on one device. A stacked weight of experts is
    as many matrices, each orthogonalised by itself, on the ranks that hold its expert.
    Memory: one moment of a matrix, AdamW's two of everything else; one whole matrix, and copies of it in bfloat16.
    Collectives: one all-gather for each matrix and mesh axis over which it is sharded; none where whole experts are.

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; Liu et al., Muon is Scalable
    for LLM Training, arXiv:2502.16982.

    Args:
        params: Parameters or groups; `matrices` of a group says which of the two it is.
        lr: Learning rate of both.
        betas: Of AdamW: decays of its first and second moments.
        eps: Of AdamW, added to the root of the second moment.
        weight_decay: Of both, decoupled.
        momentum: Of the matrices.
        nesterov: Whether their update looks ahead.
        ns_steps: Of the Newton-Schulz iteration.
        adjust_lr: How a matrix' rate depends on its shape: so that updates are as large as AdamW's and one rate fits
            both, or as in the original.
        fused: Whether AdamW runs as one kernel.

    Raises:
        ValueError: `ns_steps` is below 1, or `momentum` is not in [0, 1).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: Adjustment = "match_rms_adamw",
        fused: bool | None = None,
    ) -> None:
        if ns_steps < 1:
            raise ValueError(f"Invalid ns_steps value: {ns_steps}")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"Invalid momentum value: {momentum}")
        own = {
            "matrices": False,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr": adjust_lr,
        }
        groups = [group if isinstance(group, Mapping) else {"params": [group]} for group in params]
        super().__init__(
            [{**own, **group} for group in groups], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused
        )
        self.defaults |= own

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all groups."""
        assert closure is None, "the composition refuses closures"
        groups = self.param_groups
        # The bare step below has lost torch's own, without which only the fused kernel takes parameters.
        with torch.no_grad():
            try:
                self.param_groups = [group for group in groups if not group["matrices"]]
                # The bare step: hooks run once, around this one.
                inspect.unwrap(AdamW.step)(self)
            finally:
                self.param_groups = groups
            for group in groups:
                for parameter in group["params"] if group["matrices"] else ():
                    if parameter.grad is not None:
                        self._step_matrix(parameter, group)

    def _step_matrix(self, weight_MN: Tensor, group: Mapping[str, Any]) -> None:
        state, grad_MN = self.state[weight_MN], weight_MN.grad
        assert grad_MN is not None, "asked by the caller"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad_MN)
        buffer_MN, momentum = state["momentum_buffer"], group["momentum"]
        buffer_MN.lerp_(grad_MN, 1 - momentum)
        update_MN = grad_MN.lerp(buffer_MN, momentum) if group["nesterov"] else buffer_MN
        direction_MN = _orthogonalised(update_MN, group["ns_steps"])
        rate = float(group["lr"])
        weight_MN.mul_(1 - rate * group["weight_decay"])
        weight_MN.add_(direction_MN, alpha=-rate * _adjustment(weight_MN.shape, group["adjust_lr"]))


def _orthogonalised(update: Any, num_steps: int) -> Any:
    """Return the orthogonalised update_MN, or each matrix of update_EMN, in bfloat16, sharded as the given one is."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(update, DTensor):
        return _each_orthogonalised(update, num_steps)
    if update.ndim == 3:
        whole = [each if type(each) is Shard and each.dim == 0 else Replicate() for each in update.placements]
        local_EMN = _each_orthogonalised(update.redistribute(placements=whole).to_local(), num_steps)
        kept: Any = {"run_check": False, "shape": update.shape, "stride": update.stride()}
        return DTensor.from_local(local_EMN, update.device_mesh, whole, **kept).redistribute(
            placements=update.placements
        )
    full_MN = torch_compat.orthogonalised(update.full_tensor(), num_steps)
    result_MN = torch.empty_like(update, dtype=full_MN.dtype)
    place(result_MN, full_MN)
    return result_MN


def _each_orthogonalised(update: Tensor, num_steps: int) -> Tensor:
    if update.ndim == 2:
        return torch_compat.orthogonalised(update, num_steps)
    matrices = [torch_compat.orthogonalised(update_MN, num_steps) for update_MN in update]
    return torch.stack(matrices) if matrices else update.to(torch.bfloat16)


def _adjustment(shape: Sequence[int], kind: Adjustment) -> float:
    rows, columns = shape[-2:]
    return math.sqrt(max(1, rows / columns)) if kind == "original" else 0.2 * math.sqrt(max(rows, columns))


def matrices_of(run: Composition, expression: str | None) -> list[str]:
    """Return the FQNs of this rank's trained parameters that Muon steps: matrices, and stacks of those of experts.

    Args:
        run: Composed; its parts hold the parameters.
        expression: Searched in FQNs; None takes the matrices in blocks. Embeddings are none, wherever they are.

    Raises:
        PluginError: This torch has no Muon, or the model has no known blocks.
        PatternError: The expression matches nothing.
    """
    from torch import nn

    if not hasattr(torch.optim, "Muon"):
        raise PluginError(f"torch {torch.__version__} has no Muon")
    context = run.context
    if expression is None:
        if not context.has_blocks:
            raise PluginError(
                "muon steps the matrices in the model's blocks, and those are not known",
                hint="name blocks in [model], or matrices",
            )
        known = set(context.units(None)) - {""}
        # own_units are single modules, such as norms: what is in them has fewer dims.
        chosen = [fqn for fqn in context.parameter_fqns if any(fqn.startswith(f"{block}.") for block in known)]
    else:
        chosen = [fqn for fqn in context.parameter_fqns if search(expression, fqn)]
        if not chosen:
            raise PatternError(expression, "matrices is a regular expression, searched in FQNs")
    looked_up = {
        f"{fqn}.weight"
        for part in run.parts
        for fqn, module in part.module.named_modules()
        if isinstance(module, nn.Embedding)
    }
    stacked = frozenset[str]().union(*(stacked_parameters(part.module) for part in run.parts))
    wanted = set(chosen) - looked_up
    return [
        fqn for fqn, p in run.named_parameters() if fqn in wanted and is_matrix(fqn, p, stacked) and p.requires_grad
    ]


def group_matrices(groups: Sequence[Mapping[str, Any]], matrices: Sequence[str]) -> list[dict[str, Any]]:
    """Put the matrices of every group into one of their own; the first match wins, as before.

    Args:
        groups: As `Composition.optimizer` takes them.
        matrices: FQNs on this rank.
    """
    result: list[dict[str, Any]] = []
    left = list(matrices)
    for group in groups:
        inside = [fqn for fqn in left if search(group["match"], fqn)]
        left = [fqn for fqn in left if fqn not in inside]
        if inside:
            result.append({**group, "match": _exactly(inside), "matrices": True})
        result.append(dict(group))
    if left:
        result.append({"match": _exactly(left), "matrices": True})
    return result


def _exactly(fqns: Sequence[str]) -> str:
    return f"^(?:{'|'.join(re.escape(fqn) for fqn in fqns)})$"
