"""Manifests that are run on real ranks and planned, side by side."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from composer3d import Composition, StepAction, StepPoint, compose, hookimpl, plugin
from composer3d.huggingface.forward import expect_no_packing, run_on_meta
from composer3d.initialisation import record
from composer3d.interfaces import Action
from composer3d.manifest import load_manifest
from composer3d.mesh import Role
from composer3d.models import llama
from composer3d.planning.reports.plan_json import collective_rows
from composer3d.planning.tracing.extending import sketch_of
from composer3d.planning.tracing.fake_composition import Job, run_step
from composer3d.planning.tracing.rank_tracer import Tracer
from composer3d.planning.tracing.step_recorder import record_step
from composer3d.planning.tracing.summary import summarise
from composer3d.runner import EMA
from composer3d.step import gradients
from support.skipping_models import Skipping

VOCAB, SEQ, MICROBATCH = 64, 16, 2
SKIPPING = {
    "kept": {"kept": (0, 1)},
    "squared": {"squared": (5,)},
    "frozen": {"frozen": (0, 1)},
    "shrinking": {"halving": (1, 2), "narrowing": (0,)},
}
_STEPS = 3  # that are compared, of each real run


def factory(num_layers, source="composer3d"):
    if source in ("llama", "mixtral"):
        return lambda: huggingface(num_layers, source)
    if source in SKIPPING:
        return lambda: Skipping(num_layers, **SKIPPING[source])
    if source == "unused":
        return lambda: unused(num_layers)
    tied = source == "tied"
    return lambda: llama(
        dim=32, num_layers=num_layers, num_heads=4, num_kv_heads=2, vocab_size=VOCAB, tie_embeddings=tied
    )


def unused(num_layers):
    """Return a model with a parameter that no forward uses."""
    model = factory(num_layers)()
    model.spare = torch.nn.Parameter(torch.ones(4096))
    return model


def huggingface(num_layers, family):
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": VOCAB, "num_hidden_layers": num_layers, "use_cache": False}
    if family == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(num_local_experts=4, **sizes))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    expect_no_packing(model)
    run_on_meta(model)
    return model


def loss_fn(output, target):
    logits = getattr(output, "logits", output).flatten(0, -2).float()
    return torch.nn.functional.cross_entropy(logits, target.flatten(), reduction="sum"), target.numel()


@dataclass(frozen=True)
class Case:
    """A manifest's tables beside a tiny Llama, micro-batches of a rank, and figures that are not compared.

    The first `num_firsts` steps are unlike the others. With `decay` moving averages are kept.
    """

    text: str
    world_size: int = 2
    num_microbatches: int = 2
    num_layers: int = 4
    fused: bool = True
    source: str = "composer3d"
    num_firsts: int = 1
    uncompared: tuple[str, ...] = ()
    decay: float | None = None

    def manifest(self, folder):
        path = folder / f"{os.getpid()}.toml"
        blocks = "model.layers.*" if self.source in ("llama", "mixtral") else "layers.*"
        path.write_text(f'composer3d = 1\nmodel.blocks = "{blocks}"\ntrain.microbatch = {MICROBATCH}\n{self.text}\n')
        return load_manifest(path)

    def optimizer(self, run: Composition):
        return run.optimizer(torch.optim.AdamW, lr=1e-3, fused=self.fused)

    def averages(self, run: Composition):
        return None if self.decay is None else EMA(run, decay=self.decay)


def job_of(case, folder):
    manifest = case.manifest(folder)
    return Job(
        manifest=manifest,
        model=record(factory(case.num_layers, case.source))[0],
        loss_fn=loss_fn,
        make_optimizer=case.optimizer,
        make_averages=case.averages,
        example=((torch.empty(MICROBATCH, SEQ, dtype=torch.int64, device="meta"),), {}),
        inputs=lambda targets: {},
        grad_clip=1.0,
        world_size=case.world_size,
        num_microbatches=case.num_microbatches,
        microbatch=MICROBATCH,
    )


def tracer_of(case, folder, **options):
    return Tracer(job_of(case, folder), **options)


def one_f_one_b(degree, number):
    """Return every rank's actions of a step with that many micro-batches."""
    orders = []
    for rank in range(degree):
        warm = min(degree - rank - 1, number)
        order = [Action(rank, "F", index) for index in range(warm)]
        for index in range(number - warm):
            order += [Action(rank, "F", warm + index), Action(rank, "B", index)]
        order += [Action(rank, "B", index) for index in range(number - warm, number)]
        orders.append(order)
    return orders


def measured(case, folder):
    """Run steps on this rank and return the trace of what each of them does, the first ones left out.

    A thread of gloo's lets go of a collective's tensors after the collective is waited for, on a busy machine late: so
    a moment of a step may show more bytes than the step holds, never fewer. Of several steps the one counts in which
    nothing was late.
    """
    run = compose(
        factory(case.num_layers, case.source), case.manifest(folder), loss_fn=loss_fn, device="cpu", purpose="verify"
    )
    generator = torch.Generator().manual_seed(run.context.layout.index(dist.get_rank(), Role.BATCH))
    size = MICROBATCH * case.num_microbatches
    tokens, target = (torch.randint(VOCAB, (size, SEQ), generator=generator) for _ in range(2))
    gc.collect()
    gc.disable()
    sketches = []
    try:
        with run:
            optimizer = case.optimizer(run)
            averages = case.averages(run)
            with record_step(run, optimizer, (tokens, target), averages=averages) as observer:
                for number in range(case.num_firsts + _STEPS):
                    observer.restart()
                    options = {"inputs": {}, "grad_clip": 1.0, "number": number, "averages": averages}
                    run_step(run, optimizer, (tokens,), target, **options)
                    observer.finish()
                    sketches.append(sketch_of(observer.result, lambda module: [(module, "", 0)]))
            found = [
                _figures(replace(each, optimizer=observer.result.optimizer), run)
                for each in sketches[case.num_firsts :]
            ]
    finally:
        gc.enable()
    for each in found[1:]:
        assert (each["collectives"], each["flops"]) == (found[0]["collectives"], found[0]["flops"])
    least = min(found, key=lambda each: each["memory"]["peak"])
    return least | {"memory": least["memory"] | {"activations": min(each["memory"]["activations"] for each in found)}}


def _figures(sketch, run):
    return figures(
        summarise(sketch, context=run.context, blocks=[()], rank=dist.get_rank(), stands_for=1, is_extrapolated=False)
    )


def figures(trace):
    memory = replace(trace.memory, activations_at_peak=0, gradients_at_peak=0, transient=0, moment="")
    rows = {(row["op"], row["axis"], row["plugin"]): (row["count"], row["bytes"]) for row in collective_rows(trace)}
    flops = sum(s.count * o.count * o.flops for s in trace.segments for o in s.operators)
    return {"memory": dict(vars(memory)), "collectives": rows, "flops": flops}


@plugin(family="communication")
class Stranger:
    """A plugin of somebody else: a copy of the output projection's gradient, summed once more. Memory: the copy.

    Collectives: one all-reduce.
    """

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="stranger", point=StepPoint.GRADIENTS_REDUCED, run=self._run)

    def _run(self, state):
        grad = state.parts[0].module.get_parameter("output.weight").grad
        copy = gradients.local(grad).clone()
        dist.all_reduce(copy, group=state.context.mesh["dp_shard"].get_group())
