"""A `transformers.Trainer` that trains under a manifest, with its callbacks, evaluation, saving and resuming."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.data_loader import prepare_data_loader  # type: ignore[import-untyped]
from transformers import Trainer

from composer3d import ComposerError, compose

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

__all__ = ["Composer3DTrainer"]

_FOLDER = "composer3d"  # of a Trainer's checkpoint: parameters, optimizer and schedule, of any layout

# Training arguments that do what a manifest says, and where it says so.
_REPLACED: Mapping[str, str] = {
    "fsdp": "a plugin of [sharding]",
    "deepspeed": "what `composer3d import FILE` makes of that file",
    "bf16": "a plugin of [precision]",
    "fp16": "a plugin of [precision]",
    "activation_checkpointing": "a plugin of [scheduling]",
    "torch_compile": "a plugin of [scheduling]",
    "auto_find_batch_size": "what `composer3d plan` says that fits",
    "parallelism_config": "degrees in [mesh]",
}


class Composer3DTrainer(Trainer):
    """Trains a model under a manifest; all ranks make one and call the same methods.

    `per_device_train_batch_size` is that of a data-parallel rank: ranks that differ only in `tp` or `cp` read the same.
    Checkpoints are a Trainer's, with weights that `from_pretrained` reads, and a folder `composer3d` of the state that
    resumes in any layout. Memory: a save gathers the whole model on the first rank's CPU.

    Args:
        manifest: As of `composer3d.compose`, without what only a run uses: optimizer, data and schedule are the
            Trainer's arguments.
        weights: As of `composer3d.compose`.

    Raises:
        ComposerError: A training argument does what the manifest says, or the manifest has a pipeline.
    """

    def __init__(self, *args: Any, manifest: Any, weights: Any = "check", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_replaced(self.args)
        model: Any = self.model
        self.run = compose(model, manifest, weights=weights, device=self.args.device)
        self.model = self.model_wrapped = self.run.model
        self.callback_handler.model = self.model
        self._readers = self.run.context.num_readers
        self.accelerator.backward = self._backward
        self._num_items: Tensor | int | None = None

    # ---- data --------------------------------------------------------------------------------------------------------

    def get_tp_size(self) -> int:
        """Return how many ranks read the same samples."""
        return int(self.args.world_size // self.run.context.num_readers)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Return a loader of this data-parallel rank's samples, as accelerate makes it of ranks'."""
        prepare, accelerator = self.accelerator.prepare, self.accelerator
        accelerator.prepare = functools.partial(
            prepare_data_loader,
            device=self.args.device,
            num_processes=self._readers,
            process_index=self.run.context.reader,
            put_on_device=True,
            split_batches=accelerator.split_batches,
            even_batches=accelerator.even_batches,
            rng_types=accelerator.rng_types.copy() if self.args.world_size > 1 else None,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=self.args.data_seed,
        )
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            accelerator.prepare = prepare

    @property
    def gather_function(self) -> Callable[..., Any]:
        """Function with which evaluations gather: one rank of each that read the same samples."""
        is_shared = "_readers" in vars(self) and self._readers < self.args.world_size
        return self._gather_of_readers if is_shared else self._gather_of_all

    @gather_function.setter
    def gather_function(self, gather: Callable[..., Any]) -> None:
        self._gather_of_all = gather  # the Trainer sets it anew after every evaluation

    def _gather_of_readers(self, tensor: Tensor) -> Tensor:
        """Gather of one rank of each that read the same samples, without what a last batch repeats."""
        import torch

        own = torch.tensor([self.run.context.reader], device=tensor.device)
        readers = self.accelerator.gather(own).tolist()
        first = [readers.index(reader) for reader in range(self._readers)]
        gathered = self.accelerator.gather(tensor).chunk(len(readers))
        whole = torch.cat([gathered[rank] for rank in first])
        state = self.accelerator.gradient_state
        return whole[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else whole

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> tuple[nn.Module, Any]:
        if self._created_lr_scheduler:
            raise ComposerError("train() was called again: its schedule is another one; make another Composer3DTrainer")
        self.create_optimizer()
        self.optimizer = self.run.prepare(self.optimizer)
        self.create_scheduler(num_training_steps=max_steps)
        schedule: Any = self.lr_scheduler
        self.run.attach("lr_scheduler", schedule)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.run.model, train_dataloader

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor | Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run a micro-batch: the loss is divided by the number of items of all ranks, where the model says so."""
        self._num_items = num_items_in_batch
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def _backward(self, loss: Tensor, **kwargs: Any) -> None:
        has_kwargs = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if has_kwargs and self._num_items is not None and self.args.average_tokens_across_devices:
            # The Trainer has multiplied it by the number of ranks over which others average.
            self.run.backward(loss / self._readers, reduction="sum")
        else:
            self.run.backward(loss)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.run.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self.run.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model as `from_pretrained` reads it; all ranks call it."""
        state = self.run.full_state_dict()
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.run.save(os.path.join(output_dir, _FOLDER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not Path(checkpoint, _FOLDER).is_dir():
            raise ComposerError(
                f"{checkpoint} has no folder {_FOLDER}: it was written with save_only_model, or by another "
                "Trainer, and has no optimizer's state; load its weights with from_pretrained, and do not resume"
            )
        self.run.load(Path(checkpoint, _FOLDER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load weights where there is nothing else; `_load_optimizer_and_scheduler` loads all that was saved."""
        if not Path(resume_from_checkpoint, _FOLDER).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.run.parameters_changed()

    def close(self) -> None:
        """Close the run; the last call."""
        self.run.close()


def _refuse_replaced(arguments: Any) -> None:
    found = [(name, what) for name, what in _REPLACED.items() if getattr(arguments, name, None)]
    if found:
        told = "; ".join(f"{name} (write {what})" for name, what in found)
        raise ComposerError(
            f"these training arguments are the manifest's to say: {told}; `composer3d plugins` lists what there is"
        )
