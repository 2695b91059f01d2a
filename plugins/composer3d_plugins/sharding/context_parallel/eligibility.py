"""Dry run of a model on meta with a sharded sequence: what of it is sharded, gathered or refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from composer3d import Batch, PlannedShards, PluginError, RunContext, torch_compat
from composer3d.propagation import (
    Begins,
    Call,
    PropagatedSequence,
    PropagationError,
    Sharded,
    ShardSpec,
    Traced,
    activation_of,
    blocks_of,
    kind_of,
    on_meta,
    patched,
    spec_of,
    strip,
    trace,
    unseen,
)
from composer3d_plugins.sharding.context_parallel.attention_methods import Method, heads_over, inner_degrees, unfit
from composer3d_plugins.sharding.context_parallel.batch_placement import (
    Placement,
    Sequences,
)
from composer3d_plugins.sharding.context_parallel.drawn_dims import DrawnDims
from composer3d_plugins.sharding.context_parallel.kept_values import KeptValues
from composer3d_plugins.sharding.context_parallel.length_numbers import length_number, named
from composer3d_plugins.sharding.context_parallel.loss_positions import Losses, OutputForm
from composer3d_plugins.sharding.context_parallel.model_inputs import ModelInputs
from composer3d_plugins.sharding.context_parallel.opaque_kernels import note_compiled, refuse_opaque
from composer3d_plugins.sharding.context_parallel.position_tables import Table, Tables
from composer3d_plugins.sharding.context_parallel.sequence_positions import contiguous
from composer3d_plugins.sharding.context_parallel.sequence_rules import DryRules
from composer3d_plugins.sharding.context_parallel.stage_values import StageValues

__all__ = ["Found", "begins_of", "dry_run"]

AXIS = "cp"
LEFT_OUT = "leave out [sharding.context_parallel]"
ROWWISE = f"name it in rowwise if it does the same with every token; else {LEFT_OUT}"
# Kinds of modules whose product precision plugins may replace.
LAYERS = ("linear", "transposed")


@dataclass(kw_only=True)
class Found:
    """Outcome of a dry run.

    Attributes:
        begins: Blocks, which shard what they are given whole.
        lengths: Of sequences inside of the model that do not divide.
        has_flex: Whether FlexAttention is called, or what torch.compile has compiled: both run as they are.
        blocks: Of the tensors that each repeated block takes, the dims along which they are sharded.
        given_whole: Blocks whose activation is whole where they are called.
        rows: FQNs of modules by what is done in them: attention, products, neighbours, gathered.
        rowwise: Modules that are said to do the same with every position.
        inputs: Of the model.
        shares_output: Whether the model's output is sharded.
        table: The smallest table of positions that the model reads, beyond which nothing is padded.
        drawn: Dims of what the model draws.
        unpadded: Why lengths that do not divide are not padded; empty where they are.
        sequences: Lengths of the batch at work.
        inner_degree: Of usp, ranks that exchange heads; else 1.
        form: What the model returned.
        kept: What the forward leaves in the model, or in objects of its code.
        losses: Decisions about the run's loss function.
        values: What modules return, for stages of a pipeline.
        layers: Forwards of the classes of linear layers, by FQN, before precision plugins convert them.
        is_captured: Returns whether blocks run as graphs, in which positions are constants.
    """

    inputs: ModelInputs
    begins: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    has_flex: bool = False
    blocks: dict[str, Sharded] = field(default_factory=dict)
    given_whole: set[str] = field(default_factory=set)
    rows: dict[str, list[str]] = field(default_factory=dict)
    rowwise: tuple[str, ...] = ()
    shares_output: bool = True
    table: Table | None = None
    drawn: DrawnDims = field(default_factory=DrawnDims)
    unpadded: str = ""
    sequences: Sequences = field(default_factory=Sequences)
    inner_degree: int = 1
    form: OutputForm | None = None
    kept: KeptValues = field(default_factory=KeptValues)
    losses: Losses | None = None
    values: StageValues = field(default_factory=lambda: StageValues(axis=AXIS))
    layers: dict[str, Any] = field(default_factory=dict)
    is_captured: Callable[[], bool] = lambda: False

    def converted(self, model: nn.Module) -> set[str]:
        """Return linear layers with another product than torch's, which is that of each token whatever its code."""
        return {
            fqn
            for fqn, module in model.named_modules()
            if fqn in self.layers and type(module).forward is not self.layers[fqn]
        }


