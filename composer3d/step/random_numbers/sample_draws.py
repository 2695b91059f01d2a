"""Functions of torch that draw random numbers, run so that every sample has the numbers of its place in the batch.

Tensors that are drawn are filled row by row; functions that draw inside are called once a sample. Both take the leading
dim for the samples, in order: as many entries each, where it is a multiple of their number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.mesh.held_shards import Shards
from composer3d.step.random_numbers.counter_random import Rows, fill
from composer3d.step.random_numbers.draw_sites import Draw, argument
from composer3d.step.random_numbers.inner_draws import attention, each, heads, recurrent

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["draw_of"]

_UNIFORM: tuple[str, tuple[Any, ...]] = ("uniform_", (0.0, 1.0))
_NORMAL: tuple[str, tuple[Any, ...]] = ("normal_", (0.0, 1.0))


def draw_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
    """Return the draw that a call of a torch function is; None where it draws nothing, or from a generator of its own.

    Args:
        func: The function; it is known by its name in torch, torch.Tensor and torch.nn.functional.
        args: Its arguments.
        kwargs: Its named ones.
    """
    name = getattr(func, "__name__", "")
    make = _MAKERS.get(name)
    if (written := getattr(func, "composer3d_written", None)) is not None:
        return Draw(shape=(), by_sample=None, written=functools.partial(written, *args, **kwargs))
    if make is None:
        return None
    if kwargs.get("generator") is not None or kwargs.get("out") is not None:
        return None
    if _is_without_values(args, kwargs):
        return None
    made: Draw | None = make(func, name, args, kwargs)
    return made


def _is_without_values(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether nothing is drawn, or not on a plain tensor: on meta, on fake tensors, on shards that know it."""
    import torch

    first = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)), None)
    if first is not None:
        return first.is_meta or torch_compat.is_wrapper_subclass(type(first))
    return str(kwargs.get("device") or "").startswith("meta")


def _filling(make: Callable[[], Tensor], shape: Any, kind: str, *parameters: Any) -> Draw:
    import torch

    p = parameters[0] if kind == "bernoulli_" else None

    def by_sample(key: int, rows: Rows, shard: Shards | None) -> Tensor:
        with torch.no_grad():
            out = make()
            if not isinstance(p, torch.Tensor):
                return fill(out, kind, parameters, key=key, rows=rows, shard=shard)
            wide = torch.promote_types(p.dtype, torch.float32)
            drawn = torch.empty(out.shape, dtype=wide, device=out.device)
            return out.copy_(fill(drawn, "uniform_", (0.0, 1.0), key=key, rows=rows, shard=shard) < p)

    return Draw(shape=tuple(shape), by_sample=by_sample)


# ---- tensors that are drawn ------------------------------------------------------------------------------------------


