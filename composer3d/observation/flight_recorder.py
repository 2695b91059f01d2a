"""Flight recorder: the last collectives of every rank, exchanged through the store when one of them fails.

A span costs two list operations. The rest happens after a failure: the rank that failed first sets an alarm in the
store; a thread of every other rank, which polls for it twice a second, answers with its stack's place and the entries
of torch's flight recorder; the first rank compares the answers and publishes one text for all.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from composer3d import torch_compat
from composer3d.errors import ComposerError, StepError
from composer3d.mesh import Layout
from composer3d.observation.hang_report import Account, RecordedCollective, diagnose
from composer3d.observation.lost_peers import chain_of, lost_a_peer
from composer3d.observation.mismatch_ending import end_rank, notice
from composer3d.observation.rank_questions import RankQuestions
from composer3d.observation.recorded_collectives import KEPT, Groups, collectives
from composer3d.observation.torch_errors import TorchErrors

__all__ = ["Flight"]

_LOOK_S = 0.5  # how often a rank looks for an alarm
_MISMATCH = "a rank was sent another number of bytes than its collective expects"
_ANSWER_S = 2.0  # how long the first one waits for answers
_CLOSE_S = 10.0  # how long the end waits for a look in progress: a store that is there answers long before
_GONE_S = 0.7  # and where a connection broke, so that one of them will not come
_CLOSED = 1024  # spans that it remembers
_SILENT = ("nccl",)  # backends that raise nothing in the thread that waits: torch's watchdog ends the process
_LATE = 0.8  # of the timeout: then what such a backend waits for is told, before the watchdog ends everything
_LOOKS = 6  # looks for an alarm before each look for what is late
_TORCH = "/torch/"
# Where torch's pipeline stages wait for their neighbours; gloo's recorder holds no such exchanges.
_PIPELINING = "/torch/distributed/pipelining/"
_MESSAGES = "/composer3d/torch_compat/collectives/messages.py"
# Collectives whose innermost frame outside torch is here are composer3d's own.
_OWN_FILES = tuple(
    f"/composer3d/{file}.py" for file in ("composition/agreeing", "step/control_numbers", "step/gradients")
)
# Calls methods of process groups itself, without a frame of torch's.
_GROUP_CALLS = "/composer3d/step/control_numbers.py"

log = logging.getLogger(__name__)

_Open = tuple[str, Mapping[str, Any], int]  # a span's name and attributes, and when it began


def _frames(errors: Sequence[BaseException]) -> list[Any]:
    """Return the frames of a chain of exceptions, the innermost last."""
    return [frame for error in errors for frame, _ in traceback.walk_tb(error.__traceback__)]


class Flight:
    """State of this rank for the others when a collective fails; a recorder of spans.

    Args:
        layout: Axes and degrees.
        rank: Global rank of this process, for reports.
        groups: Axis and ranks by name of the process group.
        owners: The plugin that owns an axis, by axis.
        store: Key-value store of all ranks, under one prefix.
        sources: Plugins by their source, as of `issuers.sources_of`.

    Memory: the open spans, and the last thousand that were closed. Collectives: none; after a failure a few messages a
    rank through the store.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        rank: int,
        groups: Groups,
        owners: Mapping[str, str],
        store: Any,
        sources: Mapping[str, str],
    ) -> None:
        self._layout, self._rank, self._groups, self._owners, self._store = layout, rank, groups, owners, store
        self._sources = sources
        self._open: list[_Open] = []
        self._broken: tuple[_Open, ...] = ()
        self._closed: deque[tuple[str, int | None, int, int]] = deque(maxlen=_CLOSED)
        self._step: int | None = None
        self.errors = TorchErrors()  # of the composition
        self._stop = threading.Event()
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._watch, name="composer3d-flight", daemon=True)

    def start(self) -> None:
        """Start the thread that polls for alarms."""
        # How many compositions this process has made: ranks make them in the same order.
        self._begun_ns = time.time_ns()
        self._prefix = f"composer3d/flight/{self._store.add(f'composer3d/flight/rank-{self._rank}', 1)}"
        self._questions = RankQuestions(store=self._store, prefix=self._prefix, rank=self._rank)
        self._thread.start()
        self._unwatch = torch_compat.on_mismatched_size(self._mismatched)
        atexit.register(self.close)  # a thread that asks the store while Python ends would end it badly

    @property
    def questions(self) -> RankQuestions:
        """Questions that the thread answers; after `start`."""
        return self._questions

    def close(self) -> None:
        """Stop the thread; ranks that wait for this one find that it has closed."""
        with contextlib.suppress(RuntimeError):  # the store went with the rank that held it
            if not self._stop.is_set():
                self._answer(replace(self._now(), has_closed=True))
        self._stop.set()
        self._unwatch()
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self._thread.join(timeout=_CLOSE_S)

    # ---- a recorder of spans -----------------------------------------------------------------------------------------

    def begin(self, name: str, attributes: Mapping[str, Any]) -> Any:
        """Record an open span."""
        if "step" in attributes:
            self._step = attributes["step"]
        span = (name, attributes, time.time_ns())
        self._broken = ()
        self._open.append(span)
        return span

    def end(self, token: Any) -> None:
        """Record that a span is closed; an exception closes all, and those open at its origin are kept."""
        if not self._broken and sys.exc_info()[1] is not None:
            self._broken = tuple(self._open)
        name, attributes, start_ns = token
        self._closed.append((name, attributes.get("step", self._step), start_ns, time.time_ns()))
        if self._open and self._open[-1] is token:
            self._open.pop()
        else:
            self._open[:] = [span for span in self._open if span is not token]

    def leave(self, error: BaseException | None = None, *, kept: int = KEPT) -> dict[str, Any]:
        """Return this rank's state, at its failure if it failed, as JSON values; from any thread.

        Args:
            error: Exception that ended the rank, if it has ended.
            kept: Most collectives per group.
        """
        if error is not None:
            frames = _frames(chain_of(error))
        else:
            frames = _stack(sys._current_frames().get(self._main or 0))
        return {
            "open": [[name, start_ns] for name, _, start_ns in self._broken or self._open],
            "owners": dict(self._owners),
            "account": self._account(frames, kept=kept).to_json(),
            # A name, its step, and from when to when, ns since 1970; the last one is the newest.
            "spans": [list(span) for span in self._closed.copy()],
        }

    # ---- after a failure ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def explaining(self, activity: str = "") -> Iterator[None]:
        """Convert the error of a lost or late peer inside to one that reports what every rank did; and torch's others.

        Args:
            activity: Name of this rank's activity for the report: saving, loading, and so on.

        Raises:
            StepError: On every rank the same text, made by the one that failed first; what a rank that is gone was
                refused, in this step, is that text.
        """
        span = self.begin(activity, {}) if activity else None
        try:
            yield
        except RuntimeError as error:
            if not lost_a_peer(error):
                self.errors.refuse(error)
                raise
            raise StepError(self._explain(error)) from error
        except ComposerError as error:
            self._refused(error)
            raise
        finally:
            if span is not None:
                self.end(span)

    def _refused(self, error: ComposerError) -> None:
        """Leave why this rank ends, for those that wait for it: a stage alone knows what is wrong with a loss."""
        with contextlib.suppress(RuntimeError):  # the store went with the rank that held it
            if not lost_a_peer(error):
                self._store.set(f"{self._prefix}/refused/{self._rank}", json.dumps([self._step, str(error)]))

    def _refusal(self) -> str | None:
        """Return what another rank was refused in this step."""
        for rank in range(self._layout.world_size):
            key = f"{self._prefix}/refused/{rank}"
            if self._store.check([key]) and (found := json.loads(self._store.get(key)))[0] == self._step:
                return str(found[1])
        return None

    def _explain(self, error: BaseException) -> str:
        notice()
        chain = chain_of(error)
        # The exception may have come no further than a call of the loop's, whose own line is further out.
        own, error = self._account([*_stack(sys._getframe()), *_frames(chain)]), chain[-1]
        wait_s = _ANSWER_S if "timed out" in str(error).lower() or "timeout" in str(error).lower() else _GONE_S
        reason = str(error).partition("\n")[0].partition(". This is typically")[0]  # advice for everybody
        if self._questions.message is not None:  # it is why the peer is gone
            return self._questions.message
        try:
            if (refusal := self._refusal()) is not None:
                return refusal
            if self._store.add(f"{self._prefix}/alarm", 1) > 1:
                self._answer(own)
                published = f"{self._prefix}/message"
                self._store.wait([published], timedelta(seconds=wait_s + 1))
                return str(self._store.get(published).decode())
            text = diagnose(self._gather(own, wait_s), layout=self._layout, owners=self._owners, reason=reason)
            self._store.set(f"{self._prefix}/message", text)
            return text
        except RuntimeError:  # the store went with the rank that held it
            return diagnose([own], layout=self._layout, owners=self._owners, reason=reason)

    def _mismatched(self) -> None:
        """Publish what every rank did, and end this one before gloo does, which gives no reason."""
        notice()
        try:
            if self._store.add(f"{self._prefix}/alarm", 1) > 1:
                self._answer(self._now())
                self._questions.read()
                text = self._questions.message or _MISMATCH
            else:
                accounts = self._gather(self._now(), _ANSWER_S)
                text = diagnose(accounts, layout=self._layout, owners=self._owners, reason=_MISMATCH)
                self._questions.tell(text, [rank for rank in range(self._layout.world_size) if rank != self._rank])
        except RuntimeError:  # the store went with the rank that held it
            text = diagnose([self._now()], layout=self._layout, owners=self._owners, reason=_MISMATCH)
        end_rank(text)

    def _gather(self, own: Account, wait_s: float, place: str = "") -> list[Account]:
        accounts, deadline = [own], time.monotonic() + wait_s
        missing = [rank for rank in range(self._layout.world_size) if rank != self._rank]
        while missing and time.monotonic() < deadline:
            for rank in list(missing):
                key = f"{self._prefix}/{place}account/{rank}"
                if self._store.check([key]):
                    accounts.append(Account.from_json(json.loads(self._store.get(key))))
                    missing.remove(rank)
            time.sleep(0.02)
        return accounts

    def _answer(self, account: Account, place: str = "") -> None:
        self._store.set(f"{self._prefix}/{place}account/{self._rank}", json.dumps(account.to_json()))

    def _watch(self) -> None:
        """Poll for alarms, and answer each once, even if the main thread hangs in a call without the interpreter."""
        looks, answered = 0, False
        try:
            while not self._stop.wait(_LOOK_S):
                if self._store.check([f"{self._prefix}/alarm"]):
                    self._answer(self._now())
                    self._questions.read()
                    return
                self._questions.answer()
                if not answered and self._store.check([f"{self._prefix}/late"]):
                    self._answer(self._now(), "late/")
                    answered = True
                looks += 1
                if not answered and looks % _LOOKS == 0:
                    answered = self._tell_late()
        except RuntimeError as error:
            log.debug("no more looking for alarms: %s", error)  # the store is gone, and with it whoever could ask

    def _tell_late(self) -> bool:
        """Log an overdue collective that no error will report; return whether there is one."""
        late = _late(torch_compat.flight_records(waiting=True), time.time_ns())
        if late is None or self._store.add(f"{self._prefix}/late", 1) > 1:
            return False  # or another rank tells it, and asks this one
        reason = f"no answer for {late:.0f} s"
        accounts = self._gather(self._now(), _ANSWER_S, "late/")
        log.error("%s", diagnose(accounts, layout=self._layout, owners=self._owners, reason=reason))
        return True

    def _now(self) -> Account:
        return self._account(_stack(sys._current_frames().get(self._main or 0)))

    def _account(self, frames: Sequence[Any], *, kept: int = KEPT) -> Account:
        """Return this rank's account; `frames` from the outermost to the innermost."""
        outside = [frame for frame in frames if _TORCH not in frame.f_code.co_filename]
        place, own = "", None
        if outside:
            file = Path(outside[-1].f_code.co_filename)
            innermost = frames[-1].f_code.co_filename
            if _TORCH in innermost or innermost.endswith(_GROUP_CALLS):  # it is in a collective, not past it
                own = str(file).endswith(_OWN_FILES)
            shown = ([frame for frame in outside if not _is_known(frame.f_code.co_filename)] or outside)[-1]
            place = f"{Path(shown.f_code.co_filename).name}:{shown.f_lineno} in {shown.f_code.co_name}"
        spans = self._broken or tuple(self._open)
        return Account(
            rank=self._rank,
            step=self._step,
            inside=any("step" in attributes for _, attributes, _ in spans),  # a step's data is read before it begins
            exchanges=_exchanges(frames),
            spans=tuple(_name(name, attributes) for name, attributes, _ in spans if name != "step"),
            place=place,
            own=own,
            collectives=tuple(self._collectives(kept)),
        )

    def _collectives(self, kept: int) -> list[RecordedCollective]:
        """Return this rank's last collectives, groups made by plugins or the loop included.

        torch's recorder is the process's: it holds those of a composition before this one, and of the parent of a
        forked rank, whose groups had the same names and numbers.
        """
        entries = [entry for entry in torch_compat.flight_records() if int(entry["time_created_ns"]) >= self._begun_ns]
        names = {entry["process_group"][0] for entry in entries} - self._groups.keys()
        others = {name: ranks for name in names if (ranks := torch_compat.ranks_of_group(name)) is not None}
        spans = {name: (self._layout.span(ranks), ranks) for name, ranks in others.items()}
        return collectives(entries, self._groups, others=spans, kept=kept, sources=self._sources)


