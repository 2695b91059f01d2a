"""Subject of a verification: a model, a manifest, batches, a loss and an optimizer, wherever they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from composer3d.verification.arithmetic import in_double_precision, without_random_numbers

if TYPE_CHECKING:
    import torch
    from torch import nn

    from composer3d import Batch, Composition, Manifest
    from composer3d.interfaces import Example, LossFunction

__all__ = ["Arithmetic", "Averages", "Schedule", "Subject", "settled", "without_plugins"]

Arithmetic: TypeAlias = Literal["float64", "own"]
Kept: TypeAlias = Literal["nothing", "precision", "conversions"]


class Averages(Protocol):
    """Moving averages of the parameters, as a loop keeps them."""

    def update(self, step: int) -> None:
        """Update the averages by the parameters after a step."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return them by FQN, under `averages`."""

    def load_state_dict(self, state: Any) -> None:
        """Take them back."""


class Schedule(Protocol):
    """Learning rates, as a loop sets them."""

    def apply(self, step: int) -> float:
        """Set those of a step."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved of it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """Common input of a reference and a composition.

    Args:
        manifest: Typed, with the plugins of the run.
        build: Returns the model for `compose`: a factory, or a module with weights.
        loss_fn: As of `compose`.
        make_optimizer: Returns the optimizer of a composition.
        make_stepper: Returns one that steps in the backward, for the run that loads what another has saved; None where
            the run's does not. Gradients, which it frees, are compared without it.
        batch: Returns the batch of a step, a data-parallel rank and the data-parallel degree; on the CPU.
        grad_clip: Gradients are scaled down to this norm of the whole model's; infinity only measures.
        average_buffers: What the loop does before it saves, to buffers that training changed; None where it does not.
        device: Where parameters live.
        count_fn: As for `compose`.
        make_averages: Called with a composition; None where the loop keeps no moving averages.
        decay: What is left of an average after an update; they are updated in every step.
        example: As for `compose`.
        prepare: Called with every composition; None where a loop does nothing with it before its first step.
        make_schedule: Called with a composition and its optimizer; None where learning rates stay. It is there once a
            run is saved, and not before: a warm-up would hide updates.
    """

    manifest: Manifest
    build: Callable[[], nn.Module | Callable[[], nn.Module]]
    loss_fn: LossFunction | None
    make_optimizer: Callable[[Composition], torch.optim.Optimizer]
    batch: Callable[[int, int, int], Batch]
    grad_clip: float
    average_buffers: Callable[[Composition], None] | None
    device: torch.device
    count_fn: Callable[[Any], int] | None = None
    make_stepper: Callable[[Composition], torch.optim.Optimizer] | None = None
    make_averages: Callable[[Composition], Averages] | None = None
    decay: float = 0.0
    example: Example | Callable[[], Example | None] | None = None
    prepare: Callable[[Composition], None] | None = None
    make_schedule: Callable[[Composition, torch.optim.Optimizer], Schedule] | None = None

    @contextmanager
    def composed(self, which: Arithmetic, manifest: Manifest, *, draws: bool = False) -> Iterator[Composition]:
        """Compose the model by a manifest; inside, compute in float64 or in the run's own dtypes.

        Weights are drawn as in a run; after that random draws are replaced by their means, unless `draws`. Collectives
        with a codec send everything as it is.
        """
        from composer3d import CodedCollectives, compose

        with ExitStack() as stack:
            if which == "float64":
                stack.enter_context(in_double_precision())
            run = stack.enter_context(
                compose(
                    self.build(),
                    manifest,
                    loss_fn=self.loss_fn,
                    count_fn=self.count_fn,
                    device=self.device,
                    example=lambda: self._example(which),
                    purpose="verify",
                )
            )
            run.context.stash(CodedCollectives).is_exact = True
            if self.prepare is not None:
                self.prepare(run)
            if not draws:
                stack.enter_context(settled(run))
            yield run

    def _example(self, which: Arithmetic) -> Example | None:
        """Return the example, in float64 if the arithmetic is."""
        from composer3d import map_tensors

        found = self.example() if callable(self.example) else self.example
        if found is None or which == "own":
            return found
        args, kwargs = map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, found)
        return args, kwargs

    def manifest_for(self, which: Arithmetic) -> Manifest:
        """Return the run's manifest; in float64 without the precision plugins, which would change dtypes."""
        if which == "own":
            return self.manifest
        plugins = tuple(plugin for plugin in self.manifest.plugins if plugin.info.family != "precision")
        return replace(self.manifest, plugins=plugins)


def without_plugins(manifest: Manifest, *, keep: Kept = "nothing") -> Manifest:
    """Return a manifest for one device: every degree 1, and of the plugins only those to keep.

    Args:
        manifest: The run's.
        keep: Plugins to keep: none, those of precision, or of these the ones that replace modules.
    """
    precision = [plugin for plugin in manifest.plugins if plugin.info.family == "precision" and keep != "nothing"]
    kept = tuple(
        plugin for plugin in precision if keep == "precision" or hasattr(plugin.instance, "composer3d_convert")
    )
    return replace(manifest, plugins=kept, tables={**manifest.tables, "mesh": type(manifest.mesh)()})


@contextmanager
def settled(run: Composition) -> Iterator[None]:
    """Let nothing be random inside."""
    streams = run.context.streams
    policy, streams.policy = streams.policy, "ranks"  # else they draw by sample what is to be settled
    try:
        with without_random_numbers(), _without_dropout(run):
            yield
    finally:
        streams.policy = policy


@contextmanager
def _without_dropout(run: Composition) -> Iterator[None]:
    """Disable torch's dropout modules inside; plugins may call them where no mode intercepts it."""
    from torch import nn

    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    found = [m for part in run.parts for m in part.module.modules() if isinstance(m, kinds)]
    before = [module.p for module in found]
    for module in found:
        module.p = 0.0
    try:
        yield
    finally:
        for module, p in zip(found, before, strict=True):
            module.p = p
