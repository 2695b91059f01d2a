"""Statistics of a rank's samples that enter a forward or a loss without a gradient: no autograd graph shows them.

`x / x.detach().mean()`, losses weighted by `w / w.mean()` of detached losses, and running normalisers depend on which
samples a rank has. In the first forwards, and in what a loop computes after them, the values that are detached are
followed through torch's functions: from samples to what is reduced over them, and on to where it meets a gradient. Of
forwards without gradients the outputs are samples (old policies, teachers); in a loop and in a loss so are floats
with as many rows as the batch, but for their sums, which are counts of masks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.mesh import Role
from composer3d.observation.call_sites import caller
from composer3d.step.losses.sample_mixing import is_exchanged, is_weight
from composer3d.step.microbatches import num_samples, tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d.context import RunContext

__all__ = ["DetachedStatistics", "is_of_samples", "is_over_samples", "value_of"]

_NUM_FORWARDS = 3
# Reductions and orders over all dims, or over those at a place among the arguments, or over the last.
_OVER_ALL = {
    name: 1
    for name in "amax amin aminmax argmax argmin logsumexp max mean median min nanmean nansum prod std std_mean sum "
    "var var_mean".split()
} | {"norm": 2, "quantile": 2, "nanquantile": 2, "vector_norm": 2}
_OVER_LAST = {"argsort": 1, "kthvalue": 2, "log_softmax": 1, "softmax": 1, "sort": 1, "topk": 2, "normalize": 2} | {
    name: 1 for name in ("cumprod", "cumsum", "logcumsumexp")
}
_COUNTS = frozenset(("bincount", "histc"))  # of classes in a batch: weights of its samples are made of them
_ORDERS = {"flip": 1, "roll": 2}  # with the place of their dims
_LAST = {"normalize": 1}  # where the dim that is meant by none is not the last
_PRODUCTS = ("matmul", "mm", "__matmul__", "__rmatmul__")
_SHIFTS = frozenset("add sub __add__ __sub__ __radd__ __rsub__ rsub".split())
_UNKNOWN: tuple[Callable[[], None], str, str] = (lambda: None), "", ""


class DetachedStatistics:
    """Follows values without a gradient in the first forwards that train, and the losses after them.

    Attributes:
        seen: What was found, with its line; None where nothing is.

    Memory: none. Collectives: none.

    Args:
        context: Of the run; None, or one in which no rank has other samples: nothing is followed.
    """

    def __init__(self, context: RunContext | None = None) -> None:
        is_watched = context is not None and context.purpose == "run" and context.layout.degree(Role.BATCH) > 1
        self._num_left = self._num_bare_left = _NUM_FORWARDS if is_watched else 0
        self._num_samples = 0
        self._is_in_model = False
        self._found: dict[int, tuple[Callable[[], Tensor | None], str, str]] = {}
        self._aliases: dict[int, Callable[[], Tensor | None]] = {}
        self._mode: Any = None
        self.seen: str | None = None

    def watch(self, module: nn.Module, *, is_scheduled: Callable[[], bool], report: Callable[[str], None]) -> None:
        """Follow what a part's forwards compute.

        Args:
            module: The part's.
            is_scheduled: Returns whether a forward is the engine's; after others the loop computes a loss.
            report: Called with what is found in a forward that is the engine's.
        """
        import torch

        def before(owner: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if owner is module:
                self.end()
                is_trained = owner.training and torch.is_grad_enabled()
                if self._num_left and (is_trained or self._num_bare_left):
                    self._num_left, self._num_bare_left = (
                        self._num_left - is_trained,
                        self._num_bare_left - (not is_trained),
                    )
                    self._num_samples, self._is_in_model = num_samples((args, kwargs)) or 0, True
                    self._begin()

        def after(owner: nn.Module, _: Any, output: Any) -> None:
            if owner is not module:
                return
            self._is_in_model = False
            if is_scheduled():
                self.end()
                if self.seen is not None:
                    report(self.seen)
            elif self._mode is not None:
                bare = (each for each in tensors(output) if not each.requires_grad and each.is_floating_point())
                self._found.update((id(each), (weakref.ref(each), "", "")) for each in bare)

        if self._num_left:
            module.register_forward_pre_hook(torch_compat.uncompiled(before), with_kwargs=True)
            module.register_forward_hook(torch_compat.uncompiled(after), always_call=True)

    @contextlib.contextmanager
    def over_loss(self, num_samples: int) -> Iterator[None]:
        """Follow what a loss function computes, after a forward that was followed."""
        if not self._num_samples or self._mode is not None:
            yield
            return
        self._num_samples = num_samples
        self._begin()
        try:
            yield
        finally:
            self.end()

    def over_batch(self, batch: Any) -> None:
        """Follow what a loop computes of a batch that it has just read, until its next forward."""
        if self._num_left:
            self.end()
            self._num_samples = num_samples(batch) or 0
            self._begin()

    def _begin(self) -> None:
        if self._num_samples > 1:
            self._mode = torch_compat.function_mode(self._call)
            self._mode.follows_detached = True
            self._mode.__enter__()

    def end(self) -> None:
        """Follow nothing until the next forward, neither for this run nor for another one of the process."""
        self._mode = None
        for mode in torch_compat.function_modes():
            if hasattr(mode, "follows_detached"):
                torch_compat.leave_mode(mode)
        if not self._num_left:
            self._found.clear()

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        if self.seen is None and self._mode is not None:
            self._follow(getattr(function, "__name__", ""), args, kwargs, result)
        return result

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = list(tensors((args, kwargs)))
        returned = list(tensors(args[0] if name == "__setitem__" else result))
        if not given or not returned:
            return
        if name == "__get__" and not given[0].requires_grad:  # `.data`, into which a buffer is written
            self._aliases[id(returned[0])] = weakref.ref(given[0])
        statistic = next((tag for each in given if (tag := self._tag(each))), None)
        if returned[0].requires_grad:
            if statistic and self._matters(name, given):
                self.seen = statistic
            return
        if statistic is None and any(self._is_sample(each, name) for each in given):
            is_reduced = any(is_over_samples(name, args, kwargs, each, self._num_samples) for each in given)
            last = given[-1]  # by which a product of matrices adds up over rows: a codebook's sums
            is_reduced |= (
                name in _PRODUCTS
                and last.dim() == 2
                and self._is_sample(last, name)
                and is_of_samples(last, self._num_samples)
            )
            if is_reduced or self._is_detached(name, given[0]) or self._is_reordered(name, args, kwargs, given[0]):
                statistic = f"{name.strip('_')} of detached values in {caller(())[1] or 'the forward'}"
            elif not any(each.is_floating_point() and is_of_samples(each, self._num_samples) for each in returned):
                return
        elif statistic is None and name in _COUNTS and self._is_of_batch(given[0]):
            statistic = f"{name} of a batch in {caller(())[1] or 'the loss'}"
        elif statistic is None:
            return
        written = (self._aliases.get(id(each), lambda: None)() for each in returned)
        for each in (*returned, *(tensor for tensor in written if tensor is not None)):
            self._found[id(each)] = weakref.ref(each), value_of(each) if statistic else "", statistic or ""

    def _is_detached(self, name: str, tensor: Tensor) -> bool:
        """Return whether a loss, or values of samples in another order, are about to be left without their gradient."""
        if name not in ("detach", "__get__") or not tensor.requires_grad:
            return False
        return not tensor.dim() or is_exchanged(tensor.grad_fn, self._num_samples)

    def _is_reordered(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: Tensor) -> bool:
        """Return whether values that a model computed of samples, without a gradient, come in another order."""
        place = _ORDERS.get(name)
        if place is None or self._found.get(id(tensor), _UNKNOWN)[0]() is not tensor:
            return False
        dims = kwargs.get("dims", args[place:] if place < len(args) else ())
        flat = dims[0] if isinstance(dims, tuple | list) and dims and isinstance(dims[0], tuple | list) else dims
        return 0 in (flat if isinstance(flat, tuple | list) else (flat,))

    def _is_of_batch(self, tensor: Tensor) -> bool:
        """Return whether a tensor that a loss reads, and no forward made, is of the batch: its labels."""
        return not self._is_in_model and not tensor.is_floating_point() and is_of_samples(tensor, self._num_samples)

    def _matters(self, name: str, given: list[Tensor]) -> bool:
        """Return whether a gradient depends on a statistic that an operation combines with what has one."""
        bent = [each for each in given if each.requires_grad and each.grad_fn is not None]
        if any(is_of_samples(each, self._num_samples) for each in bent):
            return True
        is_made_of_samples = bool(bent) and (not bent[0].dim() or not is_weight(bent[0].grad_fn))
        return is_made_of_samples and name.strip("_") not in _SHIFTS

    def _tag(self, tensor: Tensor) -> str:
        """Return the statistic that a tensor is, or is made of; empty where it is none."""
        if tensor.requires_grad:
            return ""
        reference, value, tag = self._found.get(id(tensor), _UNKNOWN)
        # What no function of torch's has written is a collective's: a statistic of all ranks' samples.
        return tag if reference() is tensor and value == (value_of(tensor) if tag else "") else ""

    def _is_sample(self, tensor: Tensor, name: str) -> bool:
        """Return whether a function is of samples, with a gradient that is about to be left, or without."""
        if tensor.requires_grad:
            return tensor.grad_fn is not None and not is_weight(tensor.grad_fn)
        if self._found.get(id(tensor), _UNKNOWN)[0]() is tensor:
            return True
        has_rows = bool(tensor.dim()) and tensor.shape[0] == self._num_samples and tensor.is_floating_point()
        return has_rows and not self._is_in_model and name != "sum"


def is_over_samples(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: Tensor, num_samples: int
) -> bool:
    """Return whether a function reduces or orders a tensor along its samples.

    Args:
        name: Of the function.
        args: Of its call.
        kwargs: Of its call.
        tensor: One of its arguments.
        num_samples: Of a forward.
    """
    name = name.strip("_").removeprefix("linalg_")
    if not is_of_samples(tensor, num_samples) or not tensor.is_floating_point():
        return False
    place = _OVER_ALL.get(name, _OVER_LAST.get(name))
    if place is None:
        return False
    dims = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    if hasattr(dims, "shape"):
        return False  # of two tensors
    if dims is None:
        dims = tuple(range(tensor.dim())) if name in _OVER_ALL else _LAST.get(name, -1)
    return 0 in {dim % tensor.dim() for dim in ((dims,) if isinstance(dims, int) else dims)}


def is_of_samples(tensor: Tensor, num_samples: int) -> bool:
    """Return whether the first dim of a tensor is that of samples, or of their parts.

    Args:
        tensor: Any.
        num_samples: Of a forward.
    """
    return bool(tensor.dim()) and tensor.shape[0] > 0 and tensor.shape[0] % num_samples == 0


def value_of(tensor: Tensor) -> str:
    """Return the sum of a tensor's elements as text, in which NaNs are equal; a device is waited for."""
    import torch

    return str(tensor.detach().sum(dtype=torch.float64 if tensor.is_floating_point() else None).item())
