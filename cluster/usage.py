"""What a run uses and what it runs on: peak memory, cores, and a description of the machine."""

from __future__ import annotations

import os
import platform
import threading
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")


class PeakMemory:
    """Context manager that samples the memory of this process and of all processes below it.

    What is counted: the resident set of this process, plus the resident set of every descendant less the
    part of it that is backed by files or shared memory (code of libraries, mapped arrays, Ray's object
    store), so that what many workers map is not counted once per worker. Linux counts private pages of a
    mapped file as backed by the file until they are written to. Where the platform does not report the
    shared part (it is a Linux figure), the whole resident set of the descendants is counted.

    Peaks shorter than ``interval_s`` can be missed. A sample takes about a millisecond.

    Parameters
    ----------
    interval_s : float
        Seconds between samples.

    Attributes
    ----------
    peak_bytes : int
        Largest sum seen so far.
    """

    def __init__(self, interval_s: float = 0.2) -> None:
        self.peak_bytes = 0
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="peak-memory", daemon=True)

    def __enter__(self) -> Self:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        this = psutil.Process()
        total = this.memory_info().rss
        for child in this.children(recursive=True):
            try:
                memory = child.memory_info()
            except psutil.Error:  # it has ended since it was listed
                continue
            total += memory.rss - getattr(memory, "shared", 0)
        self.peak_bytes = max(self.peak_bytes, total)


def available_cores() -> int:
    """Return the number of cores this process may use.

    That is the size of its CPU affinity mask, or the CPU quota of its control group (cgroup v2 or v1),
    rounded down, where that is smaller; at least 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


class Machine(TypedDict):
    """Description of a machine, as JSON-ready values."""

    cpu: str
    cores: int
    memory_bytes: int
    python: str
    platform: str


def machine() -> Machine:
    """Describe the machine for ``stats.json``.

    Returns
    -------
    Machine
        ``cpu`` is the model's name; ``cores`` those that this process may use (:func:`available_cores`);
        ``memory_bytes`` the physical memory, whatever a container may use of it.
    """
    return {
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _cpu_model() -> str:
    """Name of the processor; ARM kernels give none, so there it is the architecture."""
    for line in _read_or_empty(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def cpu_quota(root: Path = _CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the cores granted by the tightest CPU quota from this process's control group to the root.

    Parameters
    ----------
    root : Path
        Where the control groups are mounted.
    membership : Path
        File that names the groups of this process, one ``number:controllers:path`` a line.

    Returns
    -------
    float or None
        ``None`` where there is no quota.
    """
    quotas = []
    for line in _read_or_empty(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, read = root, _quota_v2
        elif "cpu" in controllers.split(","):
            folder, read = root / "cpu", _quota_v1
        else:
            continue
        group = folder / path.lstrip("/")
        # In a container the path may be that of the host; the root of the mount is then the group itself.
        quotas += [quota for level in (group, *group.parents) if (quota := read(level)) is not None]
    return min(quotas, default=None)


def _quota_v2(group: Path) -> float | None:
    """``cpu.max`` is "quota period" in microseconds, or "max period" without a limit."""
    fields = _read_or_empty(group / "cpu.max").split()
    return None if len(fields) != 2 or fields[0] == "max" else int(fields[0]) / int(fields[1])


def _quota_v1(group: Path) -> float | None:
    """Quota and period lie in two files; a quota of -1 is no limit."""
    quota, period = (_read_or_empty(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return None if not quota or not period or int(quota) < 0 else int(quota) / int(period)


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
