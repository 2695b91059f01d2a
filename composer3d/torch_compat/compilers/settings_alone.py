"""Torch's compiler where nothing is compiled: its settings, and itself at the first use of anything else."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["KEPT", "settings_alone"]

_COMPILER = "torch._dynamo"
KEPT = "__dynamo_disable"
# What fake tensors name the origin of a tensor with values by: for symbols, of which there are none without a compiler.
_SOURCES = ("AttrSource", "ConstantSource", "EphemeralSource", "RandomValueSource")


@contextlib.contextmanager
def settings_alone() -> Iterator[None]:
    """Let dynamo, whose import takes as long as torch's own, be its settings until more of it is used.

    Fake modes and optimizers import it (torch 2.13): the ones for a few settings, and for classes of which none is
    used where shapes are numbers; the others to say that a graph breaks, which is only heard while there is one.
    Whatever else is asked of it, an attribute or a module, imports it. Where it is imported already nothing is changed.
    """
    import torch

    if _COMPILER in sys.modules:
        yield
        return
    package, module = _package(), _changeable(torch)
    finder = _Modules(package)
    sys.modules.update(_modules(package))
    module._dynamo = package
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _remove(package)


class _Package(ModuleType):
    """Dynamo's package with its settings; anything else that it is asked for is that of the whole one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.undisabled: list[Any] = []

    def disable(self, fn: Any = None, *_: Any, **__: Any) -> Any:
        """Return what is not to be traced as it is; `torch._compile` keeps the answer with what it asks for."""
        if fn is None:
            return self.disable
        self.undisabled.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        if name in ("__file__", "__spec__", "__wrapped__"):  # which Python asks for where it looks through modules
            raise AttributeError(name)
        return getattr(_whole(self), name)


class _Modules:
    """Finder of dynamo's other modules: the whole package is imported first, which executes most of them."""

    def __init__(self, package: _Package) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{_COMPILER}.") or sys.modules.get(_COMPILER) is not self._package:
            return None
        _whole(self._package)
        module = sys.modules.get(name)
        if module is None:
            return None
        spec = importlib.util.spec_from_loader(name, _Given(module))
        module.__spec__ = spec  # of a module that is there by now Python takes its own, and would execute it again
        return spec

    def invalidate_caches(self) -> None:
        """There are none."""


class _Given(Loader):
    """Loader of a module that is there: it only gets back what says where it is from."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


@functools.cache
def _package() -> _Package:
    """Return it with the settings, of defaults and the environment, which import nothing else of dynamo."""
    import torch

    package, name = _Package(_COMPILER), f"{_COMPILER}.config"
    spec = importlib.util.spec_from_file_location(name, Path(torch.__file__).parent / "_dynamo" / "config.py")
    assert spec is not None and spec.loader is not None, "torch has the file"
    settings = importlib.util.module_from_spec(spec)
    sys.modules[name] = settings  # where it looks itself up
    try:
        spec.loader.exec_module(settings)
    finally:
        del sys.modules[name]
    sources = ModuleType(f"{_COMPILER}.source")
    vars(sources).update({each: type(each, (_Source,), {}) for each in _SOURCES})
    # Pipelines' schedules keep the class.
    optimized = _IsOptimized("OptimizedModule", (), {})
    vars(package)["__path__"] = [str(Path(torch.__file__).parent / "_dynamo")]
    vars(package).update(config=settings, source=sources, graph_break=_ignore, OptimizedModule=optimized)
    return package


class _IsOptimized(type):
    """Type of a class whose instances are modules that `torch.compile` returned: none before dynamo is imported."""

    def __instancecheck__(cls, instance: Any) -> bool:
        found = getattr(sys.modules.get(_COMPILER), "__dict__", {}).get("OptimizedModule")
        return found is not None and found is not cls and isinstance(instance, found)


class _Source:
    """Origin of a tensor that nobody asks for."""

    def __init__(self, *args: Any) -> None:
        pass


def _ignore(*_: Any, **__: Any) -> None:
    """Break no graph, where there is none."""


def _modules(package: _Package) -> dict[str, ModuleType]:
    return {_COMPILER: package, **{f"{_COMPILER}.{name}": vars(package)[name] for name in ("config", "source")}}


def _whole(package: _Package) -> ModuleType:
    """Import the whole of dynamo."""
    _remove(package)
    return importlib.import_module(_COMPILER)


def _remove(package: _Package) -> None:
    """Let dynamo count as not imported, unless the whole of it is."""
    import torch

    for function in package.undisabled:
        if getattr(function, "__dict__", {}).get(KEPT) is function:
            delattr(function, KEPT)
    package.undisabled.clear()
    for name, module in _modules(package).items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    if vars(torch).get("_dynamo") is package:
        del _changeable(torch)._dynamo


def _changeable(owner: Any) -> Any:
    """Return a module, as what its attributes may be set of."""
    return owner
