"""Products of an activation and a weight that sum over a dim which is sharded in both."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from composer3d import torch_compat
from composer3d.propagation.shards import TENSOR_AXIS, ShardSpec, attach, interned, spec_of

__all__ = ["Products", "added_product", "bias_of", "keep_weight", "operands_of", "product_chain", "summed_size"]

PRODUCTS = frozenset({"matmul", "__matmul__", "mm", "bmm"})


def bias_of(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor | None:
    """Return the bias that a linear function adds to the product of its other arguments."""
    bias = options.get("bias", args[2] if len(args) > 2 else None) if name == "linear" and len(args) > 1 else None
    return bias if isinstance(bias, Tensor) else None


def added_product(
    name: str, args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor, float, float] | None:
    """Return what `baddbmm` or `addmm` adds: the term, both factors of the product, the factors beta and alpha."""
    names = {"baddbmm": ("batch1", "batch2"), "addmm": ("mat1", "mat2")}.get(name)
    if names is None:
        return None
    given = {**dict(zip(("input", *names), args, strict=False)), **options}
    factors = given.get("beta", 1), given.get("alpha", 1)
    return (given["input"], given[names[0]], given[names[1]], *factors)


def product_chain(
    name: str, args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Tensor, list[tuple[str, Tensor]]] | None:
    """Return a product as einsums of two: the first operand, and with which equation each further one meets the result.

    Args:
        name: Of the function: `tensordot`, or `einsum` of several tensors, or with an equation that names no result.
        args: Its arguments.
        options: Its keyword arguments.
    """
    if name == "tensordot":
        return _of_tensordot(args, options)
    found = _einsum_terms(args) if name == "einsum" else None
    if found is None:
        return None
    terms, output, operands = found
    if len(operands) < 2 or (len(operands) == 2 and "->" in args[0]):
        return None
    chain, so_far = [], terms[0]
    for at in range(1, len(terms)):
        needed = "".join(terms[at + 1 :]) + output
        kept = "".join(letter for letter in dict.fromkeys(so_far + terms[at]) if letter in needed)
        result = output if at == len(terms) - 1 else kept
        chain.append((f"{so_far},{terms[at]}->{result}", operands[at]))
        so_far = result
    return operands[0], chain


def _of_tensordot(args: Sequence[Any], options: Mapping[str, Any]) -> tuple[Tensor, list[tuple[str, Tensor]]] | None:
    given = {**dict(zip(("a", "b", "dims"), args, strict=False)), **options}
    one, other, dims = given["a"], given["b"], given.get("dims", 2)
    if given.get("out") is not None or isinstance(dims, Tensor):
        return None
    if isinstance(dims, int):
        dims = (range(one.ndim - dims, one.ndim), range(dims))
    ours, theirs = ([dim % tensor.ndim for dim in each] for each, tensor in zip(dims, (one, other), strict=True))
    letters = string.ascii_letters
    first = letters[: one.ndim]
    second = list(letters[one.ndim : one.ndim + other.ndim])
    for here, there in zip(ours, theirs, strict=True):
        second[there] = first[here]
    output = "".join(letter for letter in (*first, *second) if (letter in first) != (letter in second))
    return one, [(f"{first},{''.join(second)}->{output}", other)]


@dataclass(kw_only=True)
class Products:
    """Observations of the products of one run.

    Attributes:
        summed: Sources of those that were summed over all ranks.
        multiplied: Sharded parameters that were multiplied with something whole.
        axis: Of the marks.
    """

    summed: set[str] = field(default_factory=set)
    multiplied: set[str] = field(default_factory=set)
    axis: str = TENSOR_AXIS

    def is_partial(self, name: str, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
        """Return whether a function sums over a dim by which an activation and a weight are sharded alike.

        Args:
            name: Of the function.
            args: Its arguments, marked where they are sharded.
            options: Its keyword arguments.
        """
        found = _terms(name, args, options)
        if found is None:
            return False
        (one, other), output, operands = found
        first, second = (spec_of(operand, self.axis) for operand in operands)
        if first is None or second is None:
            self.multiplied |= {
                source for spec in (first, second) if spec and spec.is_weight for source in spec.sources
            }
            return False
        letter = one[first.placed.dim]
        is_summed = letter == other[second.placed.dim] and letter not in output
        if not is_summed or first.is_weight == second.is_weight or first.placed.parts != second.placed.parts:
            return False
        self.summed |= first.sources | second.sources
        return True


def keep_weight(result: Any, specs: Sequence[ShardSpec], arguments: Sequence[Any]) -> None:
    """Mark what a function made of sharded parameters alone as such.

    Args:
        result: What it returned.
        specs: Metadata of its sharded arguments.
        arguments: All of them.
    """
    if all(spec.is_weight for spec in specs) and len(specs) == sum(isinstance(leaf, Tensor) for leaf in arguments):
        for leaf in torch_compat.tree_leaves(result):
            if (spec := spec_of(leaf, specs[0].axis)) is not None:
                attach(leaf, interned(replace(spec, is_weight=True)))


def summed_size(name: str, args: Sequence[Any], options: Mapping[str, Any], axis: str = TENSOR_AXIS) -> int | None:
    """Return the size of a sharded dim over which a product with a tensor that is whole sums; else None."""
    found = _terms(name, args, options)
    if found is None:
        return None
    terms, output, operands = found
    for term, operand in zip(terms, operands, strict=True):
        spec = spec_of(operand, axis)
        if spec is not None and not spec.is_weight and term[spec.placed.dim] not in output:
            return int(spec.shadow.shape[spec.placed.dim])
    return None


def operands_of(
    name: str, args: Sequence[Any]
) -> tuple[tuple[str, str], str, tuple[Tensor, Tensor], Callable[[Tensor], list[Any]]] | None:
    """Return a product as einsum's letters of both operands and of the result, and what replaces the second operand."""
    if name == "__rmatmul__":
        found = _terms("matmul", [args[1], args[0]], {})
        return None if found is None else (*found, lambda second: [second, *args[1:]])
    found = _terms(name, args, {})
    if found is None or name == "linear":
        return None
    if name == "einsum":
        return (*found, lambda second: [args[0], found[2][0], second])
    return (*found, lambda second: [args[0], second, *args[2:]])


