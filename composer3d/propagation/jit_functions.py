"""Functions that torch.jit or torch.compile has compiled, in the code of a model.

No mode sees what the first do with a sharded tensor; the others can be called as they were.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from composer3d.torch_compat.compilers.compiling import is_compiled

if TYPE_CHECKING:
    from torch import nn

__all__ = ["attributes_in_use", "compiled_functions", "is_elementwise", "scripted_functions"]

_LIBRARIES = ("torch.", "composer3d")
# Operators of torch.jit's graphs that do the same with every number, whatever is around it.
_ELEMENTWISE = frozenset(
    "abs add clamp cos div elu erf exp gelu hardswish hardtanh leaky_relu log log1p lt gt mul neg pow reciprocal relu "
    "rsqrt rsub sigmoid silu sin softplus sqrt square sub tanh to type_as where".split()
)


def scripted_functions(model: nn.Module) -> dict[str, Any]:
    """Return the modules whose own code names a function that torch.jit has compiled, each with the first of them.

    Functions that a method calls are read too, and what classes and modules have as attributes. Nothing is called.

    Args:
        model: Whole, on any device.
    """
    return _functions(model, _is_scripted)


def compiled_functions(model: nn.Module) -> dict[str, Any]:
    """Return the modules whose own code names a function that torch.compile has compiled, or that it compiles in place.

    As of `scripted_functions`; of a module that is compiled in place the module.

    Args:
        model: Whole, on any device.
    """
    in_place = {fqn: each for fqn, each in model.named_modules() if is_compiled(each)}
    return _functions(model, is_compiled) | in_place


def _functions(model: nn.Module, is_one: Callable[[Any], bool]) -> dict[str, Any]:
    by_class: dict[type, Any] = {}
    found = {}
    for fqn, module in model.named_modules():
        cls = type(module)
        if cls not in by_class:
            by_class[cls] = next(_in_class(cls, is_one), None)
        own = next((value for value in vars(module).values() if is_one(value)), by_class[cls])
        if own is not None:
            found[fqn] = own
    return found


def is_elementwise(function: Any) -> bool:
    """Return whether a function of torch.jit does the same with every number, so that a shard is as good as the whole.

    Args:
        function: Compiled; its graph is read.
    """
    kinds = [node.kind() for node in function.graph.nodes()]
    return all(
        kind == "prim::Constant" or kind.partition("::")[2].removesuffix("_") in _ELEMENTWISE
        for kind in kinds
        if kind != "prim::NumToTensor"
    )


def attributes_in_use(cls: type) -> Iterator[Any]:
    """Yield what a class and the people's classes that it inherits from have, but for methods that others replace.

    A method that calls the one which it replaces, by `super()` or the name of its class, leaves that one in use.

    Args:
        cls: Of a module.
    """
    found: dict[str, list[Any]] = {}
    for base in cls.__mro__:
        if f"{base.__module__}.".startswith("torch."):
            continue
        for name, attribute in vars(base).items():
            nearer = found.setdefault(name, [])
            if all(_calls(each, base) for each in nearer[-1:]):
                nearer.append(attribute)
                yield attribute


def _calls(attribute: Any, base: type) -> bool:
    """Return whether a method may call the one of a class that it replaces; what is no function may."""
    function = inspect.unwrap(getattr(attribute, "__func__", attribute))
    return not isinstance(function, FunctionType) or not {"super", base.__name__}.isdisjoint(function.__code__.co_names)


def _is_scripted(value: Any) -> bool:
    return isinstance(value, torch.jit.ScriptFunction)


def _in_class(cls: type, is_one: Callable[[Any], bool]) -> Iterator[Any]:
    seen: set[CodeType] = set()
    for attribute in attributes_in_use(cls):
        yield from _in_value(getattr(attribute, "__func__", attribute), seen, is_one)


def _in_value(value: Any, seen: set[CodeType], is_one: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield functions of a kind that a value is, or that its code names."""
    if is_one(value):
        yield value
        return
    if isinstance(value, MethodType):
        value = value.__func__
    value = inspect.unwrap(value) if isinstance(value, FunctionType) else value
    if not isinstance(value, FunctionType) or f"{value.__module__}.".startswith(_LIBRARIES):
        return
    held = inspect.getclosurevars(value).nonlocals.values() if value.__closure__ else ()
    for each in held:
        yield from _in_value(each, seen, is_one)
    yield from _in_code(value.__code__, value.__globals__, seen, is_one)


def _in_code(
    code: CodeType, known: dict[str, Any], seen: set[CodeType], is_one: Callable[[Any], bool]
) -> Iterator[Any]:
    if code in seen:
        return
    seen.add(code)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _in_code(inner, known, seen, is_one)
    loaded = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    values = [known[name] for name in code.co_names if name in loaded and name in known]
    files = [value for value in values if isinstance(value, ModuleType)]
    own = [file for file in files if not f"{file.__name__}.".startswith(_LIBRARIES)]
    values += [vars(file)[name] for file in own for name in code.co_names if name in vars(file)]
    for value in values:
        yield from _in_value(value, seen, is_one)
