"""Detection of mixed samples: a model's or a loss's result on two micro-batches together and on each alone.

The reference uses the run's micro-batches, so it cannot show that their boundaries matter. They do where a loss is no
sum over samples: a contrastive one compares the samples of a micro-batch with each other, a mean whose divisor its
graph does not show divides by what the micro-batch has. The gradient is then not that of the global batch, in any
layout but one. A model that mixes samples, as batch normalisation does, is noted with the module, and no failure: its
author chose that.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import chosen_by_values, expert_form, torch_compat
from composer3d.verification.comparison import difference, relative
from composer3d.verification.one_device import alone, as_loss_of, count_of, microbatches
from composer3d.verification.subject import Subject

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d import Batch

__all__ = ["NOT_MIXED", "Mixing", "mixing"]

log = logging.getLogger(__name__)

# Relative, and far above the rounding difference of a matrix product with more rows.
_SAME = 1e-9


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Relative difference of two micro-batches together from each alone; 0 where that is rounding, or not known.

    Args:
        model: Of the model's outputs.
        module: The first module whose output has that difference, with its class; empty where there is none.
        experts: FQN of the experts that it is one of, or that it holds; empty where there are none.
        loss: Of the loss, on the model's outputs for each alone.
        unknown: Reason why the two could not be computed together; empty where they were, or with only one.
    """

    model: float = 0.0
    module: str = ""
    experts: str = ""
    loss: float = 0.0
    unknown: str = ""


NOT_MIXED = Mixing()


def mixing(subject: Subject, *, degree: int) -> Mixing:
    """Run the model and the loss on the first two micro-batches, each alone and both together, in float64.

    Args:
        subject: Model, manifest, batches, loss and optimizer.
        degree: Data-parallel degree.
    """
    with alone(subject, "float64") as run, run.step(0):
        pieces = microbatches(subject, 0, degree, "float64")[:2]
        if len(pieces) < 2:
            return NOT_MIXED
        with _outputs(run.model) as modules:
            outputs = [run.model(*piece.args, **piece.kwargs) for piece in pieces]
            apart = [*modules]
            modules.clear()
        try:
            args, kwargs, target = _joined([(piece.args, piece.kwargs, piece.target) for piece in pieces])
            with _outputs(run.model) as modules:
                together = run.model(*args, **kwargs)
            model = _apart(together, outputs)
            # What the model computes of both says the same of a loss, unless the model mixes samples itself.
            whole = subject.loss_fn is None or model is None
            loss = _loss(subject, pieces, outputs, together if whole else _joined(outputs), target)
        except Exception as error:  # code has not to bear another batch size, or has batches along another dim
            log.debug("two micro-batches cannot be computed together", exc_info=True)
            return Mixing(unknown=type(error).__name__)
        module = _first(modules, apart) if _beyond(model or 0.0) or loss > _SAME else ""
        experts = _experts_at(run.model, module.partition(" (")[0]) if module else ""
        if whole and loss > _SAME and (_beyond(model or 0.0) or _normalises(run.model)):
            why = "the model itself mixes samples"
            return Mixing(model=_beyond(model or loss), module=module, experts=experts, unknown=why)
    return Mixing(model=_beyond(model or 0.0), module=module, experts=experts, loss=_beyond(loss))


@contextlib.contextmanager
def _outputs(model: nn.Module) -> Iterator[list[tuple[str, list[Tensor]]]]:
    """Collect the outputs of all calls of modules, named with their class, in the order in which calls end.

    Memory: all of them, until they are cleared.
    """
    found: list[tuple[str, list[Tensor]]] = []

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, _, output: found.append(
            (f"{name or 'the model'} ({type(module).__name__})", [each.detach() for each in _tensors(output)])
        )

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _first(together: Sequence[tuple[str, list[Tensor]]], alone: Sequence[tuple[str, list[Tensor]]]) -> str:
    """Return the first module whose output for two micro-batches differs from those for each; empty if none is seen."""
    num = len(together)
    if len(alone) != 2 * num:
        return ""
    for whole, first, second in zip(together, alone[:num], alone[num:], strict=True):
        if not whole[0] == first[0] == second[0] or not len(whole[1]) == len(first[1]) == len(second[1]):
            return ""
        if _beyond(_apart(whole[1], [first[1], second[1]]) or 0.0):
            return whole[0]
    return ""


