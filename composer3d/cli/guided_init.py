"""Guided `composer3d init`: asks for model, data and devices on a terminal, and writes a commented manifest."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from composer3d.cli.output import complain, pasted, print_problems, say
from composer3d.cli.schema import SCHEMA_FILE, heading, write_schema
from composer3d.errors import ManifestError

__all__ = ["Answers", "ask", "from_terminal", "guide", "manifest_of"]

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*")
_LLAMA = "composer3d.models:llama"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers of a user.

    Args:
        model: `module:Class`, `hf:` and a name or folder; empty: a small Llama.
        data: A file or folder, from the manifest's folder, or `module:callable`; empty: the documentation that ships
            inside Python.
        devices: Ranks on this machine.
        steps: Optimizer steps.
        file: Of the manifest.
    """

    model: str
    data: str
    devices: int
    steps: int
    file: Path


def guide(read: Callable[[str], str], *, devices: int, device: str) -> int:
    """Ask, write the manifest and the schema for editors, and check it; returns the exit code.

    Args:
        read: Shows a question and returns the line that answers it; raises EOFError where there is none.
        devices: Proposed number of ranks.
        device: `cpu` or `cuda`.
    """
    from composer3d import check

    try:
        answers = ask(read, devices=devices)
    except (EOFError, KeyboardInterrupt):
        complain("\nnothing is written")
        return 2
    try:
        with answers.file.open("x", encoding="utf-8") as file:
            file.write(heading() + manifest_of(answers, device=device))
    except OSError as error:
        complain(f"{answers.file} cannot be written: {(error.strerror or str(error)).lower()}")
        return 2
    if code := write_schema(answers.file.parent):
        return code
    say(f"wrote {answers.file}, and {answers.file.with_name(SCHEMA_FILE)} for editors; checking it")
    try:
        found = check(answers.file)
    except ManifestError as error:
        print_problems(error.problems)
        return 2
    if not found.ok:
        print_problems(found.problems)
        say(f"mend {answers.file}, then: composer3d check {pasted(answers.file)}")
        return 2
    say("\n".join(found.lines))
    say(f"next: composer3d run {pasted(answers.file)}")
    return 0


def ask(read: Callable[[str], str], *, devices: int) -> Answers:
    """Ask one question after the other, each again until its answer can be."""
    say("Enter takes what stands in brackets; Ctrl-D ends without writing.")
    model = _asked(read, "Model: module:Class, or hf:NAME of Hugging Face, or hf:FOLDER [a small Llama]", "", _model)
    data = _asked(
        read, "Data: a file or folder of text, or module:callable [the documentation inside Python]", "", _data
    )
    number = _asked(read, f"Devices of this machine [{devices}]", str(devices), _number)
    steps = _asked(read, "Optimizer steps [100]", "100", _number)
    file = Path(_asked(read, "Manifest [run.toml]", "run.toml", _file))
    is_folder = model.startswith("hf:") and Path(model[3:]).exists()
    return Answers(
        model=f"hf:{_seen_from(file, model[3:])}" if is_folder else model,
        data=data if _REFERENCE.fullmatch(data) else _seen_from(file, data),
        devices=int(number),
        steps=int(steps),
        file=file,
    )


def _seen_from(manifest: Path, name: str) -> str:
    """Return a file or folder of this folder as a manifest names it: from the folder in which the manifest lies."""
    is_here = not name or os.path.isabs(name) or manifest.parent == Path()
    return name if is_here else os.path.relpath(name, manifest.parent)


def manifest_of(answers: Answers, *, device: str) -> str:
    """Return the manifest's text."""
    from composer3d.manifest import inline
    from composer3d.scaffolding import filled

    if answers.model.startswith("hf:"):
        model, comment = (
            f"hf = {inline(answers.model[3:])}",
            "A Hugging Face model, with its weights and its tokenizer.",
        )
    elif answers.model:
        model, comment = f"use = {inline(answers.model)}", "A class or function; `[model.args]` are its arguments."
    else:
        model = f'use = "{_LLAMA}"\nargs = {{ dim = 128, num_layers = 4, num_heads = 4 }}'
        comment = 'A small Llama; a model of your own is use = "module:Class", and `args` are its arguments.'
    data = answers.data or "python_docs"
    shipped = 'The documentation inside Python; a folder of text of your own is use = "corpus/".'
    origin = "Text, tokens, or a callable that returns a data set." if answers.data else shipped
    microbatch = 2
    words = {
        "@FILE@": str(answers.file),
        "@DEVICES@": str(answers.devices),
        "@DEVICE@": device,
        "@MODEL_COMMENT@": comment,
        "@MODEL@": model,
        "@DATA_COMMENT@": origin,
        "@DATA@": inline(data),
        "@STEPS@": str(answers.steps),
        "@BATCH@": str(2 * microbatch * answers.devices),
        "@MICROBATCH@": str(microbatch),
        "@EVERY@": str(max(answers.steps // 2, 1)),
    }
    return filled("run.toml.txt", words)


def _asked(read: Callable[[str], str], question: str, default: str, refusal: Callable[[str], str]) -> str:
    while True:
        answer = read(f"{question}: ").strip() or default
        wrong = refusal(answer)
        if not wrong:
            return answer
        say(f"  {wrong}")


def _model(answer: str) -> str:
    if not answer or answer.startswith("hf:") and len(answer) > 3 or _REFERENCE.fullmatch(answer):
        return ""
    return f'"{answer}" is no reference; write for example my_model:Model, or hf:Qwen/Qwen3-0.6B'


def _data(answer: str) -> str:
    if not answer or _REFERENCE.fullmatch(answer) or Path(answer).exists():
        return ""
    return f'"{answer}" is neither a file or folder here, nor module:callable'


def _number(answer: str) -> str:
    is_number = re.fullmatch(r"[1-9][0-9]{0,8}", answer)
    return "" if is_number else f'"{answer}" is not a whole number of at least 1'


def _file(answer: str) -> str:
    if not answer.endswith(".toml"):
        return f'"{answer}" is no name of a manifest; write for example run.toml'
    if not Path(answer).parent.is_dir():
        return f"there is no folder {Path(answer).parent}"
    return f"{answer} exists and is not overwritten; name another file" if Path(answer).exists() else ""


def from_terminal(question: str) -> str:
    """Show a question and return the line that answers it.

    Raises:
        EOFError: There is no line.
    """
    sys.stdout.write(question)
    sys.stdout.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
