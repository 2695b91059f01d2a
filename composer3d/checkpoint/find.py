"""Finding the checkpoint that a path means."""

from __future__ import annotations

from pathlib import Path

from composer3d.checkpoint.checkpoint_folder import complete, latest
from composer3d.checkpoint.state_file import read_state
from composer3d.errors import CheckpointError

__all__ = ["find_checkpoint", "other_than"]

_SHOWN = 5  # names in a message


def find_checkpoint(source: Path) -> Path:
    """Return the checkpoint that a path means: itself, or the newest of a run's folder or of a folder of checkpoints.

    Raises:
        CheckpointError: No checkpoint is complete, the newest one cannot be determined, or nothing can be read there.
    """
    try:
        return _found(source)
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read ({type(error).__name__}: {error})") from error


def _found(source: Path) -> Path:
    if complete(source):
        return source
    found = latest(source / "checkpoints") or latest(source)
    if found is not None:
        return found
    if (source / "checkpoints").is_dir() or (source / "metrics.jsonl").is_file():
        raise CheckpointError(f"{source}: this run has no complete checkpoint")
    names = sorted(f'run.load("{inner}")' for inner in source.glob("*") if complete(inner))[:_SHOWN]
    if names:
        raise CheckpointError(
            f"{source}: a folder of checkpoints without a marker `latest` and none that is called step-N; name the one "
            f"to load: {' or '.join(names)}"
        )
    read_state(source)  # raises with the file that the folder lacks
    raise CheckpointError(f"{source}: there is no checkpoint here")


def other_than(damaged: Path) -> Path | None:
    """Return the checkpoint of the same folder that was saved last, but for one that is damaged."""
    others = [path for path in damaged.parent.glob("step-*") if path != damaged and complete(path)]
    return max(others, key=lambda path: path.stat().st_mtime_ns, default=None)
