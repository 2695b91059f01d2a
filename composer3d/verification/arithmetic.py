"""Arithmetic of a verification: everything in float64, without random draws, whatever dtypes the model's code names."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from composer3d.torch_compat import backward_inside, traceable

if TYPE_CHECKING:
    import torch

__all__ = ["default_dtype", "in_double_precision", "without_random_numbers"]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors of this floating-point dtype inside."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def in_double_precision() -> Iterator[None]:
    """Read every narrower floating-point dtype that code names as float64.

    Models compute norms, rotary positions and losses "in float32" by `x.float()`, `x.to(torch.float32)` or
    `softmax(..., dtype=torch.float32)`. In float64 such a cast would round away the differences that a verification
    looks for (a correct layout then differs by 6e-8 where one rounding falls otherwise), so it becomes a cast to
    float64. Compiled code traces through the mode.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    def widen(value: Any) -> Any:
        return torch.float64 if value in (torch.float32, torch.float16, torch.bfloat16) else value

    # By name, and without a set of functions: the compiler traces through a mode, and looks no function up.
    class Wide(TorchFunctionMode):
        is_traced = True  # by what captures graphs, as by the compiler

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if name == "backward":
                return backward_inside(self, args, kwargs or {})
            if name in ("float", "half", "bfloat16"):
                return args[0].double()
            wide = [widen(arg) if isinstance(arg, torch.dtype) else arg for arg in args]
            named = {key: widen(arg) if isinstance(arg, torch.dtype) else arg for key, arg in (kwargs or {}).items()}
            return traceable(func)(*wide, **named)

    with default_dtype(torch.float64), Wide():
        yield


@contextlib.contextmanager
def without_random_numbers() -> Iterator[None]:
    """Replace random draws inside by their means, in modules and functionals alike.

    Dropout keeps every element; attention drops nothing; a uniform draw is its middle, a normal or exponential one its
    mean, a Bernoulli one whether its probability is above a half, a multinomial one the likeliest, a permutation the
    identity. Results are then the same in every layout.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    settled = _settled()

    class Settled(TorchFunctionMode):
        is_traced = True

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if name == "backward":
                return backward_inside(self, args, kwargs or {})
            # Draws from an own generator are the same on every rank.
            if name in settled and (kwargs or {}).get("generator") is None:
                # What initialises changes parameters, for which its own code turns gradients off.
                initialises = getattr(func, "__module__", None) == "torch.nn.init"
                with torch.no_grad() if initialises else contextlib.nullcontext():
                    return settled[name](func, args, dict(kwargs or {}))
            return traceable(func)(*args, **(kwargs or {}))

    with Settled():
        yield


def _settled() -> dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]:
    """Return the replacement of each random function, by its name in torch, torch.Tensor and functional."""
    dropouts = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    inplace = tuple(f"{name}_" for name in dropouts)
    return {
        **dict.fromkeys((*dropouts, *inplace, "dropout1d", "dropout2d", "dropout3d"), _kept),
        "scaled_dot_product_attention": _attention,
        "multi_head_attention_forward": _heads,
        **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
        **dict.fromkeys(("rrelu", "rrelu_"), _leaky),
        "gumbel_softmax": _softmax,
        **dict.fromkeys(("rand", "rand_like"), _middle),
        **dict.fromkeys(("randn", "randn_like"), _mean),
        **dict.fromkeys(("randint", "randint_like", "randperm"), _ordered),
        **dict.fromkeys(("bernoulli", "bernoulli_"), _likelier),
        "normal": _normal,
        "normal_": lambda func, args, kwargs: _fill(args, kwargs, _argument(args, kwargs, 1, "mean", 0.0)),
        "log_normal_": lambda func, args, kwargs: _fill(
            args, kwargs, math.exp(_argument(args, kwargs, 1, "mean", 1.0))
        ),
        "cauchy_": lambda func, args, kwargs: _fill(args, kwargs, _argument(args, kwargs, 1, "median", 0.0)),
        "uniform_": _uniform,
        "kaiming_uniform_": lambda func, args, kwargs: _fill(args, kwargs, 0.0),
        "exponential_": lambda func, args, kwargs: _fill(args, kwargs, 1.0 / _argument(args, kwargs, 1, "lambd", 1.0)),
        "geometric_": lambda func, args, kwargs: _fill(
            args, kwargs, math.ceil(1.0 / _argument(args, kwargs, 1, "p", 0.5))
        ),
        "random_": lambda func, args, kwargs: _fill(args, kwargs, _lowest(args, kwargs)),
        "poisson": lambda func, args, kwargs: _argument(args, kwargs, 0, "input", None).round(),
        "multinomial": _likeliest,
    }


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _subject(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the tensor that a function is about; torch.nn.init always passes its `tensor` by name."""
    return args[0] if args else kwargs["tensor" if "tensor" in kwargs else "input"]


