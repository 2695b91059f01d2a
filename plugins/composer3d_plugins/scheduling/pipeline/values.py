"""Values of small tensors on meta: what a forward's control flow reads where tensors have none.

Code reads whether a mask hides anything, whether positions count up, how many tokens a router sends to an expert.
Values that follow from numbers, the example's values and tensors made in the forward are computed beside the operators
on meta, once something is read: most models compute tables of sines in every block, and read nothing. Values that
depend on weights are unknown and read as one, or true, so that every branch is visited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LARGEST_DRAW", "Values", "draw_values"]

# Above any rate below 1.
LARGEST_DRAW = 1.0 - 2.0**-20

_MOST = 2**22  # elements of a tensor whose values are kept
_MOST_DRAWN = 2**24  # elements
_COPY = "aten::_to_copy"
_MASKED = ("aten::index.Tensor", "aten::index_put", "aten::index_put_")


class Values:
    """Runs operators on meta, and before a value is read also on the CPU where all values are known.

    Args:
        unknown: Called with a tensor that is read and whose values are not known.

    Attributes:
        is_guessing: Some values are made up: `unknown` is called with all that is read.
        num_reads: How many operators have read values.

    Memory: at most four million elements for each tensor that has values.
    """

    def __init__(self, unknown: Callable[[Tensor], None] | None = None) -> None:
        self._unknown = unknown
        self.is_guessing = False
        self.num_reads = 0
        self._results = torch_compat.MetaResults()
        self._known: dict[int, Tensor] = {}
        self._twins: dict[int, Tensor] = {}
        self._alive: list[Any] = []  # an identity is another tensor's as soon as the first is freed
        # Operators since the last read: each with its arguments, tensors among them, and result.
        self._since: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor], Any]] = []
        self._spoilt: set[int] = set()
        self._kinds: dict[Any, str] = {}

    def twin(self, tensor: Tensor) -> Tensor:
        """Return a tensor's empty twin on meta, whose values are known if the tensor has any."""
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self._twins:
            self._alive.append(tensor)
            self._twins[id(tensor)] = made = tensor.detach().to("meta")
            if not torch_compat.is_wrapper_subclass(type(tensor)):
                self.learn(made, tensor)
        return self._twins[id(tensor)]

    def learn(self, tensor: Tensor, value: Tensor) -> None:
        """Set the values of a tensor on meta; the given tensor is not changed by later writes."""
        if value.numel() <= _MOST:
            self._alive.append(tensor)
            self._known[id(tensor)] = value.detach().to("cpu", copy=True)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; results are on meta, and numbers where it returns numbers."""
        import torch

        tensors = [leaf for leaf in torch_compat.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not all(tensor.is_meta for tensor in tensors):
            args, kwargs = torch_compat.tree_map(self._on_meta, (args, kwargs))
            tensors = [self.twin(tensor) for tensor in tensors]
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        if kind == "masked":
            args = (args[0], self._without_masks(args[1]), *args[2:])
            tensors = [leaf for leaf in torch_compat.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        elif tensors and (kind == "reads" or (kind == "copies" and _leaves_meta(kwargs))):
            return self._read(func, args, kwargs)
        if not tensors and torch_compat.has_argument(func, "device"):
            kwargs = {**kwargs, "device": torch.device("meta")}
        result = self._results.run(func, args, kwargs, lambda: func(*args, **kwargs))
        self._since.append((func, args, kwargs, tensors, result))
        return result

    def forget(self) -> None:
        """Drop all tensors: what watches operators may outlive its use, in a cycle of references."""
        for held in (self._known, self._twins, self._alive, self._since):
            held.clear()

    def references(self) -> Iterator[int]:
        """Yield the identity of a tensor, or of its container, for every reference to it that is held here."""
        yield from map(id, self._alive)
        pending: list[Any] = [value for _, *values in self._since for value in values]
        while pending:
            value = pending.pop()
            yield id(value)
            if isinstance(value, list | tuple):
                pending += value
            elif isinstance(value, dict):
                pending += value.values()

    # ---- what is known -----------------------------------------------------------------------------------------------

    def _on_meta(self, value: Any) -> Any:
        import torch

        return self.twin(value) if isinstance(value, torch.Tensor) else value

    def _of(self, tensor: Tensor) -> Tensor | None:
        is_spoilt = torch_compat.storage_key(tensor) in self._spoilt
        return None if is_spoilt else self._known.get(id(tensor))

    def _catch_up(self) -> None:
        """Compute the values of all that has run, in its order."""
        since, self._since = self._since, []
        for call in since:
            self._run_beside(*call)

    def _run_beside(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], result: Any
    ) -> None:
        """Compute values where those of all arguments are known; a tensor overwritten by unknown ones loses its own."""
        import torch

        made = [leaf for leaf in torch_compat.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        is_known = not is_drawn and all(self._of(tensor) is not None for tensor in tensors)
        if is_known and all(tensor.numel() <= _MOST for tensor in made):
            try:
                found = func(*self._values_of(args), **_on_cpu(self._values_of(kwargs)))
            except Exception:  # values are a help, and the result on meta stands without them
                is_known = False
            else:
                values = [leaf for leaf in torch_compat.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
                for tensor, value in zip(made, values, strict=False):
                    self._alive.append(tensor)
                    self._known[id(tensor)] = value  # not a copy: views share what is written
                return
        if is_drawn and not tensors and all(x.numel() == 1 and x.is_floating_point() for x in made):
            # One number that code compares with a rate: `random_calls` has seen that blocks do not depend on it.
            for tensor in made:
                self.learn(tensor, torch.full(tensor.shape, LARGEST_DRAW, dtype=tensor.dtype))
        for tensor in torch_compat.written_tensors(func, args, kwargs):
            self._spoilt.add(torch_compat.storage_key(tensor))

    def _values_of(self, value: Any) -> Any:
        import torch

        return torch_compat.tree_map(lambda leaf: self._of(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)

    # ---- what is read ------------------------------------------------------------------------------------------------

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on values; where they are not known, on ones."""
        import torch

        def value(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            known = self._of(leaf)
            if self._unknown is not None and (known is None or self.is_guessing):
                self._unknown(leaf)
            if known is not None:
                return known
            return torch.ones((), dtype=leaf.dtype).expand(leaf.shape)

        self.num_reads += 1
        self._catch_up()
        args, kwargs = torch_compat.tree_map(value, (args, kwargs))
        result = func(*args, **_on_cpu(kwargs))
        if str(func.name()) == _COPY:
            return result  # for whoever reads it outside of torch
        return torch_compat.tree_map(self._on_meta, result)

    def _without_masks(self, indices: Any) -> list[Any]:
        """Return indices with every mask replaced by the positions that it selects."""
        import torch

        found: list[Any] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                places = self._read(torch.ops.aten.nonzero.default, (index,), {})
                found += places.unbind(1)
            else:
                found.append(index)
        return found


def _kind_of(func: Any) -> str:
    """Return how an operator's result depends on values: it `reads` them, is `masked`, `copies`, or `plain`."""
    import torch

    name = str(func.name())
    if name in _MASKED:  # once masks are places, shapes follow from shapes
        return "masked"
    if name == _COPY:
        return "copies"
    dependent = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return "reads" if dependent.intersection(func.tags) or func is torch.ops.aten.bincount.default else "plain"


def _leaves_meta(kwargs: dict[str, Any]) -> bool:
    """Return whether a copy goes to a device with values."""
    import torch

    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "meta"


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs


def draw_values(values: Values, tensors: Sequence[Tensor]) -> bool:
    """Give tensors on meta, such as weights, values at random; return False, and none, where they are too many."""
    import torch

    if sum(tensor.numel() for tensor in tensors) > _MOST_DRAWN:
        return False
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors:
        drawn = torch.randn(tensor.shape, generator=generator) * max(tensor.shape[-1:], default=1) ** -0.5
        values.learn(tensor, drawn.to(tensor.dtype))
    return True
