"""Random numbers of sharded tensors: the whole tensor's draw of one generator, of which each rank keeps its shard.

On CPU torch draws each shard from the rank's own generator, so ranks that share a seed draw the same numbers for every
shard of a weight; on CUDA from offsets that depend on the layout. Drawn as a whole, `nn.init`, `reset_parameters`,
`randn_like` and an optimizer's noise are those of one device that has the same seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.step.sharded_tensors.stored_rows import place_rows, sharded_like

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

__all__ = ["draw_whole"]


def draw_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator that draws random numbers for a DTensor.

    Over ranks that hold replicas the first one's generator counts, so that they agree whatever their seeds.
    Memory: the whole tensor, until the shard is copied. Collectives: one broadcast of a generator's state (5 KB on CPU)
    for each mesh dim of replicas; for operators that read a tensor's values, as `bernoulli`, those of `full_tensor`.

    Args:
        operator: Of aten.
        args: Its own; the first DTensor gives the layout.
        kwargs: Its own; `generator` is used where there is one.
    """
    import torch
    from torch.distributed.tensor import DTensor

    like = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, DTensor))
    if torch_compat.active_fake_mode() is not None or like.to_local().is_meta or _is_partial(like):
        with torch_compat.torch_handled(operator):
            return operator(*args, **kwargs)
    writes = torch_compat.is_in_place(operator)
    name = operator.name()

    def whole(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        if value is args[0] and (writes or name.endswith("_like")):
            return torch.empty(value.shape, dtype=value.dtype, device=value.to_local().device)
        return value.full_tensor()

    with torch.no_grad():
        with _one_generator(like, kwargs.get("generator")):
            result = operator(*map(whole, args), **{key: whole(value) for key, value in kwargs.items()})
        if writes:
            place_rows(like, result, like=like)
            return like
        results = result if isinstance(result, tuple) else (result,)
        shards = tuple(sharded_like(like, value) for value in results)
    return shards if isinstance(result, tuple) else shards[0]


def _is_partial(tensor: DTensor) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


@contextlib.contextmanager
def _one_generator(like: DTensor, generator: torch.Generator | None) -> Iterator[None]:
    """Draw inside as the first of the ranks that hold replicas; one whose generator differs keeps its state."""
    import torch
    import torch.distributed as dist

    device = like.to_local().device
    mesh = like.device_mesh
    dims = [dim for dim, p in enumerate(like.placements) if p.is_replicate() and mesh.size(dim) > 1]
    if not dims or mesh.get_coordinate() is None:
        yield
        return
    if generator is None:
        generator = _default_generator(device)
    own = generator.get_state()
    state = own.clone().to(device)
    for dim in dims:
        dist.broadcast(state, group=mesh.get_group(dim), group_src=0)
    agreed = state.cpu()
    generator.set_state(agreed)
    try:
        yield
    finally:
        if not torch.equal(agreed, own):
            generator.set_state(own)


def _default_generator(device: torch.device) -> torch.Generator:
    import torch

    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    found: torch.Generator = module.default_generators[index]
    return found
