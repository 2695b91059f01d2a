"""Detection of attention kernels that bypass torch's operators, so that propagation cannot see which positions mix."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn
from torch.autograd import Function

from composer3d import Decisions, PluginError, RunContext
from composer3d.propagation import attributes_in_use, compiled_functions, scripted_functions
from composer3d_plugins.sharding.context_parallel.length_numbers import named
from composer3d_plugins.sharding.context_parallel.probed_backwards import is_rowwise

__all__ = ["OpaqueKernel", "note_compiled", "opaque_kernels", "own_backwards", "refuse_opaque"]

# Packages whose attention is a binding of their own, below torch's operators.
_PACKAGES = ("flash_attn", "flash_attn_interface", "xformers", "transformer_engine", "sageattention")
_OWN = ("torch.", "composer3d.", "composer3d_plugins.")
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
    for fqn, name in own_backwards(model).items():
        if not f"{fqn}.".startswith(inside) and not is_rowwise(model.get_submodule(fqn)):
            raise PluginError(
                f'context_parallel: "{fqn}" applies {name}, a torch.autograd.Function: which positions its backward '
                "reads cannot be seen",
                hint=f'if "{fqn}" does the same with every token, name it in rowwise; else write it with operators',
            )
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


def own_backwards(model: nn.Module) -> dict[str, str]:
    """Return the modules whose own code applies a `torch.autograd.Function`, each with its name.

    What such a function does backward is no operator that a propagation sees: on shards it is computed as if they were
    whole sequences. Functions that a method calls are read too; those of torch itself, and of the core, are left out.

    Args:
        model: Whole, on any device.
    """
    by_class: dict[Any, str | None] = {}
    for module in model.modules():
        cls = type(module)
        if cls not in by_class:
            seen: set[CodeType] = set()
            methods = (method for method in attributes_in_use(cls) if isinstance(method, FunctionType))
            applied = (found for method in methods for found in _applied(method.__code__, method.__globals__, seen))
            by_class[cls] = next((found.__name__ for found in applied), None)
    named = {fqn: by_class[type(module)] for fqn, module in model.named_modules()}
    return {fqn: name for fqn, name in named.items() if name is not None}


def _applied(code: CodeType, known: Mapping[str, Any], seen: set[CodeType]) -> Iterator[type]:
    """Yield the autograd functions that code, or a function that it calls, applies."""
    if code in seen:
        return
    seen.add(code)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _applied(inner, known, seen)
    values = [known[name] for name in code.co_names if name in known]
    modules = [value for value in values if isinstance(value, ModuleType) and not _is_library(value.__name__)]
    values += [vars(module)[name] for module in modules for name in code.co_names if name in vars(module)]
    for value in values:
        owner = getattr(value, "__self__", None) if getattr(value, "__name__", "") == "apply" else value
        is_applied = owner is not value or "apply" in code.co_names
        if isinstance(owner, type) and issubclass(owner, Function) and is_applied and not _is_library(owner.__module__):
            yield owner
        elif isinstance(value, FunctionType) and not _is_library(value.__module__):
            yield from _applied(value.__code__, value.__globals__, seen)


def _is_library(module: str) -> bool:
    return f"{module}.".startswith(_OWN)


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
