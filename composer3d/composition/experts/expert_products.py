"""Products with stacked weights of experts, replaced by those of a precision: each expert's matrix is a linear layer's.

Shape suffixes: R rows, E experts, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.composition.experts.expert_einsum import einsum_by_expert, einsum_by_row
from composer3d.composition.experts.matrix_products import Product, added, grouped, linear, matmul, product_of, rowwise
from composer3d.errors import PluginError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["multiply_experts", "standing_in", "summed_dims"]

# Functions that return views of a weight, or ask what it is.
_VIEWS = frozenset(
    "__getitem__ __get__ __len__ __hash__ __iter__ adjoint as_strided chunk data_ptr detach dim element_size expand "
    "flatten is_contiguous is_floating_point movedim mT narrow numel permute requires_grad_ reshape select size split "
    "squeeze stride swapaxes swapdims t tensor_split transpose unbind unflatten unsqueeze untyped_storage view "
    "view_as".split()
)
_ADDED = frozenset(("addmm", "baddbmm"))
_MATMULS = frozenset(("matmul", "mm", "bmm", "__matmul__"))
_GROUPED = frozenset(("grouped_mm", "_grouped_mm", "grouped_mm_fallback"))
# Attributes that say where a tensor is.
_PLACES = frozenset(("device", "is_cpu", "is_cuda", "is_meta"))


def multiply_experts(module: Any, product: Product, *, fqn: str, by: str) -> None:
    """Let the forward of a module with stacked weights multiply them by a function, expert by expert.

    Its own code runs; products of rows and weights in it are taken over: `grouped_mm`, `linear` and `matmul` with the
    weights of one expert, `bmm` with those of several, with one for each row (`weight[experts_R]`), and `einsum` with
    either. Results in other dtypes than the code's are cast back.
    Collectives: none.

    Args:
        module: With the contract of `has_stacked_experts`.
        product: Of rows and one expert's matrix.
        fqn: Of the module, for messages.
        by: The plugin's name, for messages.

    Raises:
        PluginError: In the forward, where a weight is used by another function.
    """
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        weights = [
            getattr(owner, name)
            for owner in module.modules()
            for name, held in owner._parameters.items()
            if held is not None and held.ndim == 3
        ]
        if weights[0].is_meta:
            return inner(*args, **kwargs)
        with _mode(weights, product, fqn=fqn, by=by):
            return inner(*args, **kwargs)

    forward.composer3d_eager = True  # type: ignore[attr-defined]  # sizes of groups are values
    module.forward = forward


@contextmanager
def standing_in(
    weights: Mapping[tuple[Any, str], Sequence[int]],
    product: Callable[[tuple[Any, str], Tensor, Tensor], Tensor],
    *,
    like: Tensor,
    fqn: str,
    by: str,
    remedy: str | None = None,
) -> Iterator[None]:
    """Let a module's code compute with weights that have no values: what it multiplies them with goes to a function.

    In the place of each stands a tensor on meta, of which the function is given a view: where it begins says whose
    matrix it is, and its strides whether it is transposed.

    Args:
        weights: Their owners and names, each with its shape.
        product: Of a weight's owner and name, rows and a view w_OI of what stands for it.
        like: Has the dtype and the device that the code is to see; on meta it computes with what stands there.
        fqn: As of `multiply_experts`.
        by: As there.
        remedy: What can be written in the manifest where the code uses them otherwise; default: exclude them.
    """
    import torch

    made = {key: torch.empty(tuple(shape), dtype=like.dtype, device="meta") for key, shape in weights.items()}
    before = {(owner, name): owner.__dict__.get(name) for owner, name in weights}
    keys = {torch_compat.storage_key(tensor): key for key, tensor in made.items()}

    def of_weight(x: Tensor, w_OI: Tensor) -> Tensor:
        return product(keys[torch_compat.storage_key(w_OI)], x, w_OI)

    replaced = _mode(list(made.values()), of_weight, fqn=fqn, by=by, device=like.device, remedy=remedy)
    try:
        for (owner, name), tensor in made.items():
            owner.__dict__[name] = tensor  # shadows the parameter
        with nullcontext() if like.is_meta else replaced:
            yield
    finally:
        for (owner, name), value in before.items():
            owner.__dict__.pop(name)
            if value is not None:
                owner.__dict__[name] = value


@dataclass(frozen=True)
class _Chosen:
    """Stand-in, on meta, for a weight of one matrix a row.

    Args:
        weight: That they were chosen from.
        experts_R: Of each row.
        stand_in: On meta.
    """

    weight: Tensor
    experts_R: Tensor
    stand_in: Tensor

    def is_turned(self, view: Tensor) -> bool | None:
        """Return whether a view has the last two dims the other way round; None if it lacks or moves some rows."""
        last = self.stand_in.shape[-2:]
        if view.numel() == self.stand_in.numel():
            for turned, each in ((False, view), (True, view.mT)):
                if each.shape[-2:] == last and each.is_contiguous():
                    return turned
        return None

    def product(self, product: Product, x: Tensor, view: Tensor, *, is_first: bool, turns: bool) -> Tensor | None:
        """Return the product of rows and the matrices of a view; None where that lacks or moves some.

        Args:
            product: Of rows and one matrix.
            x: Rows, with the dims of the matrices before their last two, or such that broadcast.
            view: Of the stand-in.
            is_first: Whether matrices come first.
            turns: Whether they are multiplied the other way round than they stand in the view.
        """
        is_turned, dims = self.is_turned(view), view.shape[:-2]
        if is_turned is None or not 1 < x.ndim < len(dims) + 3:
            return None
        rows = x.expand(*dims, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
        experts_R = self.experts_R.reshape(-1)
        y = rowwise(product, rows, self.weight, experts_R, is_turned=is_turned != turns, is_first=is_first)
        return y.view(*dims, *y.shape[-2:])


class _Weights:
    """Weights, their views, and what was chosen from them for rows."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._held = {torch_compat.storage_key(weight) for weight in weights}
        self._chosen: dict[int, _Chosen] = {}
        self._stacked: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def has(self, value: Any) -> bool:
        """Return whether a value is one of them."""
        import torch

        if not isinstance(value, torch.Tensor):
            return False
        key = torch_compat.storage_key(value)
        return key in self._held or key in self._chosen or key in self._stacked

    def chosen(self, value: Tensor) -> _Chosen | None:
        """Return what was chosen, of which a value is a view."""
        return self._chosen.get(torch_compat.storage_key(value))

    def choose(self, weight: Tensor, experts_R: Tensor) -> Tensor:
        """Return what stands for the matrices of rows' experts."""
        import torch

        shape = (*experts_R.shape, *weight.shape[1:])
        stand_in = torch.empty(shape, dtype=weight.dtype, device="meta")
        self._chosen[torch_compat.storage_key(stand_in)] = _Chosen(weight, experts_R, stand_in)
        return stand_in

    def stack(self, weights: Sequence[Tensor]) -> Tensor | None:
        """Return what stands for a stack of matrices, on meta, laid out as they are; None where they differ in that."""
        import torch

        first, size = weights[0], weights[0].numel()
        if any(each.shape != first.shape or each.stride() != first.stride() for each in weights) or size != _span(
            first
        ):
            return None
        stand_in = torch.empty_strided(
            (len(weights), *first.shape), (size, *first.stride()), dtype=first.dtype, device="meta"
        )
        self._stacked[torch_compat.storage_key(stand_in)] = (stand_in, list(weights))
        return stand_in

    def of_one(self, matrix: Tensor) -> Tensor:
        """Return a matrix as a view of the weight that it is of, where that was stacked."""
        found = self._stacked.get(torch_compat.storage_key(matrix))
        if found is None:
            return matrix
        weight = found[1][matrix.storage_offset() // found[0].stride(0)]
        offset = weight.storage_offset() + matrix.storage_offset() % found[0].stride(0)
        return self.of_one(weight.as_strided(matrix.shape, matrix.stride(), offset))


def _span(weight: Tensor) -> int:
    """Return how many elements of memory lie from a tensor's first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))


def summed_dims(module: Any, *, fqn: str, by: str) -> dict[str, int]:
    """Return along which dim each stacked weight of three dims is summed over, found by running the module's code.

    Args:
        module: With the contract of `has_stacked_experts`; on meta or with values, of which none is read.
        fqn: As of `multiply_experts`.
        by: As there.

    Raises:
        PluginError: Its code does not run on one row of any width that its weights have.
    """
    import torch

    names = [name for name, held in module.named_parameters() if held.ndim == 3]
    owners = {(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]): name for name in names}
    shapes = {key: tuple(module.get_parameter(name).shape) for key, name in owners.items()}
    found: dict[str, int] = {}

    def product(key: tuple[Any, str], x: Tensor, w_OI: Tensor) -> Tensor:
        if x.shape[-1] != w_OI.shape[-1]:
            raise ValueError("another width")
        is_stored = tuple(w_OI.shape) == shapes[key][1:] and (w_OI.stride(-1) == 1 or w_OI.shape[-1] == 1)
        found[owners[key]] = 2 if is_stored else 1
        return x.new_zeros(*x.shape[:-1], w_OI.shape[0])

    for width in dict.fromkeys(size for shape in shapes.values() for size in shape[1:]):
        x, index = torch.zeros(1, width), torch.zeros(1, 1, dtype=torch.int64)
        plain = [(owner, name) for owner in module.modules() for name, p in owner._parameters.items() if p is not None]
        biases = [key for key in plain if key not in shapes]
        found.clear()
        try:
            for owner, name in biases:
                owner.__dict__[name] = torch.zeros(owner._parameters[name].shape)
            with torch.no_grad(), standing_in(shapes, product, like=x, fqn=fqn, by=by):
                module.forward(x, index, torch.ones(1, 1))
        except (RuntimeError, ValueError, IndexError):
            continue
        finally:
            for owner, name in biases:
                owner.__dict__.pop(name, None)
        if found.keys() == set(names):
            return found
    raise PluginError(f'{by}: the experts of "{fqn}" do not compute a row of any width that their weights have')


def _mode(
    weights: Sequence[Any],
    product: Product,
    *,
    fqn: str,
    by: str,
    device: torch.device | None = None,
    remedy: str | None = None,
) -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    held = _Weights(weights)

    def multiply(x: Tensor, w_OI: Tensor) -> Tensor:
        return product(x, held.of_one(w_OI))

    class Replaced(TorchFunctionMode):
        """Products with the weights go to the precision's."""

        def __torch_function__(
            self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            name, given = getattr(function, "__name__", ""), {**(kwargs or {})}
            values = [*args, *given.values()]
            if name in ("stack", "einsum") and any(isinstance(each, list | tuple) for each in values):
                values = torch_compat.tree_leaves(values)
            if not any(map(held.has, values)):
                return function(*args, **given)
            if name == "__get__" and device is not None and function.__self__.__name__ in _PLACES:
                return getattr(torch.empty(0, device=device), function.__self__.__name__)
            if name in ("__getitem__", "index_select") and _is_choice(values[-1], values[0]):
                return held.choose(values[0], values[-1])
            if name in _GROUPED and held.has(values[1]):
                return grouped(multiply, *args, **given)
            if name == "linear" and held.has(values[1]) and values[1].ndim == 2:
                return linear(multiply, *args, **given)
            if name in _MATMULS and held.has(values[0]) != held.has(values[1]):
                if (made := _matmul(multiply, held, *values[:2])) is not None:
                    return made
            if name in _ADDED and [*map(held.has, args)] in ([False, True, False], [False, False, True]):
                return added(args[0], self.__torch_function__(torch.matmul, types, args[1:]), **given)
            if name == "stack" and _is_stack(held, *args, **given) and (made := held.stack(args[0])) is not None:
                return made
            tensors = [each for each in values if _has_values(each)]
            places = [at for at, each in enumerate(tensors) if held.has(each)]
            if name == "einsum" and isinstance(args[0], str) and len(places) == 1:
                if (made := _einsum(multiply, held, args[0], tensors, places[0])) is not None:
                    return made
            result = function(*args, **given) if name in _VIEWS else None
            if name in _VIEWS and all(held.has(each) for each in torch_compat.tree_leaves(result) if _has_values(each)):
                return result
            used = f'einsum("{args[0]}")' if name == "einsum" else name
            raise _refusal(used, fqn=fqn, by=by, remedy=remedy)

    return Replaced()


def _matmul(product: Product, held: _Weights, one: Tensor, other: Tensor) -> Tensor | None:
    """Return a product of rows and weights; None of several dims of rows with a matrix for each."""
    is_first = held.has(one)
    x, weight = (other, one) if is_first else (one, other)
    if (chosen := held.chosen(weight)) is None:
        return matmul(product, x, weight, is_first=is_first)
    return chosen.product(product, x, weight, is_first=is_first, turns=False)


def _einsum(product: Product, held: _Weights, equation: str, tensors: Sequence[Tensor], place: int) -> Tensor | None:
    """Return an einsum with one weight, or None where it is no product of rows and matrices."""
    view = tensors[place]
    if (chosen := held.chosen(view)) is None:
        return einsum_by_expert(partial(product_of, product), equation, tensors, place)
    if chosen.is_turned(view) is None:
        return None

    def multiply(x: Tensor, is_last: bool) -> Tensor:
        made = chosen.product(product, x, view, is_first=False, turns=is_last)
        assert made is not None, "the view has all rows"
        return made

    return einsum_by_row(multiply, equation, tensors, place)


def _refusal(used: str, *, fqn: str, by: str, remedy: str | None) -> PluginError:
    others = f'exclude "{fqn}"' if remedy is None else remedy
    return PluginError(
        f'{by}: the experts of "{fqn}" use their weights in `{used}`, which is no product of rows with a matrix of '
        "each expert; it computes F.grouped_mm, F.linear, torch.matmul, torch.bmm, and torch.einsum that sums over one "
        "dim of rows and matrices; write these, and weigh or add up what experts return in place of their weights, or "
        f"{others}"
    )


def _has_values(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_stack(held: _Weights, tensors: Any, dim: int = 0) -> bool:
    """Return whether matrices of weights are stacked along a first dim, as those of one tensor are."""
    return dim == 0 and len(tensors) > 0 and all(held.has(each) and each.ndim == 2 for each in tensors)


def _is_choice(index: Any, weight: Tensor) -> bool:
    """Return whether an index chooses one matrix for each row, in any dims."""
    is_index = _has_values(index) and index.ndim > 0 and not index.is_floating_point()
    return is_index and weight.ndim == 3 and index.element_size() > 1
