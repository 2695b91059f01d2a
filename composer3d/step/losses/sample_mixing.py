"""Sums whose summands are made of several samples of a rank, read from autograd graphs: adding ranks' up is no loss.

`x.mean(0).square().sum()` is nonlinear in a mean of this rank's samples, and `(w / w.sum() * losses).sum()` is a mean
in the form of a sum. Added over ranks both are larger than one device's.
"""

from __future__ import annotations

from typing import Any, Literal

from composer3d import torch_compat

__all__ = [
    "ELEMENTWISE",
    "LINEAR",
    "REDUCTIONS",
    "Summands",
    "base",
    "dims_of",
    "is_exchanged",
    "is_parameter",
    "is_weight",
    "means_groups",
    "operands_of",
    "summands",
]

Summands = Literal["samples", "means", "mixed"]

# Reductions and normalisations, each along the dims that it saves, or along all.
REDUCTIONS = (
    "Amax", "Amin", "Cumsum", "LinalgVectorNorm", "LogSoftmax", "Logsumexp", "Max", "Mean", "Min", "Norm", "Prod",
    "Softmax", "Std", "Sum", "Var",
)  # fmt: skip
ELEMENTWISE = frozenset("Add Addcmul Atan2 Div Lerp Maximum Minimum Mul Pow Rsub Sub Where".split())
LINEAR = frozenset(
    "Add Alias Clone Expand Neg Permute Reshape Rsub Squeeze Sub T ToCopy Transpose Unsqueeze View".split()
)
_NONLINEAR = frozenset(
    "Abs BinaryCrossEntropy Clamp ClampMax ClampMin Cos Div Exp HuberLoss Log LogSigmoid Maximum Minimum MseLoss Mul "
    "Pow Relu Rsqrt Sigmoid Sin SmoothL1Loss Softplus Sqrt Tanh Where Xlogy".split()
)
# Which bring in samples, so that what is made of them is no weight.
_OF_DATA = frozenset("Embedding EmbeddingBag Gather Index IndexSelect MaskedSelect NllLoss".split())
_PRODUCTS = frozenset("Addmm Bmm Convolution Mm Mv".split())
_WHOLE = 1e-5  # weights that were normalised in float32 add up to 1 within less


def summands(node: Any) -> Summands:
    """Return what a sum adds up: parts of samples, means over the first dim's entries, or what is made of several.

    Args:
        node: Of a sum: its own, or that of a loss of torch's that adds up.
    """
    is_sum = base(node) == "Sum"
    pending, seen = [(operand, not is_sum) for operand, _ in node.next_functions], set()
    found: set[Summands] = set()
    while pending:
        each, is_bent = pending.pop()
        name = base(each)
        if each is None or name == "AccumulateGrad" or (each, is_bent) in seen:
            continue
        seen.add((each, is_bent))
        operands = operands_of(each)
        is_linear = name in (*LINEAR, "Cat", "Mean", "Stack", "Sum", "Unbind") or (
            name in ("Mul", "Div") and len(operands) == 1
        )
        if name in REDUCTIONS and _is_of_samples(each):
            if is_bent or name not in ("Mean", "Sum"):
                return "mixed"
            found.add("means" if name == "Mean" else "samples")
            pending += [(operand, False) for operand in operands if name == "Sum"]
        elif getattr(each, "_saved_reduction", 0) in (1, 2):  # torch's numbers of mean and sum
            if is_bent:
                return "mixed"
            found.add("means" if each._saved_reduction == 1 else "samples")
        elif name == "Mul" and _is_normalised(each):
            return "mixed"
        elif is_linear or name in _NONLINEAR:
            pending += [(operand, is_bent or not is_linear) for operand in operands]
        else:
            found.add("samples")
    return "mixed" if len(found) > 1 else found.pop() if found else "samples"