CUMULATIVE = frozenset("cumsum cumprod cummax cummin logcumsumexp".split())  # which read no later position
RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu".split())
UNLISTED = ("narrowed", "follows")  # notes that say something of a function which another note names


def dry_run(
    model: nn.Module, context: RunContext,
    *, degree: int, unit: int, dim: int, others: str, rowwise: Collection[str], method: str, inner_degree: int | None,
    balanced: bool,
) -> Found:  # fmt: skip
    """Run the whole model on meta with its sequence sharded.

    Args:
        model: The whole model.
        degree: Ranks along cp.
        unit: What lengths are multiples of, with padding.
        dim: The dim of inputs that is the sequence.
        others: "gather" or "refuse".
        rowwise: FQNs of modules that do the same with every position.
        method: Of attention.
        inner_degree: Of usp, where it is given.
        balanced: Whether a rank holds one chunk from both ends.

    Raises:
        PluginError: Something cannot be sharded, or nothing would be won.
    """
    refuse_opaque(model, rowwise)
    layers = {fqn: type(module).forward for fqn, module in model.named_modules() if kind_of(module) in LAYERS}
    blocks = tuple(blocks_of(model, context, several=True))
    traced = trace(model, context, blocks=blocks, scale=degree)
    waiting: list[tuple[ModelInputs | None, bool]] = [(ModelInputs.of(model, dim), False)]
    found: Found | None = None
    refused: PluginError | None = None
    for inputs, takes_all in waiting:
        if inputs is None:
            continue
        rules = DryRules(degree=degree, balanced=balanced, others=others, takes_all=takes_all)
        tried = Found(inputs=inputs, rowwise=tuple(rowwise), layers=layers, begins=blocks)
        try:
            _try(model, traced, tried, rules, context, unit, Method(method), inner_degree)
            found = tried
        except PluginError as error:
            refused = refused or error
            # Rows that values choose are whole on every rank, and sharded where an example leaves none out.
            waiting += [(inputs, True)] if traced.call.has_values and not (takes_all or found) else []
        # What a convolution takes for channels is no sequence: the model makes it of them, and it begins at a block.
        waiting += [(inputs.without_features(traced.call), takes_all)] if rules.has_features else []
    if found is None:
        assert refused is not None, "as nothing was found"
        raise refused
    found.has_flex |= note_compiled(model, context)
    return found


def _try(
    model: nn.Module, traced: Traced, found: Found, rules: DryRules, context: RunContext, unit: int, method: Method,
    inner_degree: int | None,
) -> None:  # fmt: skip
    """Run the model on meta with those of its inputs sharded that are said to have a sequence.

    Raises:
        PluginError: Something cannot be sharded, or nothing would be won.
    """
    inputs, blocks, degree = found.inputs, found.begins, rules.degree
    call = inputs.divisible(traced.call.fresh(), unit)
    inputs.refuse(call, has_blocks=bool(blocks))
    placement = Placement(
        inputs=inputs, unit=unit, shares_target=False, unpadded="", positions=partial(contiguous, degree=degree), rank=0
    )
    batch, sequences = placement.place(Batch(args=call.args, kwargs=call.kwargs))
    call = replace(call, args=batch.args, kwargs=batch.kwargs)
    call = inputs.with_all_taken(call) if rules.takes_all else call
    found.values.lengths = sequences.in_order
    outputs: list[ShardSpec | None] = []
    sequence = PropagatedSequence(
        degree=degree,
        rules=rules,
        blocks={},
        rowwise=found.rowwise,
        inputs=inputs.sharded,
        begins=begins_of(found),
    )

    def returned(leaf: Tensor, spec: ShardSpec | None) -> Tensor:
        outputs.append(spec)
        return leaf

    sequence.returned = returned
    forwards = {
        module: _tracked(fqn, forward if call.has_values or not fqn else unseen(forward), rules, found, set(blocks))
        for module, fqn, forward in sequence.forwards(model)
    }
    for fqn in found.rowwise:
        module = model.get_submodule(fqn)
        inner = module.forward if call.has_values else _without_values(module.forward)
        forwards[module] = sequence.passing(fqn, inner)
    output = _run(model, call, sequence, found, found.kept.after(forwards, model, AXIS), rules)
    found.form = OutputForm(output, tuple(outputs), num_samples=sequences.num_samples, lengths=sequences.in_order)
    found.lengths, found.shares_output = tuple(sequence.lengths), any(spec is not None for spec in outputs)
    _summarise(found, rules, traced.forms.values())
    _refuse(found, rules, context, method, inner_degree)
    found.unpadded = _unpadded(model, rules, outputs) or _length_number(model, traced.call, found, unit)


