"""torch.compile, a block at a time."""

from __future__ import annotations

import contextlib
import functools
import getpass
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from composer3d import (
    Decisions,
    LayoutOffer,
    LayoutTraits,
    Phase,
    PluginError,
    RunContext,
    Transform,
    hookimpl,
    plugin,
    select_fqns,
    torch_compat,
)

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)

# Other plugins mark with this attribute a forward that cannot be compiled.
EAGER = "composer3d_eager"
# And with this one a forward of which graphs can be captured; see CONTRIBUTING.md.
CAPTURED = "composer3d_captured"
# Of one that may be a part of such a graph: with equal arguments it does the same.
REPEATABLE = "composer3d_repeatable"
# So many forms of each block are compiled: in training and evaluation, with other sizes, numbers and hooks.
FORMS = 8
# Backends that run the graphs they are given, and keep for the backward what eager code keeps (torch 2.13).
_UNFUSED = frozenset(("eager", "eager_noexcept", "eager_debug", "pre_dispatch_eager", "aot_eager_default_partitioner"))


def _table(wanted: LayoutTraits, degrees: Mapping[str, int]) -> Mapping[str, Any] | None:
    """Compile blocks where pointwise operators are to be fused."""
    return {} if wanted.is_compiled else None


@plugin(family="scheduling", offer=LayoutOffer(table=_table, choices={"is_compiled": (True,)}))
class Compile:
    """Compile every block by itself: equal blocks compile once, and FQNs stay.

    Blocks are compiled after recomputation, so that the compiler sees it, and before data parallelism, so that it does
    not see its collectives. The first step compiles: tens of seconds without a warm cache. Fused operators round less
    often than one after the other; for `verify`, inductor is set to round as these do. Blocks over a sharded sequence,
    whose code is propagated, are captured as graphs of what the propagation makes of them, and these are compiled.
    Memory: usually less than eager, because fused operators keep less.
    Collectives: none of its own.

    Args:
        units: Patterns of the modules that are compiled; default: the model's blocks.
        backend: A torch.compile backend.
        mode: A torch.compile mode.
        fullgraph: Fail where the compiler would fall back to Python inside a block. Where a plugin does something there
            that no compiler can follow, such as dropout that differs between ranks along tp, or units of norms that are
            gathered by themselves, that is run as it is.
        dynamic: Compile for changing shapes; default: when torch sees them change.
    """

    units: tuple[str, ...] | None = None
    backend: str = Field(default="inductor", examples=["aot_eager"])
    mode: str | None = None
    fullgraph: bool = True
    dynamic: bool | None = None

    @hookimpl
    def composer3d_layout(self, degrees: Mapping[str, int]) -> LayoutTraits:
        """Describe the part in a layout."""
        return LayoutTraits(is_compiled=self.backend not in _UNFUSED)

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse options that would fail in the first step, minutes later."""
        compiler = os.environ.get("CXX", "g++")
        if self.backend == "inductor" and context.device.type == "cpu" and shutil.which(compiler) is None:
            raise PluginError(
                f'backend = "inductor" needs a C++ compiler on CPU, and "{compiler}" is not found',
                hint='install g++, or write backend = "aot_eager"',
            )
        if self.backend == "inductor" and context.purpose == "run":
            _refuse_cache_of_others()

    @hookimpl
    def composer3d_reschedule(self, context: RunContext) -> Transform:
        """Compile the blocks in place."""
        return Transform(name="compile", phase=Phase.COMPILE, select=self._select, apply=self._apply)

    def _select(self, model: nn.Module, context: RunContext) -> list[str]:
        import torch

        known = torch.compiler.list_backends(exclude_tags=())
        if self.backend not in known:
            raise PluginError(f'"{self.backend}" is not a torch.compile backend', hint="one of: " + ", ".join(known))
        patterns = (context.blocks,) if self.units is None else self.units
        return [fqn for pattern in patterns for fqn in select_fqns(pattern, context.fqns)]

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        torch_compat.hide_compiler_warnings()
        # `verify` compares with one device that is not compiled: at a tie, as fake-quantised weights have them, a
        # rounding less between two operators decides for the other side.
        keep_roundings = self.backend == "inductor" and context.purpose == "verify"
        compiled = functools.partial(
            torch_compat.compile_graph, backend=self.backend, mode=self.mode, keep_roundings=keep_roundings
        )
        left: dict[str, str] = {}
        for fqn in fqns:
            unit = model.get_submodule(fqn)
            if _is_eager(unit):
                # Never the compiler's: it would trace the hooks around, in which other plugins' modes are at work.
                why = _captured(unit, fqn, compiled, context, recomputes=self.backend not in _UNFUSED)
                left |= {fqn: why} if why else {}
                continue
            for name, module in unit.named_modules():
                if name and _is_eager(module):
                    _captured(module, f"{fqn}.{name}", compiled, context, recomputes=self.backend not in _UNFUSED)
            held = [_run_eagerly(module) for module in unit.modules()]
            # Units of data parallelism inside gather and reduce in hooks, which torch keeps the compiler out of.
            held.append(any(own.startswith(f"{fqn}.") for own in context.own_units))
            fullgraph = self.fullgraph and not any(held)
            torch_compat.compile_module(
                unit,
                backend=self.backend,
                mode=self.mode,
                keep_roundings=keep_roundings,
                fullgraph=fullgraph,
                dynamic=self.dynamic,
                most_forms=FORMS * len(fqns),
                told=functools.cache(functools.partial(_tell_of_forms, fqn, FORMS * len(fqns))),
                hooked=functools.cache(functools.partial(_tell_of_hooks, fqn)),
            )
        _report(left, len(fqns), context)
        return list(fqns)


def _tell_of_forms(fqn: str, number: int) -> None:
    log.warning(
        'compile: "%s" runs as it is where it is called in another way than before, since its code was compiled %d '
        "times: sizes, or numbers that it reads, change all the time",
        fqn,
        number,
    )


def _tell_of_hooks(fqn: str) -> None:
    log.warning(
        'compile: "%s" runs as it is while it has hooks, which are given activations of all ranks: no compiler sees it',
        fqn,
    )


def _report(left: Mapping[str, str], num_units: int, context: RunContext) -> None:
    """Say which blocks run as they are, to a plan by name and to who runs them in one line."""
    context.stash(Decisions).notes += [f'compile: "{fqn}" runs as it is, since {why}' for fqn, why in left.items()]
    if left and context.purpose == "run":
        fqn, why = next(iter(left.items()))
        log.warning('compile: %d of %d blocks run as they are: "%s", since %s', len(left), num_units, fqn, why)


def _is_eager(unit: nn.Module) -> bool:
    """Return whether no compiler can follow a module's own forward, or what of it is recomputed."""
    forward = vars(unit).get("forward")
    recomputed = forward.args if isinstance(forward, functools.partial) else ()
    return any(getattr(each, EAGER, False) for each in (forward, *recomputed))


