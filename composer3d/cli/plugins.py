"""`composer3d plugins`: every plugin found, what it owns, does and takes."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from composer3d.cli.options import Subparsers, add_json
from composer3d.cli.output import complain, print_table, say, say_json
from composer3d.errors import PluginError, did_you_mean

if TYPE_CHECKING:
    from composer3d.registry import Catalogue

__all__ = ["add", "execute"]

# Which phases a hook's transforms may stand in, where the hook itself does not name them.
_PHASES = {
    "composer3d_split": ("SPLIT",),
    "composer3d_convert": ("CONVERT",),
    "composer3d_shard": ("TENSOR", "DATA"),
    "composer3d_reschedule": ("RECOMPUTE", "COMPILE"),
    "composer3d_collectives": ("COMMUNICATE",),
}
# What every plugin may have, and what says nothing of what it acts on.
_LIFE_CYCLE = ("composer3d_configure", "composer3d_close")


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "plugins",
        help="list every plugin found: family, axes, what it acts on, options, origin",
        description="List every plugin that is installed. With a name: what it is, and its options.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="show this plugin alone, with its options")
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """List all plugins, or describe one; one that cannot be imported is listed with the reason."""
    from composer3d.registry import Catalogue

    catalogue = Catalogue.installed()
    names = catalogue.names()
    if arguments.name is not None:
        if arguments.name not in names:
            hint = did_you_mean(arguments.name, names)
            complain(f'no plugin "{arguments.name}" is installed' + (f"; {hint}" if hint else ""))
            return 2
        names = (arguments.name,)
    found = [_describe(catalogue, name) for name in names]
    if arguments.json:
        say_json({"plugins": found})
    elif arguments.name is not None:
        _show(found[0])
    else:
        columns = ("plugin", "family", "owns", "phases", "step points", "other hooks", "devices", "from")
        print_table(columns, [_row(entry) for entry in found])
        for entry in found:
            if entry["error"]:
                complain(f"{entry['name']}: {entry['error']}")
    return 0


def _describe(catalogue: Catalogue, name: str) -> dict[str, Any]:
    """Return what `--json` prints of one plugin."""
    from composer3d.registry import info_of

    entry: dict[str, Any] = {"name": name, "origin": catalogue.origin(name), "error": None}
    try:
        cls: Any = catalogue.load(name)
    except PluginError as error:
        return {**entry, "error": str(error)}
    from composer3d.hookspecs import HookSpecs
    from composer3d.manifest.descriptions import summary
    from composer3d.transform import Phase, StepPoint

    info = info_of(cls)
    assert info is not None, "the catalogue checks it"
    hooks = [hook for hook in vars(HookSpecs) if hook.startswith("composer3d_") and hasattr(cls, hook)]
    phases = {
        phase
        for hook in hooks
        if hook in _PHASES
        for phase in _named(getattr(cls, hook), "Phase", Phase.__members__) or _PHASES[hook]
    }
    actions: Any = getattr(cls, "composer3d_step_actions", None)
    points = set() if actions is None else _named(actions, "StepPoint", StepPoint.__members__)
    return {
        **entry,
        "family": info.family,
        "owns": list(info.owns),
        "axes": [{"name": axis.name, "role": axis.role.value, "inside": axis.inside} for axis in info.axes],
        "phases": [phase.name for phase in Phase if phase.name in phases],
        "points": [point.name for point in StepPoint if point.name in points],
        "hooks": hooks,
        "devices": None if info.devices is None else list(info.devices),
        "extra": info.extra,
        "summary": summary(cls),
        "options": _options(cls),
    }


def _named(hook: Any, enum: str, members: Collection[str]) -> set[str]:
    """Return the members of an enum that a hook's own code names: what it returns exists only in a run."""
    names = set(hook.__code__.co_names)
    return names & set(members) if enum in names else set()


def _others(entry: dict[str, Any]) -> list[str]:
    """Return the hooks, by their short names, of which neither phases nor points of a step tell."""
    told = {*_PHASES, *_LIFE_CYCLE, *(["composer3d_step_actions"] if entry["points"] else [])}
    return [hook.removeprefix("composer3d_") for hook in entry["hooks"] if hook not in told]


def _options(cls: type) -> list[dict[str, Any]]:
    """Return the keys of a plugin's table in the words that messages use."""
    from typing import Annotated

    from pydantic_core import to_jsonable_python

    from composer3d.manifest.descriptions import describe_keys, fields
    from composer3d.manifest.wording import expected

    descriptions = describe_keys(cls)
    result = []
    for key, field in fields(cls).items():
        annotation = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        option = {"key": key, "type": expected(annotation), "required": field.is_required()}
        if not field.is_required():
            default = field.get_default(call_default_factory=True)
            option["default"] = to_jsonable_python(default, serialize_unknown=True)
        result.append({**option, "description": descriptions.get(key, "")})
    return result


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    if entry["error"]:
        return (entry["name"], "cannot be imported, see below", "", "", "", "", "", entry["origin"])
    return (
        entry["name"],
        entry["family"],
        ", ".join(entry["owns"]) or "-",
        ", ".join(entry["phases"]) or "-",
        ", ".join(entry["points"]) or "-",
        ", ".join(_others(entry)) or "-",
        ", ".join(entry["devices"]) if entry["devices"] else "any",
        entry["origin"],
    )


def _show(entry: dict[str, Any]) -> None:
    """Print one plugin in full."""

    if entry["error"]:
        say(f"{entry['name']}  from {entry['origin']}")
        complain(entry["error"])
        return
    say(f"[{entry['family']}.{entry['name']}]  from {entry['origin']}")
    say(f"owns: {', '.join(entry['owns']) or '-'}")
    if entry["axes"]:
        say("adds axes: " + ", ".join(f"{axis['name']} ({axis['role']})" for axis in entry["axes"]))
    say(f"phases: {', '.join(entry['phases']) or '-'}")
    say(f"step points: {', '.join(entry['points']) or '-'}")
    say(f"other hooks: {', '.join(_others(entry)) or '-'}")
    say(f"devices: {', '.join(entry['devices']) if entry['devices'] else 'any'}")
    say(f"\n{entry['summary']}\n")
    if not entry["options"]:
        say("It has no options.")
        return
    print_table(
        ("key", "default", "type", "what it does"),
        [(option["key"], _default(option), option["type"], option["description"]) for option in entry["options"]],
    )


def _default(option: dict[str, Any]) -> str:
    from composer3d.manifest.toml_writer import inline

    if option["required"]:
        return "(required)"
    return "-" if option["default"] is None else inline(option["default"])
