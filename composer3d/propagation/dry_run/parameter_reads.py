"""Parameters that code outside of their module reads, such as `x @ embedding.weight.T`, and that stay whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from composer3d import torch_compat
from composer3d.propagation.module_kinds import reader_of

__all__ = ["Reads"]


class Reads:
    """Records parameters that functions take while none of the modules that own them is running.

    Args:
        model: The whole model.

    Attributes:
        owners: FQNs of the modules whose parameters are read so.
    """

    def __init__(self, model: nn.Module) -> None:
        self.owners: set[str] = set()
        self._model = model
        self._at_work: list[nn.Module] = [model]
        # Of each tensor that stands for a parameter the modules that hold it, by their FQNs.
        self._holders: dict[int, dict[str, nn.Module]] = {}

    def watch(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors that stand for the model's own, by their names."""
        holders: dict[int, dict[str, nn.Module]] = {}
        for fqn, module in self._model.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    reader = self._model.get_submodule(reader_of(self._model, fqn))
                    holders.setdefault(id(parameter), {})[fqn] = reader
        self._holders = {
            id(tensors[name]): holders[id(parameter)] for name, parameter in self._model.named_parameters()
        }

    def around(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward, during which the module is at work."""

        def answer(*args: Any, **kwargs: Any) -> Any:
            self._at_work.append(module)
            try:
                return forward(*args, **kwargs)
            finally:
                self._at_work.pop()

        return answer

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record the parameters that a function took, if it returned a tensor."""
        if any(isinstance(leaf, Tensor) for leaf in torch_compat.tree_leaves(result)):
            for leaf in torch_compat.tree_leaves([list(args), dict(kwargs)]):
                self._taken(self._holders.get(id(leaf), {}))

    def _taken(self, holders: Mapping[str, nn.Module]) -> None:
        if not any(module is other for module in holders.values() for other in self._at_work):
            self.owners |= holders.keys()
