"""Origins of every tensor in a forward on meta, propagated operator by operator."""

from __future__ import annotations

import abc
import dataclasses
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from composer3d import TransformError, torch_compat
from composer3d.propagation import attributes_of
from composer3d_plugins.scheduling.pipeline.model_copy import copy_model
from composer3d_plugins.scheduling.pipeline.plain_state import PlainState, place_name
from composer3d_plugins.scheduling.pipeline.values import Values, draw_values

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "Origins",
    "Source",
    "kept_tensors",
    "leaves_of",
    "on_meta",
    "run_forward",
    "run_on_meta",
    "same_places",
    "tensors_of",
    "to_meta",
]

# What a tensor came from: the FQN of a parameter or buffer, or what a subclass makes of modules that were called.
Source = str | int | tuple[str, int]
_PROBE = (2, 8)

W = TypeVar("W", bound="Origins")
log = logging.getLogger(__name__)


class Origins(abc.ABC):
    """Propagates the sources of every tensor through one forward.

    Args:
        model: Unchanged; a skeleton of it, on meta, runs.
    """

    repeats = False  # whether modules may take over what an equal one did, and not run

    def __init__(self, model: nn.Module) -> None:
        self.skeleton = skeleton = on_meta(model)
        self.values = Values(self._unknown)
        for empty, buffer in zip(skeleton.buffers(), model.buffers(), strict=True):
            if not buffer.is_meta:
                self.values.learn(empty, buffer)
        self._sources: dict[int, set[Source]] = defaultdict(set)
        self._alive: list[Any] = []  # a storage that is freed may give its key to another
        self._first_at: dict[int, int] = {}  # storages, and how many of these there were when each was first seen
        self._kept: dict[int, int] = {}  # tensors that a hooked module made, and the module's index
        self._entered_at = 0
        self.state = {torch_compat.storage_key(tensor): name for name, tensor in kept_tensors(skeleton)}
        self.state_reads: dict[str, set[int]] = defaultdict(set)  # places, by name
        self.written_at: dict[int, tuple[int, bool]] = {}  # storages; the last place, and whether inside of a call
        self._parameters = {id(p): fqn for fqn, p in skeleton.named_parameters()}
        self._buffers = {id(b): fqn for fqn, b in skeleton.named_buffers()}
        self._storages = {self._key(p): fqn for fqn, p in [*skeleton.named_buffers(), *skeleton.named_parameters()]}
        names = list(skeleton.named_parameters(remove_duplicate=False))
        self._firsts = {fqn: self._parameters[id(p)] for fqn, p in names}
        self._uses: dict[str, Counter[int]] = {fqn: Counter() for fqn in self._parameters.values()}
        self._running: list[dict[int, str]] = []  # of the modules at work, the names of their own parameters
        self._at_work: list[str] = []  # their FQNs
        self.checkpoints: Sequence[int] = ()  # at work in the forward, the outermost first
        self._recomputed_in: int | None = None  # the outermost one around the last call
        self._inside: int | None = None
        self.plain = PlainState(skeleton, self)
        self._costs: dict[int, float] = defaultdict(float)
        self._computed_bytes: dict[int, float] = defaultdict(float)

    def _follows_in_checkpoint(self) -> bool:
        """Note a call, and return whether the forward recomputes it together with the call before it."""
        before, self._recomputed_in = self._recomputed_in, next(iter(self.checkpoints), None)
        return before is not None and before == self._recomputed_in

    @property
    @abc.abstractmethod
    def _position(self) -> int:
        """Return the position of an operator outside of hooked modules: the next one's index, -1 before the first."""

    @property
    @abc.abstractmethod
    def call_names(self) -> Sequence[str]:
        """Names of the hooked modules in the order of their calls."""

    @property
    def place(self) -> int:
        """Index of the hooked module at work, or of the next one; -1 before the first."""
        return self._inside if self._inside is not None else self._position

    @property
    def is_inside(self) -> bool:
        """Whether a hooked module is at work."""
        return self._inside is not None

    @property
    def at_work(self) -> str:
        """FQN of the innermost module at work."""
        return self._at_work[-1] if self._at_work else ""

    def place_name(self, place: int) -> str:
        """Return the wording of a place in messages."""
        return place_name(place, self.call_names)

    def is_computed(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on parameters or on what hooked modules return."""
        sources = self._sources.get(torch_compat.storage_key(tensor), ())
        return any(not isinstance(source, str) or source in self._firsts for source in sources)

    @abc.abstractmethod
    def _needed(self, sources: set[Source], place: int) -> None:
        """Record the sources that a hooked module uses."""

    @abc.abstractmethod
    def attach(self) -> list[Any]:
        """Hook the modules whose calls are recorded; return the handles."""

    def _key(self, tensor: Tensor) -> int:
        key = torch_compat.storage_key(tensor)
        self._first_at.setdefault(key, len(self._alive))
        self._alive.append(tensor)
        return key

    def _returned(self, index: int, output: Any) -> Any:
        """Return a hooked module's output as other objects than those that it may have kept, in a list or attribute.

        Another stage receives what a module returns, and does not run what keeps it.
        """
        keys = {self._key(tensor) for tensor in tensors_of(output)}
        made = (tensor for tensor in self._alive[self._entered_at :] if torch_compat.storage_key(tensor) in keys)
        for tensor in made:
            if self._first_at[torch_compat.storage_key(tensor)] >= self._entered_at:
                self._kept[id(tensor)] = index
        return torch_compat.tree_map(_alias, output)

    def _keeper(self, tensor: Tensor) -> int | None:
        """Return the index of the hooked module that kept a tensor which is used elsewhere, not taken from a call."""
        index = self._kept.get(id(tensor))
        return None if index == self._inside else index

    # ---- operators ---------------------------------------------------------------------------------------------------

    def operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and let its results inherit the sources of its arguments."""
        taken = tensors_of((args, kwargs))
        given = self._of(taken)
        if self._inside is not None:
            self._needed(given, self._inside)
        result = self.values.run(func, args, kwargs)
        # What stands between two blocks is done where the second one is.
        place = self.place
        self._costs[place] += torch_compat.num_flops(func, args, kwargs, result)
        for tensor in taken:
            fqn = self._parameters.get(id(tensor))
            if fqn is not None:
                self._uses[fqn][place] += 1
        made, written = tensors_of(result), torch_compat.written_tensors(func, args, kwargs)
        self._note_state(taken, made, written)
        for tensor in made:
            if self._key(tensor) not in self._sources:  # not a view
                self._computed_bytes[place] += tensor.numel() * tensor.element_size()
        for tensor in [*made, *written]:
            self._sources[self._key(tensor)] |= given
        return result

    def _note_state(self, taken: Sequence[Tensor], made: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Note where buffers and attributes are read, and where tensors are written: not in views of them."""
        over = {torch_compat.storage_key(tensor) for tensor in written}
        keys = {torch_compat.storage_key(tensor) for tensor in taken} - over
        for key in keys & self.state.keys():
            self.state_reads[self.state[key]].add(self.place)
        for key in over | {torch_compat.storage_key(tensor) for tensor in made} - keys:
            self.written_at[key] = self.place, self._inside is not None

    def draw_weights(self) -> bool:
        """Give weights values at random, so that all that the forward computes has some; return whether it can have.

        Memory: of the weights, and of what the forward computes with them.
        """
        if not draw_values(self.values, list(self.skeleton.parameters())):
            return False
        self.values.is_guessing = True
        return True

    def _unknown(self, tensor: Tensor) -> None:
        """Refuse values that are read between the hooked modules: stages could take different branches."""
        computed = {source for source in self._of(tensor) if not isinstance(source, str) or source in self._firsts}
        if self._inside is None and computed:
            raise TransformError(
                f"between the modules that it calls, the forward decides by values that it has computed from "
                f"{self._described(computed)}, and stages that hold other weights would decide otherwise; move the "
                "decision into a module"
            )

    @abc.abstractmethod
    def _described(self, sources: set[Source]) -> str:
        """Return the wording of sources in messages."""

    def _of(self, value: Any) -> set[Source]:
        found: set[Source] = set()
        for tensor in tensors_of(value):
            key = self._key(tensor)
            if id(tensor) in self._parameters:
                found.add(self._name(tensor))
            elif id(tensor) in self._buffers:
                found.add(self._buffers[id(tensor)])
            elif key in self._storages and not self._sources[key]:
                found.add(self._storages[key])
            found |= self._sources[key] if id(tensor) not in self._parameters else set()
        return found

    def _name(self, parameter: Tensor) -> str:
        """Return the name under which a parameter is used: that of the innermost module at work that holds it."""
        held = (names[id(parameter)] for names in reversed(self._running) if id(parameter) in names)
        return next(held, self._parameters[id(parameter)])

    def _attach_names(self) -> list[Any]:
        handles: list[Any] = []
        for prefix, module in self.skeleton.named_modules():
            names = {id(p): f"{prefix}.{name}".lstrip(".") for name, p in module.named_parameters(recurse=False)}
            handles.append(module.register_forward_pre_hook(self._starting(prefix, names), prepend=True))
            handles.append(module.register_forward_hook(self._ending, always_call=True))
        return handles

    def _starting(self, fqn: str, names: dict[int, str]) -> Callable[..., None]:
        def start(*_: Any) -> None:
            self._running.append(names)
            self._at_work.append(fqn)

        return start

    def _ending(self, *_: Any) -> None:
        self._running.pop()
        self._at_work.pop()

    def refuse_reentrant(self) -> None:
        """Refuse a checkpoint whose backward is one of its own: stages ask for the gradients of their inputs."""
        caller = f'the forward of "{self.at_work}"' if self.at_work else "the forward"
        raise TransformError(
            f"{caller} calls torch.utils.checkpoint with "
            "use_reentrant=True, whose backward gives no gradient to another stage; write use_reentrant=False, or "
            "leave recomputation to [scheduling.activation_checkpoint]"
        )

    @staticmethod
    def caller_of(fqn: str) -> str | None:
        """Return the autograd function that calls a module in its forward, without a graph; None where none does.

        Raises:
            TransformError: A transform of `torch.func` is at work.
        """
        if torch_compat.function_transforms.is_transforming():
            raise TransformError(
                f'the forward calls "{fqn}" inside of a transform of torch.func (vmap, grad, jvp), which cannot be '
                "divided into stages; call it with the whole batch outside of transforms, have one block hold the "
                "transform and all that it calls, or replicate or shard the model instead (dp_replicate, dp_shard)"
            )
        function = torch_compat.function_transforms.calling_function()
        return None if function is None else function.__qualname__


def _alias(value: Any) -> Any:
    import torch

    return value.view_as(value) if isinstance(value, torch.Tensor) else value


def run_on_meta(make: Callable[[], W], example: Any) -> tuple[W, Any]:
    """Run the forward that is watched, and return what watched it with its output.

    What a module reads of values that depend on weights is taken to be one, or true. Code that needs more of them, such
    as the sizes of a split that have to add up, is run again with weights drawn at random, where these are few.

    Args:
        make: Makes what watches, new for every forward.
        example: `(args, kwargs)` of a forward; None tries a batch of token numbers.

    Raises:
        TransformError: The forward fails on meta.
    """
    try:
        watch = make()
        return watch, run_forward(watch, example, watch.operator)
    except TransformError:
        raise
    except Exception as error:
        try:
            watch = make()
            if watch.draw_weights():
                return watch, run_forward(watch, example, watch.operator)
        except Exception as second:  # with weights it fails too: the first error is of the code as it is
            log.debug("with random weights the forward fails too: %s", second)
        tried = "the example that compose was given" if example is not None else f"token numbers of shape {_PROBE}"
        raise TransformError(
            f"a pipeline has to see one forward to know how blocks are called, and the model does not run on meta with "
            f"{tried}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}; "
            "hand compose example=(args, kwargs), as the model takes them, or give the data set of [data] a method "
            "example() that returns an item"
        ) from error


def run_forward(watch: Origins, example: Any, operator: Callable[..., Any]) -> Any:
    """Run a forward on meta whose every operator goes to a function; return its output."""
    import torch

    args, kwargs = example if example is not None else ((torch.zeros(_PROBE, dtype=torch.int64, device="meta"),), {})
    if watch.values.is_guessing and example is None:
        args = (torch.zeros(_PROBE, dtype=torch.int64),)
    args, kwargs = torch_compat.tree_map(
        lambda leaf: watch.values.twin(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, dict(kwargs))
    )
    handles, end_recording = watch.attach(), watch.plain.record()
    try:
        with (
            torch.no_grad(),
            torch_compat.watched_checkpoints(watch.refuse_reentrant) as watch.checkpoints,
            torch_compat.dispatch_mode(operator, compiles=False, opens=False),
        ):
            return watch.skeleton(*args, **kwargs)
    finally:
        end_recording()
        for handle in handles:
            handle.remove()


def to_meta(value: Any) -> Any:
    """Return a tensor's empty twin on meta; anything else as it is."""
    import torch

    return value.detach().to("meta") if isinstance(value, torch.Tensor) else value


def on_meta(model: nn.Module) -> nn.Module:
    """Copy a model's structure; its tensors become empty twins, which costs no memory."""
    import torch
    from torch import nn

    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor):
                memo[id(value)] = value.detach().to("meta")
    for parameter in model.parameters():
        twin = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        memo[id(parameter)] = torch_compat.with_attributes_of(parameter, twin)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy_model(model, memo)


def kept_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that modules keep as attributes and buffers, by name."""
    import torch

    for fqn, module in model.named_modules():
        for name, value in (*attributes_of(module), *module.named_buffers(recurse=False)):
            if isinstance(value, torch.Tensor):
                yield f"{fqn}.{name}".lstrip("."), value


def same_places(model: nn.Module) -> list[list[str]]:
    """Return for every parameter of every module its names; several where a module is in the model more than once."""
    places: dict[tuple[int, str], list[str]] = defaultdict(list)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            places[id(module), name].append(f"{prefix}.{name}".lstrip("."))
    return list(places.values())


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts, and in what else torch takes apart."""
    import torch

    return [leaf for leaf in torch_compat.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def leaves_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output, those in dataclasses and mappings included."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves_of(getattr(value, field.name))