def _fill(args: tuple[Any, ...], kwargs: dict[str, Any], value: float) -> Any:
    return _subject(args, kwargs).fill_(value)


def _lowest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return where `random_(to)` or `random_(from, to)` begins."""
    return int(kwargs.get("from", args[1] if len(args) > 2 else 0) or 0)


def _kept(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _subject(args, kwargs)


def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # (query, key, value, attn_mask, dropout_p, is_causal)
    return func(*((*args[:4], 0.0, *args[5:]) if len(args) > 4 else args), **_zeroed(kwargs, "dropout_p"))


def _heads(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # dropout_p is the eleventh argument.
    return func(*((*args[:10], 0.0, *args[11:]) if len(args) > 10 else args), **_zeroed(kwargs, "dropout_p"))


def _recurrent(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # The probability's position differs for packed sequences; it is the only number that is no integer.
    return func(*(0.0 if isinstance(arg, float) else arg for arg in args), **kwargs)


def _middle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs).fill_(0.5)


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs).zero_()


def _normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch

    mean = _argument(args, kwargs, 0, "mean", 0.0)
    drawn = func(*args, **kwargs)
    return drawn.copy_(mean) if isinstance(mean, torch.Tensor) else drawn.fill_(mean)


def _uniform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # torch.nn.init calls its bounds a and b.
    low = _argument(args, kwargs, 1, "a" if "a" in kwargs else "from", 0.0)
    high = _argument(args, kwargs, 2, "b" if "b" in kwargs else "to", 1.0)
    return _fill(args, kwargs, (low + high) / 2)


def _ordered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the identity permutation, or the lowest of the requested integers."""
    drawn = func(*args, **kwargs)
    if func.__name__ == "randperm":
        return drawn.sort().values
    place = 1 if func.__name__ == "randint_like" else 0
    numbers = [arg for arg in args[place:] if isinstance(arg, int)]
    return drawn.fill_(kwargs.get("low", numbers[0] if len(numbers) > 1 else 0))


def _likeliest(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the most probable categories, one after the other; with replacement always the first."""
    weights, number = _argument(args, kwargs, 0, "input", None), _argument(args, kwargs, 1, "num_samples", 1)
    if _argument(args, kwargs, 2, "replacement", False):
        return weights.argmax(dim=-1, keepdim=True).expand(*weights.shape[:-1], number).contiguous()
    return weights.topk(number, dim=-1).indices


def _leaky(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch

    lower, upper = _argument(args, kwargs, 1, "lower", 1.0 / 8), _argument(args, kwargs, 2, "upper", 1.0 / 3)
    return torch.nn.functional.leaky_relu(_argument(args, kwargs, 0, "input", None), (lower + upper) / 2)


def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the softmax without noise; hard choices are the likeliest, with the gradient of the soft ones."""
    import torch

    logits, dim = _argument(args, kwargs, 0, "logits", None), _argument(args, kwargs, 4, "dim", -1)
    soft = (logits / _argument(args, kwargs, 1, "tau", 1.0)).softmax(dim)
    if not _argument(args, kwargs, 2, "hard", False):
        return soft
    hard = torch.zeros_like(soft).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
    return hard - soft.detach() + soft


def _likelier(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    subject, probability = _subject(args, kwargs), args[1] if len(args) > 1 else kwargs.get("p")
    if func.__name__ == "bernoulli_":
        import torch

        if isinstance(probability, torch.Tensor):
            return subject.copy_(probability >= 0.5)
        return subject.fill_(float(0.5 if probability is None else probability) >= 0.5)
    likely = subject >= 0.5 if probability is None else subject.new_full((), probability).expand_as(subject) >= 0.5
    return likely.to(subject.dtype)


def _zeroed(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {**kwargs, name: 0.0} if name in kwargs else kwargs
