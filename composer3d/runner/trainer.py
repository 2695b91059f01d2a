"""The training loop of a manifest run, written with composer3d's public names as a user would write it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from composer3d import EvaluatedWeights, checkpoint, compose, pieces_of
from composer3d.errors import ManifestError, ReferenceFailure
from composer3d.processes import write_private
from composer3d.runner.data import Loader, example_of, open_source
from composer3d.runner.data.data_agreement import agree_on_data, compare_streams
from composer3d.runner.evaluating.best_model import BestModel
from composer3d.runner.evaluating.evaluation_loop import loss_over
from composer3d.runner.evaluating.evaluation_metrics import EvaluationMetrics
from composer3d.runner.housekeeping import (
    GarbageCollection,
    configure_torch,
    environment,
    requested_device,
    seed_step,
)
from composer3d.runner.launching.signals import Preemption
from composer3d.runner.launching.spot_notice import watching
from composer3d.runner.local_checkpoints import local_checkpoints
from composer3d.runner.model_factory import ModelFactory
from composer3d.runner.objective.batch_size import BatchSize
from composer3d.runner.objective.lr_schedule import LRSchedule, multiplier_of
from composer3d.runner.objective.stability import Stability
from composer3d.runner.reporting.blackbox import BlackBox
from composer3d.runner.reporting.clocks import compare_clocks
from composer3d.runner.reporting.display import Display
from composer3d.runner.reporting.metrics import MetricsFile
from composer3d.runner.reporting.outcome import Outcome
from composer3d.runner.reporting.progress import Progress, RunPhase
from composer3d.runner.reporting.shared_writing import SharedWriting
from composer3d.runner.reporting.step_times import StepClock
from composer3d.runner.resume import (
    Origin,
    RunState,
    choose_checkpoint,
    clear_for,
    record_of,
    refuse_changes,
    schedule_change,
)
from composer3d.runner.tokenizer import with_tokenizer
from composer3d.runner.weights.ema import EMA

if TYPE_CHECKING:
    from composer3d import Composition
    from composer3d.manifest import Manifest
    from composer3d.runner.data import Batch

__all__ = ["Trainer", "output_folder", "train"]


def output_folder(manifest: Manifest) -> Path:
    """Return the folder that a run writes to: `[run] output`, else `runs/` and the manifest's name."""
    return manifest.output


def train(manifest: Manifest, *, resume: str = "auto", silent: bool = False, until: int | None = None) -> Outcome:
    """Train the run of a manifest, as one rank of its world.

    The run's folder gets `metrics.jsonl`, `manifest.toml` (resolved), `environment.json` and `checkpoints/step-N`.
    SIGTERM and SIGUSR1 end the run after the step in which they arrive, with a checkpoint.

    Args:
        manifest: Typed with the runner's `TABLES`.
        resume: `auto` goes on from the newest checkpoint in the run's folder, `never` starts from step 0 and moves what
            is there aside, anything else is the path of a checkpoint.
        silent: Neither progress nor results are printed; metrics are written all the same.
        until: Steps after which to stop, before those that the manifest states.

    Raises:
        ComposerError: A fault that the user can fix.

    Memory: the model in its layout, the optimizer's state, and with `[ema]` another copy. Collectives: those of the
    composition, and one all-reduce of three numbers a step.
    """
    with contextlib.ExitStack() as stack:
        trainer = Trainer(manifest, stack, silent=silent)
        trainer.until = trainer.num_steps if until is None else until
        outcome = trainer.start(resume)
    trainer.prune()  # the last save may have been finished only now
    return outcome


