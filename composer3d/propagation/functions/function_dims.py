"""Dims of torch functions by name: what each function does with the dims of its arguments, and the dims of an index."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["CASTS", "EXPANDS", "JOINS", "OBJECT", "SIZES", "SPLITS", "VIEWS", "dims_of", "mixes", "name_of", "narrowed"]

# Answered by the shadow: the code is to see whole sizes.
SIZES = frozenset({"shape", "size", "numel", "nelement", "__len__", "stride"})
# Functions of a tensor's memory: of a shard that lies there densely, so does the whole.
STRIDED = frozenset({"stride", "as_strided"})
VIEWS = frozenset({"view", "reshape", "unflatten", "flatten", "ravel", "reshape_as", "view_as"})
EXPANDS = frozenset({"expand", "expand_as", "broadcast_to"})
SPLITS = frozenset({"split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split", "tensor_split"})
CASTS = frozenset(
    {"to", "type", "type_as", "cuda", "cpu", "float", "double", "half", "bfloat16", "contiguous", "clone"}
)
# Asked of the tensor object itself: hooks of FSDP2 and others run inside of a model's forward.
OBJECT = frozenset(
    "register_hook register_post_accumulate_grad_hook requires_grad requires_grad_ grad_fn grad is_leaf retain_grad "
    "retains_grad data_ptr untyped_storage storage_offset is_contiguous _version output_nr device dtype layout "
    "is_meta is_cuda is_cpu is_sparse is_quantized is_nested is_complex is_floating_point element_size itemsize "
    "__hash__ _backward_hooks _post_accumulate_grad_hooks record_stream is_shared is_inference has_names _base _cdata "
    "_grad _grad_fn _is_view grad_dtype is_coalesced is_conj is_distributed is_ipu is_maia is_mkldnn is_mps is_mtia "
    "is_neg is_pinned is_signed is_sparse_csr is_vulkan is_xla is_xpu name names qscheme volatile".split()
)
JOINS = frozenset({"cat", "concat", "concatenate"})
# Same shape, other meaning: they go along a dim, the argument at this place, or this one where it is not given.
ALONG: Mapping[str, tuple[int, int | None]] = {
    **dict.fromkeys("softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp flip".split(), (1, None)),
    **dict.fromkeys("gather scatter scatter_add scatter_reduce index_select index_add index_copy".split(), (1, None)),
    **dict.fromkeys("index_fill renorm gather_along windows_along".split(), (1, None)),
    **dict.fromkeys("sort argsort".split(), (1, -1)),
    **dict.fromkeys("diff topk".split(), (2, -1)),
    **dict.fromkeys("roll take_along_dim".split(), (2, None)),
    "normalize": (2, 1),
    "gumbel_softmax": (4, -1),
    "msort": (99, 0),
    **dict.fromkeys(("slice_scatter", "select_scatter"), (2, 0)),
    **dict.fromkeys(("hsplit", "vsplit", "dsplit", "diagonal_scatter"), (99, None)),
}
# They read any position that an operand's values name, or all of them: of shards, wherever these are sharded.
ANYWHERE = frozenset(
    "take put bincount histc searchsorted isin lexsort grid_sample grid_sampler grid_sampler_2d grid_sampler_3d pinv "
    "pinverse fill_diagonal unique unique_consecutive".split()
)
# Same shape, other meaning: they go along the last two dims.
LAST_TWO = frozenset({"scaled_dot_product_attention", "flex_attention", "tril", "triu", "tril_", "triu_", "inverse"})
# They mix neighbours, channels or groups, in ways that shapes do not show.
MIXING = (
    "conv",
    "pool",
    "interpolate",
    "unfold",
    "fold",
    "fft",
    "lstm",
    "gru",
    "rnn",
    "bilinear",
    "group_norm",
    "instance_norm",
    "batch_norm",
    "response_norm",
    "shuffle",
    "as_strided",
    "masked_scatter",
    "index_put",
    "gradient",
    "trapezoid",
    "rot90",
    "fliplr",
    "flipud",
    "multi_head_attention",
)


@functools.lru_cache(4096)
def name_of(func: Any) -> str:
    """Return a function's name; properties come as the getter of their descriptor."""
    name = getattr(func, "__name__", None)
    if name is None:
        return str(func)
    found: str = getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name
    return found


def mixes(name: str, args: Sequence[Any], options: Mapping[str, Any], *, ndim: int, dim: int) -> bool:
    """Return whether a function on a shard along `dim` of `ndim` gives wrong numbers though the shapes fit."""
    if name == "pad" and _pads(args, options, ndim, dim):
        return True
    name = name.removeprefix("special_").removeprefix("linalg_")
    if name.rstrip("_") in ANYWHERE:
        return True
    along = (name in ALONG or name.rstrip("_") in ALONG) and _along(name, args, options, ndim, dim)
    return along or (name in LAST_TWO and dim >= ndim - 2) or any(name.find(word) >= 0 for word in MIXING)


def _pads(args: Sequence[Any], options: Mapping[str, Any], ndim: int, dim: int) -> bool:
    """Return whether a dim is padded: by a pair of sizes each, which add up to 0 where a sequence is shifted."""
    pad = options.get("pad", args[1] if len(args) > 1 else ())
    from_last = 2 * (ndim - 1 - dim)
    return any(pad[from_last : from_last + 2])


def _along(name: str, args: Sequence[Any], options: Mapping[str, Any], ndim: int, sharded: int) -> bool:
    at, default = ALONG[name.rstrip("_") if name.rstrip("_") in ALONG else name]
    value = options.get("dim", options.get("dims", args[at] if len(args) > at else default))
    if value is None:
        return True
    dims = value if isinstance(value, tuple | list) else (value,)
    return any(dim % ndim == sharded for dim in dims if isinstance(dim, int))


def narrowed(args: Sequence[Any], options: Mapping[str, Any], ndim: int) -> tuple[slice, ...]:
    """Return the index that does what `narrow` does."""
    dim, start, length = (
        options.get(name, args[at] if len(args) > at else 0) for at, name in enumerate(("dim", "start", "length"), 1)
    )
    index = [slice(None)] * ndim
    index[dim] = slice(start, start + length)
    return tuple(index)


def dims_of(entries: Sequence[Any], ndim: int) -> dict[int, int]:
    """Return the dim that each entry of an index is about."""
    taking = [at for at, entry in enumerate(entries) if entry is not None and entry is not Ellipsis]
    dots = next((at for at, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    before = [at for at in taking if at < dots]
    after = [at for at in taking if at > dots]
    return {
        **{at: dim for dim, at in enumerate(before)},
        **{at: dim - len(after) for dim, at in enumerate(after, ndim)},
    }
