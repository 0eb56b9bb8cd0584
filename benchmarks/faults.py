"""Does an index come out whole, whatever happens on the way? Kills, signals, dead workers, a full disk.

    python benchmarks/faults.py            # 50 kills and the other faults
    python benchmarks/faults.py --quick    # 20 kills

Every fault is put on `hippoindex index`, `append` or `delete` over a corpus made here, at random moments from
the start of the process on. The command is then started again until it ends by itself, and the index is
compared, byte by byte, with the one of a run that nothing happened to. A fault is survived if

- the files are the same in the end, `manifest.json`, `stats.json` and `report.html` apart where a time or the
  index of origin stands in them,
- no shard that was committed before the fault is done again or missing after it, and
- an index that was there before is whole at every moment: it is opened and verified after every fault.

`lost` counts shards that were committed and then missing or done anew, and passages missing in the end.
Exits with 1 unless every fault is survived and nothing is lost.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from common import ROOT
from rich import box
from rich.console import Console
from rich.table import Table

from hippoindex.cluster.usage import machine
from hippoindex.errors import HippoIndexError
from hippoindex.pipeline.artifact import open_index
from hippoindex.pipeline.progress import configure_logging

RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
CHANGED = 16
WORKERS = 2
SETTINGS = ("cluster.shard_passages=4", "cluster.shard_texts=48")
LINEAGE = {"manifest.json", "SHA256SUMS", "stats.json", "report.html"}
LATEST_S = 6.0
LONGEST_S = 600.0
FILE_LIMIT_BYTES = 100_000


class Outcome(NamedTuple):
    """How often a fault was put on a command, and what came of it."""

    fault: str
    injected: int
    survived: int
    lost: int


@dataclass
class Job:
    """A command, the index it makes, and how that must look.

    Attributes
    ----------
    name : str
    arguments : list of str
    output : Path
    prepare : callable
        Puts what must be there before the command into an empty folder.
    expected : dict
        Digest of every file in the end.
    passages : int
        In the end.
    takes_s : float
        Without a fault.
    """

    name: str
    arguments: list[str]
    output: Path
    prepare: Callable[[], None]
    expected: dict[str, str] = field(default_factory=dict)
    passages: int = 0
    takes_s: float = 0.0

    @property
    def latest_s(self) -> float:
        """Until when after a start a fault strikes; the first two or three seconds go by in loading."""
        return min(LATEST_S, 0.9 * self.takes_s)

    @property
    def work(self) -> Path:
        return self.output.with_name(self.output.name + ".work")

    def reset(self) -> None:
        for folder in (self.output, self.work):
            shutil.rmtree(folder, ignore_errors=True)
        self.prepare()

    def start(self, **options: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "hippoindex.cli", "--log-level", "error", *self.arguments]
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, **options
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="20 kills, not 50, one of each other fault")
    parser.add_argument("--kills", type=int, help="of the whole run, in place of 50 or 20")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows go")
    arguments = parser.parse_args()
    configure_logging("error")
    passages, kills, others = (48, 20, 1) if arguments.quick else (160, 50, 10)
    rng = np.random.default_rng(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        index, append, delete = jobs(Path(temporary), passages)
        outcomes = [
            repeated("SIGKILL of the whole run", index, kill_group, arguments.kills or kills, rng),
            repeated("SIGKILL of one worker", index, kill_worker, others, rng),
            repeated("SIGTERM", index, partial(interrupt, signal.SIGTERM), others, rng),
            repeated("SIGINT", index, partial(interrupt, signal.SIGINT), others, rng),
            no_space(index),
            repeated("SIGKILL of append", append, kill_group, others, rng),
            repeated("SIGKILL of delete", delete, kill_group, others, rng),
        ]
    Console().print(table(outcomes))
    write(arguments.json, outcomes)
    print("results:", arguments.json)
    return int(any(outcome.survived < outcome.injected or outcome.lost for outcome in outcomes))


def jobs(folder: Path, passages: int) -> list[Job]:
    """Return the three commands, after they have been carried out once without a fault."""
    records = [passage(number) for number in range(passages + CHANGED)]
    most, rest = folder / "most.jsonl", folder / "rest.jsonl"
    for path, part in ((most, records[:passages]), (rest, records[passages:])):
        path.write_text("".join(json.dumps(record) + "\n" for record in part), encoding="utf-8")
    ids = folder / "ids.txt"
    ids.write_text("\n".join(record["id"] for record in records[passages:]), encoding="utf-8")
    how = ["--workers", str(WORKERS)]
    sharded = [part for setting in SETTINGS for part in ("--set", setting)]
    output, small, large = (folder / name for name in ("index", "small", "large"))
    build = ["index", "--corpus", str(most), "--output", str(output), *sharded, *how]
    append = ["append", "--index", str(output), "--corpus", str(rest), *sharded, *how]
    delete = ["delete", "--index", str(output), "--ids", str(ids), *how]
    found = [
        Job("index", build, output, lambda: None, passages=passages),
        Job("append", append, output, partial(copy, small, output), passages=passages + CHANGED),
        Job("delete", delete, output, partial(copy, large, output), passages=passages),
    ]
    for job, kept in zip(found, (small, large, folder / "again"), strict=True):
        job.reset()
        started = time.monotonic()
        if job.start().wait():
            raise SystemExit(f"{job.name} failed without a fault")
        job.takes_s, job.expected = time.monotonic() - started, digests(output)
        output.rename(kept)
    if found[2].expected != found[0].expected:
        raise SystemExit("Deleting what was appended does not lead back to the first index")
    return found


def copy(index: Path, output: Path) -> None:
    shutil.copytree(index, output)


NAMES = [
    f"{first} {last}" for first in ("Ada", "Ben", "Cleo", "Dov") for last in ("Marsh", "Oakley", "Quist")
]
TOWNS = ["Arden", "Belmoor", "Castrel", "Dunwich"]
WORKS = ["a mill", "a bridge", "a school"]


def passage(number: int) -> dict[str, str]:
    """Make up a passage of a small world: enough to extract, link and embed."""
    rng = np.random.default_rng(number)
    name, town, work = (rng.choice(values) for values in (NAMES, TOWNS, WORKS))
    year = rng.integers(1700, 1900)
    text = (
        f"{name} was born in {town} in {year}. {name} built {work} in {town}. The town of {town} owned "
        f"{work} until {year + 60}. Visitor {number} wrote about {town}."
    )
    return {"id": f"p{number:04d}", "title": f"{name} {number}", "text": text}


def digests(index: Path) -> dict[str, str]:
    return {
        file.relative_to(index).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(index.rglob("*"))
        if file.is_file() and file.name not in LINEAGE
    }


Fault = Callable[[subprocess.Popen[bytes], float], bool]
"""Waits for so many seconds and strikes; tells whether the command was still running."""


def repeated(name: str, job: Job, fault: Fault, times: int, rng: np.random.Generator) -> Outcome:
    """Put a fault on a job again and again, as often as it takes for the job to end, and on the next one."""
    injected = survived = lost = 0
    while injected < times:
        job.reset()
        missing = struck = 0
        started = time.monotonic()
        while True:
            process = job.start()
            before = committed(job)
            if injected + struck < times and fault(process, rng.uniform(0.0, job.latest_s)):
                struck += 1
            code = process.wait()
            missing += gone(before, job, finished=code == 0) + broken(job)
            if code == 0:
                break
            if time.monotonic() - started > LONGEST_S:
                raise SystemExit(f"{name}: {job.name} did not end within {LONGEST_S:.0f} s")
        same = digests(job.output) == job.expected
        missing += job.passages - open_index(job.output).n_passages
        injected += struck
        survived += struck if same and not missing else 0
        lost += missing
        print(f"{name}: {injected} of {times}", file=sys.stderr, flush=True)
    return Outcome(name, injected, survived, lost)


def committed(job: Job) -> dict[Path, int]:
    """Return the shards that are done, with the time of their writing."""
    shards = (file for file in job.work.glob("*/*.arrow") if file.parent.name != "input")
    return {file: file.stat().st_mtime_ns for file in shards if not file.name.startswith(".")}


def gone(before: dict[Path, int], job: Job, *, finished: bool) -> int:
    """Count committed shards that are missing or were written again; a finished run removes all."""
    if finished:
        return 0
    now = committed(job)
    return sum(now.get(file) != written for file, written in before.items())


def broken(job: Job) -> int:
    """Whether there is an index that is not whole."""
    if not job.output.exists():
        return 0
    try:
        open_index(job.output).verify()
    except HippoIndexError as error:
        print(f"{job.output}: {error}", file=sys.stderr)
        return 1
    return 0


def kill_group(process: subprocess.Popen[bytes], wait_s: float) -> bool:
    if ended_within(process, wait_s):
        return False
    os.killpg(process.pid, signal.SIGKILL)
    return True


def kill_worker(process: subprocess.Popen[bytes], wait_s: float) -> bool:
    while process.poll() is None:
        workers = [child for child in psutil.Process(process.pid).children() if is_worker(child)]
        if len(workers) >= WORKERS:
            if ended_within(process, wait_s / 2):
                return False
            os.kill(workers[0].pid, signal.SIGKILL)
            return True
        time.sleep(0.02)
    return False


def is_worker(child: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(child.cmdline())
    except psutil.Error:
        return False


def interrupt(number: signal.Signals, process: subprocess.Popen[bytes], wait_s: float) -> bool:
    if ended_within(process, max(1.0, wait_s)):  # before that, Python itself is loading
        return False
    process.send_signal(number)
    return True


def ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def no_space(job: Job) -> Outcome:
    """Have every file end at a limit, as on a full disk, and then run without one."""
    job.reset()
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (FILE_LIMIT_BYTES, FILE_LIMIT_BYTES))
    code = job.start(preexec_fn=limit).wait()
    before = committed(job)
    lost = broken(job)
    code_after = job.start().wait()
    same = code == 3 and code_after == 0 and digests(job.output) == job.expected
    print(f"no space: first exit {code}, {len(before)} shards kept", file=sys.stderr, flush=True)
    return Outcome("no space left on the disk", 1, int(same and not lost), lost)


def table(outcomes: list[Outcome]) -> Table:
    made = Table(title="Faults", box=box.SIMPLE)
    for name in Outcome._fields:
        made.add_column(name, justify="left" if name == "fault" else "right")
    for outcome in outcomes:
        made.add_row(*map(str, outcome))
    return made


def write(path: Path, outcomes: list[Outcome]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": dict(machine()), "rows": [outcome._asdict() for outcome in outcomes]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
