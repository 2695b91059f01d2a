"""An optimizer's state as named tensors and JSON, for one optimizer over the parts of any layout.

torch's `get_optimizer_state_dict` and `set_optimizer_state_dict` are not used. Flattened, they turn every
hyperparameter into a pickled entry, which is never read here; they step an optimizer that has no state yet, just to
save it; and they give state to every parameter when loading, also to those that had none, so that a resumed run would
differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.checkpoint.joint_failure import together
from composer3d.checkpoint.state_file import encode_state
from composer3d.errors import CheckpointError
from composer3d.processes.json_exchange import gather_json

__all__ = [
    "initialise_optimizer_state",
    "load_optimizer_json",
    "match_optimizer_state",
    "optimizer_tensors",
]

PREFIX = "optimizer/"
# Options that choose a kernel, not a result: the run that loads decides.
IMPLEMENTATION = frozenset({"capturable", "differentiable", "foreach", "fused"})
NOT_SAVED = IMPLEMENTATION | {"params", "param_names"}
CHUNK_BYTES = 256 * 2**20


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's state as tensors keyed `optimizer/<fqn>/<name>` and a JSON-able rest.

    The rest holds the class, hyperparameters with the FQNs that they apply to, values that are no tensors, and which
    parameters have which state. On rank 0 it is the union over ranks, so that pipeline stages can be loaded elsewhere.

    Args:
        optimizer: Over any number of parts.
        parameters: All parameters of this rank's parts by FQN; a name for each tensor, so ties are given once.

    Raises:
        CheckpointError: On all ranks: a parameter without a name, a value that JSON cannot carry, nested state, or
            ranks with different hyperparameters for one parameter.

    Memory: none, the tensors are the optimizer's own. Collectives: one gather and two all-gathers of objects.
    """
    tensors: dict[str, Tensor] = {}

    def describe() -> dict[str, Any]:
        names = _names(optimizer, parameters)
        values: dict[str, dict[str, Any]] = {}
        held: dict[str, list[str]] = {}
        for parameter, fqn in names.items():
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{PREFIX}{fqn}/{name}"] = value
                    held.setdefault(fqn, []).append(name)
                else:
                    values.setdefault(fqn, {})[name] = value
        encode_state(values, "optimizer.values")
        groups = [_group(group, names) for group in optimizer.param_groups]
        return {"class": type(optimizer).__name__, "groups": groups, "values": values, "tensors": held}

    own = together(None, "optimizer state", describe)
    gathered = gather_json(own) or [own]  # rank 0's state is written
    return tensors, together(None, "optimizer state", lambda: _merge(gathered))


def match_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], data: Mapping[str, Any]
) -> None:
    """Give exactly those parameters state that have it in a checkpoint, ready to be loaded into.

    Call it before `optimizer_tensors` when loading. Parameters that had no gradient before the save have no state
    afterwards either.

    Args:
        optimizer: Of the run that loads.
        parameters: All parameters of this rank's parts by FQN.
        data: The JSON part of `optimizer_tensors`, as saved.

    Raises:
        CheckpointError: On all ranks: another optimizer class or other groups.

    Collectives: two all-gathers of small objects.
    """
    together(None, "optimizer state", lambda: _compare(optimizer, parameters, data))
    wanted = set(data["tensors"]) | set(data["values"])
    for parameter, fqn in _names(optimizer, parameters).items():
        if fqn not in wanted:
            optimizer.state.pop(parameter, None)
    with_tensors = [parameters[fqn] for fqn in data["tensors"] if fqn in parameters]
    together(None, "optimizer state", lambda: initialise_optimizer_state(optimizer, with_tensors))