def _refuse_cache_of_others() -> None:
    """Refuse inductor's cache where another user may have prepared it: its name is known, and code in it is run.

    One that `TORCHINDUCTOR_CACHE_DIR` names elsewhere is its owner's affair.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # of a container whose user has no name; torch does as much
        user = f"uid_{os.getuid()}"
    folder = Path(tempfile.gettempdir(), f"torchinductor_{user}")
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(folder)) != str(folder):
        return
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    owner, mode = folder.lstat().st_uid, folder.stat().st_mode
    if owner != os.getuid() or mode & 0o002:
        whose = f"belongs to user {owner}" if owner != os.getuid() else "is writable for all users"
        raise PluginError(
            f"{folder} {whose}, and the compiler runs code that lies in it",
            hint="remove it, or set TORCHINDUCTOR_CACHE_DIR to a folder of your own",
        )


def _captured(
    unit: nn.Module,
    fqn: str,
    compiled: Callable[[Any], Callable[..., Any]],
    context: RunContext,
    *,
    recomputes: bool,
) -> str:
    """Let a module whose code is propagated run compiled graphs of what the propagation does.

    Args:
        unit: The module.
        fqn: Its name.
        compiled: Compiles a graph.
        recomputes: Whether a graph of a backward may compute again what is cheap to.

    Returns:
        Why it cannot; empty where it does.
    """
    forward = vars(unit).get("forward")
    recomputed = forward.args if isinstance(forward, functools.partial) else ()
    if not any(hasattr(each, CAPTURED) for each in (forward, *recomputed)):
        return "its code is propagated, and no graph is captured of that"
    if why := _why_not_captured(unit, fqn, context):
        return why

    def replaced(each: Any) -> Any:
        return getattr(each, CAPTURED)(compiled, recomputes=recomputes) if hasattr(each, CAPTURED) else each

    if isinstance(forward, functools.partial):
        unit.forward = functools.partial(forward.func, *map(replaced, forward.args), **forward.keywords)
    else:
        unit.forward = replaced(forward)
    return ""


def _why_not_captured(unit: nn.Module, fqn: str, context: RunContext) -> str:
    """Return why no graph of a propagated module can be captured; empty where one can."""
    from torch import Tensor
    from torch.nn import Parameter

    for name, module in unit.named_modules():
        inner = vars(module).get("forward")
        if name and getattr(inner, EAGER, False) and not (hasattr(inner, CAPTURED) or hasattr(inner, REPEATABLE)):
            return f'no compiler can follow "{fqn}.{name}"'
        held = map(torch_compat.held_tensor, module.parameters(recurse=False))
        if any(type(each) not in (Tensor, Parameter) for each in held):
            return f'weights of "{fqn}.{name}" are converted'.replace('."', '"')
    if any(own.startswith(f"{fqn}.") for own in context.own_units):
        return "modules in it are gathered by themselves"
    return ""


def _run_eagerly(module: nn.Module) -> bool:
    """Exclude the Python code of plugins inside a module from compilation; return whether there is any."""
    import torch

    forward = vars(module).get("forward")
    if getattr(forward, EAGER, False):
        module.forward = torch.compiler.disable(forward)
    elif isinstance(forward, functools.partial) and any(getattr(each, EAGER, False) for each in forward.args):
        # A recomputed module: what is recomputed is among the arguments.
        args = [torch.compiler.disable(each) if getattr(each, EAGER, False) else each for each in forward.args]
        module.forward = functools.partial(forward.func, *args, **forward.keywords)
    else:
        return False
    return True