class Trainer:
    """One rank's run: everything that a step needs, made once.

    Args:
        manifest: Typed with the runner's `TABLES`.
        stack: Closes what was opened, in reverse.
        silent: Neither progress nor results are printed; metrics are written all the same.
    """

    def __init__(self, manifest: Manifest, stack: contextlib.ExitStack, *, silent: bool = False) -> None:
        from composer3d.runner.objective.optimizer_groups import make_optimizer

        manifest = with_tokenizer(manifest)
        tables, seed = manifest.tables, manifest.train.seed
        self.manifest, self.output = manifest, output_folder(manifest)
        configure_torch(tables["run"], seed=seed)
        self.source = open_source(
            tables["data"], seed=seed, folder=manifest.document.folder, cache=self.output / "cache"
        )
        self.factory = ModelFactory(manifest, vocab_size=self.source.vocab_size)
        self.figures = self._figures()
        num_samples = tables["train"].microbatch or 1
        self.run: Composition = stack.enter_context(
            compose(
                self.factory.build(),
                manifest,
                loss_fn=self.figures.loss,
                count_fn=self.factory.loss.count,
                loss_reduction=tables["train"].loss_table.reduction,
                device=requested_device(tables["run"]),
                example=lambda: example_of(self.source, tables["data"], seed=seed, num_samples=num_samples),
                timeout_s=tables["run"].timeout_s,
            )
        )
        self.run.averages_buffers = False  # once before an evaluation of many batches, and as the manifest says
        self.factory.refuse_unmatched()
        agree_on_data(self.run.context, self.source.record())
        compare_clocks(self.run.context)
        context = self.run.context
        self.batch_size = BatchSize(tables["train"], degree=pieces_of(context).total * context.layout.num_groups)
        self.batch_size.check(manifest, pieces_of(context).name)
        self.loader = self._loader()
        stack.callback(self.loader.close)
        self.optimizer = make_optimizer(self.run, manifest)
        self.num_steps: int = tables["train"].steps
        folder, sizes = manifest.document.folder, self.batch_size
        multiplier = multiplier_of(tables["lr_schedule"], num_steps=self.num_steps, folder=folder, sizes=sizes)
        self.schedule = LRSchedule(self.optimizer, multiplier)
        self.stability = Stability(tables["stability"], overflow_is_expected=self.run.has_grad_scaler)
        ema = tables["ema"]
        self.ema = None if ema.decay is None else EMA(self.run, decay=ema.decay, every=ema.every)
        self.best = None if tables["evaluation"].best is None else BestModel(tables["evaluation"])
        record = record_of(tables, self.factory, self.source)
        self.state = RunState(record, self.batch_size, planned_steps=self.num_steps)
        self._attach()
        self.local = local_checkpoints(self.run, manifest, record=self.state.record)
        display = stack.enter_context(
            Display(self.num_steps, log_every=tables["run"].log_every, silent=silent or context.rank != 0)
        )
        self.progress = stack.enter_context(Progress(self.output, self.run.context.rank))
        stack.enter_context(BlackBox(self.run.context, self.output))
        metrics = MetricsFile(self.output / "metrics.jsonl")
        stack.callback(metrics.close)
        self.writing = SharedWriting(self.run, metrics, display)
        self.until = self.num_steps
        self._saved: int | None = None
        self._loss: float | None = None

    def _figures(self) -> EvaluationMetrics:
        document, loss = self.manifest.document, self.factory.loss
        names = self.manifest.tables["evaluation"].metrics
        try:
            return EvaluationMetrics(
                names, document.folder, loss=self.factory.loss_fn, count=loss.count, ignored=loss.ignored
            )
        except ReferenceFailure as error:
            raise ManifestError(
                [document.problem(("evaluation", "metrics"), error.message, hint=error.hint)]
            ) from error

    def _loader(self) -> Loader:
        context = self.run.context
        return Loader(
            self.source,
            self.manifest.tables["data"],
            seed=self.manifest.train.seed,
            **pieces_of(context).read,
            batch_size_of=self.batch_size.of,
            position_of=self.batch_size.position_of,
            compare=compare_streams(context),
            ignored=self.factory.loss.ignored,
            vocab_size=self.factory.vocab_size,
        )

    def _attach(self) -> None:
        self.run.attach("run", self.state)
        self.run.attach("lr_schedule", self.schedule)
        self.run.attach("data", self.loader)
        self.run.attach("stability", self.stability)
        if self.ema is not None:
            self.run.attach("ema", self.ema)
        if self.best is not None:
            self.run.attach("best", self.best)

    # ---- start and end -----------------------------------------------------------------------------------------------

    def start(self, resume: str) -> Outcome:
        """Find out where to begin, and run to the end."""
        with self.run.explaining():
            return self._start(resume)

    def _start(self, resume: str) -> Outcome:
        replicas = self.run.replicas
        if replicas is not None and replicas.is_late:
            with Preemption() as preemption:
                replicas.begin(0)
                table, folder = self.manifest.tables["run"], self.manifest.document.folder
            with GarbageCollection(table.gc_every) as garbage, watching(table.notice, preemption, folder=folder):
                return self._loop(preemption, garbage)
        origin = choose_checkpoint(self.run, self.output, resume)
        start = 0 if origin is None else origin.num_steps
        kept = None if self.local is None else self.local.later_than(start, resume=resume)
        if start >= self.num_steps and origin is not None and origin.path.is_relative_to(self.output):
            done = f"{start} steps are done, train.steps = {self.num_steps}"
            advice = "raise train.steps to go on, or start anew with --resume never"
            self.writing.message(f"{self.output} is finished: {done}; {advice}")
            return self._outcome("already finished", step=start)
        where: str | None = None
        with Preemption() as preemption:
            if kept is not None and self.local is not None:
                self.progress.update(kept, RunPhase.LOADING)
                self.local.load(kept)
                start, where = kept, f"step {kept} in the memory of its nodes"
            elif origin is not None:
                self._load(origin)
                where = str(origin.path)
                if self.best is not None and self.best.is_over:
                    self.writing.message(f"{self.output} is finished: {self.best}; raise evaluation.patience to go on")
                    return self._outcome("already finished", step=start)
            if replicas is not None:
                replicas.begin(start)
            if self.writing.is_first and self.state.num_steps == start:
                self._begin_output(start, where)
            table, folder = self.manifest.tables["run"], self.manifest.document.folder
            with GarbageCollection(table.gc_every) as garbage, watching(table.notice, preemption, folder=folder):
                return self._loop(preemption, garbage)

    def _load(self, origin: Origin) -> None:
        refuse_changes(origin, self.state, self.batch_size)
        table, folder = self.manifest.tables["lr_schedule"], self.manifest.document.folder
        told = schedule_change(origin, table, num_steps=self.num_steps, folder=folder, sizes=self.batch_size)
        if told is not None:
            self.writing.message(told)
        self.progress.update(origin.num_steps, RunPhase.LOADING)
        self.run.load(origin.path)
        if origin.path.is_relative_to(self.output):
            self._saved = self.state.num_steps

    def _begin_output(self, start: int, source: str | None) -> None:
        """Write what the run is, and take away what a course that is given up has left; on the first rank."""
        aside = clear_for(self.output, start)
        if aside is not None:
            self.writing.message(f"moved what was saved after step {start} to {aside}")
        self.writing.begin(start)
        self.output.mkdir(parents=True, exist_ok=True)
        write_private(self.output / "manifest.toml", self.manifest.document.to_toml())
        described = environment(self.manifest, self.run, self.source.record())
        write_private(self.output / "environment.json", json.dumps(described, indent=1, default=str) + "\n")
        if self.factory.hf is not None:
            self.factory.hf.save_description(self.output / "huggingface")
        where = f"going on from {source}" if source is not None else f"training to {self.output}"
        self.writing.message(f"{where}: {self.run.context.layout}, {self.num_steps} steps")

    def _outcome(self, status: Literal["finished", "preempted", "already finished"], *, step: int) -> Outcome:
        return Outcome(status=status, step=step, loss=self._loss, output=str(self.output))

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def _loop(self, preemption: Preemption, garbage: GarbageCollection) -> Outcome:
        tables, flops = self.manifest.tables, self.factory.flops_per_token
        clock = StepClock(self.run, self.loader, flops_per_token=flops, ignored=self.factory.loss.ignored)
        replicas, last = self.run.replicas, min(self.num_steps, self.until)
        for step in range(self.state.num_steps, last):
            if replicas is not None and replicas.convene(step, stop=preemption.requested):
                return self._preempted(step)
            self.progress.update(step, RunPhase.TRAINING)
            batch = clock.read(step)
            row = self._step(step, batch)
            stop = clock.finish(row, batch, preemption.requested)
            self.state.num_tokens += row.get("tokens", 0)
            done, is_best = step + 1, False
            self.state.num_steps = done
            if _due(tables["evaluation"].every, done, self.num_steps):
                figures = self._evaluate(step, preemption)
                stop |= figures is None
                row |= {f"evaluation_{name}": value for name, value in (figures or {}).items()}
                is_best = self.best is not None and figures is not None and self.best.judge(done, figures)
            row = self.run.report(done, row)
            self.writing.row(row)
            if stop and done < self.num_steps and replicas is None:
                return self._preempted(done)
            if is_best or _due(tables["checkpoint"].every, done, None):
                self._save(done, asynchronous=tables["checkpoint"].asynchronous)
            if self.local is not None and _due(tables["checkpoint"].local_every, done, None):
                self.local.save(done)
            if self.best is not None and self.best.is_over:
                last = done
                break
            garbage.step(step)
            clock.restart()
        self.stability.finish(self.state.num_steps)
        self._save_last(last, wanted=tables["checkpoint"].final and (self.until >= self.num_steps or last < self.until))
        if self.best is not None:
            self.writing.message(str(self.best))
        self._close_local(forget=self._saved == last)
        return self._outcome("finished", step=last)

    def _preempted(self, done: int) -> Outcome:
        self._save_last(done)
        self._close_local(forget=False)
        self.writing.message(f"preempted: {done} of {self.num_steps} steps are done and saved")
        return self._outcome("preempted", step=done)

    def _close_local(self, *, forget: bool) -> None:
        if self.local is not None:
            self.local.close(forget=forget)

    def _save_last(self, done: int, *, wanted: bool = True) -> None:
        """Save at the end; of several groups one does, or the next where that one is lost meanwhile."""

        def save() -> None:
            if wanted:
                self._save(done, asynchronous=False)

        if self.run.replicas is None:
            save()
        else:
            self.run.replicas.finish(done, save)

    def _step(self, step: int, batch: Batch) -> dict[str, Any]:
        """Run one optimizer step and return its metrics."""
        seed_step(self.manifest.train.seed, step)
        with self.run.step(step) as state:
            lr = self.schedule.apply(step)
            inputs = {**batch.kwargs, **self.factory.inputs(batch.targets)}
            loss = float(self.run.forward_backward(*batch.args, target=batch.targets, **inputs))
            grad_norm = float(self.run.clip_grad_norm_(self.manifest.tables["train"].grad_clip))
            objection = self.stability.judge(step + 1, loss=loss, grad_norm=grad_norm, count=state.count)
            if objection is None:
                self.optimizer.step()
                if state.vetoes:
                    self.stability.vetoed(step + 1, by=state.vetoes, loss=loss, grad_norm=grad_norm)
                else:
                    self.stability.taken()
                    if self.ema is not None:
                        self.ema.update(step)
            else:
                self.writing.message(f"skipped {objection}")
            self.optimizer.zero_grad()
        self._loss = loss
        figures = {"step": step + 1, "loss": loss, "grad_norm": grad_norm, "lr": lr}
        return {**figures, "skipped_steps": self.stability.num_skipped, **state.metrics}

    def _evaluate(self, step: int, preemption: Preemption) -> dict[str, float] | None:
        """Return the figures of the samples held out, their mean loss first; None where the run is to stop."""
        self.progress.update(step, RunPhase.EVALUATING)
        table, weights = self.manifest.tables["evaluation"], self.run.context.stash(EvaluatedWeights)
        self._average_buffers()
        use_ema = self.ema is not None and self.manifest.tables["ema"].evaluate
        with self.ema.applied() if use_ema and self.ema is not None else contextlib.nullcontext(), weights.applied():
            loss = loss_over(
                self.loader.evaluation_batches(table.batches, batch_size=self.batch_size.largest),
                run=self.run,
                factory=self.factory,
                figures=self.figures,
                microbatch=self.manifest.train.microbatch or 1,
                is_ending=lambda: preemption.requested,
            )
        metrics = self.figures.settle()
        if loss is None:
            self.writing.message(f"left the evaluation after step {step + 1}, since the run is to stop")
        return None if loss is None else {"loss": loss, **metrics}

    def _save(self, done: int, *, asynchronous: bool) -> None:
        if self._saved == done or not self.writing.leads:
            return
        self.progress.update(done - 1, RunPhase.SAVING)
        self._average_buffers()
        self.run.save(self.output / "checkpoints" / f"step-{done}", asynchronous=asynchronous, deferred=asynchronous)
        self._saved = done
        self.prune()

    def prune(self) -> None:
        """Remove all checkpoints but the last ones; on the first rank."""
        if self.writing.is_first:
            spare = () if self.best is None else self.best.checkpoint
            checkpoint.prune(self.output / "checkpoints", self.manifest.tables["checkpoint"].keep, spare=spare)

    def _average_buffers(self) -> None:
        if self.manifest.tables["train"].sync_buffers:
            self.run.sync_buffers()


def _due(every: int | None, done: int, last: int | None) -> bool:
    return every is not None and (done % every == 0 or done == last)
