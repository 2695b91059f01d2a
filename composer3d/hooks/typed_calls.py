"""Typed calls of hooks over pluggy, one method per hook, with validated results."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pluggy

from composer3d.errors import PluginError, QueryError, did_you_mean
from composer3d.hooks.blame import BlamedAction, CheckedHook, Returned, Turns
from composer3d.hookspecs import HookSpecs
from composer3d.interfaces import GradScaler, LayoutTraits, Stateful
from composer3d.registry import GROUP, Registered
from composer3d.transform import StepAction

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from composer3d.communication import GroupOptions
    from composer3d.context import RunContext
    from composer3d.interfaces import (
        Action,
        Dtypes,
        LossFunction,
        ParameterMesh,
        Part,
        Recorder,
        Schedule,
        Split,
    )
    from composer3d.replicas import ReplicaPolicy

__all__ = ["Bound", "Hooks"]

# Hooks that return transforms, in call order; transforms declare their own order.
_TRANSFORMS = ("composer3d_convert", "composer3d_shard", "composer3d_reschedule", "composer3d_collectives")
# Parameters that a hook can pass by name.
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
Bound = tuple[Registered, CheckedHook]  # an implementation as a function of the spec's keyword arguments


class Hooks:
    """The plugins of one run.

    Queries call every implementation and return one answer; two different ones raise `QueryError`.
    What a hook raises that is no ComposerError becomes a `HookError`, which names plugin, table and hook; so does an
    answer that is not of the type that the hook's spec states, or that cannot be used.

    Args:
        plugins: Of the manifest.

    Raises:
        PluginError: Two plugins of one name, a hook that is not marked, or one that no spec knows.
    """

    def __init__(self, plugins: Sequence[Registered]) -> None:
        self.plugins = tuple(sorted(plugins, key=lambda plugin: plugin.name))
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(HookSpecs)
        for registered in self.plugins:
            self._register(registered)
        self._implementers: dict[str, tuple[Bound, ...]] = {}
        self.acts: Callable[[str, Callable[..., Any]], Callable[..., Any]] = lambda plugin, function: function

    # ---- sharding ----------------------------------------------------------------------------------------------------

    def parameter_mesh(self, context: RunContext, fqn: str) -> ParameterMesh | None:
        """Query: the mesh of a parameter that is not on the data-parallel mesh."""
        return self._query("composer3d_parameter_mesh", context=context, fqn=fqn)

    def offload_policy(self, context: RunContext, fqn: str) -> Any | None:
        """Query: torch's `OffloadPolicy` of a unit."""
        return self._query("composer3d_offload_policy", context=context, fqn=fqn)

    def place_batch(self) -> tuple[Bound, ...]:
        """Return the hooks that move or shard a batch before it is split into micro-batches."""
        return self._bound("composer3d_place_batch")

    # ---- scheduling --------------------------------------------------------------------------------------------------

    def split(self, context: RunContext, model: nn.Module) -> Split | None:
        """Query: this rank's stages of a model."""
        return self._query("composer3d_split", context=context, model=model)

    def schedule(self, context: RunContext, parts: Sequence[Part], loss_fn: LossFunction) -> Schedule | None:
        """Query: the schedule of micro-batches."""
        return self._query("composer3d_schedule", context=context, parts=parts, loss_fn=loss_fn)

    def actions(self, context: RunContext, num_microbatches: int) -> Sequence[Sequence[Action]] | None:
        """Query: the actions of every rank of the pipeline, in order."""
        return self._query("composer3d_actions", context=context, num_microbatches=num_microbatches)

    def step_actions(self, context: RunContext, acting: Turns | None = None) -> list[tuple[Registered, StepAction]]:
        """Return all step actions with their plugins; `acting` records the plugin of the running one."""
        found: list[tuple[Registered, StepAction]] = []
        for registered, answer in self._call("composer3d_step_actions", context=context):
            for action in answer if isinstance(answer, Sequence) else (answer,):
                found.append((registered, replace(action, run=BlamedAction(registered, action, acting))))
        return found

    def layout(self, degrees: Mapping[str, int]) -> LayoutTraits:
        """Query, trait by trait: the joint traits of all plugins; of `gather_bytes` the minimum."""
        found: dict[str, tuple[Registered, Any]] = {}
        for registered, answer in self._call("composer3d_layout", degrees=degrees):
            for name in [each.name for each in fields(answer) if getattr(answer, each.name) is not None]:
                value = getattr(answer, name)
                first, known = found.get(name, (registered, value))
                if name == "gather_bytes":
                    value = min(known, value)
                elif known != value:
                    raise QueryError(f"{first} and {registered} both answer composer3d_layout for {name}")
                found[name] = (first, value)
        return LayoutTraits(**{name: value for name, (_, value) in found.items()})

    # ---- precision ---------------------------------------------------------------------------------------------------

    def dtypes(self, context: RunContext, fqn: str) -> Dtypes | None:
        """Query: the dtypes of a unit."""
        return self._query("composer3d_dtypes", context=context, fqn=fqn)

    def load_parameter(self, context: RunContext, fqn: str, tensor: Tensor) -> Tensor | None:
        """Query: a full tensor converted before it is sharded."""
        return self._query("composer3d_load_parameter", context=context, fqn=fqn, tensor=tensor)

    def grad_scaler(self, context: RunContext) -> GradScaler | None:
        """Query: the loss scaler."""
        answers = self._answers("composer3d_grad_scaler", context=context)
        return next((Returned(by, "composer3d_grad_scaler", GradScaler, made) for by, made in answers), None)

    def optimizer(
        self, context: RunContext, cls: type[Optimizer], groups: Sequence[Mapping[str, Any]]
    ) -> tuple[str, Optimizer] | None:
        """Query: the optimizer in place of `cls(groups)`, with the plugin's name."""
        answers = self._answers("composer3d_optimizer", context=context, cls=cls, groups=groups)
        return next(((registered.name, made) for registered, made in answers), None)

    # ---- communication -----------------------------------------------------------------------------------------------

    def group_options(self, context: RunContext, axis: str) -> GroupOptions | None:
        """Query: the options of an axis' process group."""
        return self._query("composer3d_group_options", context=context, axis=axis)

    def replicas(self, context: RunContext) -> ReplicaPolicy | None:
        """Query: the policy for replica groups that may leave and rejoin."""
        return self._query("composer3d_replicas", context=context)

    # ---- profiling ---------------------------------------------------------------------------------------------------

    def recorders(self, context: RunContext) -> tuple[Recorder, ...]:
        """Return all recorders of spans."""
        return tuple(recorder for _, recorder in self._call("composer3d_recorder", context=context))

    def observe_batch(self) -> tuple[Bound, ...]:
        """Return the hooks that observe batches."""
        return self._bound("composer3d_observe_batch")

    def measure(self) -> tuple[Bound, ...]:
        """Return the hooks that measure a rank at the end of a step."""
        return self._bound("composer3d_measure")

    def metrics(self) -> tuple[Bound, ...]:
        """Return the hooks that export the reduced metrics of a step."""
        return self._bound("composer3d_metrics")

    # ---- life cycle --------------------------------------------------------------------------------------------------

    def configure(self) -> tuple[Bound, ...]:
        """Return the hooks that validate the run before anything is built."""
        return self._bound("composer3d_configure")

    def close(self) -> tuple[Bound, ...]:
        """Return the hooks that release resources at the end."""
        return self._bound("composer3d_close")

    def states(self, context: RunContext) -> dict[str, Mapping[str, Stateful]]:
        """Return the state that checkpoints store, by plugin."""
        return {
            by.name: {name: Returned(by, "composer3d_state", Stateful, state) for name, state in states.items()}
            for by, states in self._call("composer3d_state", context=context)
        }

    # ---- of several hooks --------------------------------------------------------------------------------------------

    def transforms(self) -> tuple[Bound, ...]:
        """Return the hooks that declare transforms."""
        return tuple(bound for hook in _TRANSFORMS for bound in self._bound(hook))

    def asked(self, hook: str) -> tuple[Bound, ...]:
        """Return the implementations of a hook one by one, for `check`, which continues after a failure."""
        return self._bound(hook)

    def implementing(self, hook: str) -> tuple[Registered, ...]:
        """Return the plugins that implement a hook, in the order of their names."""
        return tuple(registered for registered, _ in self._bound(hook))

    def idle(self) -> tuple[Registered, ...]:
        """Return the plugins that neither implement a hook nor declare anything that acts without one."""
        return tuple(
            registered
            for registered in self.plugins
            if not self._manager.get_hookcallers(registered.instance)
            and not any(getattr(registered.info, each) for each in ("owns", "axes", "devices", "offer", "provides"))
        )

    def owners(self) -> Mapping[str, Registered]:
        """Return the owner of every owned axis.

        Raises:
            PluginError: Two plugins own one axis.
        """
        result: dict[str, Registered] = {}
        for registered in self.plugins:
            for axis in registered.info.owns:
                if axis in result:
                    raise PluginError(f'{result[axis]} and {registered} both own the axis "{axis}"; remove one of them')
                result[axis] = registered
        return result

    # ---- pluggy ------------------------------------------------------------------------------------------------------

    def _register(self, registered: Registered) -> None:
        other = self._manager.get_plugin(registered.name)
        if other is not None:
            first = next(plugin for plugin in self.plugins if plugin.instance is other)
            raise PluginError(f"{first} and {registered} have the same name; rename one and write its use")
        for name in dir(registered.instance):
            marked = self._manager.parse_hookimpl_opts(registered.instance, name)
            if marked:
                _check_signature(registered, name, hook=marked.get("specname") or name)
            elif name.startswith("composer3d_"):
                raise PluginError(
                    f"{registered}: {name} is not marked, so nobody would call it",
                    hint="decorate it with @composer3d.hookimpl",
                )
        try:
            self._manager.register(registered.instance, name=registered.name)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(
                f"{registered}: {error}", hint="see composer3d.hookspecs for names and arguments"
            ) from None
        for implementation in self._implementations(registered):
            if (
                implementation.tryfirst
                or implementation.trylast
                or implementation.wrapper
                or implementation.hookwrapper
            ):
                raise PluginError(
                    f"{registered}: {implementation.function.__name__} is marked tryfirst, trylast or wrapper",
                    hint="order is declared by phases and after/before; call order carries no meaning",
                )

    def _implementations(self, registered: Registered) -> Iterator[Any]:
        for name in vars(HookSpecs):
            if name.startswith("composer3d_"):
                for implementation in getattr(self._manager.hook, name).get_hookimpls():
                    if implementation.plugin is registered.instance:
                        yield implementation

    def _bound(self, hook: str) -> tuple[Bound, ...]:
        """Return every implementation as a function of the spec's keyword arguments, in the order of plugin names.

        Found once for each hook: some are called for every parameter of a model.
        """
        if hook not in self._implementers:
            by_plugin = {impl.plugin_name: impl for impl in getattr(self._manager.hook, hook).get_hookimpls()}
            specified = tuple(inspect.signature(getattr(HookSpecs, hook)).parameters)[1:]
            self._implementers[hook] = tuple(
                (registered, CheckedHook(registered, hook, _bind(by_plugin[registered.name], specified)))
                for registered in self.plugins
                if registered.name in by_plugin
            )
        return self._implementers[hook]

    def _call(self, hook: str, **arguments: Any) -> list[tuple[Registered, Any]]:
        """Call every implementation; answers that are None are left out."""
        answers = [(found, self.acts(found.name, function)(**arguments)) for found, function in self._bound(hook)]
        return [(registered, answer) for registered, answer in answers if answer is not None]

    def _query(self, hook: str, **arguments: Any) -> Any | None:
        """Return the answer of a query; see `_answers`."""
        return next((answer for _, answer in self._answers(hook, **arguments)), None)

    def _answers(self, hook: str, **arguments: Any) -> list[tuple[Registered, Any]]:
        """Return the answer of a query, if there is one, with its plugin.

        Raises:
            QueryError: Two plugins gave different ones.
        """
        answers = self._call(hook, **arguments)
        for other, answer in answers[1:]:
            if not _agree(answer, answers[0][1]):
                about = f' for "{arguments["fqn"]}"' if "fqn" in arguments else ""
                raise QueryError(f"{answers[0][0]} and {other} both answer {hook}{about}; remove one of them")
        return answers[:1]


