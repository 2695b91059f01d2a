"""What a model's forward is told besides its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["expect_no_packing"]


def expect_no_packing(model: nn.Module) -> None:
    """Keep a model from reading its positions' values to find several sequences packed into one, where it makes them.

    transformers compares positions in every forward without a mask. They count up from zero where nobody hands them
    over, so the answer is known; reading it would wait for the accelerator, and on meta, where plugins see how a model
    is made, there is nothing to read. A forward that is given positions or a mask does as ever.
    """
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    replaced: list[Any] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        replaced.append(getattr(masking_utils, name, None))
        if replaced[-1] is not None and len(args) < 2 and kwargs.get("position_ids") is None:
            setattr(masking_utils, name, lambda position_ids: None)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found = replaced.pop()
        if found is not None:
            setattr(masking_utils, name, found)

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave, always_call=True)
