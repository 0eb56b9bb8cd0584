from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import psutil
import pyarrow as pa
import pytest

from hippoindex.cluster.ledger import (
    Lease,
    LeaseHeldError,
    LeaseLostError,
    LeaseRecord,
    Ledger,
    LedgerError,
    ProcessIdentity,
)
from hippoindex.cluster.storage import Storage, open_storage
from hippoindex.cluster.storage_backend import StorageError
from hippoindex.errors import UsageError

KEY = "0123456789abcdef"


def writer(content: bytes) -> Callable[[BinaryIO], None]:
    def write(out: BinaryIO) -> None:
        out.write(content)

    return write


def names(storage: Storage) -> list[str]:
    return [entry.name for entry in storage.entries()]


# The ledger


def test_a_unit_is_complete_when_all_its_outputs_are_there(storage: Storage) -> None:
    ledger = Ledger(storage, "extract")
    assert not ledger.has(KEY)
    seen = []

    def write_rows(out: BinaryIO) -> None:
        seen.append(ledger.has(KEY))
        out.write(b"ro")
        out.write(b"ws")

    assert ledger.commit(KEY, {"rows.arrow": write_rows, "quarantine.arrow": writer(b"")})
    assert seen == [False]
    assert ledger.has(KEY)
    assert (ledger.read(KEY, "rows.arrow"), ledger.read(KEY, "quarantine.arrow")) == (b"rows", b"")
    rows = ledger.outputs(KEY)["rows.arrow"]
    assert rows.size_bytes == 4
    assert storage.read_bytes(rows.name) == b"rows"
    assert ledger.unlisted() == []
    assert not Ledger(storage, "embed").has(KEY)


def test_only_what_is_missing_is_to_be_done(storage: Storage) -> None:
    ledger = Ledger(storage, "extract")
    assert ledger.missing(["c", "a", "b"]) == ["c", "a", "b"]
    ledger.commit("a", {"rows": writer(b"1")})
    ledger.commit("b-2", {"rows": writer(b"1")})
    Ledger(storage, "extract-more").commit("c", {"rows": writer(b"1")})
    assert ledger.done() == {"a", "b-2"}
    assert ledger.missing(["c", "a", "b"]) == ["c", "b"]


def test_a_table_is_streamed_into_a_unit(storage: Storage) -> None:
    table = pa.table({"passage_id": [f"p{i}" for i in range(100)]})

    def write(out: BinaryIO) -> None:
        with pa.ipc.new_file(out, table.schema) as file:
            file.write_table(table)

    ledger = Ledger(storage, "chunk")
    ledger.commit(KEY, {"rows.arrow": write})
    with storage.open(ledger.outputs(KEY)["rows.arrow"].name) as file:
        assert pa.ipc.open_file(file).read_all() == table
    assert pa.ipc.open_file(ledger.read(KEY, "rows.arrow")).read_all() == table


def test_the_first_of_two_commits_counts(storage: Storage) -> None:
    ledger = Ledger(storage, "extract")
    assert ledger.commit(KEY, {"rows": writer(b"first")})
    before = names(storage)
    assert not ledger.commit(KEY, {"rows": writer(b"second")})
    assert ledger.read(KEY, "rows") == b"first"
    assert names(storage) == before


def test_who_is_overtaken_while_writing_leaves_nothing(storage: Storage) -> None:
    ledger = Ledger(storage, "extract")

    def overtaken(out: BinaryIO) -> None:
        out.write(b"slow")
        assert Ledger(storage, "extract").commit(KEY, {"rows": writer(b"fast")})

    assert not ledger.commit(KEY, {"quarantine": writer(b"slow"), "rows": overtaken})
    assert ledger.read(KEY, "rows") == b"fast"
    assert set(ledger.outputs(KEY)) == {"rows"}
    assert ledger.unlisted() == []


def test_of_many_threads_one_commits_all_its_outputs(storage: Storage) -> None:
    ledger, barrier = Ledger(storage, "extract"), threading.Barrier(4)

    def commit(number: int) -> bool:
        barrier.wait(30)
        mine = writer(b"%d" % number)
        return ledger.commit(KEY, {"rows": mine, "quarantine": mine})

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(commit, range(4)))
    assert sum(won) == 1
    assert ledger.read(KEY, "rows") == ledger.read(KEY, "quarantine") == b"%d" % won.index(True)
    assert ledger.unlisted() == []


