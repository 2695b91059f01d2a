"""Manifest checks beyond types: importable references, usable data, divisible batches, patterns that match.

Each rule returns problems at the lines of the keys at fault.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.checking.called import builtin_refusal, metric_problems, schedule_callable_problems
from composer3d.checking.foreign_problems import problem_of_hook
from composer3d.composition import is_matrix, stacked_parameters
from composer3d.errors import (
    ComposerError,
    DataError,
    HookError,
    ManifestError,
    PluginError,
    Problem,
    ReferenceFailure,
    did_you_mean,
)
from composer3d.manifest import search
from composer3d.mesh import Layout, Role
from composer3d.step import refused_of_shards
from composer3d.transform import Phase

if TYPE_CHECKING:
    from composer3d.composition import Preparation
    from composer3d.context import RunContext
    from composer3d.manifest import Document, Manifest
    from composer3d.runner import ModelFactory
    from composer3d.runner.data import DataTable

__all__ = [
    "batch_problems",
    "data_problems",
    "find_factory",
    "name_problems",
    "optimizer_answer_problems",
    "optimizer_problems",
    "step_problems",
    "vocab_size_of",
]

# More layers are a slip of the pen; a factory would make them for hours, and be ended after its minute.
_MOST_LAYERS = 1 << 16
_LAYERS = re.compile(r"(num|n)_?\w*(layers?|blocks?)|depth")
_MOST_MICROBATCHES = 100_000  # in a step: minutes of the fastest forwards
# Text below this size is read whole: a fraction of a second, and binary files are found too.
_READ_BYTES = 1 << 26


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
    if problem := _uncallable(function, table.reference, document, "model"):
        return None, [problem]
    known = {"vocab_size": vocab_size_of(data, document.folder), "max_seq_len": data.seq_len}
    derived = {key: value for key, value in known.items() if value is not None}
    problems = [
        *_argument_problems(function, table.reference, table.args, document, "model", derived=derived),
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


def vocab_size_of(data: DataTable, folder: Path) -> int | None:
    """Return below what the data's tokens are, as far as that is known without reading them."""
    if data.kind == "synthetic" or data.tokenizer == "bpe":
        return data.vocab_size or (256 if data.kind == "synthetic" else None)
    if data.kind == "user":
        return data.vocab_size
    if data.has_file:
        return _size_of_tokenizer(data.tokenizer or "")
    from composer3d.runner.data import locate

    try:
        is_text = data.kind == "python_docs" or locate(data.use, folder=folder).kind == "text"
    except DataError:  # `data_problems` tells it; any model fits
        return 1
    return 256 if is_text else data.vocab_size


def _size_of_tokenizer(path: str) -> int | None:
    """Return what the tokens of a tokenizer.json are below; None where `data_problems` reports why not."""
    from composer3d.runner.data import read_tokenizer

    try:
        return max(read_tokenizer(Path(path)).get_vocab(with_added_tokens=True).values(), default=-1) + 1
    except (DataError, ImportError):
        return None


def resolve(reference: str, document: Document) -> Any:
    """Import what a reference of the manifest names; see `resolve_reference`."""
    from composer3d.manifest import resolve_reference

    return resolve_reference(reference, document.folder)


def _uncallable(function: Any, name: str, document: Document, table: str) -> Problem | None:
    """Return the problem of what cannot be called for a model or data; `sys:exit` and `os:abort` are not tried."""
    refusal = builtin_refusal(function, name)
    if refusal is None:
        return None
    return document.problem((table, "use"), refusal, hint="name a class or a function")


def _argument_problems(
    function: Any, name: str, args: Mapping[str, Any], document: Document, table: str, *, derived: Mapping[str, Any]
) -> Iterator[Problem]:
    """Compare a table `args`, and what is derived where it is silent, with the signature of what it is for."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature: the call itself tells
        return
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    by_name = {
        key: parameter
        for key, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    for key in args:
        if key not in by_name and not takes_any:
            hint = did_you_mean(key, list(by_name)) or "it takes none"
            yield document.problem((table, "args", key), f'{name} takes no argument "{key}"', hint=hint)
    for key, parameter in by_name.items():
        if parameter.default is parameter.empty and key not in args and key not in derived:
            place = (table, "args" if args else "use")
            yield document.problem(place, f'{name} needs the argument "{key}"', hint=f"write {table}.args.{key} = ...")


def data_problems(manifest: Manifest) -> list[Problem]:
    """Look whether the data are there and long enough, without preparing or calling anything."""
    document, table = manifest.document, manifest.tables.get("data")
    if table is None or table.kind == "synthetic":
        return []
    if table.kind == "user":
        try:
            factory = resolve(table.use, document)
        except ReferenceFailure as error:
            return [document.problem(("data", "use"), error.message, hint=error.hint)]
        if problem := _uncallable(factory, table.use, document, "data"):
            return [problem]
        return list(_argument_problems(factory, table.use, table.args, document, "data", derived={}))
    try:
        _probe(table, document.folder)
    except DataError as error:
        # The table is said by the problem's place.
        return [document.problem(("data", "use"), str(error).removeprefix("[data] "))]
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return [document.problem(("data", "use"), f'use = "{table.use}" cannot be read: {reason}')]
    return []


def _probe(table: DataTable, folder: Path) -> None:
    """Raise a DataError for text or token files that are missing, empty, of another kind, or too short."""
    import numpy as np

    from composer3d.runner.data import (
        MappedTokens,
        Text,
        bpe_key,
        held_out,
        locate,
        map_token_file,
        python_docs,
        read_tokenizer,
        tokenizer_key,
    )

    if table.tokenizer == "bpe":
        bpe_key("", table.vocab_size or 0)  # says which extra is missing
    if table.has_file:
        tokenizer_key("", Path(table.tokenizer or ""))
        read_tokenizer(Path(table.tokenizer or ""))
    if table.kind == "python_docs":
        arrays: list[Any] = [np.frombuffer(python_docs(), np.uint8)]
    else:
        located = locate(table.use, folder=folder)
        if located.kind == "tokens":
            arrays = [map_token_file(file, table) for file in located.files]
        else:
            num_bytes = sum(file.stat().st_size for file in located.files)
            if num_bytes <= _READ_BYTES:
                num_bytes = Text.from_files(located.files, use=table.use).num_bytes
            arrays = [MappedTokens(located.files[0], dtype=np.dtype(np.uint8), size=num_bytes)]
    # A BPE token stands for a byte or more, so text with too few bytes has too few tokens.
    held_out(arrays, table, vocab_size=None, facts={})


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
