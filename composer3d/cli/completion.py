"""`composer3d completion`: scripts that complete command lines in bash, zsh and fish, and the words they ask for.

The scripts ask `composer3d completion --words WORD ... CURRENT` at every tab, so that they know commands, options,
shipped manifests, examples and plugins of the installed version, and never grow old. No torch is imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from composer3d.cli.options import Subparsers
from composer3d.cli.output import complain, say

__all__ = ["add", "candidates", "execute"]

_BASH = """_composer3d() {
    local IFS=$'\\n'
    COMPREPLY=($(composer3d completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f 1))
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == */ ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -F _composer3d composer3d"""
_ZSH = """#compdef composer3d
_composer3d() {
    local -a found
    local word text
    while IFS=$'\\t' read -r word text; do
        found+=("${word//:/\\\\:}:$text")
    done < <(composer3d completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)
    _describe 'composer3d' found
}
compdef _composer3d composer3d"""
_FISH = """function __composer3d
    set -l words (commandline -opc) (commandline -ct)
    composer3d completion --words $words[2..-1] 2>/dev/null
end
complete -c composer3d -f -a '(__composer3d)'"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_WHERE = {
    "bash": 'eval "$(composer3d completion bash)"   in ~/.bashrc',
    "zsh": 'eval "$(composer3d completion zsh)"    in ~/.zshrc, after compinit',
    "fish": "composer3d completion fish > ~/.config/fish/completions/composer3d.fish",
}
_OF_ALL = (("--version", "print the versions of composer3d and torch"), ("--help", "show the commands"))
_PATHS = ("FILE", "FOLDER", "PATH", "DIR_OR_FILE", "RUN", "RUN_OR_CHECKPOINT", "OTHER", "NAME or FILE")


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "completion",
        help="print the script that completes command lines in a shell",
        description="Print the script that completes composer3d's command lines: commands, options, manifests, "
        "examples, plugins, files. Without SHELL it says where each goes.",
    )
    parser.add_argument("shell", metavar="SHELL", nargs="?", choices=tuple(SCRIPTS), help="bash, zsh or fish")
    parser.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    # Of all commands, once the others are added.
    parser.set_defaults(execute=execute, commands=subparsers)


def execute(arguments: argparse.Namespace) -> int:
    """Print a script, or the candidates for the last of the words, a line each: the word, a tab, what it is."""
    if arguments.words is not None:
        for word, text in candidates(arguments.words or [""], arguments.commands):
            say(f"{word}\t{text}" if text else word)
        return 0
    if arguments.shell is None:
        complain("composer3d completion needs a SHELL:\n" + "\n".join(f"  {line}" for line in _WHERE.values()))
        return 2
    say(SCRIPTS[arguments.shell])
    return 0


def candidates(words: Sequence[str], commands: Subparsers) -> list[tuple[str, str]]:
    """Return what the last word can become, each with a few words on it.

    Args:
        words: Of a command line, after the program's name.
        commands: The parsers of all commands.
    """
    current = words[-1]
    if len(words) == 1:
        texts = {action.dest: action.help or "" for action in commands._choices_actions}
        found = [(name, _brief(texts.get(name, ""))) for name in commands.choices]
        return _beginning([*found, *_OF_ALL], current)
    command = commands.choices.get(words[0])
    if command is None:
        return []
    waiting = _waiting(command, words[:-1])
    if waiting is not None:
        return _beginning(_values(words[0], waiting, current), current)
    if current.startswith("-"):
        return _beginning([entry for entry in _options(command) if entry[0] not in words[1:-1]], current)
    place = sum(not word.startswith("-") for word in _without_values(command, words[1:-1]))
    positionals = [action for action in command._actions if not action.option_strings]
    if place >= len(positionals):
        return []
    return _beginning(_values(words[0], positionals[place], current), current)


def _options(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    return [
        (action.option_strings[-1], _brief(action.help or ""))
        for action in parser._actions
        if action.option_strings and action.help != argparse.SUPPRESS
    ]


def _waiting(command: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Action | None:
    """Return the option that the last complete word is, if it takes a value."""
    found = command._option_string_actions.get(words[-1])
    return found if found is not None and found.nargs != 0 else None


def _without_values(command: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[str]:
    """Yield words that are no values of options."""
    is_value = False
    for word in words:
        if not is_value:
            yield word
        action = command._option_string_actions.get(word)
        is_value = not is_value and action is not None and action.nargs != 0


def _values(command: str, action: argparse.Action, current: str) -> list[tuple[str, str]]:
    """Return the values of an option or of a positional."""
    if action.choices is not None:
        return [(str(choice), "") for choice in action.choices]
    if action.dest == "manifest":
        return [*_manifests(), *_paths(current, ".toml")]
    if action.dest == "name" and command == "init":
        return [*_manifests(), *_examples()]
    if action.dest == "name" and command == "plugins":
        return _plugins()
    if action.metavar in _PATHS:
        return _paths(current)
    return []


def _manifests() -> list[tuple[str, str]]:
    folder = Path(__file__).parent.parent / "manifests"
    return [(name, "shipped manifest") for name in sorted(path.stem for path in folder.glob("*.toml"))]


def _examples() -> list[tuple[str, str]]:
    folder = Path(__file__).parent.parent / "examples"
    return [(path.parent.name, "example") for path in sorted(folder.glob("*/run.toml"))]


def _plugins() -> list[tuple[str, str]]:
    from importlib.metadata import entry_points

    return [(point.name, point.value.split(":")[0]) for point in sorted(entry_points(group="composer3d"))]


def _paths(current: str, suffix: str = "") -> list[tuple[str, str]]:
    """Return folders, with a slash, and files that a path can become."""
    folder, _, name = current.rpartition("/")
    root = Path(folder or ("/" if current.startswith("/") else "."))
    try:
        entries = sorted(root.iterdir())
    except OSError:
        return []
    prefix = f"{folder}/" if "/" in current else ""
    shown = [entry for entry in entries if not entry.name.startswith(".") or name.startswith(".")]
    return [
        (f"{prefix}{entry.name}{'/' if entry.is_dir() else ''}", "")
        for entry in shown
        if entry.is_dir() or entry.name.endswith(suffix)
    ]


def _beginning(found: Sequence[tuple[str, str]], current: str) -> list[tuple[str, str]]:
    return [(word, text) for word, text in found if word.startswith(current)]


def _brief(text: str) -> str:
    return " ".join(text.replace("%(default)s", "").split())
