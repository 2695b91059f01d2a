"""Functions of which a propagation knows what they do with each dim; of all others it does not judge by shapes.

A function that returns tensors of the same shape may still have read other elements along any dim. Elementwise ones
are known by torch's own tag of their operators; the others are listed: those that reduce, move, split or repeat stated
dims, products, and losses, of whose results shapes do show what became of a sharded dim.
"""

from __future__ import annotations

import functools

from composer3d import torch_compat
from composer3d.propagation.functions.function_dims import (
    ALONG,
    ANYWHERE,
    CASTS,
    EXPANDS,
    JOINS,
    LAST_TWO,
    MIXING,
    OBJECT,
    SIZES,
    SPLITS,
    VIEWS,
)

__all__ = ["is_elementwise_name", "is_known"]

# Elementwise under names that are no operator's, or that have no tag, and those that make or fill tensors of a shape.
ELEMENTWISE = frozenset(
    "_autocast_to_full_precision _autocast_to_reduced_precision abs absolute add alpha_dropout and arccos arccosh "
    "arcsin arcsinh arctan arctan2 arctanh as_subclass bernoulli bool bucketize byte cauchy cdouble cfloat chalf char "
    "complex conj copy data dequantize detach div divide dropout empty_like eq expit exponential "
    "fake_quantize_per_tensor_affine fill fix floor_divide floordiv full_like ge geometric greater greater_equal gt "
    "hardswish idiv imag int invert isclose isreal le less less_equal log_normal log_sigmoid logsigmoid long lshift "
    "lt map map2 masked_fill mod module_load mul multigammaln multiply native_dropout ndtr ne neg negative new_empty "
    "new_empty_strided new_full new_ones new_tensor new_zeros normal not not_equal ones_like or pin_memory poisson "
    "polar pos pow prelu quantize_per_tensor rand_like randint_like randn_like random real requires_grad resolve_conj "
    "resolve_neg rshift short softsign sub subtract tanhshrink truediv uniform xor zero zeros_like".split()
)
REDUCING = frozenset(
    "all amax amin aminmax any argmax argmin cosine_similarity count_nonzero dist frobenius_norm glu kthvalue "
    "layer_norm logdet logsumexp matrix_norm max mean median min mode nanmean nanmedian nanquantile nansum "
    "native_layer_norm norm nuclear_norm pairwise_distance prod quantile rms_norm std std_mean sum var var_mean "
    "vecdot vector_norm".split()
)
MOVING = frozenset(
    "adjoint alias atleast_1d atleast_2d atleast_3d broadcast_tensors constant_pad_nd diag_embed embedding get "
    "getitem H iter mH moveaxis movedim mT narrow narrow_copy one_hot pad permute repeat repeat_interleave select set "
    "setitem split split_with_sizes squeeze stack swapaxes swapdims t T tile transpose unbind unsqueeze "
    "view_as_complex view_as_real".split()
)
PRODUCTS = frozenset(
    "addbmm addmm addmv addr baddbmm bmm chain_matmul dot einsum inner linear matmul rmatmul mm multi_dot mv outer "
    "tensordot vdot".split()
)
# Without a reduction elementwise, or of the classes of each position; others return a total, which has no sharded dim.
LOSSES = frozenset(
    "binary_cross_entropy binary_cross_entropy_with_logits cross_entropy gaussian_nll_loss hinge_embedding_loss "
    "huber_loss kl_div l1_loss mse_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss".split()
)
# Of a tensor's form, which is asked of a shard as of the whole.
FORM = frozenset("dim get_device ndim ndimension".split())
NAMES = FORM | ELEMENTWISE | REDUCING | MOVING | PRODUCTS | LOSSES
TABLES = CASTS | EXPANDS | JOINS | LAST_TWO | OBJECT | SIZES | SPLITS | VIEWS | ANYWHERE | frozenset(ALONG)
# Python asks for them; what they tell of a shard is not told of the whole.
VALUES = frozenset("__array__ __bool__ __complex__ __contains__ __float__ __index__ __int__ __nonzero__".split())
# Of what is displayed or copied nothing is computed.
DISPLAYED = frozenset("__deepcopy__ __dir__ __format__ __reduce_ex__ __repr__".split())
# Operators that Python has with the operands exchanged, and in place: `__radd__`, `__iadd__`.
REFLECTED = frozenset("add and div floordiv lshift mod mul or pow rshift sub truediv xor".split())


@functools.lru_cache(4096)
def is_known(name: str) -> bool:
    """Return whether tables, or the tag of torch's operator, say what a function does along each dim.

    Args:
        name: As of `name_of`.
    """
    if name in VALUES or name in DISPLAYED:
        return name in DISPLAYED
    plain, is_special = _plain(name)
    if name in TABLES or plain in TABLES or plain in NAMES or any(word in name for word in MIXING):
        return True
    return not is_special and torch_compat.is_pointwise(plain)


@functools.lru_cache(4096)
def is_elementwise_name(name: str) -> bool:
    """Return whether a function is known to do the same with every number.

    Args:
        name: As of `name_of`.
    """
    plain, is_special = _plain(name)
    if name in VALUES or any(word in name for word in MIXING):
        return False
    return name in DISPLAYED or plain in ELEMENTWISE or (not is_special and torch_compat.is_pointwise(plain))


def _plain(name: str) -> tuple[str, bool]:
    """Return a function's name as tables have it, and whether Python calls it by a name of its own."""
    is_special = name.startswith("__") and name.endswith("__")
    plain = name.strip("_") if is_special else name.rstrip("_")
    plain = plain.removeprefix("special_").removeprefix("linalg_")
    if is_special and plain[:1] in ("r", "i") and plain[1:] in REFLECTED:
        plain = plain[1:]
    return plain, is_special
