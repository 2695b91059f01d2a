"""Manifest checks beyond types: importable references, usable data, divisible batches, patterns that match.

Each rule returns problems at the lines of the keys at fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from composer3d.checking.called import (
    argument_problems,
    metric_problems,
    resolve,
    schedule_callable_problems,
    uncallable,
)
from composer3d.checking.data_rules import UNREAD, vocab_size_of
from composer3d.checking.foreign_problems import problem_of_hook
from composer3d.composition import is_matrix, stacked_parameters
from composer3d.errors import (
    ComposerError,
    HookError,
    ManifestError,
    PluginError,
    Problem,
    ReferenceFailure,
)
from composer3d.manifest import search
from composer3d.mesh import Layout, Role
from composer3d.step import refused_in_units, refused_of_shards
from composer3d.transform import Phase

if TYPE_CHECKING:
    from composer3d.composition import Preparation
    from composer3d.context import RunContext
    from composer3d.manifest import Document, Manifest
    from composer3d.runner import ModelFactory

__all__ = [
    "batch_problems",
    "find_factory",
    "name_problems",
    "optimizer_answer_problems",
    "optimizer_problems",
    "step_problems",
]

# More layers are a slip of the pen; a factory would make them for hours, and be ended after its minute.
_MOST_LAYERS = 1 << 16
_LAYERS = re.compile(r"(num|n)_?\w*(layers?|blocks?)|depth")
_MOST_MICROBATCHES = 100_000  # in a step: minutes of the fastest forwards


def find_factory(manifest: Manifest) -> tuple[ModelFactory | None, list[Problem]]:
    """Return the model's factory with its arguments, or what is wrong with the reference or the arguments."""
    from composer3d.runner import ModelFactory

    document, table, data = manifest.document, manifest.tables["model"], manifest.tables["data"]
    if problems := list(_too_many_layers(table.args, document)):
        return None, problems
    if table.hf is not None:
        return _find_hugging_face(manifest)
    try:
        function = resolve(table.reference, document)
    except ReferenceFailure as error:
        return None, [document.problem(("model", "use"), error.message, hint=error.hint)]
    if problem := uncallable(function, table.reference, document, ("model",)):
        return None, [problem]
    vocab_size = vocab_size_of(data, document.folder)
    if vocab_size == UNREAD and "vocab_size" not in table.args:
        vocab_size = 256  # as bytes have: a head of one row could not be sharded, which would be told as well
    known = {"vocab_size": vocab_size, "max_seq_len": data.seq_len}
    derived = {key: value for key, value in known.items() if value is not None}
    problems = [
        *argument_problems(function, table.reference, table.args, document, ("model",), derived=derived),
        *(
            document.problem(("model", "args", key), f"{key} = {table.args[key]} is below that of the data, {value}")
            for key, value in derived.items()
            if isinstance(table.args.get(key), int) and table.args[key] < value
        ),
    ]
    if problems:
        return None, problems
    try:
        return ModelFactory(manifest, vocab_size=derived.get("vocab_size")), []
    except ManifestError as error:
        return None, list(error.problems)


def _too_many_layers(args: Mapping[str, Any], document: Document) -> Iterator[Problem]:
    for key, value in args.items():
        if isinstance(value, int) and value > _MOST_LAYERS and _LAYERS.fullmatch(key):
            yield document.problem(("model", "args", key), f"{key} = {value} is above {_MOST_LAYERS}")


