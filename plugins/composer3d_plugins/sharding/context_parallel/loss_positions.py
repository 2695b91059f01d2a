"""Whether a loss function relates positions: then it is given all of them, and otherwise this rank's.

It is run on meta, once for each form of targets, with what the model returned in the dry run. All ranks decide alike.
"""

from __future__ import annotations

import copy
import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer3d import torch_compat
from composer3d.propagation import SEQUENCE, AttentionCall, LossPropagation, Placed, Reach, Relation, ShardSpec, mark
from composer3d_plugins.sharding.context_parallel.loss_state import state_of
from composer3d_plugins.sharding.context_parallel.sequence_positions import Positions

__all__ = ["Losses", "OutputForm"]

# Files whose lines are no loss's.
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(inspect.getfile(LossPropagation)).parents[1]))


@dataclass(frozen=True)
class OutputForm:
    """Form of the model's output in the dry run.

    Args:
        output: On meta.
        specs: Of each of its tensors, in order; None where it is whole.
        num_samples: Of the example.
        lengths: Of the sequences that were sharded, with padding, in order of the arguments.
    """

    output: Any
    specs: tuple[ShardSpec | None, ...]
    num_samples: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """Local lengths of the first rank; nothing else may be asked for."""

    positions: Callable[[int], Positions]

    def local_length(self, length: int) -> int:
        return self.positions(length).local_lengths[0]

    def divides(self, *, coarse: int, fine: int) -> bool:
        return False

    def window_sizes(self, reach: Reach) -> list[int] | None:
        return None

    def index(self, length: int, device: torch.device) -> Tensor:
        raise Relation("numbers by position")

    def gather(self, x: Tensor, *, dim: int, length: int) -> Tensor:
        raise Relation("a gather")

    def windows(self, x: Tensor, *, dim: int, reach: Reach) -> Tensor:
        raise Relation("neighbours")

    def attend(self, call: AttentionCall) -> Tensor:
        raise Relation("attention")

    def weigh(self, weights: Tensor, *, row: int, column: int, rows: int, columns: int) -> None:
        raise Relation("products over positions")

    def note(self, what: str, name: str) -> None:
        raise Relation(f"{name} ({what})")


@dataclass(kw_only=True)
class Losses:
    """Decisions about the loss function of a run.

    Args:
        form: Of what the model returns.
        dim: Sequence dim of targets.
        degree: Ranks along cp.
        positions: Returns the positions of every rank.
    """

    form: OutputForm
    dim: int
    degree: int
    positions: Callable[[int], Positions]
    _known: dict[Any, tuple[Any, str]] = field(default_factory=dict)
    # Kept, so that no other function has the id of one of them.
    _decided_of: dict[Any, Any] = field(default_factory=dict)

    def relation(self, loss_fn: Any, target: Any, *, num_samples: int, lengths: tuple[int, ...]) -> str:
        """Return by what a loss relates positions, with its line; empty where it does not.

        Args:
            loss_fn: The loss function.
            target: The whole batch's.
            num_samples: Of the batch.
            lengths: Of its sequences, without padding, in order of the arguments.
        """
        leaves = [leaf for leaf in torch_compat.tree_leaves(target) if isinstance(leaf, Tensor)]
        shapes = tuple((leaf.dtype, tuple(self._dims(leaf, set(lengths)))) for leaf in leaves)
        key = id(loss_fn), shapes
        if self._known.get(key, (None, ""))[0] != state_of(loss_fn):
            self._decided_of[key] = loss_fn
            try:
                loss_fn = copy.deepcopy(loss_fn)  # a module may count its calls
            except Exception:  # an object of the loop's own may refuse, for any reason
                pass
            decided = self._decided(loss_fn, target, num_samples, lengths)
            # A loss that keeps a record of its calls has one more now.
            self._known[key] = state_of(self._decided_of[key]), decided
        return self._known[key][1]

    def _dims(self, leaf: Tensor, lengths: set[int]) -> list[bool]:
        return [size in lengths for size in leaf.shape]

    def _decided(self, loss_fn: Any, target: Any, num_samples: int, lengths: tuple[int, ...]) -> str:
        if len(lengths) != len(self.form.lengths) or not lengths:
            return "its sequences are others than in the dry run"
        modes = []
        try:
            with torch_compat.with_values(), torch.enable_grad(), torch.device("meta"):
                for scale in (1, 2):
                    mode = LossPropagation(self.degree, rules=_Rules(positions=self.positions))
                    output = self._output(num_samples, [scale * length for length in lengths])
                    given = torch_compat.tree_map(functools.partial(self._target, lengths, scale), target)
                    mode.watch(functools.partial(loss_fn, output, given))
                    modes.append(mode)
        except Exception as error:  # a loop's own code may raise anything
            said = error if isinstance(error, Relation) else f"{type(error).__name__} without values"
            return f"{said}{_line(error)}"
        one, other = modes
        if other.factors != one.factors or other.divisors != [2 * number for number in one.divisors]:
            return "it is divided by a number that is not that of its positions"
        return ""

    def _output(self, num_samples: int, lengths: list[int]) -> Any:
        """Return the model's output of a batch, marked."""
        form, specs = self.form, iter(self.form.specs)
        sizes: Mapping[int, int] = dict(zip(form.lengths, lengths, strict=True))

        def like(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            spec, shape = next(specs), list(leaf.shape)
            dim = None if spec is None else spec.placed.dim
            if shape and dim != 0 and shape[0] == form.num_samples:
                shape[0] = num_samples
            if spec is None or dim is None:
                return torch.empty(shape, dtype=leaf.dtype, requires_grad=leaf.is_floating_point())
            if spec.placed.parts != (spec.shadow.shape[dim],) or spec.shadow.shape[dim] not in sizes:
                raise Relation("an output of another sequence than the inputs'")
            return self._marked(shape, leaf.dtype, dim, sizes[spec.shadow.shape[dim]])

        return torch_compat.tree_map(like, form.output)

    def _target(self, lengths: tuple[int, ...], scale: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.ndim > self.dim and leaf.shape[self.dim] in lengths:
            return self._marked(list(leaf.shape), leaf.dtype, self.dim, scale * leaf.shape[self.dim])
        return torch.empty(leaf.shape, dtype=leaf.dtype)

    def _marked(self, shape: list[int], dtype: torch.dtype, dim: int, length: int) -> Tensor:
        shape[dim] = self.positions(length).local_lengths[0]
        x = torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point)
        placed, sources = Placed(dim=dim, parts=(length,)), frozenset({SEQUENCE})
        return mark(x, placed=placed, degree=self.degree, sources=sources, axis="cp")


def _line(error: Exception) -> str:
    """Return the innermost line of a loss that raised an error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(LIBRARIES)]
    frames = [frame for frame in frames if "composer3d_plugins" not in frame.filename]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