def _length_number(model: nn.Module, call: Call, found: Found, unit: int) -> str:
    """Return how the model computes with its sequence's length as a number; empty if it does not."""
    call = call.fresh()
    dims = found.inputs.sharded(call.args, call.kwargs)
    given = [leaf for leaf in torch_compat.tree_leaves([call.args, dict(call.kwargs)]) if isinstance(leaf, Tensor)]
    sharded = [call.args[key] if isinstance(key, int) else call.kwargs[key] for key in dims]
    lengths = {x.shape[found.inputs.dim] for x in sharded}
    tables = Tables(lengths=lengths, given=given)
    try:
        where = length_number(
            model, call, tables=tables, drawn=found.drawn, shorter=unit - 1, has_products="products" in found.rows
        )
    except Exception as error:  # a model's own code may raise anything
        return f"it cannot be run for another length ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    found.table = tables.smallest
    return where or ("it draws from generators of its own, one number after another" if found.drawn.is_seeded else "")


def _summarise(found: Found, rules: DryRules, forms: Iterable[Sequence[str]]) -> None:
    """Take over what was noted of functions and blocks, which are of several forms."""
    # Code may leave out blocks at random: what they take is what others of their form take.
    forms = list(forms)
    found.values.complete(forms)
    for group in forms:
        given = [found.blocks[fqn] for fqn in group if fqn in found.blocks and fqn not in found.given_whole]
        found.blocks = dict.fromkeys(group if given else (), next(iter(given), ())) | found.blocks
    for what, fqn, name in rules.notes:
        if what not in UNLISTED:
            found.rows.setdefault(what, []).append(fqn)
        found.has_flex |= name == "flex_attention"
    # Those that take shards never take a local shard for the whole: what a stage receives carries no mark. A decoder's
    # first takes its own sequence whole, beside a shard of the encoder's.
    found.begins = tuple(
        fqn
        for fqn in found.begins
        if fqn in found.given_whole or not any(d is not None for d in found.blocks.get(fqn, ()))
    )


def _unpadded(model: nn.Module, rules: DryRules, outputs: Sequence[ShardSpec | None]) -> str:
    """Return why tokens may see padding that follows them; empty where they do not.

    Masks have no values on meta: those of a run, and weights of attention that is written out, are looked at.
    """
    for what, fqn, name in rules.notes:
        if what == "gathered" and not _is_causal(model.get_submodule(fqn), name):
            return f"{named(fqn)} ({name}) sees padding as it sees tokens"
        if what == "follows":
            return f"{named(fqn)} ({name}) reads what follows a token"
    for fqn, call in rules.calls:
        if call.k_length is not None and (
            call.q_length != call.k_length or not (call.is_causal or call.mask is not None)
        ):
            return f"{named(fqn)} attends to what follows a token"
    if not all(spec is not None and len(spec.placed.parts) == 1 for spec in outputs):
        return "not all that the model returns is sharded"
    return ""


def _is_causal(module: nn.Module, name: str) -> bool:
    """Return whether a function along the sequence reads what comes before a token alone."""
    if name in RECURRENT:
        return isinstance(module, nn.RNNBase) and not module.bidirectional
    return name in CUMULATIVE


def _run(
    model: nn.Module,
    call: Call,
    sequence: PropagatedSequence,
    found: Found,
    forwards: Mapping[nn.Module, Callable[..., Any]],
    rules: DryRules,
) -> Any:
    try:
        with patched(forwards), sequence.hooked(model), found.values.noted(model):
            return on_meta(model, call)
    except PropagationError as error:
        text = str(error) if str(error).startswith('"') else f"{named(rules.failed)}: {error}"
        text = named(rules.failed) + text.removeprefix('""') if text.startswith('""') else text
        raise PluginError(
            f"context_parallel cannot shard the sequence: {text}",
            hint=f'if "{rules.failed}" does the same with every token, name it in rowwise' if rules.failed else None,
        ) from error
    except Exception as error:  # a model's own code may raise anything
        raise PluginError(
            f"context_parallel cannot run {named(rules.failed)} on meta with a sharded sequence "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]})",
            hint=(ROWWISE if rules.failed else LEFT_OUT) + found.inputs.other_dims(call),
        ) from error


