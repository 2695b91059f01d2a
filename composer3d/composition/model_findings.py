"""Findings about a model that no layout changes, kept while several layouts of it are inspected."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from composer3d import torch_compat

if TYPE_CHECKING:
    from torch import nn

    from composer3d.initialisation import Recipe

__all__ = ["ModelFindings"]

T = TypeVar("T")
_OF_MODEL = "of the model"
_PLAIN = (bool, int, float, str, bytes, type(None))


class _Kept:
    """The model of one factory, and what was found of it: what inspections have in common."""

    def __init__(self) -> None:
        self.factory: object = None
        self.made: tuple[nn.Module, Recipe] | None = None
        self.found: dict[Hashable, Any] = {}


class ModelFindings:
    """Stash of what is found of the whole model, once for all layouts: `context.stash(ModelFindings)`.

    A search inspects a dozen layouts of one model, and each of them runs it on meta. Layouts change copies of it, so
    that what depends on the model and on a few options alone is the same for all of them. Without a search every
    preparation has findings of its own.

    Memory: a model on meta, and what was found.
    """

    def __init__(self) -> None:
        self._kept = _Kept()

    def __copy__(self) -> ModelFindings:
        """Return the same: another rank's view of a run has the same model."""
        return self

    def join(self, other: ModelFindings) -> None:
        """Use what another inspection has found, and add to it."""
        self._kept = other._kept

    def model_of(self, factory: object, make: Callable[[], tuple[nn.Module, Recipe]]) -> tuple[nn.Module, Recipe]:
        """Return a factory's model and recipe, made once if all of its tensors are on meta: values may be taken away.

        Args:
            factory: That makes it.
            make: Calls it.
        """
        kept = self._kept
        if kept.made is None or kept.factory is not factory:
            made = make()
            is_kept = all(tensor.is_meta for tensor in (*made[0].parameters(), *made[0].buffers()))
            kept.factory, kept.made = factory, made if is_kept else None
            kept.found = {key: value for key, value in kept.found.items() if not _is_of_model(key)}
            return made
        return kept.made

    def of_model(self, model: nn.Module, key: Hashable, find: Callable[[], T], *, example: Any) -> T:
        """Return what is found of a model as it came from its factory; errors are not kept.

        Args:
            model: The whole model.
            key: All else that the result depends on, and who asks.
            find: Finds it. Nobody may change the result.
            example: Of a forward, on which it depends too; with values nothing is kept.
        """
        made, form = self._kept.made, _form_of(example)
        if form is None or made is None or made[0] is not model:
            return find()
        return self.once((_OF_MODEL, model.training, form, key), find)

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """Return what depends on its key alone, found once."""
        found = self._kept.found
        if key not in found:
            found[key] = find()
        return cast(T, found[key])


def _is_of_model(key: Hashable) -> bool:
    return isinstance(key, tuple) and key[:1] == (_OF_MODEL,)


def _form_of(example: Any) -> str | None:
    """Return what examples have in common that run alike on meta; None where that is not known."""
    import torch

    leaves = torch_compat.tree_leaves(example)
    if not all((isinstance(leaf, torch.Tensor) and leaf.is_meta) or type(leaf) in _PLAIN for leaf in leaves):
        return None
    return repr(
        torch_compat.tree_map(
            lambda leaf: (
                (str(leaf.dtype), tuple(leaf.shape), leaf.stride()) if isinstance(leaf, torch.Tensor) else leaf
            ),
            example,
        )
    )