def _find_hugging_face(manifest: Manifest) -> tuple[ModelFactory | None, list[Problem]]:
    """Return the factory of a folder's model, or what is wrong with the folder, or with the data for it."""
    from composer3d.runner import ModelFactory

    document, data = manifest.document, manifest.tables["data"]
    try:
        factory = ModelFactory(manifest, vocab_size=None)
    except ManifestError as error:
        return None, list(error.problems)
    assert factory.hf is not None, "the manifest names one"
    problems = []
    needed, size = vocab_size_of(data, document.folder), factory.hf.vocab_size
    if needed is not None and size is not None and needed > size:
        message = f"the model has {size} tokens, and the data have {needed}"
        hint = "set data.vocab_size" if data.kind == "synthetic" else "set data.tokenizer"
        problems.append(document.problem(("model", "hf"), message, hint=hint))
    longest = factory.hf.max_seq_len
    if longest is not None and data.seq_len > longest:
        message = f"seq_len = {data.seq_len} is above the model's max_position_embeddings, {longest}"
        hint = "lower it, or set model.args.max_position_embeddings"
        problems.append(document.problem(("data", "seq_len"), message, hint=hint))
    return (None if problems else factory), problems


def batch_problems(manifest: Manifest, layout: Layout) -> list[Problem]:
    """Check that global batches divide into micro-batches of all data-parallel ranks, and not into millions."""
    from composer3d.runner import BatchSize

    try:
        sizes = BatchSize(manifest.tables["train"], degree=layout.degree(Role.BATCH, Role.REPLICA))
        sizes.check(manifest)
    except ManifestError as error:
        return list(error.problems)
    count = sizes.largest // ((manifest.tables["train"].microbatch or 1) * layout.degree(Role.BATCH, Role.REPLICA))
    if count <= _MOST_MICROBATCHES:
        return []
    message = f"global_batch = {sizes.largest} is {count:,} micro-batches on every rank, one after the other, in a step"
    return [manifest.document.problem(("train", "global_batch"), message, severity="warning")]


def optimizer_problems(manifest: Manifest) -> list[Problem]:
    """Import the optimizer, the schedule and the metrics that are named, and check what they are called with."""
    from composer3d.runner import optimizer_class, refused_arguments

    document, problems = manifest.document, []
    if "optimizer" in manifest.tables:
        table = manifest.tables["optimizer"]
        try:
            cls, arguments = optimizer_class(table, document.folder)
        except (PluginError, ReferenceFailure) as error:
            key = next((key for key in table.args if f'"{key}"' in error.message), None)
            path = ("optimizer", "args", key) if key else ("optimizer", "use")
            problems.append(document.problem(path, error.message, hint=error.hint))
        else:
            refused = refused_arguments(table, cls, arguments)
            problems += [document.problem(("optimizer", *path), reason) for path, reason in refused]
    if "lr_schedule" in manifest.tables and ":" in manifest.tables["lr_schedule"].kind:
        problems += schedule_callable_problems(manifest)
    return [*problems, *metric_problems(manifest)]


def optimizer_answer_problems(manifest: Manifest, preparation: Preparation) -> list[Problem]:
    """Ask plugins for the optimizer, on meta: else only the run's ranks would find out what they refuse.

    Args:
        manifest: With the runner's tables.
        preparation: The model on meta; its hooks are called.
    """
    from composer3d.runner import optimizer_class

    if "optimizer" not in manifest.tables:
        return []
    document, asked = manifest.document, preparation.hooks.implementing("composer3d_optimizer")
    try:
        cls, defaults = optimizer_class(manifest.tables["optimizer"], document.folder)
    except (PluginError, ReferenceFailure):
        return []  # told by `optimizer_problems`
    if preparation.context.claimants("stepped_units") and not preparation.context.claimants("optimizer"):
        if reason := refused_in_units(cls):
            return [document.problem(("optimizer", "use"), reason)]
    if not asked:
        makes_shards = any(transform.phase in (Phase.TENSOR, Phase.DATA) for transform, _ in preparation.selected)
        reason = refused_of_shards(cls) if makes_shards else ""
        # A data-parallel plugin may leave parameters as they are; the run refuses where it does not.
        return [document.problem(("optimizer", "use"), reason, severity="warning")] if reason else []
    group = {"params": list(preparation.model.parameters()), **defaults}
    try:
        preparation.hooks.optimizer(preparation.context, cls, [group])
    except HookError as error:
        # It was made of all parameters and on meta: what else a class asks of them, the run has.
        return [problem_of_hook(error, document)] if error.is_own else []
    except ComposerError as error:
        # What is wrong with the optimizer that is the default is the plugin's table.
        if document.get(("optimizer", "use")) is not None:
            return [document.problem(("optimizer", "use"), str(error))]
        own = ("optimizer",) if len(asked) > 1 else (asked[0].info.family, asked[0].name)
        return [document.problem(own, str(error), whole_table=True)]
    return []