def _refuse(found: Found, rules: DryRules, context: RunContext, method: Method, inner_degree: int | None) -> None:
    """Refuse a model in which nothing mixes positions of sharded activations, and heads that a method cannot divide."""
    done = {what for what, _, _ in rules.notes}
    goes_on = found.shares_output or any(dim is not None for dims in found.blocks.values() for dim in dims)
    if not done & {"attention", "products", "neighbours"} and not (goes_on and "gathered" in done):
        gathered = [(fqn, name) for what, fqn, name in rules.notes if what == "gathered"]
        if gathered:
            names = ", ".join(dict.fromkeys(name for fqn, name in gathered if fqn == gathered[0][0]))
            raise PluginError(
                f"context_parallel has no effect: {named(gathered[0][0])} gathers the sequence ({names}), and no "
                "attention, convolution or scan works on shards of it after that",
                hint=f"let attention take samples, masked in place of rows that values choose; or {LEFT_OUT}",
            )
        raise PluginError(
            "context_parallel has no effect: no attention, convolution or scan of the model works on the sequence that "
            "is sharded",
            hint=f"{LEFT_OUT}, or set sequence_dim to the sequence's dim of inputs",
        )
    planned = context.stash(PlannedShards).by_parameter
    for fqn in (fqn for what, fqn, _ in rules.notes if what == "gathered" and f"{fqn}.weight" in planned):
        raise PluginError(
            f"context_parallel: {named(fqn)} sums over positions, which are sharded over cp, and tp shards its weight",
            hint="leave it out of the plan of tp, set cp = 1 or tp = 1, or, if it sums over features, sequence_dim",
        )
    possible: set[int] | None = None
    for fqn, attention in rules.calls:
        if attention.q_length is None or attention.k_length is None:
            continue
        # Query heads are the third dim from the last; those without are one head.
        num_heads = attention.q_BHSE.shape[-3] if attention.q_BHSE.ndim > 3 else 1
        num_heads //= heads_over(context, num_heads)
        why = unfit(method, num_heads=num_heads, degree=rules.degree, inner_degree=inner_degree)
        if why is not None:
            raise PluginError(f'context_parallel: "{fqn}": {why}')
        divisors = set(inner_degrees(num_heads, rules.degree))
        possible = divisors if possible is None else possible & divisors
        if method is Method.USP and not possible:
            raise PluginError(
                f'context_parallel: "{fqn}": no divisor of cp = {rules.degree} divides the {num_heads} heads here and '
                'those of the attentions before; write method = "gather" or "ring"'
            )
    if method is Method.USP:
        found.inner_degree = inner_degree or max(possible or {1})


def begins_of(found: Found) -> Begins | None:
    """Return at which blocks a sequence begins that no input has, or one of another length than the inputs'."""
    dim = found.inputs.dim
    if not found.begins:
        return None
    return Begins(blocks=found.begins, dim=dim, is_sequence=lambda x: x.ndim == dim + 2)


def _without_values(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward of a rowwise module, whose code may look at values: its result is then as what it is given."""
    answered = unseen(forward)

    def passed(*args: Any, **kwargs: Any) -> Any:
        plain, options = torch_compat.tree_map(lambda x: strip(x) if isinstance(x, Tensor) else x, [list(args), kwargs])
        return answered(*plain, **options)

    return passed


def _tracked(
    fqn: str, forward: Callable[..., Any], rules: DryRules, found: Found, blocks: Collection[str]
) -> Callable[..., Any]:
    def tracked(*args: Any, **kwargs: Any) -> Any:
        if fqn in blocks:
            found.blocks.setdefault(fqn, _dims_of(args, kwargs))
            key = activation_of(args, kwargs)
            if key is not None and spec_of(args[key] if isinstance(key, int) else kwargs[key], AXIS) is None:
                found.given_whole.add(fqn)
        rules.at_work.append(fqn)
        try:
            return forward(*args, **kwargs)
        except Exception:
            rules.failed = rules.failed or fqn
            raise
        finally:
            rules.at_work.pop()

    return tracked


def _dims_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sharded:
    with torch_compat.without_torch_functions():
        leaves = [leaf for leaf in torch_compat.tree_leaves([list(args), dict(kwargs)]) if isinstance(leaf, Tensor)]
        return tuple(None if (spec := spec_of(leaf, AXIS)) is None else spec.placed.dim for leaf in leaves)
