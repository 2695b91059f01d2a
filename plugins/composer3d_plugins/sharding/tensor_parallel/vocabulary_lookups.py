"""Lookups in shards of a vocabulary: partial results, summed where an embedding returns them, or where it reads them.

DTensor sums a partial result where it is used, and keeps the mask of tokens until then: once. Code of an embedding may
read its rows several times, as a norm does for their size and to scale them; there they are summed first.

Shapes: B batch, S sequence, T degree of tp, D model dim.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from composer3d import torch_compat
from composer3d.propagation import eagerly
from composer3d_plugins.sharding.tensor_parallel.activation_layouts import Activations

__all__ = ["sum_lookups"]


def sum_lookups(module: nn.Module, activations: Activations, placement: Shard | None) -> None:
    """Let an embedding whose weight is going to be sharded return x_BSD, or x_B(S/T)D.

    Args:
        module: Called with tokens_BS, whole on every rank of tp.
        activations: Converts activations to and from DTensors.
        placement: Of what it returns; None is whole.

    Collectives: 1 all-reduce over tp, or 1 reduce-scatter into x_B(S/T)D; backward none, or 1 all-gather.
    """
    if type(module).forward is nn.Embedding.forward or not _reads_rows_again(module):
        module.register_forward_pre_hook(lambda module, args: (activations.wrap(args[0], None), *args[1:]))
    else:
        _sum_inside(module, activations)

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        activations.refuse_uneven(output, placement)
        whole = output if isinstance(output, DTensor) else activations.wrap(output, None)
        result: Tensor = activations.unwrap(whole, placement)
        return result

    module.register_forward_hook(after)


def _sum_inside(module: nn.Module, activations: Activations) -> None:
    """Let the code of an embedding compute with plain, whole rows."""
    forward = module.forward

    def summed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [*args, *kwargs.values()]
        if getattr(function, "__name__", "") != "embedding" or not any(isinstance(each, DTensor) for each in given):
            return function(*args, **kwargs)
        whole = {id(each): activations.wrap(each, None) for each in given if type(each) is Tensor}
        args = tuple(whole.get(id(each), each) for each in args)
        kwargs = {name: whole.get(id(each), each) for name, each in kwargs.items()}
        return activations.unwrap(function(*args, **kwargs), None)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch_compat.function_mode(summed):
            return forward(*args, **kwargs)

    module.forward = eagerly(run)


class _Uses(TorchFunctionMode):
    """Notes whether what was looked up, or what is made of it, is used by two functions."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Tensor] = {}
        self.used: set[int] = set()
        self.again = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if name == "__get__":  # of a dtype, a device or a shape
            return result
        given = {id(leaf) for leaf in torch_compat.tree_leaves([args, kwargs]) if id(leaf) in self.made}
        self.again = self.again or bool(given & self.used)
        self.used |= given
        if given or name == "embedding":
            self.made |= {id(leaf): leaf for leaf in torch_compat.tree_leaves(result) if isinstance(leaf, Tensor)}
        return result


def _reads_rows_again(module: nn.Module) -> bool:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), _Uses() as uses:
            torch.func.functional_call(module, state, (tokens,))
    except Exception:  # code that does not run on meta: whole rows are right whatever it does
        return True
    return uses.again
