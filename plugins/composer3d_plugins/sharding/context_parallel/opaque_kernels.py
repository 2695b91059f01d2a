"""Detection of attention kernels that bypass torch's operators, so that propagation cannot see which positions mix."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from composer3d import Decisions, PluginError, RunContext
from composer3d.propagation import attributes_in_use, compiled_functions, scripted_functions
from composer3d_plugins.sharding.context_parallel.length_numbers import named

__all__ = ["OpaqueKernel", "note_compiled", "opaque_kernels", "refuse_opaque"]

# Packages whose attention is a binding of their own, below torch's operators.
_PACKAGES = ("flash_attn", "flash_attn_interface", "xformers", "transformer_engine", "sageattention")
# What transformers calls its attention implementations that torch computes itself.
_SEEN = ("eager", "sdpa", "flex_attention")


class OpaqueKernel(NamedTuple):
    """One kernel and who calls it.

    Args:
        fqn: Of the module.
        name: Of the function or the implementation.
        instead: What to write.
    """

    fqn: str
    name: str
    instead: str


def refuse_opaque(model: nn.Module, rowwise: Collection[str]) -> None:
    """Refuse a model whose code runs what a propagation cannot see into.

    Args:
        model: Whole, on any device.
        rowwise: FQNs of modules that are said to do the same with every position.

    Raises:
        PluginError: With the module, the reason and what to write.
    """
    inside = tuple(f"{fqn}." for fqn in rowwise)
    for fqn, function in scripted_functions(model).items():
        if not f"{fqn}.".startswith(inside):
            raise PluginError(
                f"context_parallel: {named(fqn)} calls {function.name}, which torch.jit has compiled: which positions "
                "it reads cannot be seen",
                hint="call the function as it was, without torch.jit.script and torch.jit.trace"
                + (f'; or name "{fqn}" in rowwise, if it does the same with every token' if fqn else ""),
            )
    for kernel in opaque_kernels(model):
        raise PluginError(
            f'context_parallel: "{kernel.fqn}" calls {kernel.name}, a kernel that is no operator of torch: which '
            "positions it reads cannot be seen",
            hint=f"write {kernel.instead}",
        )


def note_compiled(model: nn.Module, context: RunContext) -> bool:
    """Return whether a model's code calls what torch.compile has compiled, and note it: it runs as it was.

    Args:
        model: Whole, on any device.
        context: Whose plan has the notes.
    """
    found = compiled_functions(model)
    for fqn, function in found.items():
        name = getattr(function, "__name__", type(function).__name__)
        note = f"context_parallel: what torch.compile has compiled in {named(fqn)} runs as it was ({name})"
        context.stash(Decisions).notes.append(note)
    return bool(found)


def opaque_kernels(model: nn.Module) -> list[OpaqueKernel]:
    """Return the kernels of a model that context parallelism cannot see into, of each the first module that has it.

    A module's own code is read for functions of the packages that bind such kernels, and the configuration of a model
    of transformers for the implementation of its attention. Nothing is called.

    Args:
        model: Whole, on any device.
    """
    found: dict[str, OpaqueKernel] = {}
    by_class: dict[Any, tuple[str, ...]] = {}
    for fqn, module in model.named_modules():
        cls = type(module)
        if cls not in by_class:
            by_class[cls] = _names(cls)
        of_code = [
            OpaqueKernel(fqn, name, "torch.nn.functional.scaled_dot_product_attention") for name in by_class[cls]
        ]
        for kernel in (*_by_config(fqn, module), *of_code):
            found.setdefault(kernel.name, kernel)
    return list(found.values())


def _by_config(fqn: str, module: nn.Module) -> Iterator[OpaqueKernel]:
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if isinstance(name, str) and name.removeprefix("paged|") not in _SEEN:
        yield OpaqueKernel(fqn, name, 'attn_implementation = "sdpa"')


def _names(cls: Any) -> tuple[str, ...]:
    """Return the attention of such packages that a class is, or that its methods name."""
    if _is_of_package(cls) and _is_attention(cls.__qualname__):
        return (f"{cls.__module__}.{cls.__qualname__}",)
    methods = [method for method in attributes_in_use(cls) if isinstance(method, FunctionType)]
    return tuple(dict.fromkeys(name for method in methods for name in _named_by(method)))


def _named_by(method: FunctionType) -> Iterator[str]:
    names = method.__code__.co_names
    for name in names:
        value = method.__globals__.get(name)
        if value is None or not _is_of_package(value):
            continue
        if isinstance(value, ModuleType):
            yield from (f"{value.__name__}.{each}" for each in names if _is_attention(each) and hasattr(value, each))
        elif _is_attention(called := getattr(value, "__qualname__", name)):
            yield f"{value.__module__}.{called}"


def _is_attention(name: str) -> bool:
    return "attn" in name.lower() or "attention" in name.lower()


def _is_of_package(value: Any) -> bool:
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(module, str) and module.split(".")[0] in _PACKAGES
