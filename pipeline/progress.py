"""How far a long run is: a live display on a terminal, log lines elsewhere, and the seconds of each stage."""

from __future__ import annotations

import logging
import sys
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

log = structlog.get_logger("hippoindex")

Advance = Callable[[float], None]


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
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self.times: list[StageTime] = []

    @contextmanager
    def stage(self, name: str, items: int, unit: str) -> Iterator[Advance]:
        """Time a stage; call what is yielded with the number of items just finished.

        Parameters
        ----------
        name : str
        items : int
            Items to do; 0 if not known beforehand.
        unit : str
            What an item is, in the plural.
        """
        started = time.perf_counter()
        done = 0.0

        def count(number: float) -> None:
            nonlocal done
            done += number

        if self._console.is_terminal:
            with _display(self._console) as progress:
                task = progress.add_task(name, total=items or None)

                def advance(number: float) -> None:
                    count(number)
                    progress.advance(task, number)

                yield advance
        else:
            yield count
        total = items or round(done)
        took = StageTime(name, time.perf_counter() - started, total, unit)
        self.times.append(took)
        log.info("stage done", stage=name, items=total, unit=unit, seconds=round(took.seconds_s, 2))


def _display(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
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
