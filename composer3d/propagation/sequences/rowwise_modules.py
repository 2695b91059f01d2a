"""Modules that work on local shards of a sequence, or on rows of it in any order, whatever their code.

Hooks of plugins that shard such a module's weight work on local shards as its code does, and are folded into its
forward; those of others, around it, are given what one device's are. Of rows inside nobody knows which positions they
are of: what hooks there relate rows is refused, and what they do with each number, or along the last dim, is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from composer3d import torch_compat
from composer3d.observation.call_sites import beside
from composer3d.propagation.functions.function_dims import CASTS, OBJECT, SIZES, name_of
from composer3d.propagation.functions.known_functions import is_elementwise_name
from composer3d.propagation.shards import PropagationError
from composer3d.torch_compat import forward_hooks

__all__ = ["EachRow", "Rows", "with_own_hooks"]

# Functions of one dim, and the place of its argument.
ALONG_ONE = {
    **dict.fromkeys("sum mean amax amin softmax log_softmax cumsum cumprod std var argmax argmin logsumexp".split(), 1),
    **dict.fromkeys("max min sort topk median prod all any".split(), 1),
    **dict.fromkeys("norm normalize renorm".split(), 2),
    "vector_norm": 2,
}


def with_own_hooks(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward with the hooks of plugins around it, which are taken off the module.

    Args:
        module: Whose hooks.
        forward: Its.
    """
    before = _taken(module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
    after = _taken(module._forward_hooks, module._forward_hooks_with_kwargs)
    if not (before or after):
        return forward

    def called(*args: Any, **kwargs: Any) -> Any:
        for hook, takes_kwargs in before:
            given = hook(module, args, kwargs) if takes_kwargs else hook(module, args)
            if given is not None and takes_kwargs:
                args, kwargs = given
            elif given is not None:
                args = given if isinstance(given, tuple) else (given,)
        output = forward(*args, **kwargs)
        for hook, takes_kwargs in after:
            found = hook(module, args, kwargs, output) if takes_kwargs else hook(module, args, output)
            output = output if found is None else found
        return output

    return called


def _taken(hooks: dict[int, Any], with_kwargs: Mapping[int, bool]) -> list[tuple[Any, bool]]:
    """Take the hooks of plugins off a module's, and return them in order, with whether each takes keyword arguments."""
    own = [
        key
        for key, hook in hooks.items()
        if forward_hooks.home_of(hook).startswith(("composer3d", "torch.distributed"))
    ]
    return [(hooks.pop(key), key in with_kwargs) for key in own]


@dataclass(frozen=True)
class Rows:
    """In place of a mark: a tensor has rows of a rank's positions, in any order.

    Args:
        module: FQN of the module that computes them.
    """

    module: str


class EachRow(TorchFunctionMode):
    """A mode in which code may compute with each number, or along the last dim, and relates no rows.

    Args:
        where: The hook, for messages.
        module: FQN of the module inside of which it is; None of one on a module's last function.
    """

    def __init__(self, where: str, module: str | None) -> None:
        super().__init__()
        self._where, self._module = where, module

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one function, if it relates no rows.

        Raises:
            PropagationError: It does, or may.
        """
        options, name = dict(kwargs or {}), name_of(func)
        leaves = torch_compat.tree_leaves([list(args), options])
        ndim = max((leaf.ndim for leaf in leaves if isinstance(leaf, Tensor)), default=0)
        if ndim and not (name in CASTS or name in OBJECT or is_elementwise_name(name)) or name in SIZES:
            plain = name.strip("_").removeprefix("linalg_")
            dim = options.get("dim", options.get("axis", _at(args, ALONG_ONE.get(plain, 0))))
            dims = dim if isinstance(dim, tuple | list) else (dim,)
            last = (-1, ndim - 1) if ndim > 1 else ()
            if plain not in ALONG_ONE or not all(type(each) is int and each in last for each in dims):
                self.refuse(name)
        return func(*args, **options)

    def refuse(self, name: str) -> None:
        """Raise an error.

        Args:
            name: Of the function that may relate rows.
        """
        if self._module is None:
            raise PropagationError(
                f"{self._where}: {name}{beside()} of what register_backward_hook gives, of a rank's positions "
                "alone: the hook would relate these, and not all of one device; use register_full_backward_hook"
            )
        raise PropagationError(
            f'{self._where}: {name} inside of "{self._module}"{beside()}, whose rows are of a rank\'s positions, '
            "in any order: the hook would relate these alone, and not all rows of one device; let it compute with each "
            "number, or along the last dim, or register it on the module, or outside of it"
        )


def _at(args: Sequence[Any], at: int) -> Any:
    return args[at] if 0 < at < len(args) else None
