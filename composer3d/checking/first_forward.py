"""First forward: two real samples in a process of its own, so that `check` reports errors of a first step."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d import pieces_of
from composer3d.checking.drawn import Foreign, recorded_draws
from composer3d.errors import ComposerError, DataError, ForkError, LossError, Problem
from composer3d.processes import running

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d.composition import Preparation
    from composer3d.manifest import Manifest
    from composer3d.runner import ModelFactory
    from composer3d.step import Site

__all__ = ["first_forward_problems"]

# Above it, of every list of equal blocks one is kept, and if that is still more the forward has shapes and no values.
_MOST_BYTES = 1 << 26
_MOST_SECONDS = 10
# Beyond rounding: of two samples a sum is the sum of both, and a mean that of both.
_TOLERANCE = 1e-4


def first_forward_problems(
    manifest: Manifest, factory: ModelFactory, preparation: Preparation
) -> tuple[list[Problem], str | None]:
    """Return what goes wrong where the model is called with the first samples and the loss with what it returns.

    On the CPU, in a forked child whose every part lives ten seconds at most: it may crash, hang or print, and this
    process runs no operator.

    Args:
        manifest: Typed, and without a problem so far.
        factory: Of its model; called before.
        preparation: The model on meta, or as the host built it.

    Returns:
        Problems, and why nothing is known of the first forward, or less than with values: None if all is.
    """
    from composer3d.processes import Child, ForeignCodeError

    try:
        found = Child(lambda: _look(manifest, factory, preparation)).result()
    except ForeignCodeError as error:
        if error.hung:
            return [], f"it was not over after {_MOST_SECONDS} s"
        paths = {
            manifest.tables["data"].use: ("data", "use"),
            manifest.tables["train"].loss_table.use: ("train", "loss"),
        }
        path = paths.get(error.code.reference, ("model", "use" if factory.hf is None else "hf"))
        return [manifest.document.problem(path, f"{error}, with the first samples")], None
    except ForkError:
        return [], "this process has computed with tensors, and cannot fork another one for it"
    except ComposerError as error:
        return [], f"it could not be run by itself: {str(error).strip().splitlines()[-1]}"  # the run says what it meets
    if "message" not in found:
        return [], found.get("note")
    path = tuple(found["path"])
    problem = manifest.document.problem(path, found["message"], hint=found["hint"], severity=found["severity"])
    return [problem], found.get("note")


def _look(manifest: Manifest, factory: ModelFactory, preparation: Preparation) -> Mapping[str, Any]:
    import torch

    from composer3d.runner.data import first_samples

    torch.set_num_threads(1)
    data, document = manifest.tables["data"], manifest.document
    degree = _num_pieces(preparation)
    with running("called", data.use, limit_s=_MOST_SECONDS):
        try:
            samples = first_samples(data, document.folder, seed=manifest.train.seed, vocab_size=_vocab_size(manifest))
        except DataError as error:
            if "meet in one batch" in str(error) and manifest.train.batch_over(degree) == degree:
                raise  # in the run no two samples do
            return _problem(
                ("data", "use"),
                *str(error).removeprefix(f'[data] use = "{data.use}": ').removeprefix("[data] ").partition("; ")[::2],
            )
    if samples is None:
        return {"note": f'[data] use = "{data.use}" gives no samples before it is prepared; a method example() would'}
    name = manifest.tables["model"].hf or manifest.tables["model"].reference
    with running("called", name, limit_s=_MOST_SECONDS):
        found = _call(manifest, factory, preparation, samples)
    return found if "message" in found else _unfilled(manifest, preparation, samples[1]) or found


def _num_pieces(preparation: Preparation) -> int:
    """Return the equal pieces of a global batch, of all islands and groups."""
    return pieces_of(preparation.context).total * preparation.context.layout.num_groups


def _unfilled(manifest: Manifest, preparation: Preparation, targets: Any) -> Mapping[str, Any] | None:
    """Return what the first evaluation would refuse."""
    from composer3d.runner.data import unfilled_evaluation

    if manifest.tables["evaluation"].every is None:
        return None
    data, degree = manifest.tables["data"], _num_pieces(preparation)
    with running("called", data.use, limit_s=_MOST_SECONDS):
        message = unfilled_evaluation(
            data, manifest.document.folder, batch_size=manifest.train.batch_over(degree), targets=targets
        )
    return None if message is None else _problem(("data", "evaluation_fraction"), message.removeprefix("[data] "), None)


def _call(
    manifest: Manifest, factory: ModelFactory, preparation: Preparation, samples: tuple[Any, Any]
) -> Mapping[str, Any]:
    """Call model and loss."""
    import torch

    from composer3d.runner.data import call_of

    inputs, targets = samples
    model, has_values = _with_values(preparation, manifest.train.seed)
    note = None if has_values else f"it has no values, only shapes: the model is above {_MOST_BYTES >> 20} MiB"
    args, kwargs = call_of(inputs)
    try:
        kwargs = {**kwargs, **factory.inputs(targets)}
    except LossError as error:
        return _problem(("train", "loss"), str(error), None)
    if not has_values:
        args, kwargs = _on_meta((args, kwargs))
    foreign = Foreign()
    try:
        with torch.set_grad_enabled(has_values), recorded_draws(model, num_samples=2) as sites:
            output = model(*args, **kwargs)
    except (Exception, SystemExit) as error:
        if not _is_certain(error, has_values=has_values, device=preparation.context.device.type):
            return {"note": f"it fails on the CPU and without a process group, which a run's need not: {_said(error)}"}
        return _problem(
            ("model", "use" if factory.hf is None else "hf"),
            f"its forward fails on the first samples: {_said(error)}",
            f"it was called with {_described(args, kwargs)}{_defaults(manifest)}",
        )
    if not has_values:
        return {"note": note}
    if _is_without_gradient(model, output):
        return _problem(
            ("model", "use" if factory.hf is None else "hf"),
            "no parameter would be trained: what its forward returns has no gradient",
            "look for .detach(), torch.no_grad() or torch.inference_mode() in it",
        )
    with torch.no_grad(), running("called", manifest.tables["train"].loss_table.use, limit_s=_MOST_SECONDS):
        found = _judge(manifest, factory, output, targets)
    return found or _drawn(foreign.moved(), sites if manifest.train.random_numbers != "ranks" else [])


def _is_without_gradient(model: nn.Module, output: Any) -> bool:
    """Return whether parameters are to be trained, and nothing that a forward returned depends on one."""
    import torch

    from composer3d import torch_compat

    leaves = [leaf for leaf in torch_compat.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    return is_trained and bool(leaves) and not any(leaf.requires_grad for leaf in leaves)


def _drawn(foreign: str, sites: Sequence[Site]) -> Mapping[str, Any]:
    """Say what a forward draws that depends on the layout, or on nothing that a run knows of."""
    if foreign:
        return _problem(
            ("model", "use"),
            f"its forward draws from {foreign}, whose state is no function of seed and step: ranks and resumed runs "
            "draw other numbers",
            "draw with torch, whose generators the run's streams set",
            severity="warning",
        )
    apart = [site for site in sites if not site.by_sample]
    if not apart:
        return {}
    more = f" and {len(apart) - 1} other places" if len(apart) > 1 else ""
    return _problem(
        ("model", "use"),
        f"its forward draws random numbers at {apart[0]}{more}, without samples along their leading dim: they are "
        "drawn once a micro-batch, so layouts with other micro-batches draw other ones",
        "where layouts have to agree, draw one for each sample, as torch.rand(x.shape[0]), or a single one for all, as "
        "torch.rand(())",
        severity="warning",
    )


def _is_certain(error: BaseException, *, has_values: bool, device: str) -> bool:
    """Return whether the run's forward will fail like this one, which has no process group and runs on the CPU."""
    if isinstance(error, SystemExit):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if any("/torch/distributed/" in frame.filename for frame in frames):
        return False
    # On meta some operators do not work that do elsewhere, and some kernels are a GPU's alone.
    if not has_values:
        return isinstance(error, TypeError) and len(frames) < 4  # the call itself
    return device == "cpu" or isinstance(error, IndexError | TypeError)


