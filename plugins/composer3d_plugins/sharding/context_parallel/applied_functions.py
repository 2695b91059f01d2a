"""Functions with a backward of their own, which no propagation sees: refused where a model's forward applies them.

What such a function does backward is no operator: on shards it is computed as if they were whole sequences. A model's
code is read for them, and they are watched where it runs: code that no forward comes to is no reason to refuse.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType, TracebackType
from typing import Any

from torch import nn
from torch.autograd import Function

from composer3d import PluginError
from composer3d.propagation import attributes_in_use, spec_of
from composer3d_plugins.sharding.context_parallel.length_numbers import named
from composer3d_plugins.sharding.context_parallel.probed_backwards import is_rowwise

__all__ = ["AppliedFunctions", "own_backwards"]

_OWN = ("torch.", "composer3d.", "composer3d_plugins.")
_APPLY = "apply"


class AppliedFunctions:
    """A context for runs of a model on meta: functions of its own that they apply are refused behind them.

    Args:
        model: Whole, or a stage; on any device.
        rowwise: FQNs of modules that are said to do the same with every position.

    Raises:
        PluginError: Behind the runs, with the module, the line, and what to write.
    """

    def __init__(self, model: nn.Module, rowwise: Collection[str]) -> None:
        inside = tuple(f"{fqn}." for fqn in rowwise)
        found = own_backwards(model)
        exempt = {fqn for fqn in found if f"{fqn}.".startswith(inside) or is_rowwise(model.get_submodule(fqn))}
        seldom = {each for fqn in exempt for each in found[fqn]}
        self._fqns: dict[type, str] = {}
        self._lines: dict[type, str] = {}
        for fqn, kinds in found.items():
            for kind, is_named in kinds.items() if fqn not in exempt else ():
                self._fqns.setdefault(kind, fqn)
                if kind in seldom or is_named:  # by another name, or where it may be: it cannot be watched
                    self._lines[kind] = ""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._replaced(self._noting))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        for each, fqn in self._fqns.items():
            if each in self._lines and (error is None or isinstance(error, PluginError)):
                raise self._refusal(each, fqn, self._lines[each]) from error

    def guarded(self, forward: Callable[..., Any], at_work: Callable[[], Any]) -> Callable[..., Any]:
        """Return a forward that raises where it applies one of the functions to a shard after all.

        Args:
            forward: Of the model.
            at_work: Returns the propagation at work, if any.
        """
        if not self._fqns:
            return forward

        def refusing(kind: type, apply: Callable[..., Any]) -> Callable[..., Any]:
            def applied(*args: Any) -> Any:
                mode = at_work()
                if mode is not None and not mode.pauses and any(spec_of(x, mode.axis) is not None for x in args):
                    raise self._refusal(kind, self._fqns[kind], _line())
                return apply(*args)

            return applied

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._replaced(refusing):
                return forward(*args, **kwargs)

        return run

    def _noting(self, kind: type, apply: Callable[..., Any]) -> Callable[..., Any]:
        def applied(*args: Any) -> Any:
            self._lines.setdefault(kind, _line())
            return apply(*args)

        return applied

    @contextlib.contextmanager
    def _replaced(self, around: Callable[[type, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """Replace what applies the functions inside; classes inherit it from torch's, or from one of their own."""
        before = {kind: vars(kind).get(_APPLY) for kind in self._fqns}
        try:
            for kind in self._fqns:
                setattr(kind, _APPLY, staticmethod(around(kind, getattr(kind, _APPLY))))
            yield
        finally:
            for kind, own in before.items():
                if own is None:
                    delattr(kind, _APPLY)
                else:
                    setattr(kind, _APPLY, own)

    @staticmethod
    def _refusal(kind: type, fqn: str, line: str) -> PluginError:
        where = f'if "{fqn}" does the same with every token, name it in rowwise; else ' if fqn else ""
        return PluginError(
            f"context_parallel: {named(fqn)} applies {kind.__name__}{line}, a torch.autograd.Function: which positions "
            "its backward reads cannot be seen",
            hint=f"{where}write it with operators",
        )


def _line() -> str:
    frame = sys._getframe(2)
    return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def own_backwards(model: nn.Module) -> dict[str, dict[type, bool]]:
    """Return the modules whose own code names functions of `torch.autograd.Function` that it may apply.

    Functions that a method calls are read too; those of torch itself, and of the core, are left out. Nothing is called.

    Args:
        model: Whole, on any device.

    Returns:
        By FQN the functions, each with whether the code has another name for what applies it.
    """
    by_class: dict[Any, dict[type, bool]] = {}
    for module in model.modules():
        cls = type(module)
        if cls not in by_class:
            by_class[cls], seen = {}, set[CodeType]()
            methods = (method for method in attributes_in_use(cls) if isinstance(method, FunctionType))
            for method in methods:
                for kind, is_named in _applied(method.__code__, method.__globals__, seen):
                    by_class[cls][kind] = by_class[cls].get(kind, False) or is_named
    return {fqn: kinds for fqn, module in model.named_modules() if (kinds := by_class[type(module)])}


def _applied(code: CodeType, known: Mapping[str, Any], seen: set[CodeType]) -> Iterator[tuple[type, bool]]:
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
        owner = getattr(value, "__self__", None) if getattr(value, "__name__", "") == _APPLY else value
        is_named = owner is not value
        is_applied = is_named or _APPLY in code.co_names
        if isinstance(owner, type) and issubclass(owner, Function) and is_applied and not _is_library(owner.__module__):
            yield owner, is_named
        elif isinstance(value, FunctionType) and not _is_library(value.__module__):
            yield from _applied(value.__code__, value.__globals__, seen)


def _is_library(module: str) -> bool:
    return f"{module}.".startswith(_OWN)
