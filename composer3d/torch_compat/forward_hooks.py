"""Forward hooks of a module that its forward calls itself: where code around it gives torch other tensors than it has.

Torch calls a module's hooks outside of its `forward`, with what it was called with. Where only the forward knows what
these tensors are, such as shards or what a stage of a pipeline sends, hooks are called there, in torch's order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "ForwardTables",
    "HeldHooks",
    "after",
    "are_there",
    "before",
    "calling",
    "hooks_form",
    "home_of",
    "is_users_hook",
    "leave_hooks",
    "newest",
    "num_registered",
    "of_plugins",
    "replace_hooks",
    "skip",
    "tables_of",
    "tables_of_forwards",
    "take_hooks",
    "users_hooks",
    "with_hooks",
]

# Of the attribute of a module that calls its hooks itself; copies of composed models leave such names out.
SLOT = "_composer3d_forward_hooks"
# Of that of a class whose forward does so.
CALLS = "composer3d_calls_forward_hooks"
# Packages whose hooks stay where torch calls them: they gather parameters, place batches, or note what is there.
LIBRARIES = ("torch.", "composer3d")
# Of that of a module with the keys of hooks that plugins have registered on it: those stay there, too.
PLUGINS = "_composer3d_plugin_hooks"
# Tables of hooks, private (torch 2.11-2.15).
TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


Around = Callable[[Callable[..., Any]], Callable[..., Any]]


def _as_it_is(hook: Callable[..., Any]) -> Callable[..., Any]:
    return hook


# What code can register.
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
# Of those that a forward asks, and of what they say of its hooks.
FORWARD_TABLES = ("_forward_pre_hooks", "_forward_hooks")
FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class _Hooks:
    """Hooks of the call at work, in order, each with whether it takes arguments by name."""

    def __init__(self) -> None:
        self.before: list[tuple[Any, bool]] = []
        self.after: list[tuple[Any, bool]] = []
        self.is_called = self.is_done = False
        self.is_cut, self.around = [False], _as_it_is

    def __deepcopy__(self, memo: Any) -> _Hooks:
        return _Hooks()

    def __reduce__(self) -> Any:
        return _Hooks, ()


def take_hooks(module: nn.Module) -> None:
    """State of a module that its forward calls its hooks, see `before` and `after`, until `leave_hooks`."""
    vars(module).setdefault(SLOT, _Hooks())


def leave_hooks(module: nn.Module) -> None:
    """State of a module that torch calls its hooks again."""
    vars(module).pop(SLOT, None)


@contextlib.contextmanager
def calling(module: nn.Module) -> Iterator[None]:
    """Keep torch from calling a module's hooks in a call inside, if its forward does.

    Hooks of libraries and plugins are left to torch. Those of all modules (`register_module_forward_hook`) are called
    by torch for others. The tables are private (torch 2.11-2.15); behind the call they are as they were.
    """
    hooks: _Hooks | None = vars(module).get(SLOT)
    if hooks is None:
        yield
        return
    from torch.nn.modules import module as modules

    known: Any = vars(modules)
    hooks.before, hooks.after, hooks.is_called, hooks.is_done, hooks.is_cut = [], [], True, False, [False]
    replaced: list[tuple[MutableMapping[int, Any], int, Any, Any]] = []
    named = module._forward_pre_hooks_with_kwargs
    for table, key, hook in users_hooks(known["_global_forward_pre_hooks"], module._forward_pre_hooks, of=module):
        hooks.before.append((hook, table is module._forward_pre_hooks and key in named))
        replaced.append((table, key, hook, _left_out(module, hook, lambda: hooks.is_called, hooks.around)))
    named, everywhere = module._forward_hooks_with_kwargs, known["_global_forward_hooks_with_kwargs"]
    for table, key, hook in users_hooks(known["_global_forward_hooks"], module._forward_hooks, of=module):
        hooks.after.append((hook, key in named or key in everywhere))
        replaced.append((table, key, hook, _left_out(module, hook, lambda: hooks.is_done, hooks.around)))
    if getattr(type(module), CALLS, False):
        backward = (known["_global_backward_pre_hooks"], known["_global_backward_hooks"])
        is_cut = hooks.is_cut  # of this call: hooks run in its backward
        for table, key, hook in users_hooks(*backward, module._backward_pre_hooks, module._backward_hooks, of=module):
            replaced.append((table, key, hook, _left_out(module, hook, lambda: is_cut[0])))
    for table, key, _, other in replaced:
        table[key] = other
    try:
        yield
    finally:
        hooks.is_called = hooks.is_done = False
        for table, key, hook, other in replaced:
            if table.get(key) is other:
                table[key] = hook


def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the hooks that precede a forward; return its arguments.

    Raises:
        RuntimeError: As torch's, of a hook that takes arguments by name and returns something else than both.
    """
    hooks: _Hooks | None = vars(module).get(SLOT)
    if hooks is None or not hooks.is_called:
        return args, kwargs
    for each, takes_names in hooks.before:
        hook = hooks.around(each)
        if not takes_names:
            if (given := hook(module, args)) is not None:
                args = given if isinstance(given, tuple) else (given,)
        elif (given := hook(module, args, kwargs)) is not None:
            if not isinstance(given, tuple) or len(given) != 2:
                raise RuntimeError(
                    f"forward pre-hook must return None or a tuple of (new_args, new_kwargs), not {given}"
                )
            args, kwargs = given
    return args, kwargs


