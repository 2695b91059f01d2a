"""Models that ranks train of their own, and bring together every few steps: local SGD, DiLoCo, Streaming DiLoCo."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field

from composer3d import (
    Axis,
    Decisions,
    EvaluatedWeights,
    PluginError,
    Role,
    RunContext,
    SampleWeights,
    Stateful,
    StepAction,
    StepPoint,
    hookimpl,
    plugin,
    select_fqns,
)
from composer3d_plugins.communication.local_sgd.islands import AXIS, OUTER, Islands, Settings

__all__ = ["LocalSGD"]


@plugin(family="communication", owns=(AXIS,), axes=(Axis(name=AXIS, role=Role.INDEPENDENT),))
class LocalSGD:
    """Train a model on each island of ranks by itself, on samples of its own, and bring them together now and then.

    Islands do not reduce gradients: a step of one is that of one device on its samples, which `verify` proves; what
    they exchange is outside of that contract. The state of inner optimizers stays on its island.

    average: every `every` steps parameters are the mean of all islands'.
    post_local: the same, after `warmup_steps` steps of ordinary data parallelism.
    diloco: the mean of the islands' parameters is a step of an outer optimizer from those before: with d = before -
        mean, v <- outer_momentum v + d, and outer_lr (d + outer_momentum v) is subtracted (Nesterov).
    streaming_diloco: the same for one of `fragments` parts of the blocks after the other, at equal distances within
        `every` steps. The exchange may take `overlap` steps, in which training goes on; `mix` is then the part of an
        island's own parameters that stays.
    Published settings of the outer optimizer were found over hundreds of outer steps from a trained model: in 80 of
    them, from scratch, plain averaging had the lower loss (2.21 beside 2.47, 100,000 parameters, 4 islands).
    An island's outer gradient, before - own, may travel in 8 or 4 bits: it is encoded once, and all islands decode and
    add all of them in the order of islands, in float32. Islands have equal weights, or those of the valid tokens that
    each has trained on since its last exchange. A mesh gives all islands as many ranks: an exchange is between those
    that hold the same shards, of which islands of other degrees have none. Those that are slower, or have less data,
    are given fewer samples of a global batch by `samples`, and make fewer micro-batches a step of them.
    Evaluation is of the mean of the islands' weights, moving averages included (the mean of moving averages is the
    moving average of means), and every island evaluates all samples, so that it is the same on all of them. With a step
    count that is no multiple of `every` islands end with parameters of their own; an exported model is the first one's.
    Between exchanges no number crosses islands: loss and grad_norm of a row of metrics are the first island's, tokens
    and samples are those of all.

    Memory: average: a buffer of the largest fragment's local shards. With an outer optimizer besides the outer
        parameters and their momentum, in float32: two more copies of the local shards; with overlap three.
    Collectives: one all-reduce a fragment and dtype over island in every `every`-th step, with quantise one all-gather
        of payloads; in warm-up steps one all-reduce of all gradients; in an evaluation one of all parameters.

    Source: Sebastian Stich, Local SGD Converges Fast and Communicates Little, arXiv:1805.09767; Tao Lin et al., Don't
    Use Large Mini-Batches, Use Local SGD, arXiv:1808.07217; Arthur Douillard et al., DiLoCo, arXiv:2311.08105, and
    Streaming DiLoCo with Overlapping Communication, arXiv:2501.18512.

    Args:
        method: See above.
        every: Steps from one exchange to the next.
        outer_lr: Of the outer optimizer; default: 0.7.
        outer_momentum: Of the outer optimizer; default: 0.9.
        warmup_steps: Steps of ordinary data parallelism at the beginning: gradients are averaged over islands, weighted
            by their valid tokens.
        fragments: Parts of the blocks that are exchanged at steps of their own; the rest goes with the first.
        overlap: Steps that an exchange may take.
        mix: Part of an island's own parameters that stays when an overlapped exchange has ended; default: 0.5.
        quantise: Codec of outer gradients, in blocks of 256: int8, fp8 or int4; default: parameters travel as they are.
        weigh: `equal` islands, or by the `tokens` that each has trained on since its last exchange; default: equal, and
            with samples by tokens.
        samples: Of a global batch each island's, in proportion: [2, 1] gives the first twice as many as the second;
            default: all as many.
        evaluate: The `mean` of islands, or each its `own` weights.
    """

    method: Literal["average", "post_local", "diloco", "streaming_diloco"] = "diloco"
    every: int = Field(default=100, ge=1)
    outer_lr: float | None = Field(default=None, gt=0)
    outer_momentum: float | None = Field(default=None, ge=0, lt=1)
    warmup_steps: int = Field(default=0, ge=0, examples=[1])
    fragments: int = Field(default=1, ge=1, examples=[2])
    overlap: int = Field(default=0, ge=0, examples=[1])
    mix: float | None = Field(default=None, ge=0, lt=1)
    quantise: Literal["int8", "fp8", "int4"] | None = None
    weigh: Literal["equal", "tokens"] | None = None
    samples: tuple[Annotated[int, Field(ge=1, le=1 << 16)], ...] | None = Field(default=None, examples=[[2, 1]])
    evaluate: Literal["mean", "own"] = "mean"

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse options that would do nothing, and exchanges that never happen."""
        for name in ("outer_lr", "outer_momentum", "quantise"):
            if getattr(self, name) is not None and self.method not in OUTER:
                what = "outer gradient" if name == "quantise" else "outer optimizer"
                raise PluginError(
                    f'{name} has no effect with method = "{self.method}", which has no {what}',
                    hint='write method = "diloco"',
                    keys=(name,),
                )
        for name, nothing in (("fragments", 1), ("overlap", 0), ("mix", None)):
            if getattr(self, name) != nothing and self.method != "streaming_diloco":
                raise PluginError(
                    f'{name} has no effect with method = "{self.method}"', hint='write method = "streaming_diloco"'
                )
        if self.mix is not None and not self.overlap:
            raise PluginError("mix has no effect without overlap: an exchange ends in the step in which it begins")
        if (self.method == "post_local") != (self.warmup_steps > 0) and self.method in ("post_local", "average"):
            raise PluginError(
                f'method = "{self.method}" with warmup_steps = {self.warmup_steps}: post_local is average after a '
                "warm-up",
                hint='write method = "post_local" and warmup_steps' if self.warmup_steps else "state warmup_steps",
            )
        if self.every < self.fragments or self.overlap >= max(self.every // self.fragments, 1):
            raise PluginError(
                f"every = {self.every} has no room for {self.fragments} fragments that take {self.overlap} steps each",
                hint="overlap has to be below every / fragments",
            )
        if context.degrees[AXIS] == 1 and context.manifest.document.get(("mesh", AXIS)) is None:
            raise PluginError(
                f"there is one {AXIS}, and nobody to exchange with",
                hint=f"[mesh] {AXIS} = 2 makes two, {AXIS} = 1 says that one is meant",
            )
        num_steps = getattr(context.manifest.train, "steps", None)
        if num_steps is not None and self.warmup_steps + self.every > num_steps:
            raise PluginError(
                f"the run has {num_steps} steps, and islands first meet after {self.warmup_steps + self.every}",
                hint="lower every, or train for longer",
            )
        if self.fragments > 1:
            blocks = len(select_fqns(context.blocks, context.fqns)) if context.fqns else self.fragments
            if blocks < self.fragments:
                raise PluginError(f"fragments = {self.fragments}, and the model has {blocks} blocks")
        if self.warmup_steps:
            context.claim("gradients", by=self)
        if self.samples is not None:
            self._divide_unequally(self.samples, context)

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> Sequence[StepAction]:
        """Bring islands together after the optimizer's step; average gradients in warm-up steps."""
        islands = context.state[self] = Islands(self._settings, context)
        if self.evaluate == "mean" and context.purpose == "run":
            context.stash(EvaluatedWeights).around.append(islands.evaluated)
        if context.purpose != "check":  # which has no mesh, and counts no bytes
            context.stash(Decisions).notes.extend(self._notes(islands.planned(), num_islands=context.degrees[AXIS]))
        actions = [
            StepAction(name="local_sgd.begin", point=StepPoint.BEGIN, run=islands.begin),
            StepAction(name="local_sgd", point=StepPoint.PARAMETERS_SYNCHRONISED, run=islands.meet),
        ]
        if self.warmup_steps:
            actions.append(StepAction(name="local_sgd.warmup", point=StepPoint.UNSCALED, run=islands.average_gradients))
        return actions

    @hookimpl
    def composer3d_state(self, context: RunContext) -> Mapping[str, Stateful] | None:
        """Save outer parameters and their momentum."""
        islands: Islands = context.state[self]
        if self.method in OUTER:
            islands.allocate()
        elif self._settings.weigh == "equal":
            return None
        return {"outer": islands}

    def _divide_unequally(self, samples: Sequence[int], context: RunContext) -> None:
        """Have the global batch divided by `samples`; `verify` proves islands by themselves, each on a whole batch."""
        num, listed = context.degrees[AXIS], ", ".join(map(str, samples))
        if len(samples) != num and context.purpose != "verify":  # which may make do with fewer islands
            raise PluginError(
                f"samples = [{listed}] is for {len(samples)} islands, and there are {num}",
                hint=f"write a number for each, or [mesh] {AXIS} = {len(samples)}",
                keys=("samples",),
            )
        if len(set(samples)) == 1:
            raise PluginError(
                f"samples = [{listed}] gives all islands as many, as without it", hint="remove it", keys=("samples",)
            )
        if context.purpose != "verify":
            common = math.gcd(*samples)
            context.stash(SampleWeights).by_axis[AXIS] = tuple(each // common for each in samples)

    def _notes(self, exchanges: Sequence[tuple[str, int]], *, num_islands: int) -> list[str]:
        """Return what a plan says of exchanges, which are in no trace of a step."""
        if num_islands == 1:
            return [f"{AXIS} = 1: there is one island, and nobody to exchange with; [mesh] {AXIS} = 2 makes two"]
        sent = [(how, num_bytes) for how, num_bytes in exchanges if num_bytes]
        if not sent:
            return []
        what = "parameters" if self.quantise is None else f"outer gradients in {self.quantise}"
        listed = ", ".join(f"{num_bytes:,}" for _, num_bytes in sent)
        parts = f", in {len(sent)} of these steps one fragment each: {listed}" if len(sent) > 1 else ""
        total = sum(num_bytes for _, num_bytes in sent)
        return [
            f"over {AXIS}, outside of the trace, which is of a step between exchanges: in every {self.every} steps a "
            f"rank {sent[0][0]} {total:,} bytes of {what}{parts}; that is {total / self.every:,.0f} bytes a step"
        ]

    @property
    def _settings(self) -> Settings:
        weigh = self.weigh or ("equal" if self.samples is None else "tokens")
        stated = {each.name: getattr(self, each.name) for each in fields(Settings)}
        return Settings(**{**stated, "weigh": weigh})
