"""`composer3d plugins`: every plugin found, or one in full."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from composer3d.cli.options import Subparsers, add_json, amount, path
from composer3d.cli.output import complain, print_table, say, say_json
from composer3d.cli.plugin_conformance import test_plugin
from composer3d.errors import did_you_mean

__all__ = ["add", "execute"]

_WIDTH = 110  # characters of a line of the long form


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "plugins",
        help="list every plugin found: family, axes, what it acts on, options, origin",
        description="List every plugin that is installed. With a name: what it does and costs, its hooks, options "
        "and refusals; with --conformance its suite of tests, on ranks of this machine's CPU.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="show this plugin alone, in full")
    parser.add_argument(
        "--conformance",
        action="store_true",
        help="test it: numerics, collectives, state, refusals, order, plan, purpose, overhead, effect, and beside "
        "every other plugin; exit code 1 if something does not hold",
    )
    parser.add_argument(
        "--options",
        metavar="TOML",
        action="append",
        help="with --conformance: its table, 'limit = 0.1' for example; may be repeated; default: its defaults, "
        "or the first option with which check accepts it",
    )
    parser.add_argument(
        "--beside", metavar="FILE", type=path, help="with --conformance: TOML of other tables that it needs"
    )
    parser.add_argument(
        "--minutes", metavar="M", type=amount, help="with --conformance: for proofs beside other plugins; default: 1"
    )
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """List all plugins, or describe one; one that cannot be imported is listed with the reason."""
    from composer3d.checking import describe_plugin
    from composer3d.registry import Catalogue

    catalogue = Catalogue.installed()
    names = catalogue.names()
    for option in ("options", "beside", "minutes"):
        if getattr(arguments, option) is not None and not arguments.conformance:
            complain(f"--{option} has no effect without --conformance")
            return 2
    if arguments.conformance and arguments.name is None:
        complain(f"--conformance needs the NAME of a plugin; one of: {', '.join(names)}")
        return 2
    if arguments.name is not None:
        if arguments.name not in names:
            hint = did_you_mean(arguments.name, names)
            complain(f'no plugin "{arguments.name}" is installed' + (f"; {hint}" if hint else ""))
            return 2
        names = (arguments.name,)
    if arguments.conformance:
        return test_plugin(arguments, catalogue.load(arguments.name))
    found = [describe_plugin(catalogue, name, full=arguments.name is not None) for name in names]
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


def _others(entry: dict[str, Any]) -> list[str]:
    """Return the short names of hooks that neither a phase nor a point of a step represents."""
    from composer3d.checking import BESIDES, PHASES

    shown = {*PHASES, *BESIDES, *(["composer3d_step_actions"] if entry["points"] else [])}
    return [hook.removeprefix("composer3d_") for hook in entry["hooks"] if hook not in shown]


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
    if entry["extra"]:
        say(f"needs the extra: {entry['extra']}")
    say(f"source: {entry['file']}")
    say(f"\n{entry['summary']}")
    _show_options(entry["options"])
    say("\nHooks")
    for hook, does in entry["hook_docs"].items():
        _indented(f"{hook}: {does}" if does else hook)
    if entry["refusals"]:
        say('\nRefuses, as its source states it ("..." is known in a run)')
        for refusal in entry["refusals"]:
            _indented(refusal["message"] + (f"; {refusal['hint']}" if refusal["hint"] else ""))


def _show_options(options: list[dict[str, Any]]) -> None:
    if not options:
        say("\nOptions: none")
        return
    say("\nOptions")
    for option in options:
        default = "required" if option["required"] else f"default {_default(option)}"
        say(f"  {option['key']}: {option['type']}, {default}")
        if option["description"]:
            say(textwrap.indent(textwrap.fill(option["description"], _WIDTH - 6, break_on_hyphens=False), " " * 6))


def _indented(text: str) -> None:
    say(textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False))


def _default(option: dict[str, Any]) -> str:
    from composer3d.manifest import inline

    return "none" if option["default"] is None else inline(option["default"])
