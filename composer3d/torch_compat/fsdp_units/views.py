"""Outputs of FSDP2's units that are views."""

from __future__ import annotations

from typing import Any

from composer3d.torch_compat.tensors import tree_flatten, tree_unflatten, with_attributes_of

__all__ = ["keep_output_hooks"]


def keep_output_hooks(module: Any) -> None:
    """Return a module's outputs as tensors that are no views; before it becomes a unit of FSDP2.

    FSDP2 gathers a unit's parameters for the backward in hooks on the unit's outputs. Of a view, as a linear layer with
    a bias returns of `x_BSD`, autograd makes a new graph when `x += y` changes it, and drops the hook: gradients may
    be wrong, and torch 2.13 warns at every such output, changed or not. An alias that autograd takes for a tensor of
    its own keeps the hook, shares the version that detects overwritten values, and no warning is due. What is a
    parameter of the module, or a view of one, is copied: FSDP2 frees its storage behind the forward, and whoever read
    the output would read freed memory.

    Memory: that of outputs that are views of parameters. Collectives: none.

    Args:
        module: Its forward gets a hook. What is compiled is left alone: FSDP2's hooks are not part of it.
    """
    import torch

    class UnitOutput(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            return value.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient

    def apart(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        base = value if isinstance(value, torch.nn.Parameter) else value._base
        if base is not None and any(base is parameter for parameter in module.parameters()):
            return value.clone()
        is_view = base is not None and value.requires_grad and torch.is_grad_enabled()
        return with_attributes_of(value, UnitOutput.apply(value)) if is_view else value

    def keep(_: Any, __: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return output
        # In the containers in which FSDP2 finds tensors; an output without a view stays the object that it is.
        leaves, form = tree_flatten(output)
        kept = [apart(leaf) for leaf in leaves]
        if all(one is other for one, other in zip(kept, leaves, strict=True)):
            return output
        return tree_unflatten(kept, form)

    module.register_forward_hook(keep)