def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Call the hooks that follow a forward; return its output.

    Args:
        module: Which has run.
        args: As `before` has returned them.
        kwargs: Likewise.
        output: Of the forward.
    """
    hooks: _Hooks | None = vars(module).get(SLOT)
    if hooks is None or not hooks.is_called:
        return output
    for each, takes_names in hooks.after:
        hook = hooks.around(each)
        found = hook(module, args, kwargs, output) if takes_names else hook(module, args, output)
        output = output if found is None else found
    hooks.is_called, hooks.is_done = False, True
    return output


def skip(module: nn.Module) -> None:
    """Leave out the hooks on the output of a forward, and on its gradient: it has ended before its end."""
    hooks: _Hooks | None = vars(module).get(SLOT)
    if hooks is not None and hooks.is_called:
        hooks.is_called, hooks.is_done, hooks.is_cut[0] = False, True, True


def with_hooks(module: nn.Module, forward: Callable[..., Any], *, around: Around = _as_it_is) -> Callable[..., Any]:
    """Return a forward that calls a module's hooks around another; the same one where its class does so already.

    Args:
        module: Whose hooks.
        forward: Its.
        around: Returns what is called in place of a hook of the module, or of all modules where that is of one inside.
    """
    take_hooks(module)
    vars(module)[SLOT].around = lambda hook: around(hook)  # what searches a model for tensors enters no such function
    if getattr(type(module), CALLS, False):
        return forward

    @functools.wraps(forward)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(module, args, kwargs)
        return after(module, args, kwargs, forward(*args, **kwargs))

    return hooked


def tables_of(modules: Iterable[nn.Module]) -> list[MutableMapping[int, Any]]:
    """Return the tables of the hooks of modules, and of those of all modules: their lengths change with the hooks."""
    from torch.nn.modules import module as home

    everywhere = [vars(home)[f"_global{name}"] for name in TABLES]
    return [*everywhere, *(getattr(module, name) for module in modules for name in TABLES)]


def tables_of_forwards(modules: Iterable[nn.Module]) -> list[MutableMapping[int, Any]]:
    """Return the tables of the hooks before and after forwards, of modules whose hooks torch calls."""
    return [getattr(module, name) for module in modules if SLOT not in vars(module) for name in TABLES[:2]]


def replace_hooks(tables: Iterable[MutableMapping[int, Any]], around: Around) -> None:
    """Put what `around` returns in the place of hooks that are no library's."""
    for table, key, hook in list(users_hooks(*tables)):
        table[key] = around(hook)


def are_there(tables: Iterable[MutableMapping[int, Any]]) -> bool:
    """Return whether tables have hooks that are no library's."""
    return next(users_hooks(*tables), None) is not None


def newest(tables: Iterable[MutableMapping[int, Any]]) -> int:
    """Return the number of the hook in tables that was registered last; numbers grow (torch 2.11-2.15)."""
    return max(map(max, filter(None, tables)), default=-1)


def hooks_form(root: nn.Module) -> Hashable:
    """Return what tells hooks of a module, and of those in it, that are no library's, from those of another one.

    Likewise of functions that modules hold, which their code may register. Equal blocks have equal forms: a function is
    told by its code, what it holds by its value, a module inside by its name, and other objects by their identity.
    """
    names = {id(module): name for name, module in root.named_modules()}
    found: list[Hashable] = []
    for name, module in root.named_modules():
        for table in TABLES:
            found += ((name, table, _form(hook, names)) for _, _, hook in users_hooks(getattr(module, table)))
        for key, value in vars(module).items():
            if isinstance(value, FUNCTIONS) and key != "forward":
                found.append((name, key, _form(value, names)))
    return tuple(found)


