"""Places in modules where FSDP2 puts the parameters of a unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Places"]


class Places:
    """The places of a group's parameters, which hold others while `torch.func.functional_call` runs.

    FSDP2 gathers its own parameters over what was passed, computes with them, and, in its first forward, takes what it
    finds for the parameters that it shards. What it knows of modules is private (torch 2.11-2.15).

    Args:
        group: FSDP2's.
        names: FQNs of the part's modules, by their ids.
    """

    def __init__(self, group: Any, names: Mapping[int, str]) -> None:
        self._places: list[tuple[dict[str, Any], str, str, Any, bool]] = []
        for parameter in group.fsdp_params:
            info = parameter._module_info
            tied = zip(info.shared_modules, info.shared_param_names, strict=True)
            for module, name in ((info.module, info.param_name), *tied):
                fqn = names.get(id(module), "")
                whole = f"{fqn}.{name}" if fqn else name
                self._places.append((module._parameters, name, whole, parameter, module is not info.module))

    def verify(self, refuse: Callable[[str], None]) -> None:
        """Call a function with the name of a place that holds another tensor than the unit's.

        Where the unit is gathered and `functional_call` has put back the sharded parameter that it found before, the
        gathered one takes its place again. A tie that somebody has taken apart is tied again, as it is in every gather.
        """
        from torch import nn

        for parameters, name, fqn, parameter, is_tied in self._places:
            found = parameters.get(name)
            gathered = getattr(parameter, "_unsharded_param", None)
            if found is parameter.sharded_param:
                if parameter.sharded_state.name == "UNSHARDED" and gathered is not None:
                    parameters[name] = gathered
            elif found is gathered or found is getattr(parameter, "_sharded_post_forward_param", None):
                continue
            elif not is_tied or not isinstance(found, nn.Parameter):
                refuse(fqn)
