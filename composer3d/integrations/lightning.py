"""A Lightning Fabric strategy that trains under a manifest."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from lightning_fabric.strategies.ddp import DDPStrategy

from composer3d import Composition, StepError, compose

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = ["Composer3DStrategy"]


class _Synchronised:
    """Gradients of a micro-batch are the global batch's as each backward ends, and summed over a step's."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Composer3DStrategy(DDPStrategy):
    """`Fabric(strategy=Composer3DStrategy("run.toml"))`: the model that is set up is composed; one of a process.

    `fabric.save` writes a folder that any layout loads. Loaders are set up after the model, whose layout says which
    ranks read other samples.

    Args:
        manifest: As of `composer3d.compose`, without what only a run uses.
        weights: As of `composer3d.compose`.
        options: Of Fabric's DDPStrategy, for the process group.

    Attributes:
        run: The composition, once a model is set up.
    """

    def __init__(self, manifest: Any, *, weights: Any = "check", **options: Any) -> None:
        super().__init__(**options)
        self._manifest, self._weights = manifest, weights
        self._backward_sync_control: Any = _Synchronised()
        self.run: Composition | None = None
        self._others: dict[str, Any] = {}

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number and index of the ranks that read other samples."""
        context = self._composed("fabric.setup_dataloaders").context
        return {"num_replicas": context.num_readers, "rank": context.reader}

    def setup_module(self, module: nn.Module) -> Any:
        """Compose the model."""
        if self.run is not None:
            raise StepError("fabric.setup was called twice; a strategy composes one model, with one optimizer")
        if self.precision.precision != "32-true":
            raise StepError(
                f'Fabric(precision="{self.precision.precision}") is the manifest\'s to say; name a plugin of '
                "[precision] there, and leave Fabric's precision out"
            )
        self.run = compose(module, self._manifest, weights=self._weights, device=self.root_device)
        self.run.attach("fabric", self._others)
        return self.run.model

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Adopt the optimizer of the model, in place."""
        adopted: Optimizer = self._composed("fabric.setup_optimizers").prepare(optimizer)
        return adopted

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Compose the model, and adopt its optimizer and scheduler."""
        model = self.setup_module(module)
        adopted = [self.setup_optimizer(optimizer) for optimizer in optimizers]
        return model, adopted, scheduler if scheduler is None else self._composed("fabric.setup").prepare(scheduler)

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward; the gradient is the global batch's."""
        if args or kwargs:
            raise StepError(f"fabric.backward(loss) takes nothing else here, and was given {[*args, *kwargs]}")
        self._composed("fabric.backward").backward(tensor)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradient of the whole model."""
        norm = self._composed("fabric.clip_gradients").clip_grad_norm_(float(max_norm), norm_type=float(norm_type))
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise StepError(
                f"the gradient's norm is {float(norm)}; write error_if_nonfinite=False where "
                "such steps are to be taken, or skipped by a loss scale"
            )
        return norm

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: dict[str, Any] | None = None
    ) -> None:
        """Write the composition, and what else the loop keeps, to a folder; all ranks call it."""
        if storage_options is not None or filter:
            raise StepError("fabric.save takes no storage_options and no filter here: all of the model is written")
        run = self._composed("fabric.save")
        self._others.clear()
        for name, value in state.items():
            if not _is_composed(value):
                self._others[name] = value.state_dict() if hasattr(value, "state_dict") else value
        run.save(path)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` wrote, in any layout; return what `state` does not have."""
        self._composed("fabric.load").load(path)
        left = dict(self._others)
        for name, value in dict(state or {}).items() if isinstance(state, dict) else ():
            if _is_composed(value):
                continue
            if name not in left and strict:
                raise KeyError(f'{path} has no "{name}"; it has {", ".join(self._others) or "the model alone"}')
            if hasattr(value, "load_state_dict") and name in left:
                value.load_state_dict(left.pop(name))
            elif name in left:
                state[name] = left.pop(name)
        return left

    def teardown(self) -> None:
        """Close the composition, then what Fabric has set up."""
        if self.run is not None:
            self.run.close()
        super().teardown()

    def _composed(self, call: str) -> Composition:
        if self.run is None:
            raise StepError(f"{call} was called before fabric.setup(model, optimizer), which composes the model")
        return self.run


def _is_composed(value: Any) -> bool:
    """Return whether something is a model or an optimizer, which the composition saves itself."""
    from torch import nn, optim

    return isinstance(value, nn.Module | optim.Optimizer)
