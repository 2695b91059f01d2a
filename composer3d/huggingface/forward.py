"""Adjustments of Hugging Face forwards: no detection of packed sequences, runs on meta, experts in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["expect_no_packing", "multiply_in_double_precision", "run_on_meta"]


def expect_no_packing(model: nn.Module) -> None:
    """Keep a model from reading its positions' values to find several sequences packed into one, where it makes them.

    transformers compares positions in every forward without a mask. They count up from zero where no caller passes them
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


def run_on_meta(model: nn.Module) -> None:
    """Let a forward on meta, in which plugins see how a model is made, go where one with values goes.

    transformers reads masks to leave out those that hide nothing, some of which models make themselves: on meta they
    stay. Experts run by `eager` look for tokens one after the other, and torch's grouped product knows bfloat16 alone
    there: on meta `batched_mm` multiplies them all, and the same parameters lead to the same outputs.
    """
    from transformers import masking_utils

    name = "fast_all"

    def keep_mask(replaced: list[Any], module: nn.Module) -> None:
        original = getattr(masking_utils, name, None)
        replaced.append(original)
        if original is not None:
            setattr(masking_utils, name, lambda mask: not mask.is_meta and original(mask))

    def restore_mask(replaced: list[Any], module: nn.Module) -> None:
        if (original := replaced.pop()) is not None:
            setattr(masking_utils, name, original)

    def multiply_all(replaced: list[Any], module: Any) -> None:
        replaced.append(module.config._experts_implementation)
        module.config._experts_implementation = "batched_mm"

    def restore_experts(replaced: list[Any], module: Any) -> None:
        module.config._experts_implementation = replaced.pop()

    _on_meta(model, keep_mask, restore_mask)
    for module in model.modules():
        if _experts_of(module) in ("eager", "grouped_mm"):
            _on_meta(module, multiply_all, restore_experts)


def multiply_in_double_precision(model: nn.Module) -> None:
    """Let experts compute in float64, which torch's grouped matrix product does not know: one product a token."""
    for module in model.modules():
        if _experts_of(module) == "grouped_mm":
            config: Any = module.config
            config._experts_implementation = "batched_mm"


def _experts_of(module: nn.Module) -> str | None:
    """Return how transformers multiplies the experts that a module holds; None where it holds none."""
    found: str | None = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return found if hasattr(module, "_apply_gate") else None


def _on_meta(
    module: nn.Module,
    before: Callable[[list[Any], nn.Module], None],
    after: Callable[[list[Any], nn.Module], None],
) -> None:
    """Run something around those forwards of a module that are given tensors on meta."""
    replaced: list[Any] = []
    entered: list[bool] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(any(getattr(value, "is_meta", False) for value in (*args, *kwargs.values())))
        if entered[-1]:
            before(replaced, module)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if entered.pop():
            after(replaced, module)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)