def load_optimizer_json(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], data: Mapping[str, Any]
) -> None:
    """Restore hyperparameters and values that are no tensors, by FQN.

    Which groups there are may differ, as long as every group's parameters had the same hyperparameters. A tensor stays
    the tensor that it is and is filled; `fused`, `foreach`, `capturable` and `differentiable` stay this run's.

    Args:
        optimizer: Of the run that loads.
        parameters: All parameters of this rank's parts by FQN.
        data: The JSON part of `optimizer_tensors`, as saved.

    Raises:
        CheckpointError: On this rank alone (call `match_optimizer_state` first, it raises on all): another class, other
            parameters, or a group whose parameters had different hyperparameters.
    """
    _compare(optimizer, parameters, data)
    saved = _saved_groups(data)
    names = _names(optimizer, parameters)
    for group in optimizer.param_groups:
        if group["params"]:
            hyperparameters = data["groups"][saved[names[group["params"][0]]]]["hyperparameters"]
            for key, value in hyperparameters.items():
                _refuse_kind(key, group.get(key), value)
            group.update({key: _restored(group.get(key), value) for key, value in hyperparameters.items()})
    for fqn, values in data["values"].items():
        if fqn in parameters:
            state = optimizer.state[parameters[fqn]]
            state.update({name: _restored(state.get(name), value) for name, value in values.items()})


def initialise_optimizer_state(optimizer: torch.optim.Optimizer, only: Iterable[nn.Parameter] | None = None) -> None:
    """Create the state of parameters that have none, as a step would, without changing a parameter.

    Steps the bare optimizer on zero gradients at learning rate 0 (Tensor rates stay Tensors), without the hooks that
    were put on it, and puts parameters, gradients and rates back. Parameters that already have state keep it.

    Args:
        optimizer: Any torch optimizer that steps without a closure.
        only: The parameters to give state, frozen ones included; by default all that require gradients.

    Raises:
        CheckpointError: The optimizer cannot step so.

    Memory: gradients and copies of parameters, at most 256 MiB (or one parameter) at a time. Collectives: none of its
    own.
    """
    chosen = None if only is None else set(only)
    missing = [
        parameter
        for parameter in _parameters(optimizer)
        if not optimizer.state.get(parameter) and (parameter.requires_grad if chosen is None else parameter in chosen)
    ]
    sharded = [isinstance(parameter, DTensor) for parameter in missing]
    for kind in (False, True):  # fused and foreach kernels refuse to take both at once
        for chunk in _chunks([p for p, is_sharded in zip(missing, sharded, strict=True) if is_sharded is kind]):
            _step_on_zeros(optimizer, chunk)


def _step_on_zeros(optimizer: torch.optim.Optimizer, chunk: list[nn.Parameter]) -> None:
    gradients = [(parameter, parameter.grad) for parameter in _parameters(optimizer)]
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    with torch.no_grad():
        copies = [(parameter, parameter.detach().clone()) for parameter in chunk]
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            for parameter in chunk:
                parameter.grad = torch.zeros_like(parameter)
            for group, rate in rates:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
            # Without hooks: those of a run would take this for a step of training.
            inspect.unwrap(type(optimizer).step)(optimizer)
        except Exception as error:
            name = type(optimizer).__name__
            raise CheckpointError(f"{name} cannot make its state by a step on zero gradients: {error}") from error
        finally:
            for parameter, copy in copies:
                parameter.copy_(copy)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for group, rate in rates:
                group["lr"] = rate