@pytest.mark.parametrize("kind", ["disk"])
def test_of_many_processes_one_commits_a_unit(
    storage: Storage, workers: ModuleType, in_processes: Callable[..., list[bool]]
) -> None:
    assert sum(in_processes(workers.commit, storage)) == 1
    ledger = Ledger(storage, "extract")
    assert ledger.read("a", "rows.arrow") == ledger.read("a", "quarantine.arrow") != b""
    assert ledger.unlisted() == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_unit_that_fails_leaves_nothing(storage: Storage, error: type[BaseException]) -> None:
    ledger = Ledger(storage, "extract")

    def fail(out: BinaryIO) -> None:
        out.write(b"half")
        raise error("half-way")

    with pytest.raises(error, match="half-way"):
        ledger.commit(KEY, {"quarantine": writer(b"whole"), "rows": fail})
    assert not ledger.has(KEY)
    assert names(storage) == []


def test_what_a_killed_attempt_left_does_not_count(storage: Storage) -> None:
    ledger = Ledger(storage, "extract")
    storage.create(f"extract/files/{KEY}/0000.rows", b"left")
    assert not ledger.has(KEY)
    assert ledger.commit(KEY, {"rows": writer(b"whole")})
    assert ledger.read(KEY, "rows") == b"whole"
    assert ledger.unlisted() == [f"extract/files/{KEY}/0000.rows"]


def test_a_lost_answer_does_not_lose_a_unit(storage: Storage, faults: ModuleType) -> None:
    unreliable, _ = faults.faulty(
        storage, itertools.cycle([faults.Fault.LOST, faults.Fault.NONE]), attempts=3
    )
    assert Ledger(unreliable, "extract").commit(KEY, {"rows": writer(b"1"), "quarantine": writer(b"2")})
    ledger = Ledger(storage, "extract")
    assert (ledger.read(KEY, "rows"), ledger.read(KEY, "quarantine")) == (b"1", b"2")
    assert ledger.unlisted() == []


@pytest.mark.parametrize("last", ["REFUSED", "LOST"])
def test_a_record_of_which_nothing_is_known_keeps_its_files(
    storage: Storage, faults: ModuleType, last: str
) -> None:
    # Requests: look for the record, put the output, create the record (twice).
    broken, _ = faults.faulty(storage, faults.after(2, [faults.Fault[last]] * 2), attempts=2)
    with pytest.raises(StorageError, match="2 attempts failed"):
        Ledger(broken, "extract").commit(KEY, {"rows": writer(b"1")})
    ledger = Ledger(storage, "extract")
    assert ledger.has(KEY) == (last == "LOST")
    assert ledger.commit(KEY, {"rows": writer(b"1")}) == (last == "REFUSED")
    assert ledger.read(KEY, "rows") == b"1"


def test_damage_is_found_and_can_be_done_again(storage: Storage) -> None:
    ledger = Ledger(storage, "extract")
    with pytest.raises(LedgerError, match="is not complete"):
        ledger.outputs(KEY)
    ledger.commit(KEY, {"rows": writer(b"rows")})
    with pytest.raises(LedgerError, match="has no output 'vectors'"):
        ledger.read(KEY, "vectors")
    name = ledger.outputs(KEY)["rows"].name
    for damage in (lambda: storage.delete(name), lambda: storage.create(name, b"rowz")):
        damage()
        with pytest.raises(LedgerError, match=f"is missing or has changed .*delete extract/done/{KEY}.json"):
            ledger.read(KEY, "rows")
    for damaged in (b"{", b"[]", b'{"outputs": {"rows": {"name": "x"}}}'):
        storage.delete(f"extract/done/{KEY}.json")
        storage.create(f"extract/done/{KEY}.json", damaged)
        with pytest.raises(LedgerError, match=r"is damaged .*delete it"):
            ledger.outputs(KEY)
    storage.delete(f"extract/done/{KEY}.json")
    assert ledger.commit(KEY, {"rows": writer(b"again")})


def test_names_that_would_leave_the_ledger_are_refused(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path), None, None)  # type: ignore[arg-type]
    for stage in ("", "../x", "a/b"):
        with pytest.raises(UsageError, match="folder of a stage"):
            Ledger(storage, stage)
    ledger = Ledger(storage, "extract")
    for key in ("", "../x", "a/b", "a.json", "x" * 129):
        with pytest.raises(UsageError, match="no completion key"):
            ledger.has(key)
    for role in ("", "../x", "Rows", "a/b"):
        with pytest.raises(UsageError, match="role of an output"):
            ledger.commit(KEY, {role: writer(b"")})


# The lease


def silent(storage: Storage, ttl_s: float, **changes: Any) -> LeaseRecord:
    """Put a lease whose holder runs elsewhere and gives no sign of life."""
    elsewhere = replace(ProcessIdentity.own(), host="node-7", boot_id="of another kernel", pid=4321)
    record = LeaseRecord("their-token", "index --output x", elsewhere, "2026-05-04T03:02:01+00:00", ttl_s)
    record = replace(record, **changes)
    assert storage.create("lease.json", record.to_bytes()) is not None
    return record


