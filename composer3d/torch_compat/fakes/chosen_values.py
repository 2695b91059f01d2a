"""Values of the places that `topk` and the like choose, on fake tensors, which have none otherwise.

What a mixture of experts does depends on which experts were chosen: code loops over those that were, skips those that
were not, and sorts rows by them. Where floating-point values are unknown, places are chosen so that each is chosen as
often as any other. What is computed from them in integers and truths is computed for real, beside the fake result, so
that sizes, loops and conditions are those of a step with such a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["FROM_NUMBERS", "PLACES", "ChosenValues", "values_of"]

# Operators that choose places along a dim, with which of their results has them.
PLACES = {
    "aten::argmax": 0,
    "aten::argmin": 0,
    "aten::argsort": 0,
    "aten::max.dim": 1,
    "aten::min.dim": 1,
    "aten::multinomial": 0,
    "aten::sort": 1,
    "aten::sort.stable": 1,
    "aten::topk": 1,
}
FROM_NUMBERS = frozenset({"aten::arange", "aten::full", "aten::ones", "aten::scalar_tensor", "aten::zeros"})
_READERS = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"})
_OF_VALUES = frozenset(
    {"aten::nonzero", "aten::masked_select", "aten::bincount", "aten::index", "aten::_unique", "aten::_unique2"}
    | {"aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave"}
)
_WITHOUT = frozenset({"aten::empty_like", "aten::new_empty", "aten::new_empty_strided"})  # of any values
_MOST, _MOST_FROM_NUMBERS = 2**24, 2**16  # elements
_KEPT = "composer3d_values"


def values_of(tensor: Any) -> Any:
    """Return the values of a fake tensor, on CPU; None where they are not known."""
    attributes = getattr(tensor, "__dict__", {})
    found = attributes.get(_KEPT)
    if found is None:
        return attributes.get("constant")  # torch's own, of a number
    return None if _is_forgotten(found) else found


class ChosenValues:
    """The values of a fake mode's tensors.

    Attributes:
        are_any: Whether places were chosen; before, nothing has values.
        have_decided: Whether values have decided sizes, or were read, since this was last set to False.
    """

    def __init__(self) -> None:
        self.are_any = False
        self.have_decided = False

    def concern(self, name: str, args: Any, kwargs: Any) -> bool:
        """Return whether an operator is given something with values, or makes integers from numbers."""
        return self.are_any and (name in FROM_NUMBERS or any(values_of(x) is not None for x in _tensors(args, kwargs)))

    def choose(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Give values to the places in the result of one of `PLACES`: along the dim each other, and each as often.

        Of `topk` of K of N in R rows, row r has the places r K to r K + K - 1, modulo N.
        """
        import torch

        places = result[PLACES[name]] if isinstance(result, tuple | list) else result
        source, given = args[0], args[2 if name == "aten::topk" else 1 :]
        default = None if name in ("aten::argmax", "aten::argmin") else -1
        if name == "aten::sort.stable":
            given = given[1:]
        dim = -1 if name == "aten::multinomial" else kwargs.get("dim", given[0] if given else default)
        number = source.numel() if dim is None or not source.ndim else source.shape[dim]
        if not number or places.numel() > _MOST:
            return
        chosen = torch.arange(places.numel(), dtype=places.dtype) % number
        if dim is not None and places.ndim == source.ndim and places.ndim:
            chosen = chosen.view(places.movedim(dim, -1).shape).movedim(-1, dim)
        setattr(places, _KEPT, chosen.reshape(places.shape))
        self.are_any = True

    def answer(self, operator: Any, name: str, args: Any, kwargs: Any, fake: Callable[[], Any]) -> Any:
        """Return what an operator returns, with values where they follow; NotImplemented where they do not.

        Args:
            operator: Of aten.
            name: Of it, without its overload.
            args: With something that has values, unless it makes integers from numbers.
            kwargs: Of the operator.
            fake: Returns what it returns without values.
        """
        import torch

        tensors = list(_tensors(args, kwargs))
        known = all(values_of(x) is not None or not _is_fake(x) for x in tensors)
        if not known or torch.Tag.nondeterministic_seeded in operator.tags:
            self._forget_written(operator, args, kwargs)
            return NotImplemented

        def real() -> Any:
            return operator(*_real(args), **_real(kwargs))

        if name in _READERS:
            self.have_decided = True
            return real()
        if name in _OF_VALUES:
            return self._decided(real(), tensors[0])
        result = fake()
        leaves = list(_tensors(result, {}))
        most = _MOST_FROM_NUMBERS if name in FROM_NUMBERS else _MOST
        is_left = name in _WITHOUT or not any(map(_is_whole, leaves)) or any(x.numel() > most for x in leaves)
        try:
            values = [] if is_left else list(_tensors(real(), {}))
        except (IndexError, RuntimeError):  # what was chosen does not fit what the code knows of its own choice
            values = []
        if not values:
            self._forget_written(operator, args, kwargs)
            return result
        for made, value in zip(leaves, values, strict=True):
            if _is_whole(made):
                setattr(made, _KEPT, value)
        return result

    def _decided(self, real: Any, like: Any) -> Any:
        """Return fake tensors of the sizes of real ones, with their values where these are whole numbers."""
        self.have_decided = True
        if isinstance(real, tuple | list):
            return type(real)(self._decided(each, like) for each in real)
        made = like.new_empty(real.shape, dtype=real.dtype)
        if _is_whole(real) and real.numel() <= _MOST:
            setattr(made, _KEPT, real)
        return made

    def _forget_written(self, operator: Any, args: Any, kwargs: Any) -> None:
        """Forget the values of what an operator writes to, and of all that shares its memory."""
        for place, argument in enumerate(operator._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[place] if place < len(args) else kwargs.get(argument.name)
            for x in _tensors((written,), {}):
                if (value := values_of(x)) is not None:
                    value.untyped_storage().resize_(0)  # which its views see too


def _tensors(args: Any, kwargs: Any) -> Iterator[Any]:
    import torch

    for value in (*(args if isinstance(args, tuple | list) else (args,)), *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value, {})


def _is_forgotten(value: Any) -> bool:
    return bool(value.numel()) and not value.untyped_storage().size()


def _is_fake(x: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def _is_whole(x: Any) -> bool:
    return not x.is_floating_point() and not x.is_complex()


def _real(value: Any) -> Any:
    """Return arguments with values in place of fake tensors, and the CPU for any device."""
    import torch

    if isinstance(value, torch.Tensor):
        found = values_of(value)
        return value if found is None else found
    if isinstance(value, tuple | list):
        return type(value)(_real(each) for each in value)
    if isinstance(value, dict):
        return {key: _real(each) for key, each in value.items()}
    return torch.device("cpu") if isinstance(value, torch.device) else value
