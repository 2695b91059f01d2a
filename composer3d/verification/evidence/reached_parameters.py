"""Parameters that a forward reached, by rank: where ranks differ, their gradient reductions do not match."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.mesh import Layout, Role
from composer3d.torch_compat import fsdp_groups, in_backward

if TYPE_CHECKING:
    from composer3d import Composition

__all__ = ["Uneven", "noting_reached", "uneven"]

# Number of times that each parameter was reached, by FQN, for every forward of this rank.
Reached = list[list[str]]


class Uneven(Exception):
    """Ranks failed in a step whose forward had reached other parameters on some of them; the message names them."""

    @property
    def failure(self) -> str:
        """Message of the ranks' own failure."""
        message = next(iter(str(self.__cause__).splitlines()), "")
        return f"the ranks do not get through a step: {message[:200] or type(self.__cause__).__name__}"


@contextlib.contextmanager
def noting_reached(run: Composition, folder: Path) -> Iterator[None]:
    """Record, after every forward inside, the parameters of its graph in a file that survives a killed rank.

    Collectives: none.
    """
    import torch

    found: Reached = []
    file = folder / f"reached-{run.context.rank}.json"

    def note(module: Any, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            found.append(sorted(_reached(output, _leaves(module))))
            file.write_text(json.dumps(found))

    hooks = [part.module.register_forward_hook(note) for part in run.parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _leaves(module: Any) -> Mapping[int, str]:
    """Return FQNs by `id` of a graph's leaves: parameters, or their gathered tensors under FSDP2."""
    named = {id(parameter): fqn for fqn, parameter in module.named_parameters(remove_duplicate=False)}
    leaves = dict(named)
    for inner in module.modules():
        for group, _, _ in fsdp_groups(inner):
            for held in group.fsdp_params:
                if hasattr(held, "_unsharded_param") and id(held.sharded_param) in named:
                    leaves[id(held._unsharded_param)] = named[id(held.sharded_param)]
    return leaves


def _reached(output: Any, leaves: Mapping[int, str]) -> set[str]:
    from composer3d.step import tensors

    todo = [tensor.grad_fn for tensor in tensors(output) if tensor.grad_fn is not None]
    seen, found = set(todo), set()
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in leaves:
            found.add(leaves[id(leaf)])
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        todo += new
    return found


def uneven(folder: Path, layout: Layout) -> str:
    """Return a sentence on parameters reached on one rank and not on another of the same stage; empty if none."""
    reached: dict[int, Reached] = {}
    for rank in range(layout.world_size):
        file = folder / f"reached-{rank}.json"
        with contextlib.suppress(OSError, ValueError):  # a rank that was killed while it wrote
            reached[rank] = json.loads(file.read_text())
    peers: dict[int, list[int]] = {}
    for rank in reached:
        peers.setdefault(layout.index(rank, Role.STAGE), []).append(rank)
    for ranks in peers.values():
        for one in ranks:
            for other in ranks:
                for number, (here, there) in enumerate(zip(reached[one], reached[other], strict=False)):
                    missing = sorted(set(here) - set(there))
                    if missing:
                        return _sentence(layout, missing, one, other, number)
    return ""


def _sentence(layout: Layout, missing: list[str], one: int, other: int, number: int) -> str:
    more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    return (
        f"{', '.join(missing[:4])}{more} gets a gradient on {layout.who(one)} and none on {layout.who(other)} in "
        f"forward {number}: what reduces gradients sends less there than elsewhere; let every rank use every "
        "parameter, if only multiplied by zero, whatever its number or its samples"
    )
