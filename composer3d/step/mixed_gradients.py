"""Code in a backward that relates a rank's samples to one another, which the samples of other ranks take no part in.

`g / g.norm()`, `g - g.mean(0)` and `-g * len(g)`, in a hook on an activation, of a module, or in the backward of an
autograd function of a model's own, depend on which samples a rank has. In the first backwards the gradients that such
code is given are followed through torch's functions to what it returns: it is called once, as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from typing import TYPE_CHECKING, Any, Literal

from composer3d import torch_compat
from composer3d.mesh import Role
from composer3d.observation.call_sites import caller
from composer3d.step.losses.detached_statistics import is_of_samples, is_over_samples, value_of
from composer3d.step.microbatches import tensors

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.context import RunContext

__all__ = ["MixedGradients", "kept_numbers"]

log = logging.getLogger(__name__)

_NUM_BACKWARDS = 3
_ARITHMETIC = frozenset("add div divide mul multiply sub subtract true_divide truediv rmul rsub itruediv imul".split())
_COUNTS = frozenset(("__len__", "nelement", "numel", "size"))
_READS = frozenset(("__float__", "item", "tolist"))
_VIEWS = frozenset(("flatten", "ravel", "reshape", "view"))


class MixedGradients:
    """Follows the gradients that code of a model's own is given in the first backwards, and warns once a run.

    Memory: what such code computes, until it returns. Collectives: none.

    Args:
        context: Of the run; one in which no rank has other samples: nothing is followed.

    Attributes:
        num_samples: In a forward of this rank.
    """

    def __init__(self, context: RunContext) -> None:
        self._num_ranks = context.layout.degree(Role.BATCH)
        self._num_left = _NUM_BACKWARDS if context.purpose == "run" and self._num_ranks > 1 else 0
        names = context.layout.names(Role.BATCH, Role.SEQUENCE, Role.TENSOR)
        self._is_first = not any(context.coordinates[axis] for axis in names)
        self.num_samples = 0
        self._mode: Any = None
        self._is_open = False
        self._found: dict[int, tuple[Tensor, Literal["row", "statistic", "mixed"], str, str]] = {}
        self._rows: set[int] = set()
        self._numbers: set[float] = set()
        self._is_counted, self._read = False, ""

    @property
    def is_watching(self) -> bool:
        """Return whether backwards are looked at still."""
        return self._num_left > 0

    def open(self) -> None:
        """Follow from here on the gradients of a backward that data parallelism averages."""
        self._is_open = self._num_left > 0

    def close(self) -> None:
        """End with that backward, in which code may have raised."""
        self._leave()
        self._is_open, self._num_left = False, max(0, self._num_left - 1)

    def begin(self, gradients: Any, kept: Container[int] = ()) -> None:
        """Follow what is computed from gradients.

        Args:
            gradients: As the code is given them.
            kept: Numbers that the forward of an autograd function has kept, see `kept_numbers`.
        """
        import torch

        if not self._is_open or self._mode is not None or self.num_samples < 2:
            return
        given = [each for each in tensors(gradients) if type(each) is torch.Tensor]
        given = [each for each in given if is_of_samples(each, self.num_samples)]
        if not given:
            return
        for each in given:
            self._found[id(each)] = each, "row", "", ""
        sizes = {each.shape for each in given}
        self._rows = {size[0] for size in sizes}
        self._numbers = {float(size[0]) for size in sizes if size[0] not in size[1:]} | {
            float(size.numel()) for size in sizes if len(size) > 1
        }
        self._is_counted = any(number in kept for number in self._rows)
        self._mode = torch_compat.function_mode(self._call)
        self._mode.__enter__()

    def end(self, values: Any, what: str) -> None:
        """Warn where a gradient that was returned, or written to, relates samples.

        Args:
            values: What was returned, and what was given.
            what: The code, as a message names it.
        """
        found = next((tag for each in tensors(values) if (tag := self._tag(each, "mixed"))), None)
        self._leave()
        if found is not None:
            self._num_left, self._is_open = 0, False
            if self._is_first:
                log.warning(
                    "%s: %s relates a rank's samples to one another in the backward: each of the %d data-parallel "
                    "ranks computes with its own alone, as under DDP, and gradients are not one device's over all "
                    "samples; for those, gather the samples of all ranks, or all-reduce the statistic "
                    "(torch.distributed.all_reduce)",
                    found,
                    what,
                    self._num_ranks,
                )

    def _leave(self) -> None:
        if self._mode is not None:
            torch_compat.leave_mode(self._mode)
            self._mode = None
        self._found.clear()
        self._is_counted, self._read = False, ""

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        if self._mode is not None:
            name = getattr(function, "__name__", "")
            if name == "__get__":  # of a property
                name = getattr(getattr(function, "__self__", None), "__name__", "") or name
            self._follow(name, args, kwargs, result)
        return result

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = list(tensors((args, kwargs)))
        statistic = next((tag for each in given if (tag := self._tag(each, "statistic"))), "")
        mixed = next((tag for each in given if (tag := self._tag(each, "mixed"))), "")
        rows = [each for each in given if self._tag(each, "row") is not None]
        if name in _COUNTS or name == "shape":
            self._is_counted |= bool(rows)
        elif name in _READS:
            self._read = self._read or statistic
        if rows and name.strip("_") in _ARITHMETIC and not mixed:
            mixed = self._by_number((*args, *kwargs.values()))
        reduced = [each for each in rows if is_over_samples(name, args, kwargs, each, self.num_samples)]
        if reduced and not statistic:
            statistic, rows = _told(f"{name.strip('_').removeprefix('linalg_')} over the samples of a batch"), []
            if any(each.shape == reduced[0].shape for each in tensors(result)):  # an order, or values over their norm
                mixed = mixed or statistic
        for each in tensors(args[0] if name == "__setitem__" else result):
            is_row = bool(each.dim()) and each.shape[0] in self._rows
            if mixed or (statistic and (rows or (is_row and len(given) > 1)) and is_of_samples(each, self.num_samples)):
                self._found[id(each)] = each, "mixed", mixed or statistic, ""
            elif statistic:
                self._found[id(each)] = each, "statistic", statistic, value_of(each)
            elif rows and (is_row or (name in _VIEWS and is_of_samples(each, self.num_samples))):
                self._found[id(each)] = each, "row", "", ""

    def _by_number(self, arguments: tuple[Any, ...]) -> str:
        """Return what a Python number is that a gradient is combined with; empty where it is none of samples."""
        numbers = [abs(float(each)) for each in arguments if type(each) in (int, float)]
        if numbers and self._read:
            return self._read
        named = {form for n in self._numbers for form in (n, 1 / n, n**0.5, n**-0.5)} if self._is_counted else set()
        return _told("the number of samples") if named.intersection(numbers) else ""

    def _tag(self, tensor: Tensor, kind: str) -> str | None:
        """Return the line and name of what a tensor was made with, if it is of a kind."""
        found = self._found.get(id(tensor))
        if found is None or found[0] is not tensor or found[1] != kind:
            return None
        # What no function of torch's has written is a collective's: a statistic of all ranks' samples.
        return found[2] if kind != "statistic" or found[3] == value_of(tensor) else None


def _told(what: str) -> str:
    place = caller(())[1]
    return f"{place}: {what}" if place else what


def kept_numbers(node: Any) -> set[int]:
    """Return the integers that an autograd function has kept for its backward, if its forward asks for sizes.

    Args:
        node: Of a graph.
    """
    code = getattr(getattr(torch_compat.own_function(node), "forward", None), "__code__", None)
    if code is None or not {"shape", "size", "len", "numel"}.intersection(code.co_names):
        return set()
    return {value for value in getattr(node, "__dict__", {}).values() if type(value) is int}