def _factory(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
    """`rand`, `randn` and `randint` of a size."""
    import torch

    kind, parameters = _UNIFORM if name == "rand" else _NORMAL
    options = {key: value for key, value in kwargs.items() if key not in ("low", "high", "size", "generator")}
    if name == "randint":
        numbers = [arg for arg in args if isinstance(arg, int)]
        high = kwargs.get("high", numbers[-1] if numbers else None)
        low = kwargs.get("low", numbers[0] if len(numbers) + ("high" in kwargs) > 1 else 0)
        kind, parameters = "random_", (low, high)
        args = tuple(arg for arg in args if not isinstance(arg, int))
        options.setdefault("dtype", torch.int64)
    size = kwargs.get("size", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
    requires_grad = options.pop("requires_grad", False)
    dtype = options.get("dtype") or torch.get_default_dtype()
    if dtype.is_complex or requires_grad or any(not isinstance(number, int) for number in size):
        return None
    return _filling(lambda: torch.empty(size, **options), size, kind, *parameters)


def _like(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
    """`rand_like` and its kin."""
    import torch

    source = argument(args, kwargs, 0, "input")
    options = {key: value for key, value in kwargs.items() if key not in ("input", "low", "high")}
    if (options.get("dtype") or source.dtype).is_complex or options.pop("requires_grad", False):
        return None
    kind, parameters = _UNIFORM if name == "rand_like" else _NORMAL
    if name == "randint_like":
        numbers = [*args[1:], *(kwargs[key] for key in ("low", "high") if key in kwargs)]
        kind, parameters = "random_", (0 if len(numbers) == 1 else numbers[0], numbers[-1])
    return _filling(lambda: torch.empty_like(source, **options), source.shape, kind, *parameters)


_IN_PLACE: Mapping[str, tuple[tuple[str, float | None], ...]] = {
    "uniform_": (("from", 0.0), ("to", 1.0)),
    "normal_": (("mean", 0.0), ("std", 1.0)),
    "exponential_": (("lambd", 1.0),),
    "cauchy_": (("median", 0.0), ("sigma", 1.0)),
    "log_normal_": (("mean", 1.0), ("std", 2.0)),
    "geometric_": (("p", None),),
    "bernoulli_": (("p", 0.5),),
    "random_": (("from", None), ("to", None)),
}


def _in_place(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
    """Methods that fill their tensor."""
    target = args[0]
    given = tuple(argument(args, kwargs, place, key, usual) for place, (key, usual) in enumerate(_IN_PLACE[name], 1))
    if name == "random_":
        given = tuple(number for number in given if number is not None)
        given = (0, *given) if len(given) == 1 else given
        if len(given) != 2:
            return None
    return _filling(lambda: target, target.shape, name, *given)


def _bernoulli(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
    import torch

    source, p = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "p")
    probability = source.detach() if p is None else p
    return _filling(lambda: torch.empty_like(source), source.shape, "bernoulli_", probability)


def _normal(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
    """`torch.normal` of means and deviations, or of a size."""
    import torch

    mean, std = argument(args, kwargs, 0, "mean", 0.0), argument(args, kwargs, 1, "std", 1.0)
    size = argument(args, kwargs, 2, "size")
    tensors = [value for value in (mean, std) if isinstance(value, torch.Tensor)]
    if size is None and not tensors:
        return None
    shape = tuple(size) if size is not None else torch.broadcast_shapes(*(value.shape for value in tensors))
    options = {key: kwargs[key] for key in ("dtype", "device") if key in kwargs}
    like = tensors[0] if tensors else torch.empty(0, **options)

    def by_sample(key: int, rows: Rows, shard: Shards | None) -> Tensor:
        out = torch.empty(shape, dtype=like.dtype, device=like.device)
        return fill(out, "normal_", (), key=key, rows=rows, shard=shard) * std + mean

    return Draw(shape=shape, by_sample=by_sample)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def _probability(args: tuple[Any, ...], kwargs: Mapping[str, Any], default: float = 0.5) -> float:
    """Return with which probability a dropout drops; 0 where it is off."""
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return float(argument(args, kwargs, 1, "p", default)) if training else 0.0


def _dropout(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
    """Dropout of elements, or of whole channels."""
    import torch

    x, p = argument(args, kwargs, 0, "input"), _probability(args, kwargs)
    if not 0.0 < p < 1.0:
        return None
    inplace = name.endswith("_") or bool(argument(args, kwargs, 3, "inplace", False))
    shape = tuple(x.shape)
    if inplace and "alpha" in name:
        return Draw(shape=shape, by_sample=None)
    if "feature" in name or name[-2:] in ("1d", "2d", "3d"):
        # A sample alone has no dim of samples: torch warns of it, or takes the first for channels.
        if name[-2:] in ("1d", "2d", "3d") and x.ndim < int(name[-2]) + 2:
            return Draw(shape=(), by_sample=None)
        shape = (*shape[:2], *(1,) * (x.ndim - 2))

    def by_sample(key: int, rows: Rows, shard: Shards | None) -> Tensor:
        kept = torch.empty(shape, dtype=torch.bool, device=x.device)
        kept = fill(kept, "bernoulli_", (1.0 - p,), key=key, rows=rows, shard=shard)
        if "alpha" in name:
            # What is dropped becomes selu's least value, and all is scaled so that mean and variance stay.
            least = 1.7580993408473766 / math.sqrt((1.7580993408473766**2 * p + 1.0) * (1.0 - p))
            scale = 1.0 / math.sqrt((1.7580993408473766**2 * p + 1.0) * (1.0 - p))
            return x * kept * scale + (kept.to(x.dtype) - 1.0) * least + least * p
        if inplace:
            return x.mul_(kept).mul_(1.0 / (1.0 - p))
        return x * kept * (1.0 / (1.0 - p))

    return Draw(shape=shape, by_sample=by_sample)


def _rrelu(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
    """Leaky units, each with its slope."""
    import torch

    if not argument(args, kwargs, 3, "training", False):
        return None
    x, lower, upper = args[0], argument(args, kwargs, 1, "lower", 1 / 8), argument(args, kwargs, 2, "upper", 1 / 3)
    if name.endswith("_") or argument(args, kwargs, 4, "inplace", False) is True:
        return Draw(shape=tuple(x.shape), by_sample=None)

    def by_sample(key: int, rows: Rows, shard: Shards | None) -> Tensor:
        slopes = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return torch.where(x <= 0, x * fill(slopes, "uniform_", (lower, upper), key=key, rows=rows, shard=shard), x)

    return Draw(shape=tuple(x.shape), by_sample=by_sample)


def _gumbel(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
    """A softmax of logits with noise; hard ones have the gradient of the soft ones."""
    import torch

    logits, tau = args[0], argument(args, kwargs, 1, "tau", 1.0)
    is_hard, dim = argument(args, kwargs, 2, "hard", False), argument(args, kwargs, 4, "dim", -1)

    def by_sample(key: int, rows: Rows, shard: Shards | None) -> Tensor:
        noise = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        noise = -fill(noise, "exponential_", (1.0,), key=key, rows=rows, shard=shard).log()
        soft: Tensor = ((logits + noise) / tau).softmax(dim)
        if not is_hard:
            return soft
        hard = torch.zeros_like(soft).scatter_(dim, soft.max(dim, keepdim=True)[1], 1.0)
        return hard - soft.detach() + soft

    return Draw(shape=tuple(logits.shape), by_sample=by_sample)


def _alone(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
    """Return a draw that has no samples."""
    return Draw(shape=(), by_sample=None)


_MAKERS: Mapping[str, Callable[..., Draw | None]] = {
    **dict.fromkeys(("rand", "randn", "randint"), _factory),
    **dict.fromkeys(("rand_like", "randn_like", "randint_like"), _like),
    **dict.fromkeys(_IN_PLACE, _in_place),
    "bernoulli": _bernoulli,
    "normal": _normal,
    **dict.fromkeys(("dropout", "dropout_", "feature_dropout", "feature_dropout_"), _dropout),
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d"), _dropout),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout", "alpha_dropout_", "feature_alpha_dropout_"), _dropout),
    **dict.fromkeys(("rrelu", "rrelu_"), _rrelu),
    "gumbel_softmax": _gumbel,
    **dict.fromkeys(("multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"), each),
    "scaled_dot_product_attention": attention,
    "multi_head_attention_forward": heads,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
    "randperm": _alone,
}