def _judge(manifest: Manifest, factory: ModelFactory, output: Any, targets: Any) -> Mapping[str, Any]:
    """Compute the loss of the samples together and of each alone."""
    import torch

    from composer3d import torch_compat

    tensors = [leaf for leaf in torch_compat.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        message = f"its forward returns {type(output).__name__}, in which torch finds no tensor"
        return _problem(("model", "use"), message, "return tensors, alone or in a tuple, list, dict or dataclass")
    loss = manifest.tables["train"].loss_table
    try:
        whole = _value(factory, output, targets)
        divisors = _divisors(factory, output, targets) if ":" in loss.use else []
        divisor = divisors[0] if len(set(divisors)) == 1 else None
        if ":" not in loss.use or not all(leaf.dim() and leaf.shape[0] == 2 for leaf in tensors):
            return {}
        parts = [(_row(output, place), _row(targets, place)) for place in (0, 1)]
        rows = [_value(factory, *part) for part in parts]
        own = [_divisors(factory, *part) if divisors else [] for part in parts]
        if divisor:
            # What a mean was divided by is what the run weighs it by.
            rows = [value * (each[0] if each else 1.0) / divisor for value, each in zip(rows, own, strict=True)]
    except (Exception, SystemExit) as error:
        said = str(error) if isinstance(error, LossError) else f"the loss fails on the first samples: {_said(error)}"
        return _problem(("train", "loss"), said, None)
    scale = max(abs(whole), *map(abs, rows), 1e-12)
    if min(abs(whole - sum(rows)), abs(whole - sum(rows) / 2)) <= _TOLERANCE * scale:
        return {}
    train = manifest.tables["train"]
    if train.global_batch is not None and train.global_batch == train.microbatch:
        return {}
    numbers = [numbers for numbers in zip(*own, strict=False) if numbers[0] != numbers[1]]
    if divisor is None and numbers and len(divisors) > 1:
        return _problem(
            ("train", "loss"),
            f'loss = "{loss.use}" adds up means over other numbers ({" and ".join(f"{each:g}" for each in divisors)} '
            "in two samples), of which micro-batches and ranks have different ones "
            f"({numbers[0][0]:g} and {numbers[0][1]:g} in each), and a run weighs a loss by one number",
            "average every term over the targets that are counted, as in logits[target != -100].square().mean(), or "
            "write a loop of your own, in which run.backward(loss) weighs each term by its own",
        )
    together, alone = f"{whole:.6g}", f"{rows[0]:.6g} and {rows[1]:.6g}"
    return _problem(
        ("train", "loss"),
        f'loss = "{loss.use}" of two samples together is {together}, and of each alone {alone}: '
        "it is no sum or mean over samples, so every micro-batch and every data-parallel rank changes it",
        "set train.microbatch to train.global_batch on one data-parallel rank, or gather what is compared",
        severity="warning",
    )


def _value(factory: ModelFactory, output: Any, targets: Any) -> float:
    value = factory.loss_fn(output, targets)
    total = getattr(value, "sum", None) if not hasattr(value, "numel") else value
    if isinstance(value, tuple | list) and len(value) == 2:
        total = value[0]
    found: Any = total if total is not None else value
    return float(found.detach() if hasattr(found, "detach") else found)


def _divisors(factory: ModelFactory, output: Any, targets: Any) -> list[float]:
    """Return what the terms of a mean were divided by, in all or each; nothing where its graph does not say.

    Raises:
        LossError: It is a scalar of which it is unknown whether it is a sum or a mean.
    """
    import torch

    from composer3d import map_tensors
    from composer3d.step import divisor_of_mean, divisors_of_terms, reduction_of

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor

    with torch.enable_grad():
        value = factory.loss_fn(map_tensors(leaf, output), targets)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return []
    found, divisor = [float(each) for each in divisors_of_terms(value)], divisor_of_mean(value)
    if len(set(found)) > 1 and divisor is None:
        return found
    return [] if reduction_of(value) == "sum" or divisor is None else [float(divisor)] * max(len(found), 1)


def _row(value: Any, place: int) -> Any:
    from composer3d import map_tensors

    return map_tensors(lambda tensor: tensor[place : place + 1] if tensor.dim() else tensor, value)


def _with_values(preparation: Preparation, seed: int) -> tuple[nn.Module, bool]:
    """Return the model with its weights; a large one with a block of each list, or on meta."""
    from composer3d.initialisation import materialise

    model, recipe = preparation.model, preparation.recipe
    if recipe is None:
        return model, not any(parameter.is_meta for parameter in model.parameters())
    if _bytes(model) > _MOST_BYTES:
        _keep_first_blocks(model)
    if _bytes(model) > _MOST_BYTES:
        return model, False
    recipe.source = None  # weights on disk are not read: those that the configuration draws do as well
    materialise(model, recipe, seed=seed, device="cpu")
    return model, True


def _keep_first_blocks(model: nn.Module) -> None:
    from torch import nn

    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1:
            del module[1:]


def _bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])