def _form(value: Any, names: Mapping[int, str], within: tuple[int, ...] = ()) -> Hashable:
    if isinstance(value, bool | int | float | str | None):
        return (type(value), value)
    if id(value) in names or id(value) in within:
        return (type(value), names.get(id(value), id(value)))
    within, held = (*within, id(value)), [type(value), id(value)]
    if isinstance(value, functools.partial):
        held = [value.func, *value.args, *itertools.chain.from_iterable(sorted(value.keywords.items()))]
    elif isinstance(value, types.MethodType):
        held = [value.__func__, value.__self__]
    elif isinstance(value, types.FunctionType):
        held = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                held.append(cell.cell_contents)
        return (value.__code__, *(_form(each, names, within) for each in held))
    else:
        return tuple(held)
    return tuple(_form(each, names, within) for each in held)


def num_registered() -> int:
    """Return a number that grows with every hook, on anything, that is registered (torch 2.11-2.15)."""
    from torch.utils.hooks import RemovableHandle

    return int(RemovableHandle.next_id)


@contextlib.contextmanager
def of_plugins(module: nn.Module) -> Iterator[None]:
    """State that hooks which are registered inside, on a module or on those in it, are a plugin's.

    Hooks have numbers that grow (torch 2.11-2.15).
    """
    first = num_registered()
    yield
    if num_registered() == first:
        return
    for inner in module.modules():
        if keys := {key for name in TABLES for key in getattr(inner, name) if key >= first}:
            vars(inner)[PLUGINS] = vars(inner).get(PLUGINS, frozenset()) | keys


class HeldHooks:
    """Hooks that a forward has, for one that is run again when some are gone, and others there.

    Hooks of libraries are as they are then: tools that observe modules enter and leave as they like.

    Args:
        tables: In which these are found.

    Attributes:
        keys: Their numbers.
    """

    def __init__(self, tables: ForwardTables) -> None:
        self._tables, self.keys, self._held = tables, tables.keys(), []
        if self.keys:
            self._held = [(place, dict(table)) for place, table in enumerate(tables.all) if table]

    @contextlib.contextmanager
    def again(self) -> Iterator[list[Any]]:
        """Let modules inside have these hooks; yield those that they do not have outside."""
        if self._tables.keys() == self.keys:
            yield []
            return
        held, now, gone = dict(self._held), [dict(table) for table in self._tables.all], []
        for place, (table, there) in enumerate(zip(self._tables.all, now, strict=True)):
            # What says how to call a hook is True, and left for those that are gone, too.
            before = held.get(place, {}).items()
            then = {key: there.get(key, hook) for key, hook in before if key in there or _is_kept(hook)}
            gone += [hook for key, hook in then.items() if key not in there and hook is not True]
            table.clear()
            table.update(then)
            table.update((key, hook) for key, hook in there.items() if key not in then and not _is_kept(hook))
        try:
            yield gone
        finally:
            for table, there in zip(self._tables.all, now, strict=True):
                table.clear()
                table.update(there)


class ForwardTables:
    """Tables in which forwards of modules, and of all modules, find hooks, and how to call them.

    Args:
        modules: Whose.

    Attributes:
        all: Those with hooks first.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        from torch.nn.modules import module as home

        owners, known = list(modules), vars(home)
        self._found, flags = (
            [
                *(known[f"_global{name}"] for name in names if f"_global{name}" in known),
                *(getattr(module, name) for module in owners for name in names),
            ]
            for names in (FORWARD_TABLES, FLAGS)
        )
        self.all: list[MutableMapping[int, Any]] = [*self._found, *flags]

    def keys(self) -> tuple[int, ...]:
        """Return the numbers of all hooks that are there, in order; microseconds where there are none."""
        return tuple(itertools.chain.from_iterable(self._found)) if any(self._found) else ()


def _is_kept(hook: Any) -> bool:
    return hook is True or is_users_hook(hook)


def _left_out(
    module: nn.Module, hook: Callable[..., Any], is_left: Callable[[], bool], around: Around = _as_it_is
) -> Callable[..., Any]:
    elsewhere = around(hook)

    @functools.wraps(hook, updated=())
    def other(owner: nn.Module, *given: Any) -> Any:
        if owner is not module:
            return elsewhere(owner, *given)
        return None if is_left() else hook(owner, *given)

    return other


def users_hooks(
    *tables: MutableMapping[int, Any], of: nn.Module | None = None
) -> Iterator[tuple[MutableMapping[int, Any], int, Any]]:
    """Yield the hooks in tables, of a module and of all modules, that are no library's and no plugin's."""
    plugins = () if of is None else vars(of).get(PLUGINS, ())
    for table in tables:
        for key, hook in table.items():
            if key not in plugins and is_users_hook(hook):
                yield table, key, hook


def home_of(hook: Any) -> str:
    """Return the dotted name of the module that defines a hook, or the function of a partial one."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(getattr(hook, "__self__", hook)).__module__)


def is_users_hook(hook: Any) -> bool:
    """Return whether a hook of a module is no library's."""
    return not f"{home_of(hook)}.".startswith(LIBRARIES)