def step_problems(manifest: Manifest, preparation: Preparation) -> list[Problem]:
    """Check that nothing needs what an optimizer that steps in the backward leaves nothing of."""
    from composer3d.runner import in_backward_problems, untrained_problem

    if not manifest.tables.keys() >= {"optimizer", "train", "stability"}:
        return []
    has_schedule = bool(preparation.hooks.implementing("composer3d_schedule"))
    found = in_backward_problems(manifest, preparation.context, has_schedule=has_schedule)
    if not any(transform.phase is Phase.CONVERT for transform, _ in preparation.selected):  # which may add parameters
        untrained = untrained_problem(manifest, preparation.model.named_parameters())
        found += [] if untrained is None else [untrained]
    return [*found, *_matrix_problems(manifest, preparation), *_empty_parameters(manifest, preparation)]


def _empty_parameters(manifest: Manifest, preparation: Preparation) -> list[Problem]:
    """Warn of parameters without elements: a size that the model was given is probably 0."""
    found = [fqn for fqn, parameter in preparation.model.named_parameters() if not parameter.numel()]
    if not found:
        return []
    more = f" and {len(found) - 1} others" if len(found) > 1 else ""
    zero = next(
        (key for key, value in manifest.tables["model"].args.items() if value == 0 and value is not False), None
    )
    path = ("model", "use") if zero is None else ("model", "args", zero)
    cause = "" if zero is None else f"{zero} = 0: "
    message = f'{cause}parameters without elements, "{found[0]}"{more}, which nothing can train'
    return [manifest.document.problem(path, message, severity="warning")]


def _matrix_problems(manifest: Manifest, preparation: Preparation) -> list[Problem]:
    """Check that Muon has a matrix to step, which a stage of a pipeline need not have."""
    expression = manifest.tables["optimizer"].matrices
    if manifest.tables["optimizer"].use != "muon" or expression is None:
        return []
    path = ("optimizer", "matrices")
    matched = {fqn: p for fqn, p in preparation.model.named_parameters() if search(expression, fqn)}
    stacked = stacked_parameters(preparation.model)
    if any(is_matrix(fqn, parameter, stacked) for fqn, parameter in matched.items()):
        return []
    found = f"finds {len(matched)} parameters, and none of them is a matrix" if matched else "finds no parameter"
    hint = f"it is a regular expression; the model has {', '.join(preparation.context.parameter_fqns[:8])}"
    return [manifest.document.problem(path, f'matrices = "{expression}" {found}', hint=hint)]


def name_problems(manifest: Manifest, factory: ModelFactory, context: RunContext) -> list[Problem]:
    """Check the patterns of the runner's own tables against the model's names; after the factory was called."""
    problems: list[Problem] = []
    try:
        factory.refuse_unmatched()
    except ManifestError as error:
        problems += error.problems
    groups = manifest.tables["optimizer"].groups if "optimizer" in manifest.tables else ()
    for index, group in enumerate(groups):
        if not any(search(group.match, fqn) for fqn in context.parameter_fqns):
            message = f'match = "{group.match}" finds no parameter of the model'
            hint = f"it is a regular expression; the model has {', '.join(context.parameter_fqns[:8])}"
            path = ("optimizer", "groups", index, "match")
            problems.append(manifest.document.problem(path, message, hint=hint))
    return problems
