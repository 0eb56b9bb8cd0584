"""What a stage uses is told while it runs: beside the progress on a terminal, in the log elsewhere."""

from __future__ import annotations

import io
import threading

import structlog
from rich.console import Console

from hippoindex.errors import HippoIndexError
from hippoindex.pipeline.progress import Monitor


class Asked:
    """A note that lets the test wait until it was asked for twice: what the first one said is told then."""

    def __init__(self, error: HippoIndexError | None = None) -> None:
        self.twice = threading.Event()
        self._times = 0
        self._error = error

    def __call__(self) -> str:
        self._times += 1
        if self._times > 1:
            self.twice.set()
        if self._error is not None:
            raise self._error
        return "1,234 tokens/s"


def test_a_terminal_shows_the_note_beside_the_progress() -> None:
    screen, asked = io.StringIO(), Asked()
    console = Console(file=screen, force_terminal=True, width=120)
    with Monitor(console, note_interval_s=0.01).stage("extract", 10, "passages", asked) as advance:
        advance(3)
        assert asked.twice.wait(30)
    shown = screen.getvalue()
    assert "1,234 tokens/s" in shown
    assert "3/10" in shown


def test_the_log_tells_the_note_where_there_is_no_terminal() -> None:
    asked = Asked()
    monitor = Monitor(Console(file=io.StringIO()), log_interval_s=0.01)
    with structlog.testing.capture_logs() as log, monitor.stage("extract", 10, "passages", asked) as advance:
        advance(3)
        assert asked.twice.wait(30)
    told = [entry for entry in log if entry["event"] == "stage at work"]
    assert (told[-1]["done"], told[-1]["items"], told[-1]["uses"]) == (3, 10, "1,234 tokens/s")
    assert log[-1]["event"] == "stage done"


def test_a_note_that_fails_is_told_and_stops_nothing() -> None:
    asked = Asked(HippoIndexError("no storage"))
    monitor = Monitor(Console(file=io.StringIO()), log_interval_s=0.01)
    with structlog.testing.capture_logs() as log, monitor.stage("extract", 1, "passages", asked):
        assert asked.twice.wait(30)
    assert ("no storage", "extract") in [(entry.get("error"), entry["stage"]) for entry in log]
    assert [time.name for time in monitor.times] == ["extract"]
