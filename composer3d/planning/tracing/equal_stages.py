"""Equal stages: positions of a pipeline that differ in their number of equal blocks alone, of which one is traced."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from composer3d import patterns
from composer3d.errors import TransformError
from composer3d.planning.schedules.planned_stages import StageForms
from composer3d.planning.tracing.equal_blocks import Known, form_of, form_of_tensor, kind_of, prefixes, treatments

if TYPE_CHECKING:
    from composer3d.composition import Preparation
    from composer3d.interfaces import Part
    from composer3d.planning.tracing.enough_microbatches import ShortStep
    from composer3d.planning.tracing.extending import Message, Sketch

__all__ = ["Twin", "twins_of"]


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A rank that runs as another one does, on other blocks: its trace is the other's, but for stage and groups.

    Args:
        rank: Global.
        stage: Of the pipeline.
        names: FQNs of the stage's blocks.
        like: The rank that it is like.
        stage_of_like: Stage of that one.
    """

    rank: int
    stage: int
    names: Sequence[str]
    like: int
    stage_of_like: int

    def of(self, sketch: Sketch | None) -> Sketch | None:
        """Return a sketch of the other rank as one of this rank; None where that is not known.

        A group with both ranks is one of both. Any other one is as far from it as the ranks are from each other, but
        for groups along no axis.
        """
        if sketch is None or any(row[1].startswith("ranks(") for stage in sketch.stretches for row in stage.messages):
            return None
        distance = self.rank - self.like

        def own(message: Message) -> Message:
            ranks = message[2] if self.rank in message[2] else tuple(rank + distance for rank in message[2])
            return (*message[:2], ranks, *message[3:])

        stretches = tuple(
            replace(
                stage,
                stage=self.stage if stage.stage == self.stage_of_like else stage.stage,
                messages={own(message): count for message, count in stage.messages.items()},
            )
            for stage in sketch.stretches
        )
        return replace(sketch, stretches=stretches)


def twins_of(
    preparation: Preparation, ranks: Sequence[int], step_of: Callable[[int], ShortStep], *, whole: int
) -> dict[int, Twin]:
    """Return the ranks that are each like an earlier one: both have one stage, of equal blocks that are treated alike.

    Args:
        preparation: Of the job.
        ranks: At the origin of positions between the first and the last one.
        step_of: Gives what of a rank's step is traced.
        whole: Blocks of a stage that is traced whole. Those with fewer are like none, those with so many like others
            with so many.

    Memory: none; stages of a model on meta. Collectives: none.
    """
    from composer3d.planning.tracing.fake_composition import planned

    context = preparation.context
    firsts: dict[Hashable, tuple[int, int]] = {}
    found: dict[int, Twin] = {}
    for rank in ranks if len(ranks) > 1 else ():
        step = step_of(rank)
        with context.as_rank(rank), planned(context):
            split = preparation.hooks.split(context, preparation.model)
            parts = () if split is None else split.parts
            names, form = _looked_at(parts[0], preparation) if len(parts) == 1 else ([], None)
        # Of other schedules it is not known that two positions run the same.
        if form is not None and len(names) >= whole and step.most_in_flight is not None:
            stage = parts[0].index
            forms = context.stash(StageForms)
            own = frozenset(forms.around(stage).items()), frozenset(forms.costs(stage))
            key = (step.num_microbatches, step.most_in_flight, len(names) > whole, form, own)
            like = firsts.setdefault(key, (rank, stage))
            if like[0] != rank:
                found[rank] = Twin(rank=rank, stage=stage, names=names, like=like[0], stage_of_like=like[1])
    return found


def _looked_at(part: Part, preparation: Preparation) -> tuple[list[str], Hashable | None]:
    """Return the names of a stage's blocks, and what stages like it have in common: None where its blocks differ."""
    context, module = preparation.context, part.module
    try:
        blocks = patterns.select(context.blocks, context.fqns)
    except TransformError:  # no single list of equal blocks
        return [], None
    modules = dict(module.named_modules())
    names = [fqn for fqn in blocks if fqn in modules and any(True for _ in modules[fqn].parameters())]
    digests: Known = {}
    forms = {form_of(modules[fqn], digests) for fqn in names}
    treated = treatments(preparation, names)
    if len(forms) != 1 or len({*treated[1:-1]}) > 1:
        return names, None
    known = frozenset(blocks)
    others = [(fqn, inner) for fqn, inner in modules.items() if known.isdisjoint(prefixes(fqn))]
    tensors = [*module.named_parameters(), *module.named_buffers()]
    rest = [(fqn, form_of_tensor(tensor)) for fqn, tensor in tensors if known.isdisjoint(prefixes(fqn))]
    outside = frozenset(fqn for fqn, _ in (*others, *rest))
    selected = tuple(outside.intersection(fqns) for _, fqns in preparation.selected)
    kinds = tuple((fqn, kind_of(inner, digests)) for fqn, inner in others)
    return names, (forms.pop(), *treated[:2], treated[-1], kinds, tuple(rest), selected)
