"""Check thousands of manifests that are nearly right: no raw exception, no long wait, every problem with its line.

    python benchmarks/fuzz_manifests.py --count 20000 --seed 1 [--output benchmarks/results/fuzz_manifests.json]

Cases are a function of seed and number, so that `--only 1234` repeats one. They run in forked processes that have
imported what a check imports: 0.1 s of CPU each. `--output` adds a row a seed to those that are there.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fuzz_mutations
from harness import conditions

from composer3d.cli import main as composer3d
from composer3d.huggingface.folder import import_transformers
from composer3d.processes.forking import fork, prewarm

__all__ = ["LIMIT_CPU_S", "faults_of", "fuzz", "main"]

LIMIT_CPU_S = 5.0
LIMIT_S = 300.0  # of waiting: a machine may be busy with something else
CHUNK = 100


_STOPPED: list[str] = []  # where
_SLOWEST: list[float] = []  # CPU seconds, of the last call of `fuzz`


class TooSlow(BaseException):
    """The limit of a case has passed."""


def _stop(signum: int, frame: Any) -> None:
    _STOPPED.append(f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "")
    raise TooSlow


def faults_of(folder: Path, case: fuzz_mutations.Case) -> tuple[list[str], float]:
    """Check one manifest in this process; return what is wrong with how it was checked, and the CPU seconds.

    Args:
        folder: From `make_folder`; the working folder.
        case: What to check.
    """
    (folder / "run.toml").write_bytes(case.text)
    arguments = ["check", "run.toml", "--json", *case.options]
    arguments += [f"--set={text}" for text in case.overrides]
    out, err = io.StringIO(), io.StringIO()
    begun = _cpu_s()
    signal.signal(signal.SIGPROF, _stop)
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_CPU_S)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    raised = code = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = composer3d(arguments)
    except BaseException as error:
        raised = f"{type(error).__name__} left main"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    spent = _cpu_s() - begun
    found = [raised] if raised else list(_faults(code, out.getvalue(), err.getvalue()))
    if spent >= LIMIT_CPU_S:
        found.append(f"took more than {LIMIT_CPU_S:g} s of CPU time: {'.'.join(_STOPPED[-1:])}")
    return found, spent


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of the children that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _faults(code: int | None, out: str, err: str) -> Iterator[str]:
    if "Traceback (most recent call last)" in err:
        lines = [line.strip() for line in err.strip().splitlines()]
        where = [line for line in lines if line.startswith("File ")]
        yield f"raw exception: {lines[-1][:150]} at {re.sub('.*/', '', where[-1]) if where else '?'}"
    if code not in (0, 2):
        yield f"exit code {code}"
    if code == 2 and not out and re.fullmatch(r"--[a-z-]+\b[^\n]*: [^\n]+\n", err):
        return  # a mistake of the command line: one line that names the option
    try:
        report = json.loads(out)
    except json.JSONDecodeError:
        yield f"standard output is no JSON: {out[:60]!r}"
        return
    errors = [problem for problem in report["problems"] if problem["severity"] == "error"]
    if bool(errors) == report["ok"] and code == 0:
        yield "ok, and errors"
    if not report["ok"] and not report["problems"]:
        yield "not ok, and no problem"
    for problem in report["problems"]:
        # What the command line asks for has no line.
        if problem["line"] is None and problem["file"] is not None and not problem["file"].startswith("--"):
            yield f"a problem without a line: {problem['message'][:100]}"
        if len(problem["message"]) > 2000:
            yield f"a message of {len(problem['message'])} characters"


def fuzz(indices: Sequence[int], *, seed: int, folder: Path, report: Any = print) -> list[tuple[int, str, float]]:
    """Check cases in forked processes; return number, fault and CPU seconds of all that were checked badly.

    Args:
        indices: Numbers of cases.
        seed: Of the cases.
        folder: An empty one.
        report: Takes a line now and then.
    """
    schema = fuzz_mutations.schema_of_all()
    fuzz_mutations.make_folder(folder)
    _prewarm()
    found: list[tuple[int, str, float]] = []
    slowest, done = 0.0, 0
    _SLOWEST.clear()
    pending = list(indices)
    while pending:
        chunk, pending = pending[:CHUNK], pending[CHUNK:]
        finished = 0
        for index, faults, spent in _in_fork(chunk, seed, folder, schema):
            finished += 1
            slowest = max(slowest, spent)
            _SLOWEST[:] = [slowest]
            for fault in faults:
                report(f"--only {index}: {fault}")
            found += [(index, fault, spent) for fault in faults]
        if finished < len(chunk):
            found.append((chunk[finished], "the process ended", 0.0))
            pending = chunk[finished + 1 :] + pending
        done += finished
        report(f"{done} of {len(indices)}: {len(found)} faults, slowest {slowest:.2f} s")
    return found


def _in_fork(
    chunk: Sequence[int], seed: int, folder: Path, schema: dict[str, Any]
) -> Iterator[tuple[int, list[str], float]]:
    reader, writer = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            os.close(reader)
            _work(chunk, seed, folder, schema, writer)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        for line in pipe:
            index, faults, spent = json.loads(line)
            yield index, faults, spent
    os.waitpid(pid, 0)


def _work(chunk: Sequence[int], seed: int, folder: Path, schema: dict[str, Any], writer: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(writer, "w", buffering=1) as pipe:
        for index in chunk:
            faults, spent = faults_of(folder, fuzz_mutations.make_case(seed, index, schema))
            pipe.write(json.dumps([index, faults, spent]) + "\n")


def _prewarm() -> None:
    """Import what a check imports, and nothing that starts a thread."""
    prewarm()
    prewarm(
        (
            "composer3d.checking.check",
            "composer3d.checking.rules",
            "composer3d.composition.compose",
            "composer3d.runner.data",
        )
    )
    import_transformers()  # a third of the CPU time of a hundred manifests, where each process imports it
    # A collection would write to the pages of all that is imported, and the kernel would copy them in every fork.
    gc.collect()
    gc.freeze()


def _record(path: Path, row: dict[str, Any]) -> None:
    """Add a row to a file of results, in the place of one of the same seed and first number."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    same = [old for old in rows if (old["seed"], old["first"]) != (row["seed"], row["first"])]
    kept = sorted([*same, row], key=lambda one: (one["seed"], one["first"]))
    path.write_text(json.dumps({"rows": kept, "conditions": conditions()}, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case, shown with its manifest")
    parser.add_argument("--output", type=Path, help="JSON file of the seeds that were tried")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as parent:
        # Manifests name `..`, which is to hold this folder and nothing else.
        folder = Path(parent) / "run"
        folder.mkdir()
        if arguments.only is not None:
            case = fuzz_mutations.make_case(arguments.seed, arguments.only, fuzz_mutations.schema_of_all())
            sys.stdout.write(f"{case.text[:8000].decode(errors='replace')}\n{case.overrides} {case.options}\n")
            indices: Sequence[int] = [arguments.only]
        else:
            indices = range(arguments.first, arguments.first + arguments.count)
        begun = time.monotonic()
        found = fuzz(indices, seed=arguments.seed, folder=folder, report=lambda line: print(line, flush=True))
    if arguments.output is not None:
        row = {"seed": arguments.seed, "first": indices[0], "manifests": len(indices), "faults": len(found)}
        _record(arguments.output, {**row, "slowest_cpu_s": round(max(_SLOWEST, default=0.0), 2)})
    kinds: dict[str, list[int]] = {}
    for index, fault, _ in found:
        kinds.setdefault(re.sub(r"'[^']*'|\d{3,}|[0-9a-f]{12,}", "_", fault), []).append(index)
    for fault, numbers in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"{len(numbers):5} x {fault}  (--only {numbers[0]})")
    print(f"{len(indices)} manifests, seed {arguments.seed}, {len(found)} faults, {time.monotonic() - begun:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
