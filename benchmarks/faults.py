"""Does an index come out whole, whatever happens on the way? Kills, signals, lost nodes, a full disk, S3.

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
import contextlib
import hashlib
import json
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from common import ROOT
from rich import box
from rich.console import Console
from rich.table import Table

from hippoindex.cluster.storage import open_storage
from hippoindex.cluster.usage import machine
from hippoindex.errors import HippoIndexError
from hippoindex.pipeline.artifact import MANIFEST, open_index
from hippoindex.pipeline.models import cache_folder
from hippoindex.pipeline.progress import configure_logging
from hippoindex.pipeline.remote import is_remote
from hippoindex.pipeline.work import work_url

RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
CHANGED = 16
WORKERS = 2
SETTINGS = ("cluster.shard_passages=4", "cluster.shard_texts=48")
LINEAGE = {"manifest.json", "SHA256SUMS", "stats.json", "report.html"}
LATEST_S = 6.0
LATEST_SHARD = 12
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
    output : str
        Folder, or S3 prefix.
    prepare : callable
        Puts what must be there before the command.
    expected : dict
        Digest of every file in the end.
    passages : int
        In the end.
    takes_s : float
        Without a fault.
    """

    name: str
    arguments: list[str]
    output: str
    prepare: Callable[[], None]
    expected: dict[str, str] = field(default_factory=dict)
    passages: int = 0
    takes_s: float = 0.0

    @property
    def latest_s(self) -> float:
        """Until when after a start a fault strikes; the first two or three seconds go by in loading."""
        return min(LATEST_S, 0.9 * self.takes_s)

    def reset(self) -> None:
        for place in (self.output, work_url(self.output)):
            open_storage(place).delete_all("")
            if not is_remote(place):
                shutil.rmtree(place, ignore_errors=True)
        self.prepare()

    def start(self, *more: str, **options: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "hippoindex.cli", "--log-level", "error", *self.arguments, *more]
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
        use_cache(Path(temporary) / "cache")
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
        outcomes.append(killed_nodes(index, -(-others // 2), rng))
        with s3_prefix() as prefix:
            remote = on_s3(index, prefix)
            outcomes.append(repeated("SIGKILL, output on S3", remote, kill_group, others, rng))
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
    output, small, large = (str(folder / name) for name in ("index", "small", "large"))
    build = ["index", "--corpus", str(most), "--output", str(output), *sharded, *how]
    append = ["append", "--index", str(output), "--corpus", str(rest), *sharded, *how]
    delete = ["delete", "--index", str(output), "--ids", str(ids), *how]
    found = [
        Job("index", build, output, lambda: None, passages=passages),
        Job("append", append, output, partial(copy, small, output), passages=passages + CHANGED),
        Job("delete", delete, output, partial(copy, large, output), passages=passages),
    ]
    for job, kept in zip(found, (small, large, str(folder / "again")), strict=True):
        job.reset()
        started = time.monotonic()
        if job.start().wait():
            raise SystemExit(f"{job.name} failed without a fault")
        job.takes_s, job.expected = time.monotonic() - started, digests(output)
        Path(output).rename(kept)
    if found[2].expected != found[0].expected:
        raise SystemExit("Deleting what was appended does not lead back to the first index")
    return found


def copy(index: str, output: str) -> None:
    shutil.copytree(index, output)


def use_cache(folder: Path) -> None:
    """Have what is fetched from S3 removed in the end; the models are those of the usual cache."""
    models = cache_folder().resolve()
    folder.mkdir()
    (folder / "models").symlink_to(models)
    os.environ["HIPPOINDEX_CACHE"] = str(folder)


@contextlib.contextmanager
def s3_prefix() -> Iterator[str]:
    """Start the S3 server of the tests and yield a prefix on it."""
    sys.path.append(str(ROOT / "tests" / "cluster"))
    from s3_server import running_s3_server

    with running_s3_server() as server:
        os.environ.update(server.environment())
        yield f"s3://{server.bucket}/faults"


def on_s3(job: Job, prefix: str) -> Job:
    """Return a job with its output on S3; it has to come to the same files."""
    output = f"{prefix}/index"
    arguments = [output if argument == job.output else argument for argument in job.arguments]
    return replace(job, arguments=arguments, output=output, takes_s=2 * job.takes_s)


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


def digests(output: str) -> dict[str, str]:
    index = open_index(output).path
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
            missing += gone(before, job, finished=code in {0, 2}) + broken(job)
            if code == 0 or (code == 2 and digests(job.output) == job.expected):  # killed after its last step
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


def committed(job: Job) -> dict[str, bytes]:
    """Return the records of the shards that are done; each names files that no other attempt has written."""
    work = open_storage(work_url(job.output))
    names = [entry.name for entry in work.entries() if "/done/" in entry.name]
    return {name: work.read_bytes(name) for name in names}


def gone(before: dict[str, bytes], job: Job, *, finished: bool) -> int:
    """Count committed shards that are missing or were written again; a finished run removes all."""
    if finished:
        return 0
    now = committed(job)
    return sum(now.get(name) != record for name, record in before.items())


def broken(job: Job) -> int:
    """Whether there is an index that is not whole."""
    if not open_storage(job.output).exists(MANIFEST):
        return int(not is_remote(job.output) and Path(job.output).exists())
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


def killed_nodes(job: Job, times: int, rng: np.random.Generator) -> Outcome:
    """Kill one of two nodes of a Ray cluster in the middle of extraction; the command must not notice."""
    sys.path.append(str(ROOT / "tests" / "cluster"))
    from ray_nodes import Cluster

    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    survived = lost = 0
    for number in range(times):
        job.reset()
        cluster = Cluster()
        try:
            cluster.add_node()
            doomed = cluster.add_node()
            process = job.start("--address", cluster.address)
            shards = int(rng.integers(1, LATEST_SHARD))
            while process.poll() is None and len(committed(job)) < shards:
                time.sleep(0.05)
            doomed.kill_raylet()
            before = committed(job)
            code = process.wait()
        finally:
            cluster.remove()
        missing = gone(before, job, finished=code == 0) + broken(job)
        survived += int(code == 0 and not missing and digests(job.output) == job.expected)
        lost += missing
        print(f"SIGKILL of a Ray node: {number + 1} of {times}", file=sys.stderr, flush=True)
    return Outcome("SIGKILL of a Ray node", times, survived, lost)


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