def _on_meta(value: Any) -> Any:
    from composer3d import map_tensors

    return map_tensors(lambda tensor: tensor.to("meta"), value)


def _vocab_size(manifest: Manifest) -> int | None:
    from composer3d.checking.data_rules import vocab_size_of

    return vocab_size_of(manifest.tables["data"], manifest.document.folder)


def _said(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost line that is the user's own; torch's says nothing to them.
    own = [frame for frame in frames if "/torch/" not in frame.filename and "composer3d" not in frame.filename]
    place = f", at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{place}"


def _described(args: Any, kwargs: Mapping[str, Any]) -> str:
    from composer3d.runner.data import Inputs, named_leaves

    shown = []
    for name, tensor in named_leaves(Inputs(args=args, kwargs=kwargs), "input"):
        largest = f" up to {int(tensor.max())}" if _is_index(tensor) else ""
        shown.append(f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{largest}")
    return ", ".join(shown)


def _is_index(tensor: Tensor) -> bool:
    return not tensor.is_meta and not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() > 0


def _defaults(manifest: Manifest) -> str:
    """Name the values of `[data]` behind the tokens that are not stated."""
    data, document = manifest.tables["data"], manifest.document
    if data.kind == "user":
        return ""
    told = [f"data.seq_len = {data.seq_len}{'' if document.get(('data', 'seq_len')) is not None else ' (the default)'}"]
    if document.get(("data", "use")) is None:
        told.append(f"data.use = {json.dumps(data.use)} (the default)")
    return "; " + ", ".join(told)


def _problem(path: tuple[str, str], message: str, hint: str | None, *, severity: str = "error") -> Mapping[str, Any]:
    return {"path": list(path), "message": message, "hint": hint, "severity": severity}
