"""Forms of experts in a list, found on meta: sizes of results, and whether positions of a sample are apart.

Shape suffixes: N samples, T positions of one, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from composer3d import PluginError, propagation
from composer3d_plugins.sharding.expert_parallel.rerun_state import BlockState

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ExpertForm", "form_of"]

_DEGREE = 2
_SIZES = frozenset("shape size numel nelement dim ndim ndimension __len__ stride".split())


class ExpertForm:
    """Sizes of what an expert makes, by those of what it is given as one.

    Attributes:
        is_rowwise: Whether it does the same with every row of its input, by all that is known of its functions, and
            asks for no sizes: what it is given may be exchanged row by row, else sample by sample.
        widths: How wide its results are, by the width of rows.

    Args:
        expert: One with parameters.
        of: FQN of the list, for messages.

    Raises:
        PluginError: It returns something else than a tensor.
    """

    def __init__(self, expert: nn.Module, of: str) -> None:
        self._expert, self._outside = _on_meta(expert, {}), propagation.OutsideState(expert.modules())
        dtypes = [parameter.dtype for parameter in expert.parameters() if parameter.is_floating_point()]
        self._dtype = dtypes[0] if dtypes else torch.get_default_dtype()
        self._results: dict[tuple[int, ...], tuple[int, ...]] = {}
        sizes = dict.fromkeys(size for parameter in expert.parameters() for size in parameter.shape)
        made = {width: self._made(2, (width,)) for width in sizes}
        for value in made.values():
            if value is not None and not isinstance(value, torch.Tensor):
                raise PluginError(
                    f'expert_parallel: an expert of "{of}" returns a {type(value).__name__}; experts of a list return '
                    "one tensor with a row for each that they are given: return what goes with it from the block's own "
                    "code, or leave this list out of [sharding.expert_parallel] experts"
                )
        self.widths = {width: y.shape[1] for width, y in made.items() if y is not None and y.ndim == 2}
        self.is_rowwise = any(self._keeps_positions_apart(width) for width in self.widths)

    def result(self, given: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of the result of one row, or sample, by its own; the same where it does not run on meta."""
        if len(given) == 1:
            return (self.widths.get(given[0], given[0]),)
        if given not in self._results:
            y = self._made(2, given)
            self._results[given] = given if y is None or y.shape[:1] != (2,) else tuple(y.shape[1:])
        return self._results[given]

    def _made(self, number: int, sizes: Sequence[int]) -> Any:
        x = torch.empty(number, *sizes, dtype=self._dtype, device="meta")
        try:
            with torch.no_grad():
                return self._run(x)
        except Exception:  # another width, or code that does not run on meta
            return None

    def _run(self, x: Tensor) -> Any:
        state = BlockState(self._expert, self._outside.now())  # lists among its attributes are the expert's own
        try:
            return self._expert(x)
        finally:
            state.restore()

    def _keeps_positions_apart(self, width: int) -> bool:
        """Return whether a shard of positions x_N(T/2)D is all that the results of these positions need."""
        x_NTD = torch.empty(2, 3, width, dtype=self._dtype, device="meta")
        placed = propagation.Placed(dim=1, parts=(3 * _DEGREE,))
        sizes, mode = _Sizes(), propagation.SequencePropagation(_DEGREE, "", rules=_Apart())
        sources = frozenset({propagation.SEQUENCE})
        propagation.mark(x_NTD, placed=placed, degree=_DEGREE, sources=sources, axis=mode.axis)
        try:
            with torch.no_grad(), mode, sizes:
                made = self._run(x_NTD)
        except Exception:  # a function of several positions, or one that nothing is known of
            return False
        spec = propagation.spec_of(made, mode.axis) if isinstance(made, torch.Tensor) else None
        return spec is not None and made.ndim == 3 and spec.placed.dim == 1 and not sizes.are_read


class _Sizes(TorchFunctionMode):
    """Notices code that asks a tensor for its sizes: rows by themselves have others than samples."""

    def __init__(self) -> None:
        super().__init__()
        self.are_read = False

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(getattr(function, "__self__", None), "__name__", getattr(function, "__name__", ""))
        self.are_read = self.are_read or name in _SIZES
        return function(*args, **(kwargs or {}))


class _Apart:
    """Rules of a sequence of which nothing is exchanged."""

    def index(self, length: int, device: torch.device) -> Tensor:
        """Return the first positions."""
        return torch.arange(self.local_length(length), device=device)

    def local_length(self, length: int) -> int:
        """Return how many they are."""
        return length // _DEGREE

    def divides(self, *, coarse: int, fine: int) -> bool:
        """Return that windows of positions are not kept together."""
        return False

    def note(self, what: str, name: str) -> None:
        """Refuse what is no function of one position."""
        raise propagation.PropagationError(f"{name} is {what}")

    def gather(self, x: Tensor, *, dim: int, length: int) -> Tensor:
        """Refuse to gather."""
        raise propagation.PropagationError("positions are gathered")

    def window_sizes(self, reach: Any) -> list[int] | None:
        """Refuse windows."""
        raise propagation.PropagationError("neighbours are read")

    def windows(self, x: Tensor, *, dim: int, reach: Any) -> Tensor:
        """Refuse windows."""
        raise propagation.PropagationError("neighbours are read")

    def attend(self, call: Any) -> Tensor:
        """Refuse attention."""
        raise propagation.PropagationError("positions attend")

    def weigh(self, weights: Tensor, *, row: int, column: int, rows: int, columns: int) -> None:
        """Refuse products over positions."""
        raise propagation.PropagationError("positions are multiplied")


def _on_meta(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a module with the code and attributes of another, on meta: without hooks, which nobody's call is to reach.

    Plugins may replace the other's forward and parameters later.
    """
    if module in known:
        return known[module]
    known[module] = other = copy.copy(module)
    fresh = vars(nn.Module())
    vars(other).update({name: value for name, value in fresh.items() if name.endswith("_hooks")})
    other._modules = {name: None if each is None else _on_meta(each, known) for name, each in module._modules.items()}
    for held in ("_parameters", "_buffers"):
        tensors = {
            name: None if each is None else each.detach().to("meta") for name, each in vars(module)[held].items()
        }
        vars(other)[held] = tensors
    return other


def form_of(expert: nn.Module, of: str, known: dict[Any, ExpertForm]) -> ExpertForm:
    """Return the form of an expert, found once for those of equal classes, attributes and sizes.

    Args:
        expert: One with parameters.
        of: FQN of its list.
        known: Forms of a list's experts found before.
    """
    plain = vars(nn.Module()).keys()  # with hooks, parameters and modules
    modules = [
        (type(each), repr([item for item in vars(each).items() if item[0] not in plain])) for each in expert.modules()
    ]
    key = tuple(modules), _shapes(dict(expert.named_parameters())), _shapes(dict(expert.named_buffers()))
    if key not in known:
        known[key] = ExpertForm(expert, of)
    return known[key]


def _shapes(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
