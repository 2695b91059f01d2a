"""Joint failure: what raises on one rank raises on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import distributed as dist

from composer3d.errors import CheckpointError
from composer3d.processes.json_exchange import all_gather_json

__all__ = ["rank_of", "together"]

T = TypeVar("T")

MAX_RANKS_NAMED = 3


def rank_of(group: dist.ProcessGroup | None) -> int:
    """Return this process's rank in the group, 0 where there is no process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def together(group: dist.ProcessGroup | None, place: object, action: Callable[[], T]) -> T:
    """Run an action on this rank and raise the same error on every rank if it failed on any.

    A rank that raised alone would leave the others waiting in their next collective.

    Args:
        group: Who takes part; None is the default group, or this process alone where there is none.
        place: Subject of the error, which begins its text.
        action: This rank's work; it must not leave a collective half way.

    Raises:
        CheckpointError: With the failed ranks and their reasons.

    Collectives: those of one `all_gather_json`, after the action.
    """
    failure: BaseException | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    except BaseException as error:  # torch's CheckpointException is no Exception
        if not hasattr(error, "failures"):
            raise
        failure = error
    texts = all_gather_json(None if failure is None else reason(failure), group=group)
    if any(text is not None for text in texts):
        raise CheckpointError(report(place, texts)) from failure
    return result


def reason(error: BaseException) -> str:
    """Return an error's text without its traceback; torch's gathered errors name their ranks themselves."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict):
        return "; ".join(f"rank {rank}: {reason(pair[0])}" for rank, pair in sorted(failures.items())[:MAX_RANKS_NAMED])
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def report(place: object, texts: list[str | None]) -> str:
    """Join the reasons of all ranks: a common reason is stated once, others name their rank."""
    failed = [(rank, text.removeprefix(f"{place}: ")) for rank, text in enumerate(texts) if text is not None]
    first = failed[0][1]
    if len({text for _, text in failed}) == 1 and (len(failed) == len(texts) or first.startswith("rank ")):
        return first if first.startswith(f"{place}") else f"{place}: {first}"
    shown = "; ".join(f"rank {rank}: {text}" for rank, text in failed[:MAX_RANKS_NAMED])
    more = f"; and {len(failed) - MAX_RANKS_NAMED} more ranks" if len(failed) > MAX_RANKS_NAMED else ""
    return f"{place}: {shown}{more}"