def _experts_at(model: nn.Module, fqn: str) -> str:
    """Return the FQN of the experts that a module is one of, or else of the first that it holds; empty without any."""
    modules = dict(model.named_modules())
    if fqn not in modules:  # the model itself
        return ""
    names = fqn.split(".")
    outer = [".".join(names[:number]) for number in range(len(names), 0, -1)]
    inner = [name for name in modules if name.startswith(f"{fqn}.")]
    return next((name for name in [*outer, *inner] if _are_experts(model, name, modules[name])), "")


def _are_experts(model: nn.Module, fqn: str, module: nn.Module) -> bool:
    from torch import nn

    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return expert_form(module) is not None
    name = fqn.rpartition(".")[2].lower()
    return len(module) > 1 and (("expert" in name and "shared" not in name) or chosen_by_values(model, fqn))


def _normalises(model: nn.Module) -> bool:
    """Return whether the model has torch modules that mix samples by design."""
    from torch import nn

    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return any(isinstance(module, kinds) for module in model.modules())


def _loss(subject: Subject, pieces: Sequence[Batch], outputs: Sequence[Any], output: Any, target: Any) -> float:
    """Return the distance of the loss of both from the sum of theirs; 0 where it is not comparable.

    A scalar among the outputs is a parameter, such as a temperature, or belongs to a micro-batch, such as the loss that
    balances experts: it is no sum over samples, and is left out.
    """
    numbers = [[leaf for leaf in _tensors(one) if not leaf.dim()] for one in outputs]
    pairs = zip(*numbers, strict=True)
    is_left_out = subject.loss_fn is not None and any(not bool((one == other).all()) for one, other in pairs)
    if is_left_out:
        outputs, output = [_without_numbers(one) for one in outputs], _without_numbers(output)
    counts = [count_of(subject, piece) for piece in pieces]
    apart = sum(
        float(as_loss_of(subject, out, piece.target, count, counts).sum.detach())
        for out, piece, count in zip(outputs, pieces, counts, strict=True)
    )
    together = as_loss_of(subject, output, target, sum(counts), [sum(counts)])
    found = relative(float(together.sum.detach()), apart)
    return found if math.isfinite(found) or not is_left_out else 0.0


def _without_numbers(tree: Any) -> Any:
    """Return a tree of tensors with scalars set to zero."""
    import torch

    return torch_compat.tree_map(
        lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) and not leaf.dim() else leaf, tree
    )


def _joined(trees: Sequence[Any]) -> Any:
    """Return trees of tensors x_B... concatenated along dim 0; other leaves, and shared tensors, as they are."""
    import torch

    leaves = iter(
        [
            torch.cat(found)
            if isinstance(found[0], torch.Tensor) and found[0].dim() and any(one is not found[0] for one in found)
            else found[0]
            for found in zip(*map(torch_compat.tree_leaves, trees), strict=True)
        ]
    )
    return torch_compat.tree_map(lambda _: next(leaves), trees[0])


def _apart(together: Any, outputs: Sequence[Any]) -> float | None:
    """Return the largest difference of outputs together and alone; None where dim 0 is not the batch."""
    import torch

    found = []
    for whole, *pieces in zip(_tensors(together), *map(_tensors, outputs), strict=True):
        if not whole.dim():
            continue
        if any(piece.shape[1:] != whole.shape[1:] for piece in pieces):
            return None
        joined = torch.cat([piece.detach() for piece in pieces])
        if joined.shape != whole.shape:
            return None
        found.append(difference(whole.detach(), joined))
    return max(found, default=None)


def _tensors(tree: Any) -> list[Tensor]:
    import torch

    return [leaf for leaf in torch_compat.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _beyond(distance: float) -> float:
    return distance if distance > _SAME else 0.0
