"""Recording of a model factory: it runs once, on meta, and its operators are kept for replay."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from composer3d.errors import ComposerError, InitialisationError, describe_error, is_interrupt
from composer3d.initialisation.operation_log import Entry, Log, TensorSpec
from composer3d.initialisation.reachable import reachable_tensors
from composer3d.initialisation.recipe import Recipe
from composer3d.initialisation.sharing import refuse_shared_memory
from composer3d.initialisation.source_lines import is_torch, place_of_error, user_place
from composer3d.initialisation.ties import named_tensors, ties
from composer3d.initialisation.unreadable import unreadable
from composer3d.torch_compat import (
    dispatch_mode,
    has_argument,
    recomputed_tensors,
    storage_key,
    tree_leaves,
    tree_map,
    written_tensors,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["record"]

_INSTEAD = 'set [model] build = "host", or hand compose a module that is already built'
# These leave torch without passing an operator, so they are seen by name; all other reads end in a tagged operator.
_READERS = ("tolist", "numpy", "__array__", "__dlpack__")
_MOVERS = ("cpu", "cuda", "xpu")
_MAKERS_FROM_DATA = ("tensor", "as_tensor", "asarray")


def record(factory: Callable[[], nn.Module]) -> tuple[nn.Module, Recipe]:
    """Run a factory once with all tensors on meta, and keep the history of each.

    Tensors land on meta whatever device the factory asks for; the values that it writes down itself (torch.tensor of
    numbers, from_numpy) are kept. Initialisers that look at their tensor, and would do nothing on meta, are recorded
    whole. torch's random state is left as it was. Memory: no parameter gets any. Collectives: none.

    Args:
        factory: Makes the model; called once.

    Returns:
        The model on meta, and how to make its tensors.

    Raises:
        InitialisationError: The factory reads values, loads data, draws from a generator of its own, fails, or does not
            return a module whose tensors it made; the message begins with the line at fault.
    """
    import torch
    from torch import nn

    recorder = _Recorder()
    state = torch.get_rng_state()
    try:
        with recorder.modes():
            module = factory()
    except ComposerError:
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        said = describe_error(error)
        on_meta = isinstance(error, NotImplementedError) or "meta" in said
        hint = f"; if it needs values, which are not there while it is recorded: {_INSTEAD}" if on_meta else ""
        raise InitialisationError(f"{place_of_error(error)}the factory raised {said}{hint}") from error
    finally:
        if not torch.equal(torch.get_rng_state(), state):
            logging.getLogger(__name__).warning("the factory seeds torch, which has no effect: the run's seed decides")
            torch.set_rng_state(state)
    if not isinstance(module, nn.Module):
        raise InitialisationError(f"the factory returned {type(module).__name__}, not a torch.nn.Module")
    return module, recorder.finish(module)


class _Recorder:
    """Hears every operator and every torch function of a factory."""

    def __init__(self) -> None:
        self._log = Log()
        self._made: set[int] = set()
        self._twins: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._calling: Callable[..., Any] | None = None
        self._is_inside = False  # our own operators, and those of torch's kernels on meta, are not the factory's
        self._is_paused = False

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Record inside."""
        from torch.overrides import TorchFunctionMode

        handler = self._function

        class Mode(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return handler(func, args, dict(kwargs or {}))

        with Mode(), dispatch_mode(self._operator, compiles=False):
            yield

    # ---- functions, as Python calls them -----------------------------------------------------------------------------

    def _function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch

        if self._is_inside:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__" and func in (torch.Tensor.is_meta.__get__, torch.Tensor.device.__get__):  # type: ignore[attr-defined]
            return self._where(func, args[0])
        if getattr(func, "__module__", None) == "torch.nn.init":
            return self._initialiser(func, args, kwargs)
        if name in _READERS + _MOVERS and func == getattr(torch.Tensor, name, None):
            if name in _READERS:
                raise self._reads(func)
            return args[0]
        func, args, kwargs = _on_meta(func, args, kwargs)
        self._calling = func
        try:
            return func(*args, **kwargs)
        finally:
            self._calling = None

    def _where(self, getter: Any, tensor: Tensor) -> Any:
        """Answer `tensor.is_meta` and `tensor.device`.

        To the factory its tensors are on the CPU, so that code which skips tensors on meta does its work. torch hears
        the truth; but an initialiser of torch.nn.init that asks is about to return at once, and is recorded whole.
        """
        import torch

        frame: FrameType | None = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__") == __name__:
            frame = frame.f_back
        truth = getter(tensor)
        if frame is None or not tensor.is_meta:
            return truth
        if not is_torch(frame.f_code.co_filename):
            return torch.device("cpu") if isinstance(truth, torch.device) else False
        if truth is True and frame.f_globals.get("__name__") == "torch.nn.init":
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            func = getattr(torch.nn.init, code.co_name)
            self._add_initialiser(func, (), {name: frame.f_locals[name] for name in names})
        return truth

    def _initialiser(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let an initialiser check its arguments on meta, then record it whole."""
        self._is_paused = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._is_paused = False
        self._add_initialiser(func, args, kwargs)
        return result

    def _add_initialiser(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        args, kwargs = tree_map(self._enter, args), tree_map(self._enter, kwargs)
        target = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        spec = self._spec(target)
        self._add(
            run=func,
            name=f"torch.nn.init.{func.__name__.removeprefix('_no_grad_')}",
            args=tree_map(self._spec, args),
            kwargs=tree_map(self._spec, kwargs),
            reads=frozenset(),
            writes=frozenset([spec.storage]),
            overwrites=spec.storage if self._log.covers(spec) else None,
            is_random=True,
        )

    # ---- operators, as torch dispatches them -------------------------------------------------------------------------

    def _operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        was_inside, self._is_inside = self._is_inside, True
        try:
            return self._run(func, args, dict(kwargs))
        finally:
            self._is_inside = was_inside

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch

        if torch.Tag.data_dependent_output in func.tags:
            raise self._reads(self._calling or func)
        args, kwargs = tree_map(self._enter, args), tree_map(self._enter, kwargs)
        if kwargs.get("device") is not None or (not _tensors((args, kwargs)) and has_argument(func, "device")):
            kwargs["device"] = torch.device("meta")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        recorded, options = tree_map(self._spec, (args, kwargs))
        written = frozenset(self._log.spec(tensor).storage for tensor in written_tensors(func, args, kwargs))
        try:
            # torch's kernels on meta for random numbers import dynamo and sympy, 0.9 s, only to return their argument.
            result = args[0] if _draws_in_place(func) else func(*args, **kwargs)
        except NotImplementedError as error:
            # Operators with data-dependent shapes (nonzero, masked_select) have no kernel on meta.
            raise self._reads(self._calling or func) from error
        self._after(func, recorded, options, written, result)
        return result

    def _after(self, func: Any, args: Any, kwargs: Any, written: frozenset[int], result: Any) -> None:
        """Log an operator, unless it only made a view or empty memory."""
        import torch

        outputs = _tensors(result)
        is_view_change = torch.Tag.inplace_view in func.tags  # set_ may bring a storage from elsewhere
        fresh = {storage_key(tensor) for tensor in outputs if not (is_view_change or self._log.knows(tensor))}
        self._made |= fresh
        name = func.name().partition(".")[0]
        is_empty = name.removeprefix("aten::").startswith(("empty", "new_empty"))
        if self._is_paused or is_empty or is_view_change or not (fresh or written):
            for tensor in outputs:
                self._log.spec(tensor)
            return
        made = tuple(self._log.spec(tensor) for tensor in outputs)
        overwrites = self._log.overwritten(name, args)
        sources = args[1:] if overwrites is not None else args
        reads = {leaf.storage for leaf in tree_leaves((sources, kwargs)) if isinstance(leaf, TensorSpec)}
        self._add(
            run=func,
            name=func.name(),
            args=args,
            kwargs=kwargs,
            outputs=made,
            reads=frozenset(reads),
            writes=written | {spec.storage for spec in made},
            overwrites=overwrites,
            is_random=torch.Tag.nondeterministic_seeded in func.tags,
        )

    def _add(self, *, outputs: tuple[TensorSpec, ...] = (), **fields: Any) -> None:
        import torch

        place = user_place(inspect.currentframe())
        self._log.add(Entry(outputs=outputs, dtype=torch.get_default_dtype(), place=place, **fields))

    def _spec(self, value: Any) -> Any:
        import torch

        return self._log.spec(value) if isinstance(value, torch.Tensor) else value

    def _enter(self, value: Any) -> Any:
        """Let an argument into the recording: real tensors become constants, other sources of values are refused."""
        import torch

        if isinstance(value, torch.Generator):
            raise self._refusal("the factory draws from a torch.Generator of its own, which cannot be recorded")
        if isinstance(value, torch.UntypedStorage) and value.device.type != "meta":
            raise self._refusal("the factory loads data, and there is no memory for it while it is recorded")
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type != "meta":
            return self._twin(value)
        if storage_key(value) not in self._made:
            raise self._refusal("the factory uses a tensor on meta that was made outside of it")
        return value

    def _twin(self, tensor: Tensor) -> Tensor:
        """Return a meta tensor for a real one, whose whole storage is kept as a constant."""
        import torch

        tensor = tensor.detach().resolve_conj().resolve_neg()
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key not in self._twins:
            values = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            twin = torch.empty(values.numel(), dtype=torch.uint8, device="meta")
            self._made.add(storage_key(twin))
            self._log.constants[self._log.spec(twin).storage] = values.to("cpu", copy=True)
            self._twins[key] = (storage, twin)
        memory = self._twins[key][1].untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device="meta")
        return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _reads(self, func: Callable[..., Any]) -> InitialisationError:
        from torch.overrides import resolve_name

        what = resolve_name(func) or getattr(func, "__name__", str(func))
        return self._refusal(f"the factory reads values of a tensor ({what}), and there are none while it is recorded")

    def _refusal(self, message: str) -> InitialisationError:
        return InitialisationError(f"{user_place(inspect.currentframe())}{message}; {_INSTEAD}")

    # ---- the end -----------------------------------------------------------------------------------------------------

    def finish(self, module: nn.Module) -> Recipe:
        """Look up what every parameter, buffer and attribute has become.

        Raises:
            InitialisationError: A tensor was made outside the factory, or cannot be reached from the model.
        """
        if (what := unreadable(module)) is not None:
            raise InitialisationError(what)
        tensors = dict(named_tensors(module))
        attributes = _attributes(module, {id(tensor) for tensor in tensors.values()})
        loose = _loose(module, {id(tensor) for tensor in tensors.values()} | {id(t) for t in attributes.values()})
        everything = {**tensors, **attributes, **loose}
        for fqn, tensor in everything.items():
            if tensor.device.type != "meta" or storage_key(tensor) not in self._made:
                raise InitialisationError(f'"{fqn}" was made outside of the factory; {_INSTEAD}')
        specs = {fqn: self._log.spec(tensor) for fqn, tensor in everything.items()}
        anew = recomputed_tensors(module)  # no view any more in the first forward
        others = {name: each for name, each in {**attributes, **loose}.items() if id(each) not in anew}
        refuse_shared_memory(tensors, others)
        return Recipe(self._log, specs, ties=ties(module), attributes=tuple(attributes), loose=loose)


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Turn a call that names a device into one on meta, except for those that make tensors of data."""
    import torch

    if func == torch.Tensor.new_tensor:
        # On meta it would drop the data.
        kwargs["dtype"] = kwargs.get("dtype") or args[0].dtype
        func, args = torch.tensor, args[1:]
    if func in [getattr(torch, maker) for maker in _MAKERS_FROM_DATA]:
        kwargs["device"] = "cpu"
    elif kwargs.get("device") is not None:
        kwargs["device"] = "meta"
    if func == torch.Tensor.to:
        args = tuple("meta" if isinstance(value, str | torch.device) else value for value in args)
    return func, args, kwargs


def _draws_in_place(func: Any) -> bool:
    import torch

    return torch.Tag.nondeterministic_seeded in func.tags and func.name().partition(".")[0].endswith("_")


def _tensors(tree: Any) -> list[Tensor]:
    import torch

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _attributes(module: nn.Module, registered: set[int]) -> dict[str, Tensor]:
    """Return the tensors that modules hold as plain attributes, which no torch function would find."""
    import torch

    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, owner in module.named_modules()
        for name, value in vars(owner).items()
        if isinstance(value, torch.Tensor) and id(value) not in registered
    }


def _loose(module: nn.Module, known: set[int]) -> dict[str, Tensor]:
    """Return the tensors on meta that containers, closures and hooks hold, by how they are reached."""
    found: dict[str, Tensor] = {}
    for reached in reachable_tensors(module):
        if reached.tensor.is_meta and id(reached.tensor) not in known:
            if not reached.is_ordered:
                raise InitialisationError(
                    f'"{reached.path}" is in a set of tensors, which has no order that is the same on all ranks; '
                    "keep them in a list, or register them with register_buffer(name, tensor, persistent=False)"
                )
            known.add(id(reached.tensor))
            found.setdefault(reached.path, reached.tensor)
    return found
