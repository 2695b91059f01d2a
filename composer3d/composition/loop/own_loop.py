"""The part of a composition for loops that keep their own forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from composer3d import torch_compat
from composer3d.composition.assembling import Assembled
from composer3d.composition.composed_model.changed_models import ComposedModules, refuse_added
from composer3d.composition.loop.loop_objects import DictState, adopt_optimizer, adopt_scheduler
from composer3d.composition.loop.sampling import Sampler, sampler_of
from composer3d.composition.loop.shared_loader import shared_loader
from composer3d.composition.loop.stage_parameters import named_parameters
from composer3d.errors import StepError, did_you_mean
from composer3d.step.evaluation import reshard_units
from composer3d.step.loops.whole_gradients import whole_gradients

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    from composer3d.composition.replica_groups.replica_steps import ReplicaSteps
    from composer3d.composition.run_state.persistence import Persistence
    from composer3d.context import RunContext
    from composer3d.interfaces import Part, Stateful
    from composer3d.step.engine import StepEngine

__all__ = ["OwnLoop", "refused_after_close"]


def refused_after_close(activity: str = "") -> NoReturn:
    """Refuse what is called of a composition after its close."""
    what = f"run.{activity}(...) was called" if activity else "run was used"
    raise StepError(f"{what} after run.close(), which is the last call; compose again for more steps")


class OwnLoop:
    """The part of a composition that such a loop calls; `Composition` is one."""

    _assembled: Assembled
    _engine: StepEngine
    _persistence: Persistence
    replicas: ReplicaSteps | None
    _optimizer: torch.optim.Optimizer | None
    _composed: ComposedModules

    if TYPE_CHECKING:
        optimizer: Callable[..., torch.optim.Optimizer]

    @property
    def context(self) -> RunContext:
        """The run as plugins see it."""
        return self._assembled.context

    @property
    def parts(self) -> tuple[Part, ...]:
        """This rank's stages; without a pipeline one, the whole model."""
        return self.context.parts

    @property
    def model(self) -> nn.Module:
        """The model, for a loop that keeps its own forward.

        Raises:
            StepError: A schedule runs the forward itself.
        """
        if self._assembled.has_schedule:
            raise StepError(
                "the manifest has a pipeline, which runs the forward itself; use run.forward_backward(...), and "
                "run.named_parameters() and run.named_buffers() for what this rank's stages hold"
            )
        return self.parts[0].module

    def named_parameters(self, *, of_all_stages: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under the FQNs of the whole model, each tensor once; as local shards.

        `full_tensor(fqn, parameter)` gathers one of them.

        Args:
            of_all_stages: Of a pipeline yield those of other stages, too, as scratch tensors: for loops that draw.
        """
        shards: dict[int, nn.Parameter] = {}
        if torch_compat.in_backward():  # which still needs what is gathered
            for part in self.parts:
                shards |= torch_compat.shards_of_gathered(part.module)
        else:
            reshard_units(self.parts)
        found = self.context.named_parameters()
        if self._assembled.has_schedule:
            found = named_parameters(self.context, of_all_stages=of_all_stages)
        for fqn, parameter in found:
            yield fqn, shards.get(id(parameter), parameter)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of this rank's stages under the FQNs of the whole model, each tensor once.

        Those that several stages hold each of them keeps up to date by itself.
        """
        seen: set[int] = set()
        for part in self.parts:
            for fqn, buffer in part.module.named_buffers():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield fqn, buffer

    @property
    def has_grad_scaler(self) -> bool:
        """Whether a plugin scales the loss; gradients that are not finite are then its to find, and to skip."""
        return self._engine.scaling.scaler is not None

    @contextlib.contextmanager
    def without_grad_scaler(self) -> Iterator[None]:
        """Leave gradients as they are inside, for a loop that computes losses and backwards without this composition.

        A plugin's loss scaler would divide them by a scale that they were not multiplied with.
        """
        scaling = self._engine.scaling
        scaler, scaling.scaler, self._engine.is_plain = scaling.scaler, None, True
        try:
            with self._engine.units.trained():
                yield
        finally:
            scaling.scaler, self._engine.is_plain = scaler, False

    def backward(
        self,
        loss: Any,
        *,
        last: bool | None = None,
        reduction: Literal["mean", "sum"] | None = None,
        retain_graph: bool = False,
    ) -> Tensor | None:
        """Run backward of a loss that the loop computed with `run.model`.

        Args:
            loss: A scalar mean or sum, `(sum, count)`, or a `Loss`.
            last: Whether it is the last one of this step; None, the default, says so, but for the micro-batches of
                `accumulate` that are not. `run.backward(a, last=False, retain_graph=True); run.backward(b)` steps by
                (a + b) / 2; without `last=False` by a + b.
            reduction: Of a scalar whose last operations do not show it; None reads it from its graph. A loss that mixes
                the samples of a rank, as contrastive ones do, is averaged over ranks like a mean.
            retain_graph: Whether another backward of this step goes through the same graph.

        Returns:
            None unless `last`; else the mean loss over all ranks, divided where the loop passed `loss / n`: its sum.

        Raises:
            StepError: With a pipeline, or in one of several groups of ranks.
            LossError: Whether ranks' losses are averaged or added up is not known.
        """
        if self._assembled.has_schedule:
            raise StepError(
                "the manifest has a pipeline, which runs the backward itself; use run.forward_backward(...)"
            )
        if self.replicas is not None:
            raise StepError(
                "run.backward was called in one of several groups of ranks that come and go: which samples are this "
                "group's is known only when a step begins, and it may have to be done again; use "
                "run.forward_backward(...), which is given the whole batch"
            )
        with self._engine.explaining():  # a step that opened itself does not surround the loop's calls
            self._engine.outside.look(loss)
            is_last = self._engine.accumulated.is_last if last is None else last
            with self._engine.criterion.inside.apart():
                return self._engine.backward(loss, last=is_last, reduction=reduction, retain_graph=retain_graph)

    def grad(
        self,
        loss: Tensor,
        *,
        create_graph: bool = False,
        retain_graph: bool | None = None,
        reduction: Literal["mean", "sum"] | None = None,
    ) -> dict[str, Tensor]:
        """Return the gradients of the global batch's loss by FQN, whole, the same on every rank.

        `torch.autograd.grad` returns those of this rank's samples, and a norm, product or step of these is another one
        than the global batch's. Losses made of what this returns are differentiated through it: pass them to `backward`
        like penalties.

        Args:
            loss: A scalar of `run.model`, as `backward` takes it.
            create_graph: Whether something is computed from the gradients that is differentiated.
            retain_graph: Whether the loss's graph is used again; None as `create_graph`.
            reduction: As of `backward`.

        Raises:
            StepError: With a pipeline, over tp or ep.

        Memory: a whole gradient of every parameter. Collectives: one all-reduce an axis and parameter.
        """
        if self._assembled.has_schedule:
            raise StepError("the manifest has a pipeline, which runs the backward itself: no rank has all gradients")
        with self._engine.explaining(), self._engine.units.taking_gradients():
            options: Any = {"create_graph": create_graph, "retain_graph": retain_graph, "reduction": reduction}
            return whole_gradients(loss, self.context, **options)

    def attach(self, name: str, stateful: Stateful | dict[str, Any]) -> None:
        """Save and load something with the checkpoint: a scheduler, a loader, a tokenizer's state.

        Args:
            name: In the checkpoint.
            stateful: Its state consists of tensors and JSON values. Or a dict of such, which a load fills anew.

        Raises:
            StepError: Something has this name, or what is attached has no state.
        """
        if type(stateful) is dict:
            stateful = DictState(stateful)
        missing = [each for each in ("state_dict", "load_state_dict") if not callable(getattr(stateful, each, None))]
        if missing:
            raise StepError(
                f'run.attach("{name}", ...) was given a {type(stateful).__name__}, which has no {missing[0]}(); attach '
                "an object with state_dict() and load_state_dict(state), such as a scheduler"
            )
        self._persistence.attach(name, cast("Stateful", stateful))

    def _refuse_without_gradients(self, call: str) -> None:
        import torch

        if not torch.is_grad_enabled():
            raise StepError(
                f"run.{call}(...) was called under torch.no_grad() or inference_mode, where there are no gradients; "
                "call it outside, and run.evaluate(...) for a loss without them"
            )

    def _refuse_unknown(self, fqn: str) -> None:
        """Refuse a name that neither a parameter nor a buffer has, on this stage or another."""
        known = {*self.context.parameter_forms, *(each for group in self.context.ties for each in group)}
        for part in self.parts:
            known |= {name for name, _ in part.module.named_parameters(remove_duplicate=False)}
            known |= {name for name, _ in part.module.named_buffers(remove_duplicate=False)}
        if fqn not in known:
            hint = did_you_mean(fqn, sorted(known))
            raise StepError(f'the model has no parameter "{fqn}"' + (f"; {hint}" if hint else ""))

    def rank_gradients(self) -> contextlib.AbstractContextManager[None]:
        """Let `torch.autograd.grad` inside return gradients of parameters, which are those of this rank's samples.

        For ranks with tasks of their own, as in MAML, and for what compares ranks.
        """
        return self._engine.units.taking_gradients()

    @contextlib.contextmanager
    def accumulate(self, num_microbatches: int, *, last: bool = False) -> Iterator[None]:
        """Run a micro-batch of the loop's own; `num_microbatches` of them are one step, which opens and closes itself.

        In all but the last of a group the optimizer's `step` and `zero_grad`, `step` of its schedulers that are
        attached, and `clip_grad_norm_`, which returns NaN then, do nothing, and data parallelism reduces no gradients
        but those that it keeps sharded. All micro-batches of a group weigh the same, also where one has fewer.

        Args:
            num_microbatches: Of a step.
            last: End the group here, at the end of an epoch for example; batches of `run.loader(...)` say so.

        Raises:
            StepError: The loop opened a step itself, or changed the learning rate inside a group.
        """
        engine = self._engine
        if engine.state is not None and not engine.own_steps.is_open:
            raise StepError("run.accumulate(...) was called inside run.step(...), whose micro-batches are its own")
        attached = self._persistence.attached.values()
        with engine.accumulated.microbatch(num_microbatches, last=last, optimizer=engine.optimizer, attached=attached):
            yield

    def _added(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take what the loop adds to the optimizer, of other modules than the model."""
        refuse_added(self.parts, self._composed)
        stages = "a pipeline computes the loss on one stage; put them into the model" * self._assembled.has_schedule
        in_backward = "in_backward=True steps the model's alone" * (self._engine.stepper is not None)
        engine = self._engine

        def meet() -> None:
            engine.guard.meet(engine.own_steps.next, at="optimizer.add_param_group")

        with engine.explaining("optimizer.add_param_group"):
            engine.outside.add(parameters, refused=stages or in_backward, meet=meet)

    def _clear_gradients(self) -> bool:
        """Give up an own step whose gradients the loop drops; return whether it drops them, and adds to none."""
        if self.sync_gradients:
            self._engine.own_steps.drop_gradients()
        return self.sync_gradients

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are complete after this micro-batch, so that the optimizer steps; see `accumulate`."""
        return self._engine.accumulated.is_last

    def sampler(self, dataset: Any) -> Sampler:
        """Return a batch sampler for a map-style dataset: sample i of step s is a function of the seed and s.

        Args:
            dataset: Anything with a length; or the length.
        """
        return sampler_of(dataset, self.context)

    def prepare(self, *things: Any) -> Any:
        """Adopt what a loop has made for one device: the model, its optimizer, schedulers, and loaders.

        The optimizer and its schedulers are changed in place: `run.optimizer` and `run.attach` are not called for them.

        Args:
            things: The model, for which `run.model` is returned; the one optimizer of its parameters, made before
                `compose` or after; learning-rate schedulers of that, after it; DataLoaders of the global batch.

        Returns:
            As many, in their order; of one thing, that.

        Raises:
            StepError: Something is none of these, or cannot be adopted.
        """
        import torch

        optimizers = [thing for thing in things if isinstance(thing, torch.optim.Optimizer)]
        if len(optimizers) > 1:
            named = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise StepError(
                f"run.prepare was given {len(optimizers)} optimizers, {named}, and a composition has one, with groups; "
                "give one optimizer all parameters, with a group for those of each, or compose the modules that each "
                "steps by themselves"
            )
        found = [self._prepared(thing) for thing in things]
        return found[0] if len(found) == 1 else tuple(found)

    def _prepared(self, thing: Any) -> Any:
        import torch
        from torch.optim.lr_scheduler import LRScheduler
        from torch.utils.data import DataLoader

        if isinstance(thing, torch.nn.Module):
            if thing is not self.model:
                raise StepError(
                    f"run.prepare was given a {type(thing).__name__} that is not the model of this composition; "
                    "compose each model of a loop by itself"
                )
            return thing
        if isinstance(thing, torch.optim.Optimizer):
            adopt_optimizer(thing, self.optimizer, self.context)
            self._optimizer = self._engine.optimizer = thing
            return thing
        if isinstance(thing, LRScheduler):
            if self._optimizer is None:
                raise StepError("run.prepare takes an optimizer before its schedulers; pass both, in this order")
            adopt_scheduler(thing, self._optimizer)
            self.attach(self._scheduler_name(), thing)
            return thing
        if isinstance(thing, DataLoader):
            return self.loader(thing)
        raise StepError(
            f"run.prepare was given a {type(thing).__name__}; it takes the model, an optimizer, schedulers of it, and "
            "DataLoaders"
        )

    def _scheduler_name(self) -> str:
        number = 1 + sum(name.startswith("lr_scheduler") for name in self._persistence.attached)
        return "lr_scheduler" if number == 1 else f"lr_scheduler_{number}"

    def loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a DataLoader that reads this rank's part of every batch of another one, which is the global batch."""
        engine = self._engine
        return shared_loader(
            loader,
            self.context,
            accumulated=engine.accumulated,
            detached=engine.criterion.mixed.detached,
            loop=engine.loop,
        )