def stop_heart(lease: Lease) -> None:
    lease._stop.set()
    lease._heart.join()


class Holder:
    """Another process that holds the lease."""

    def __init__(self, process: Any, events: Any) -> None:
        self.process = process
        self._events = events
        self.process.start()
        assert self.event() == "held"

    def event(self) -> str:
        return str(self._events.get(timeout=30))


@pytest.fixture
def hold(storage: Storage, workers: ModuleType, processes: Any) -> Iterator[Callable[[float], Holder]]:
    """Start another process that holds the lease of the storage."""
    holders: list[Holder] = []

    def start(ttl_s: float) -> Holder:
        events = processes.Queue()
        process = processes.Process(target=workers.hold, args=(storage, ttl_s, events), daemon=True)
        holders.append(Holder(process, events))
        return holders[-1]

    yield start
    for holder in holders:
        holder.process.kill()
        holder.process.join(10)


def test_a_lease_is_given_back_at_the_end(storage: Storage) -> None:
    for number in range(3):
        with Lease.acquire(storage, f"run {number}") as lease:
            lease.check()
            lease.check()
    with pytest.raises(LeaseLostError, match="was given back"):
        lease.check()
    lease.release()


def test_an_abandoned_lease_may_be_removed_with_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    with Lease.acquire(open_storage(folder), "me", 0.2) as lease:
        lease.abandon()
        shutil.rmtree(folder)
        time.sleep(0.3)
        with pytest.raises(LeaseLostError, match="was abandoned"):
            lease.check()
    assert not folder.exists()


def test_the_second_run_is_told_who_holds_the_lease(
    storage: Storage, hold: Callable[[float], Holder]
) -> None:
    holder = hold(1.0)
    with pytest.raises(LeaseHeldError) as caught:
        Lease.acquire(storage, "me")
    message = str(caught.value)
    own = ProcessIdentity.own()
    for part in (
        "'the other run'",
        f"host {own.host}",
        f"pid {holder.process.pid}",
        "since 20",
        "expires at 20",
    ):
        assert part in message
    assert storage.url in message
    assert holder.process.is_alive()


def test_a_killed_holder_is_taken_over_at_once(storage: Storage, hold: Callable[[float], Holder]) -> None:
    holder = hold(600.0)
    holder.process.kill()
    holder.process.join(10)
    began_s = time.monotonic()
    with Lease.acquire(storage, "me") as lease:
        lease.check()
    assert time.monotonic() - began_s < 5


def test_a_pid_that_was_given_again_is_not_taken_for_the_holder(storage: Storage) -> None:
    silent(storage, 600, process=replace(ProcessIdentity.own(), started="1"))
    Lease.acquire(storage, "me").release()


def test_a_killed_process_is_dead_before_its_parent_takes_note_and_after() -> None:
    process = subprocess.Popen(["sleep", "60"])
    # Field 22 of what the kernel tells of a process is when it started.
    started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    identity = replace(ProcessIdentity.own(), pid=process.pid, started=started)
    assert not identity.is_dead()
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert identity.is_dead()
    process.wait()
    assert identity.is_dead()


@pytest.mark.parametrize(
    ("changes", "dead"),
    [
        ({}, False),
        ({"started": "1"}, True),
        ({"started": "1", "host": "another"}, False),
        ({"started": "1", "boot_id": "another"}, False),
        ({"started": "1", "pid_namespace": "pid:[1]"}, False),
        ({"started": ""}, False),
        ({"boot_id": "", "started": "1"}, False),
    ],
)
def test_only_a_process_that_can_be_judged_from_here_is_called_dead(
    changes: dict[str, str], dead: bool
) -> None:
    assert replace(ProcessIdentity.own(), **changes).is_dead() == dead  # type: ignore[arg-type]


def test_a_silent_holder_elsewhere_is_taken_over_after_its_time(storage: Storage) -> None:
    silent(storage, 0.4, acquired_at="2999-01-01T00:00:00+00:00")  # by a clock that is wrong
    began_s = time.monotonic()
    with Lease.acquire(storage, "me") as lease:
        assert 0.4 <= time.monotonic() - began_s < 5
        lease.check()


def test_of_many_that_wait_for_a_silent_lease_one_gets_it(storage: Storage) -> None:
    silent(storage, 0.5)
    barrier = threading.Barrier(4)

    def acquire(number: int) -> Lease | str:
        barrier.wait(30)
        try:
            return Lease.acquire(storage, f"run {number}", 2.0)
        except LeaseHeldError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(acquire, range(4)))
    [winner] = [result for result in results if isinstance(result, Lease)]
    with winner:
        winner.check()
    refusals = [result for result in results if isinstance(result, str)]
    assert len(refusals) == 3
    assert all(f"'run {results.index(winner)}' (host" in refusal for refusal in refusals)