def _late(entries: Sequence[Mapping[str, Any]], now_ns: int) -> float | None:
    """Return the seconds that the oldest collective close to its timeout has waited; None if there is none."""
    ages = [
        (now_ns - int(entry["time_created_ns"])) / 1e9
        for entry in entries
        if entry["profiling_name"].startswith(_SILENT)
        and not entry["retired"]
        and now_ns - int(entry["time_created_ns"]) > _LATE * 1e6 * int(entry["timeout_ms"])
    ]
    return max(ages, default=None)


def _exchanges(frames: Sequence[Any]) -> bool:
    """Return whether the innermost frames are those of a stage that waits for a message, rather than computes."""
    for frame in reversed(frames):
        file = frame.f_code.co_filename
        if _PIPELINING in file or file.endswith(_MESSAGES):
            return True
        if _TORCH not in file:
            return False
    return False


def _is_known(file: str) -> bool:
    """Return whether a file is Python's or composer3d's own, which is not reported as the place of a failure."""
    is_standard = file.startswith(sysconfig.get_path("stdlib")) and "-packages" not in file
    return is_standard or file.startswith(("<", f"{Path(__file__).parent.parent}/"))


def _stack(frame: Any) -> list[Any]:
    return [found for found, _ in traceback.walk_stack(frame)][::-1] if frame is not None else []


def _name(name: str, attributes: Mapping[str, Any]) -> str:
    numbers = ", ".join(f"{key} {value}" for key, value in attributes.items() if key in ("microbatch", "stage"))
    return f"{name} ({numbers})" if numbers else name
