"""Schema of `state.json`, which is validated before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from composer3d.checkpoint.checkpoint_folder import STATE
from composer3d.errors import CheckpointError

__all__ = ["validated_composition", "validated_run"]

M = TypeVar("M", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Group(_Strict):
    hyperparameters: dict[str, Any]
    parameters: list[str]


class _Optimizer(_Strict):
    name: str = Field(alias="class")
    groups: list[_Group]
    values: dict[str, dict[str, Any]]
    tensors: dict[str, list[str]]


class _Composition(_Strict):
    states: dict[str, Any]
    dispensable: list[str] = []
    next_step: NonNegativeInt = 0
    optimizer: _Optimizer | None = None


class _Record(_Strict):
    model: dict[str, Any] = {}


class _Run(_Strict):
    steps: NonNegativeInt
    sequences: NonNegativeInt
    tokens: NonNegativeInt
    record: _Record


def validated_composition(path: Path, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state that has the form in which a composition writes it.

    Args:
        path: The checkpoint, for errors.
        state: Content of `state.json`, not yet validated.

    Raises:
        CheckpointError: It has another form, with the place of the first difference.
    """
    _validate(_Composition, path, state, ())
    return state


def validated_run(path: Path, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a run's position and record; None if no run wrote the checkpoint.

    Args:
        path: The checkpoint, for errors.
        state: Content of `state.json`, not yet validated.

    Raises:
        CheckpointError: It has another form, with the place of the first difference.
    """
    validated_composition(path, {"states": {}, **state})
    found = state.get("states", {}).get("attached/run")
    if found is not None:
        _validate(_Run, path, found, ("states", "attached/run"))
    return found


def _validate(model: type[M], path: Path, value: object, place: tuple[str, ...]) -> None:
    try:
        model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("state", *place, *first["loc"])))
        raise CheckpointError(f"{path / STATE}: {where}: {first['msg']}; composer3d did not write this") from error