def _terms(
    name: str, args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[tuple[str, str], str, tuple[Tensor, Tensor]] | None:
    """Return a product of two tensors in einsum's letters: those of both, of the result, and the tensors."""
    if name == "einsum":
        return _of_einsum(args)
    x = args[0] if args else None
    y = args[1] if len(args) > 1 else options.get("other", options.get("mat2", options.get("weight")))
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or not (name in PRODUCTS or name == "linear"):
        return None
    if x.ndim < 2 or y.ndim < 2:
        return None
    batch = string.ascii_uppercase
    one = f"{batch[26 - (x.ndim - 2) :] if x.ndim > 2 else ''}ik"
    if name == "linear":
        return (one, "jk"), f"{one[:-1]}j", (x, y)
    other = f"{batch[26 - (y.ndim - 2) :] if y.ndim > 2 else ''}kj"
    longer = max(one[:-2], other[:-2], key=len)
    return (one, other), f"{longer}ij", (x, y)


def _of_einsum(args: Sequence[Any]) -> tuple[tuple[str, str], str, tuple[Tensor, Tensor]] | None:
    found = _einsum_terms(args) if args and isinstance(args[0], str) and "->" in args[0] else None
    if found is None or len(found[0]) != 2:
        return None
    terms, output, operands = found
    return (terms[0], terms[1]), output, (operands[0], operands[1])


def _einsum_terms(args: Sequence[Any]) -> tuple[list[str], str, list[Tensor]] | None:
    """Return the letters of an einsum's operands and of its result, those of dots too, and the operands."""
    operands = list(args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:])
    if not args or not isinstance(args[0], str) or not all(isinstance(operand, Tensor) for operand in operands):
        return None
    inputs, arrow, output = args[0].replace(" ", "").partition("->")
    free = "".join(letter for letter in string.ascii_letters if letter not in args[0])
    terms, most = [], 0
    for term, operand in zip(inputs.split(","), operands, strict=True):
        count = operand.ndim - len(term.replace("...", ""))
        most = max(most, count)
        terms.append(term.replace("...", free[len(free) - count :] if count else ""))
    dots = free[len(free) - most :] if most else ""
    if not arrow:  # as torch has it: the letters that stand once, in their order
        letters = inputs.replace("...", "").replace(",", "")
        output = "..." + "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    return terms, output.replace("...", dots), operands
