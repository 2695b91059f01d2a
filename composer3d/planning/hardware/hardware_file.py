"""Hardware files: the shipped ones, those of users, and every mistake of one as a sentence with its key.

Shipped files describe devices and networks; `h100/efa-3200` is the device `h100` with the network `efa-3200`, and
`h100/efa-3200:megatron` the same as the stack `megatron` makes use of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from composer3d.errors import ComposerError, did_you_mean, known_words
from composer3d.planning.hardware.cluster import STACKS, Hardware, StackName

__all__ = ["hardware_names", "load_hardware", "problems_of"]

_FOLDER = Path(__file__).parent
_IN_FILE = {"file": True}  # pydantic's context: numbers have units
_DIRECTIONS = {"each": "in each direction", "both": "in both directions together"}
_OWNERS = {"device": "of one device", "node": "of a whole node, shared by its devices"}
_AMBIGUOUS = {"direction": _DIRECTIONS, "per": _OWNERS}
_TYPES = {
    "string_type": "a text",
    "string_too_short": "a text that is not empty",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
}


def hardware_names() -> tuple[str, ...]:
    """Return the shipped devices, and after them the networks that may follow one behind a slash."""
    networks = _read(_FOLDER / "networks.toml")
    devices = sorted(path.stem for path in _FOLDER.glob("*.toml") if path.stem != "networks")
    return (*devices, *(f"/{name}" for name in sorted(networks["network"])))


def load_hardware(name: str) -> Hardware:
    """Read a description of a cluster.

    Args:
        name: A file that ends in `.toml`, or a shipped device such as `h100`, with another network than its usual one
            behind a slash: `h100/roce-200`. Behind a colon, of both, the stack to plan with, whatever a manifest runs.

    Raises:
        ComposerError: There is no such description, or it lacks something, with the key and what is allowed.
    """
    stated, (name, asked) = name, _without_stack(name)
    path, network = Path(name), ""
    if path.suffix != ".toml":
        stem, _, network = name.lower().partition("/")
        path = _FOLDER / f"{stem}.toml"
        known = [known for known in hardware_names() if not known.startswith("/")]
        if stem not in known and (Path(name).exists() or not stem.strip(".")):
            raise ComposerError(
                f'{name} is no description of hardware: the name of its file ends in ".toml"; {known_words("", known)}'
            )
        if stem not in known:
            raise ComposerError(f'there is no hardware "{stem}"; {known_words(stem, known)}')
    content = _read(path)
    if network or isinstance(content.get("inter"), str):
        content["inter"] = _network(network or content["inter"], place="" if network else f"{path}: inter: ")
    problems = problems_of(content)
    if problems:
        raise ComposerError("\n".join(f"{path}: {problem}" for problem in problems))
    found = TypeAdapter(Hardware).validate_python(content, context=_IN_FILE)
    links = {key: getattr(found, key).of_one_device(found.devices_per_node) for key in ("intra", "inter", "host")}
    return dataclasses.replace(found, name=found.name or stated, asked=_described(found, name, asked), **links)


def _without_stack(name: str) -> tuple[str, str]:
    """Return a name without the stack behind its colon, and that; of a file that has a colon its whole name."""
    before, colon, stack = name.rpartition(":")
    if not colon or Path(name).suffix == ".toml":
        return name, ""
    if stack not in STACKS:
        raise ComposerError(f'unknown stack "{stack}" in "{name}"; {known_words(stack, list(STACKS))}')
    return before, stack


def _described(hardware: Hardware, name: str, asked: str) -> StackName | None:
    """Return a stack that was asked for, which a description has to have."""
    stack = next((each for each in STACKS if each == asked), None)
    if stack is not None and stack not in hardware.stacks:
        known = known_words(stack, sorted(hardware.stacks)) if hardware.stacks else "it describes none"
        raise ComposerError(f'{name} has no stack "{stack}"; {known}')
    return stack


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomli.load(file)
    except OSError as error:
        raise ComposerError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ComposerError(f"{path}: is not UTF-8: byte 0x{error.object[error.start]:02x}") from error
    except (ValueError, RecursionError) as error:  # also of nesting, and of numbers of too many digits
        raise ComposerError(f"{path}: is not TOML: {str(error) or 'nested too deeply'}") from error


def _network(name: str, *, place: str) -> Any:
    networks = _read(_FOLDER / "networks.toml")["network"]
    if name not in networks:
        raise ComposerError(f'{place}there is no network "{name}"; {did_you_mean(name, sorted(networks))}')
    return networks[name]


def problems_of(content: Mapping[str, Any]) -> list[str]:
    """Return every mistake of a description, as sentences with the key.

    Args:
        content: The file, with a network's name replaced by its table.
    """
    try:
        found = TypeAdapter(Hardware).validate_python(dict(content), context=_IN_FILE)
    except ValidationError as error:
        return list(dict.fromkeys(_sentence(content, details) for details in error.errors(include_url=False)))
    return list(_unsaid(found))


def _unsaid(hardware: Hardware) -> Iterator[str]:
    """Yield the dtypes of which a file has a peak, and nothing of what products reach of it."""
    parts = hardware.device.gemm_efficiency
    for dtype in hardware.device.peaks if "default" not in parts else ():
        if dtype not in parts:
            yield f'device.gemm_efficiency says nothing of {dtype}; write "default" for all others'


def _sentence(content: Mapping[str, Any], details: Any) -> str:
    """Return one error of pydantic in the words of the file."""
    path, kind, value = details["loc"], details["type"], details["input"]
    if path[-1:] == ("[key]",):  # of a table whose names are fixed
        known = list(STACKS)
        return f'unknown stack "{value}" in [stack]; {known_words(str(value), known)}'
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    table = _at(content, path[:-1])
    name = path[-1] if path else ""
    if name in _AMBIGUOUS and kind in ("missing", "literal_error"):
        meaning = ", ".join(f'"{word}" ({what})' for word, what in _AMBIGUOUS[name].items())
        owner = key.removesuffix(f".{name}")
        of = next((known for known in ("bandwidth", "read") if known in table), "bandwidth")
        said = f"{owner}.{of} has no {name}" if kind == "missing" else f"{key} = {value!r}"
        doubt = f"{table[of]} may be twice or half of it; " if of in table else ""
        return f"{said}: {doubt}write {name} = one of {meaning}"
    if kind == "unexpected_keyword_argument":
        return f'unknown key "{key}"; {did_you_mean(str(name), sorted(_keys(path[:-1])))}'
    if kind in ("missing", "too_short", "dataclass_type"):
        field = _keys(path[:-1]).get(str(name))
        is_table = field is None or "Mapping" in str(field.annotation) or dataclasses.is_dataclass(field.annotation)
        what = f"the table [{key}] is missing" if is_table else f"{key} is missing"
        return what if field is None or field.description is None else f"{what}: {field.description}"
    if kind == "value_error":
        return f"{key} = {details['ctx']['error']}"
    if kind == "literal_error":
        return f"{key} = {value!r}; it is {details['ctx']['expected'].replace(chr(39), chr(34))}"
    expected = _TYPES.get(kind)
    return f"{key} = {value!r}; it is {expected}" if expected else f"{key} = {value!r}: {details['msg']}"


def _at(content: Any, path: Sequence[str | int]) -> Any:
    for part in path:
        content = content[part]
    return content


def _keys(path: Sequence[str | int]) -> dict[str, FieldInfo]:
    """Return the fields of a table of a file by key."""
    owner: Any = Hardware
    for part in path:
        known = _keys_of(owner)
        if isinstance(part, str) and part in known:  # others are names or numbers of rows
            owner = known[part].annotation
        if not dataclasses.is_dataclass(owner):  # rows: tuple[Gemm, ...]
            owner = next((one for one in getattr(owner, "__args__", ()) if dataclasses.is_dataclass(one)), owner)
    return _keys_of(owner)


def _keys_of(owner: Any) -> dict[str, FieldInfo]:
    fields: dict[str, FieldInfo] = getattr(owner, "__pydantic_fields__", {})
    return {str(field.validation_alias or name): field for name, field in fields.items()}