def test_a_halted_holder_loses_the_lease_and_says_so(
    storage: Storage, hold: Callable[[float], Holder]
) -> None:
    holder = hold(0.6)
    os.kill(holder.process.pid, signal.SIGSTOP)
    with Lease.acquire(storage, "me") as lease:
        os.kill(holder.process.pid, signal.SIGCONT)
        message = holder.event()
        lease.check()
    assert message.startswith("LeaseLostError: This run has lost the lease")
    assert f"'me' (host {ProcessIdentity.own().host}, pid {os.getpid()}, since 20" in message
    assert "without publishing anything" in message
    holder.process.join(10)
    assert holder.process.exitcode == 0


def test_who_has_not_noticed_yet_notices_before_publishing(storage: Storage) -> None:
    halted = Lease.acquire(storage, "halted", 0.4)
    stop_heart(halted)
    with Lease.acquire(storage, "me") as lease:
        for _ in range(2):
            with pytest.raises(LeaseLostError, match=r"'me' .* has taken it over"):
                halted.check()
        halted.release()
        lease.check()


def test_the_heartbeat_notices_a_loss(storage: Storage) -> None:
    with Lease.acquire(storage, "robbed", 0.8) as lease:
        storage.delete("lease.json")
        lease._heart.join(10)
        assert not lease._heart.is_alive()
        with pytest.raises(LeaseLostError, match="somebody has deleted it"):
            lease.check()
    assert not storage.exists("lease.json")


def test_a_lease_that_is_damaged_is_lost(storage: Storage) -> None:
    with Lease.acquire(storage, "robbed") as lease:
        storage.delete("lease.json")
        storage.create("lease.json", b"{")
        with pytest.raises(LeaseLostError, match=r"lease.json is no lease"):
            lease.check()
    assert storage.read_bytes("lease.json") == b"{"


def test_after_a_check_nobody_gets_the_lease_for_its_time_to_live(storage: Storage) -> None:
    lease = Lease.acquire(storage, "first", 0.6)
    stop_heart(lease)
    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(Lease.acquire, storage, "second")
        time.sleep(0.3)  # it watches by now, and would have the lease after as long again
        lease.check()
        checked_s = time.monotonic()
        with pytest.raises(LeaseHeldError, match="'first'"):
            watcher.result()
    with Lease.acquire(storage, "third"):
        assert time.monotonic() - checked_s >= 0.6


def test_an_outage_is_no_loss(storage: Storage, faults: ModuleType) -> None:
    refused = [faults.Fault.REFUSED] * 4
    unreliable, _ = faults.faulty(storage, faults.after(2, refused), attempts=2)
    lease = Lease.acquire(unreliable, "me")
    for _ in range(2):
        with pytest.raises(StorageError, match="2 attempts failed"):
            lease.check()
    lease.check()
    lease.release()
    assert json.loads(storage.read_bytes("lease.json"))["released"]


@pytest.mark.parametrize("at", ["check", "release"])
def test_a_heartbeat_that_was_made_though_it_failed_is_no_loss(
    storage: Storage, faults: ModuleType, at: str
) -> None:
    unreliable, _ = faults.faulty(storage, faults.after(2, [faults.Fault.LOST] * 2), attempts=2)
    lease = Lease.acquire(unreliable, "me")
    with pytest.raises(StorageError, match="2 attempts failed"):
        lease.check()
    if at == "check":
        lease.check()
    lease.release()
    assert json.loads(storage.read_bytes("lease.json"))["released"]


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b'{"process": 3}'])
def test_what_is_no_lease_is_not_overwritten(storage: Storage, content: bytes) -> None:
    storage.create("lease.json", content)
    with pytest.raises(LedgerError, match=r"lease.json is no lease .*delete it"):
        Lease.acquire(storage, "me")
    assert storage.read_bytes("lease.json") == content


def test_a_lease_with_senseless_numbers_is_not_waited_for(storage: Storage) -> None:
    silent(storage, -1.0)
    with pytest.raises(LedgerError, match="is no lease"):
        Lease.acquire(storage, "me")


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_senseless_time_to_live_is_refused(tmp_path: Path, ttl_s: float) -> None:
    with pytest.raises(UsageError, match="positive number of seconds"):
        Lease.acquire(Storage(str(tmp_path), None, None), "me", ttl_s)  # type: ignore[arg-type]
