"""How far a long run is: a live display on a terminal, log lines elsewhere, and the seconds of each stage."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hippoindex.errors import HippoIndexError

log = structlog.get_logger("hippoindex")

Advance = Callable[[float], None]
Note = Callable[[], str]
"""Says in a few words what a stage is using."""


@dataclass(frozen=True)
class StageTime:
    """What one stage took."""

    name: str
    seconds_s: float
    items: int
    unit: str


class Monitor:
    """Shows stages as they run and remembers what they took.

    Parameters
    ----------
    console : rich.console.Console, optional
        Where the display goes; by default standard error. A live display is only shown on a terminal.
    note_interval_s, log_interval_s : float
        How often the display, and without one the log, tells what a stage is using.
    """

    def __init__(
        self, console: Console | None = None, *, note_interval_s: float = 5.0, log_interval_s: float = 60.0
    ) -> None:
        self._console = console or Console(stderr=True)
        self._note_interval_s = note_interval_s
        self._log_interval_s = log_interval_s
        self.times: list[StageTime] = []

    @contextmanager
    def stage(self, name: str, items: int, unit: str, note: Note | None = None) -> Iterator[Advance]:
        """Time a stage; call what is yielded with the number of items just finished.

        Parameters
        ----------
        name : str
        items : int
            Items to do; 0 if not known beforehand.
        unit : str
            What an item is, in the plural.
        note : callable, optional
            Asked now and then, in a thread of its own, for what is told beside the progress.
        """
        started = time.perf_counter()
        done = 0.0

        def count(number: float) -> None:
            nonlocal done
            done += number

        if self._console.is_terminal:
            with _display(self._console) as progress:
                task = progress.add_task(name, total=items or None, note="")

                def advance(number: float) -> None:
                    count(number)
                    progress.advance(task, number)

                def show(text: str) -> None:
                    progress.update(task, note=text)

                with _noted(name, note, show, self._note_interval_s):
                    yield advance
        else:

            def tell(text: str) -> None:
                log.info("stage at work", stage=name, done=round(done), items=items, unit=unit, uses=text)

            with _noted(name, note, tell, self._log_interval_s):
                yield count
        total = items or round(done)
        took = StageTime(name, time.perf_counter() - started, total, unit)
        self.times.append(took)
        log.info("stage done", stage=name, items=total, unit=unit, seconds=round(took.seconds_s, 2))


@contextmanager
def _noted(stage: str, note: Note | None, tell: Callable[[str], None], interval_s: float) -> Iterator[None]:
    """Tell a note every so many seconds while the block runs."""
    if note is None:
        yield
        return
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(interval_s):
            try:
                tell(note())
            except HippoIndexError as error:
                log.warning("it cannot be seen what the stage is using", stage=stage, error=str(error))

    thread = threading.Thread(target=work, name=f"note-{stage}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _display(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
    )


def configure_logging(level: str = "info", *, as_json: bool = False) -> None:
    """Send structured log lines to standard error.

    Parameters
    ----------
    level : str
        "debug", "info", "warning" or "error".
    as_json : bool
        One JSON object a line instead of text.
    """
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if not as_json else "iso", utc=as_json),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
