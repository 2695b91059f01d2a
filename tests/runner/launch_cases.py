"""Run cases one after another in local worlds, or one as a rank of torchrun.

`launch_cases.py OUTPUT CASE[:MAX_RESTARTS[:TIMEOUT_S[:GRACE_S]]] ...`; each case has its own folder in a local world.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from composer3d.errors import DataError, ManifestError, Problem, StepError
from composer3d.runner.launching.launcher import is_rank, launch_local, rank_main
from composer3d.runner.launching.signals import Preemption
from composer3d.runner.reporting.progress import Progress, RunPhase


def join():
    import torch
    import torch.distributed as dist

    from composer3d.processes.process_group import join_world

    join_world(torch.device("cpu"))
    return dist.get_rank()


def reduce_all(value=1.0):
    import torch
    import torch.distributed as dist

    total = torch.tensor([value])
    dist.all_reduce(total)
    return total.item()


def steps(last, output):
    rank = join()
    progress = Progress(output, rank)
    for step in range(last + 1):
        progress.update(step)
        reduce_all()
    return rank


def case_reduce(output):
    join()
    print(f"sum {reduce_all():g}")


def case_raise(output):
    if steps(12, output) == 1:
        raise ValueError("the batch is bad")
    reduce_all()


def case_kill(output):
    if steps(12, output) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    reduce_all()


def case_os_exit(output):
    if steps(3, output) == 1:
        os._exit(0)
    reduce_all()


def case_sys_exit(output):
    if steps(3, output) == 1:
        sys.exit(0)
    reduce_all()


def case_return(output):
    if steps(3, output) == 1:
        return
    reduce_all()


def composed(output):
    """Return a composed run of a small model, and a function that runs a step of it."""
    import tempfile

    import torch

    import composer3d

    manifest = Path(tempfile.mkdtemp(dir=output)) / "run.toml"
    manifest.write_text("composer3d = 1\n[sharding.fsdp2]\n")
    run = composer3d.compose(lambda: torch.nn.Linear(2, 2), manifest, loss_fn=lambda out, _: out.sum(), device="cpu")
    progress = Progress(output, run.context.rank)

    def step(number, then=None):
        progress.update(number)
        with run.step(number):
            run.forward_backward(torch.ones(2, 2), target=torch.ones(2))
            if then is not None:
                then(run.context.rank)

    return run, step


def case_mismatch(output):
    _, step = composed(output)
    step(0)
    step(1, mismatched)


def case_slow_report(output):
    """Lose a rank, and take longer to report that than ranks may take that have noticed nothing."""
    from composer3d.runner.launching.watch import _PEERS_S

    run, step = composed(output)
    step(0)
    if run.context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        step(1)
    except StepError:
        threading.Event().wait(2 * _PEERS_S)
        raise


def case_skip(output):
    run, step = composed(output)
    for number in (0, 2, 3) if run.context.rank == 1 else (0, 1, 2):
        step(number)


def mismatched(rank):
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(5000 if rank == 1 else 5))


def case_user(output):
    print("attempt", os.environ.get("TORCHELASTIC_RESTART_COUNT", 0), flush=True)
    raise DataError("corpus/: there is no text here; name a file or a folder of text")


def case_manifest(output):
    raise ManifestError([Problem(message="the table is empty", file="run.toml", line=3, column=1, table="train")])


def case_crash_once(output):
    rank = join()
    reduce_all()  # neither is connecting any more when the other ends
    if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("only once")
    print(f"sum {reduce_all():g} after {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)


class Unreadable:
    """What a rank returns and its launcher cannot read."""

    def __setstate__(self, state):
        raise LookupError("no such state")


def case_unreadable(output):
    join()
    result = Unreadable()
    result.state = 1
    return result


def case_preempt(output):
    rank = join()
    with Preemption() as preemption, Progress(output, rank) as progress:
        step = 0
        while not reduce_all(float(preemption.requested)):
            progress.update(step)
            if step == 3:
                print("running", flush=True)
            step += 1
        progress.update(step, RunPhase.SAVING)
        (output / f"saved-{rank}").write_text(str(step))


def case_interrupt(output):
    join()
    try:
        while reduce_all():
            print("running", flush=True)
    finally:
        print("closed", flush=True)


def case_stubborn(output):
    rank = steps(0, output)
    if rank == 1:
        raise ValueError("only rank 1")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


def case_stuck(output):
    steps(2, output)
    while True:
        signal.pause()


def case_linger(output):
    thread = threading.Thread(target=threading.Event().wait)
    if join() == 1:
        thread.start()
    return reduce_all()


def case_deaf(output):
    """Ignore and catch whatever asks a rank to end."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    while True:
        try:
            threading.Event().wait(1)
        except BaseException as error:
            print("caught", error, flush=True)


def case_threads(output):
    import torch

    print(f"{os.environ['OMP_NUM_THREADS']} {torch.get_num_threads()}")


def run(name, output, max_restarts=0, timeout_s=120, grace_s=10):
    for stream in (sys.stdout, sys.stderr):
        stream.write(f"== {name}\n")
        stream.flush()
    result = launch_local(
        globals()[f"case_{name}"],
        (output,),
        num_ranks=2,
        device="cpu",
        output=output,
        max_restarts=int(max_restarts),
        timeout_s=float(timeout_s),
        grace_s=float(grace_s),
    )
    print(f"{result.outcome} {result.exit_code}", flush=True)
    if any(value is not None for value in result.values.values()):
        print(f"values {dict(result.values)}", flush=True)
    if result.report is not None:
        sys.stderr.write(result.report.render(output))
        sys.stderr.flush()


def main():
    output = Path(sys.argv[1])
    for case in sys.argv[2:]:
        name, *options = case.split(":")
        if is_rank():
            rank_main(globals()[f"case_{name}"], output, output=output)
        else:
            run(name, output / name, *options)


if __name__ == "__main__":
    main()