def _agree(one: Any, other: Any) -> bool:
    """Return whether two answers are one; of tensors only the very same are, because comparing them gives a tensor."""
    return one is other or (type(one) is type(other) and not hasattr(one, "shape") and bool(one == other))


def _bind(implementation: Any, specified: tuple[str, ...]) -> Callable[..., Any]:
    """Pass exactly the arguments that the implementation declared."""
    function, wanted = implementation.function, implementation.argnames
    if tuple(wanted) == specified:
        return typing.cast(Callable[..., Any], function)
    return lambda **arguments: function(**{name: arguments[name] for name in wanted})


def _check_signature(registered: Registered, name: str, *, hook: str) -> None:
    """Raise where no spec has the hook that a method implements, or the arguments that the method requires."""
    if not hook.startswith("composer3d_") or hook not in vars(HookSpecs):
        known = [each for each in vars(HookSpecs) if each.startswith("composer3d_")]
        raise PluginError(f"{registered}: there is no hook {hook}", hint=did_you_mean(hook, known))
    allowed = tuple(inspect.signature(getattr(HookSpecs, hook)).parameters)[1:]
    taken = inspect.signature(getattr(registered.instance, name)).parameters.values()
    required = [each.name for each in taken if each.default is each.empty and each.kind in _NAMED]
    if unknown := [each for each in required if each not in allowed]:
        raise PluginError(
            f"{registered}: {name} takes {', '.join(unknown)}, which its hook does not pass",
            hint=f"allowed: {', '.join(allowed)}" if allowed else "it passes nothing",
        )