def means_groups(node: Any, num_samples: int) -> bool:
    """Return whether a sum adds up fewer means than there are samples: means of groups of them.

    Args:
        node: Of a sum.
        num_samples: Of the forward.
    """
    found: Any = node.next_functions[0][0] if base(node) == "Sum" else None
    while len(operands_of(found)) == 1 and base(found) in (*LINEAR, "Mul", "Div"):
        found = operands_of(found)[0]
    if base(found) != "Mean" or (dims := dims_of(found)) is None or 0 in dims[0]:
        return False
    return int(found._saved_self_sym_sizes[0]) < num_samples


def operands_of(node: Any) -> list[Any]:
    """Return the nodes of what an operation computed from, without constants."""
    return [] if node is None else [operand for operand, _ in node.next_functions if operand is not None]


def base(node: Any) -> str:
    """Return the name of a node's operation, as "Mean"."""
    return type(node).__name__.partition("Backward")[0]


def _is_of_samples(node: Any) -> bool:
    """Return whether a reduction is over a first dim of several entries."""
    found = dims_of(node)
    return found is not None and 0 in found[0] and found[1] > 1


def dims_of(node: Any) -> tuple[set[int], int] | None:
    """Return the dims of a reduction, and the size of the first of its operand; None where these are not saved."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is None:
        saved = torch_compat.saved_tensor(node, "self")
        saved = torch_compat.saved_tensor(node, "result") if saved is None else saved
        if saved is None:
            return None
        sizes = saved.shape
    if not len(sizes):
        return None
    dims = getattr(node, "_saved_dim", None)
    given = range(len(sizes)) if dims is None or dims == () else (dims,) if isinstance(dims, int) else dims
    # Negative ones are saved without their sign.
    return {(dim - 2**64 if dim >= 2**63 else dim) % len(sizes) for dim in given}, int(sizes[0])


def is_exchanged(node: Any, num_samples: int) -> bool:
    """Return whether a node gives samples in another order, through what changes its elements one by one."""
    import torch

    for _ in range(8):
        name = base(node)
        if node is None or name not in (*LINEAR, *ELEMENTWISE, "Abs", "Exp", "Log", "Sqrt"):
            break
        node = next(iter(operands_of(node)), None)
    if name in ("Flip", "Roll"):
        return 0 in tuple(node._saved_dims)
    index = node._saved_indices[0] if name == "Index" else getattr(node, "_saved_index", None)
    if name not in ("Index", "IndexSelect") or not isinstance(index, torch.Tensor) or index.dtype is torch.bool:
        return False
    is_first = name == "Index" or node._saved_dim == 0
    return is_first and index.dim() == 1 and len(index) == num_samples == node._saved_self_sym_sizes[0]


def _is_normalised(node: Any) -> bool:
    """Return whether a product is one with weights of several entries that add up to 1."""
    import torch

    if torch_compat.active_fake_mode() is not None:
        return False
    saved: Any
    for saved in (torch_compat.saved_tensor(node, "self"), torch_compat.saved_tensor(node, "other")):
        weights = saved.full_tensor() if hasattr(saved, "full_tensor") else saved
        if not isinstance(weights, torch.Tensor) or not weights.dim() or weights.shape[0] < 2 or weights.is_complex():
            continue
        values = weights.detach().double()
        # A single 1 among zeros selects a sample.
        if abs(float(values.sum()) - 1.0) < _WHOLE and float(values.max()) < 1.0 - _WHOLE:
            return True
    return False


def is_weight(node: Any) -> bool:
    """Return whether a node is a parameter, or computed from parameters, and constants of elementwise operations."""
    pending, seen = [node], set()
    while pending:
        each = pending.pop()
        name = base(each)
        if each is None or each in seen:
            continue
        seen.add(each)
        if len(seen) > 64 or name in _OF_DATA:
            return False
        if name == "AccumulateGrad":
            if not is_parameter(each.variable):
                return False
            continue
        if name in _PRODUCTS and any(operand is None for operand, _ in each.next_functions):
            return False
        pending += operands_of(each)
    return True


def is_parameter(variable: Any) -> bool:
    """Return whether a leaf of a graph is a parameter."""
    from torch import nn

    return isinstance(variable, nn.Parameter)