def _chunks(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    chunk: list[nn.Parameter] = []
    size_bytes = 0
    for parameter in parameters:
        chunk.append(parameter)
        size_bytes += parameter.numel() * parameter.element_size()
        if size_bytes >= CHUNK_BYTES:
            yield chunk
            chunk, size_bytes = [], 0
    if chunk:
        yield chunk


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _names(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[nn.Parameter, str]:
    """Return the FQN of each of the optimizer's parameters; of several names the first."""
    known: dict[nn.Parameter, str] = {}
    for fqn, parameter in parameters.items():
        known.setdefault(parameter, fqn)
    held = list(_parameters(optimizer))
    for parameter in held:
        if parameter not in known:
            raise CheckpointError(f"the optimizer holds a parameter of shape {list(parameter.shape)} of no known name")
    return {parameter: known[parameter] for parameter in held}


def _group(group: Mapping[str, Any], names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    hyperparameters = {key: _plain(value) for key, value in group.items() if key not in NOT_SAVED}
    encode_state(hyperparameters, "optimizer.hyperparameters")
    return {"hyperparameters": hyperparameters, "parameters": [names[parameter] for parameter in group["params"]]}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _refuse_kind(key: str, current: Any, saved: Any) -> None:
    """Refuse a hyperparameter of another kind than this optimizer's, by which a step would fail."""
    is_number = isinstance(saved, (int, float))
    if (isinstance(current, (int, float, Tensor)) and not is_number) or (
        isinstance(current, (list, tuple)) and not (isinstance(saved, list) and len(saved) == len(current))
    ):
        raise CheckpointError(f"the optimizer's {key} is {current!r}, and the checkpoint has {saved!r:.80}")


def _restored(current: Any, saved: Any) -> Any:
    """Return a saved value in the type of the current one: JSON has neither tuples nor tensors."""
    if isinstance(current, Tensor):
        return current.fill_(saved)
    if isinstance(current, (list, tuple)) and isinstance(saved, list) and len(current) == len(saved):
        return type(current)(_restored(*pair) for pair in zip(current, saved, strict=True))
    return saved


def _merge(gathered: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the union of ranks' descriptions; groups are one where their hyperparameters are equal."""
    merged: dict[str, Any] = {"class": gathered[0]["class"], "groups": [], "values": {}, "tensors": {}}
    groups: dict[str, dict[str, Any]] = {}
    home: dict[str, str] = {}
    for description in gathered:
        for group in description["groups"]:
            text = encode_state(group["hyperparameters"])
            kept = groups.setdefault(text, {"hyperparameters": group["hyperparameters"], "parameters": []})
            for fqn in group["parameters"]:
                if home.setdefault(fqn, text) != text:
                    other = groups[home[fqn]]["hyperparameters"]
                    raise CheckpointError(f"{fqn}: ranks differ: {_first_difference(other, group['hyperparameters'])}")
            kept["parameters"] = list(dict.fromkeys([*kept["parameters"], *group["parameters"]]))
        merged["values"].update(description["values"])
        merged["tensors"].update(description["tensors"])
    merged["groups"] = [group for group in groups.values() if group["parameters"]]
    return merged


def _saved_groups(data: Mapping[str, Any]) -> dict[str, int]:
    return {fqn: index for index, group in enumerate(data["groups"]) for fqn in group["parameters"]}


def _compare(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], data: Mapping[str, Any]) -> None:
    name = type(optimizer).__name__
    if data["class"] != name:
        raise CheckpointError(f"the checkpoint's optimizer is {data['class']}, this run's is {name}")
    saved, names = _saved_groups(data), _names(optimizer, parameters)
    held = set(names.values())
    for fqn in names.values():
        if fqn not in saved:
            raise CheckpointError(f"the checkpoint's optimizer does not hold {fqn}; was it frozen or absent then?")
    for fqn in parameters:
        if fqn in saved and fqn not in held and names.get(parameters[fqn]) is None:
            raise CheckpointError(f"the checkpoint's optimizer holds {fqn}, this run's does not; is it frozen now?")
    for group in optimizer.param_groups:
        firsts: dict[int, str] = {}
        for parameter in group["params"]:
            firsts.setdefault(saved[names[parameter]], names[parameter])
        if len(firsts) > 1:
            (one, first), (two, second) = list(firsts.items())[:2]
            difference = _first_difference(*(data["groups"][index]["hyperparameters"] for index in (one, two)))
            raise CheckpointError(
                f"{first} and {second} share a parameter group in this run, in the checkpoint they differ: {difference}"
            )


def _first_difference(one: Mapping[str, Any], two: Mapping[str, Any]) -> str:
    for key in sorted({*one, *two}):
        if encode_state({"value": one.get(key)}) != encode_state({"value": two.get(key)}):
            return f"{key} is {one.get(key)} and {two.get(key)}"
    raise AssertionError("equal hyperparameters are one group")
