"""What a run has done, and who may run: the completion ledger and the lease of an output.

Both rest on the conditional writes of :class:`hippoindex.cluster.storage.Storage` and hold for runs on one
machine and on many.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

import structlog

from hippoindex.cluster.storage import Storage
from hippoindex.cluster.storage_backend import Content, StorageError
from hippoindex.errors import HippoIndexError, UsageError

_log = structlog.get_logger(__name__)

_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")
_ROLE = re.compile(r"[a-z0-9_-]{1,32}(\.[a-z0-9]{1,16})?")
#: Heartbeats in the time to live.
_BEATS_PER_TTL = 4
#: Looks at another run's heartbeat in its time to live.
_LOOKS_PER_TTL = 20
_MAX_LOOK_INTERVAL_S = 2.0


class LedgerError(HippoIndexError):
    """A record of the ledger, or an output that it lists, is missing or damaged."""


class LeaseHeldError(HippoIndexError):
    """Another run works on this output."""


class LeaseLostError(HippoIndexError):
    """The lease that this run held is another run's now."""


@dataclass(frozen=True)
class Output:
    """A file of a completed unit of work."""

    name: str
    size_bytes: int
    sha256: str


Writer = Callable[[BinaryIO], None]
"""Writes one output, as a stream."""


class Ledger:
    """Which units of work a stage has completed, by completion key.

    A unit has one or more outputs, told apart by their role ("rows.arrow", "quarantine.arrow"). They are
    written under names that nobody else has, and then a small record ``<stage>/done/<key>.json`` that lists
    them is created, which only one of several can do. So the outputs of a unit are always of one and the same
    attempt, whole, or not there at all. A killed attempt leaves files that no record lists;
    :meth:`unlisted` finds them.

    Parameters
    ----------
    storage : Storage
    stage : str
        Name of the stage; the folder of its outputs.
    """

    def __init__(self, storage: Storage, stage: str) -> None:
        if not _KEY.fullmatch(stage):
            raise UsageError(f"{stage!r} cannot be the folder of a stage: use letters, digits, '_' and '-'")
        self.storage = storage
        self.stage = stage

    def has(self, key: str) -> bool:
        """Tell whether a unit is complete."""
        return self.storage.exists(self._record(key))

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys of the units that are not complete, in their order, after one listing."""
        done = self.done()
        return [key for key in keys if key not in done]

    def done(self) -> set[str]:
        """Return the keys of all complete units, by one listing (a request per 1,000 of them)."""
        prefix = f"{self.stage}/done/"
        names = (entry.name.removeprefix(prefix) for entry in self.storage.entries(prefix))
        return {name.removesuffix(".json") for name in names if name.endswith(".json")}

    def commit(self, key: str, outputs: Mapping[str, Writer]) -> bool:
        """Write the outputs of a unit and record it as complete.

        Parameters
        ----------
        key : str
            Completion key: 1 to 128 letters, digits, '_' or '-'.
        outputs : mapping of str to callable
            Role of each output to what writes it.

        Returns
        -------
        bool
            Whether these outputs count. If not, the unit was complete already, or somebody else was first;
            what was written here is removed, and the first ones stay. That is no error: both are results of
            the same work.
        """
        record = self._record(key)
        for role in outputs:
            if not _ROLE.fullmatch(role):
                raise UsageError(f"{role!r} cannot be the role of an output, such as 'rows.arrow'")
        if self.storage.exists(record):
            return False
        attempt = secrets.token_hex(8)
        names = {role: f"{self.stage}/files/{key}/{attempt}.{role}" for role in outputs}
        try:
            written = {role: self._write(names[role], write) for role, write in outputs.items()}
        except BaseException:
            self._discard(names.values())
            raise
        content = {"key": key, "outputs": {role: asdict(output) for role, output in written.items()}}
        # An error here leaves the files: the record may have been made nevertheless.
        won = self.storage.create(record, _json(content)) is not None
        if not won:
            self._discard(names.values())
        return won

    def outputs(self, key: str) -> dict[str, Output]:
        """Return the outputs of a complete unit by role.

        Raises
        ------
        LedgerError
            If the unit is not complete, or its record is damaged.
        """
        name = self._record(key)
        content = self.storage.read(name)
        if content is None:
            raise LedgerError(f"{self.storage.url}/{name}: this unit of work is not complete")
        try:
            found = json.loads(content.data)["outputs"]
            return {role: Output(**fields) for role, fields in found.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LedgerError(
                f"{self.storage.url}/{name} is damaged ({error}): delete it, and the unit is done again"
            ) from error

    def read(self, key: str, role: str) -> bytes:
        """Return an output that fits into memory, compared with its record.

        Raises
        ------
        LedgerError
            If there is none of that role, or its content is not the recorded one.
        """
        output = self.outputs(key).get(role)
        if output is None:
            raise LedgerError(f"The unit {key} of stage {self.stage!r} has no output {role!r}")
        content = self.storage.read(output.name)
        if content is None or hashlib.sha256(content.data).hexdigest() != output.sha256:
            raise LedgerError(
                f"{self.storage.url}/{output.name} is missing or has changed since it was recorded: delete "
                f"{self._record(key)}, and the unit is done again"
            )
        return content.data

    def unlisted(self) -> list[str]:
        """Return the names of files that no record lists: of attempts that failed, or are going on now."""
        listed = {output.name for key in self.done() for output in self.outputs(key).values()}
        return [e.name for e in self.storage.entries(f"{self.stage}/files/") if e.name not in listed]

    def _record(self, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise UsageError(f"{key!r} is no completion key: 1 to 128 letters, digits, '_' or '-'")
        return f"{self.stage}/done/{key}.json"

    def _write(self, name: str, write: Writer) -> Output:
        with self.storage.write(name) as stream:
            hashing = _HashingWriter(stream)
            write(cast("BinaryIO", hashing))
        return Output(name, hashing.tell(), hashing.sha256.hexdigest())

    def _discard(self, names: Iterable[str]) -> None:
        try:
            for name in names:
                self.storage.delete(name)
        except StorageError as error:
            _log.warning("files that do not count are left", stage=self.stage, why=str(error))


class _HashingWriter(io.BufferedIOBase):
    """Passes on what is written, and hashes and counts it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._size_bytes = 0
        self.sha256 = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size_bytes

    def write(self, data: Any) -> int:
        written = self._stream.write(data)
        self.sha256.update(data)
        self._size_bytes += written
        return written


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, told from every other one: also from a later one with the same pid, and on other machines.

    Attributes
    ----------
    host : str
        Alone it would not do: machines may share a name.
    boot_id : str
        Of the running kernel; empty where the platform has none.
    pid_namespace : str
        Containers on one kernel count their pids separately.
    pid : int
    started : str
        Start of the process in clock ticks since boot.
    """

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> ProcessIdentity:
        """Return that of this process."""
        namespace = Path("/proc/self/ns/pid")
        return cls(
            host=socket.gethostname(),
            boot_id=_read_or_empty(Path("/proc/sys/kernel/random/boot_id")).strip(),
            pid_namespace=str(namespace.readlink()) if namespace.is_symlink() else "",
            pid=os.getpid(),
            started=_state_and_start(os.getpid())[1],
        )

    def is_dead(self) -> bool:
        """Tell whether the process has certainly ended: false means it may live, or cannot be seen from here.

        It can be judged if it ran on this host, under the same boot of its kernel and in the same pid
        namespace. Then it has ended if its pid is free, or belongs to a process that started at another time,
        or if it is a zombie (only its exit status is left). A process that belongs to somebody else and is
        hidden counts as living. Machines restored from one snapshot could be taken for one another; that
        would cost a run its lease, which it notices, and nothing else.
        """
        own = ProcessIdentity.own()
        here = replace(own, pid=self.pid, started=self.started)
        if self != here or not all((self.boot_id, self.pid_namespace, self.started)):
            return False
        state, started = _state_and_start(self.pid)
        if started:
            return started != self.started or state in {"Z", "X"}
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # it exists, and is hidden
            return False
        return False


@dataclass(frozen=True)
class LeaseRecord:
    """Content of a lease object.

    Attributes
    ----------
    token : str
        Of the run that holds it; no other run has it.
    owner : str
        What the run calls itself, for messages.
    process : ProcessIdentity
    acquired_at : str
        By the holder's clock, for messages.
    ttl_s : float
    beat : int
        Heartbeats so far. Only that it changes matters.
    released : bool
    """

    token: str
    owner: str
    process: ProcessIdentity
    acquired_at: str
    ttl_s: float
    beat: int = 0
    released: bool = False

    def to_bytes(self) -> bytes:
        """Return it as JSON."""
        return _json(asdict(self))

    @classmethod
    def from_content(cls, content: Content, where: str) -> LeaseRecord:
        """Read it from JSON."""
        try:
            fields = json.loads(content.data)
            record = cls(**fields | {"process": ProcessIdentity(**fields["process"])})
            if not 0 < record.ttl_s < float("inf") or record.process.pid < 1:
                raise ValueError("a number in it makes no sense")  # noqa: TRY301
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(
                f"{where} is no lease ({error}): if no run works on this output, delete it"
            ) from error
        return record


class Lease:
    """The right of one run to write to an output; made by :meth:`acquire`, given back at the end of ``with``.

    It is one small object in the output's storage, changed by compare-and-swap only. The holder changes it
    every ``ttl_s / 4`` seconds from a thread (the heartbeat).

    **No clocks are compared.** A second run does not look at times in the object, since machines disagree
    about them. It watches the object: if that stays unchanged for the holder's ``ttl_s`` by the watcher's own
    monotonic clock, the holder has been silent for so long, and the watcher replaces exactly that version. If
    the holder beats in the last moment, the version differs and the replacement fails. A watcher that is
    itself halted for a while looks again afterwards, so that does no harm. A run that finds the lease held
    thus needs a heartbeat's time to know that the holder lives, and ``ttl_s`` to take over from one that does
    not.

    **A dead process is not waited for** if it can be judged from here: see :meth:`ProcessIdentity.is_dead`.

    **A holder that was halted** (a suspended machine, SIGSTOP) for longer than ``ttl_s`` may have lost the
    lease without knowing. It learns so at its next heartbeat, and at the latest in :meth:`check`, which must
    be called right before anything is published: it beats at once. When it returns, nobody else can have
    the lease before another ``ttl_s`` has gone by, so what is published must be out within that time; a
    manifest that is put with :meth:`Storage.replace` on the version read after :meth:`acquire` is safe even
    beyond it.

    Attributes
    ----------
    record : LeaseRecord
        What this run has last written.
    """

    def __init__(self, storage: Storage, name: str, record: LeaseRecord, version: str) -> None:
        self.record = record
        self._storage = storage
        self._name = name
        self._version = version
        self._lost: str | None = None
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat_until_stopped, name="lease-heartbeat", daemon=True)
        self._heart.start()

    @classmethod
    def acquire(cls, storage: Storage, owner: str, ttl_s: float = 60.0, *, name: str = "lease.json") -> Lease:
        """Take the lease, or say who has it.

        Parameters
        ----------
        storage : Storage
            Of the output.
        owner : str
            What this run is, for the message that another run gets (such as its command line).
        ttl_s : float
            Silence after which this run counts as dead. A run on another machine that finds this one killed
            waits as long; a storage outage that is longer, while another run waits, loses the lease.
        name : str
            Name of the object.

        Returns
        -------
        Lease

        Raises
        ------
        LeaseHeldError
            If another run holds it and lives.
        LedgerError
            If the object is no lease.
        """
        if not 0 < ttl_s < float("inf"):
            raise UsageError(f"The time to live of a lease must be a positive number of seconds, got {ttl_s}")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        mine = LeaseRecord(secrets.token_hex(16), owner, ProcessIdentity.own(), now, ttl_s)
        while True:
            content = storage.read(name)
            if content is None:
                version = storage.create(name, mine.to_bytes())
            else:
                _wait_until_free(storage, name, content)
                version = storage.replace(name, mine.to_bytes(), content.version)
            if version is not None:
                return cls(storage, name, mine, version)

    def check(self) -> None:
        """Make sure that this run still has the lease, and has it for another ``ttl_s``.

        Raises
        ------
        LeaseLostError
            If it has not. Nothing may be published then.
        StorageError
            If that cannot be found out.
        """
        if self._lost is None:
            self._beat()
        if self._lost is not None:
            raise LeaseLostError(self._lost)

    def abandon(self) -> None:
        """Never touch the lease again: before it is removed together with the folder that it lies in."""
        self._stop.set()
        self._heart.join()
        with self._mutex:
            self._lost = self._lost or f"The lease {self._storage.url}/{self._name} was abandoned"

    def release(self) -> None:
        """Stop the heartbeat and let others have the lease. Does nothing if it is lost."""
        self._stop.set()
        self._heart.join()
        with self._mutex:
            if self._lost is None and self._swap(released=True):
                self._lost = f"The lease {self._storage.url}/{self._name} was given back"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.release()
        except StorageError as failure:  # it will expire
            _log.warning("lease not given back", lease=f"{self._storage.url}/{self._name}", why=str(failure))

    def _beat_until_stopped(self) -> None:
        while self._lost is None and not self._stop.wait(self.record.ttl_s / _BEATS_PER_TTL):
            try:
                self._beat()
            except StorageError as error:
                # Still ours unless somebody takes it: the next beat, or check, finds out.
                _log.warning("lease heartbeat failed", lease=self._name, why=str(error))

    def _beat(self) -> None:
        with self._mutex:
            if self._lost is None and not self._swap(released=False):
                _log.error("lease lost", lease=f"{self._storage.url}/{self._name}", why=self._lost)

    def _swap(self, *, released: bool) -> bool:
        """Write the next record in place of the last one; if that is impossible, note why."""
        while True:
            following = replace(self.record, beat=self.record.beat + 1, released=released)
            version = self._storage.replace(self._name, following.to_bytes(), self._version)
            if version is not None:
                self.record, self._version = following, version
                return True
            content = self._storage.read(self._name)
            self._lost = self._loss(content)
            if content is None or self._lost is not None:
                return False
            # A write of ours that was given up as failed has been made after all.
            self.record, self._version = self._parsed(content), content.version

    def _parsed(self, content: Content) -> LeaseRecord:
        return LeaseRecord.from_content(content, f"{self._storage.url}/{self._name}")

    def _loss(self, content: Content | None) -> str | None:
        """Return why a lease of this content is not this run's; ``None`` if it is."""
        if content is None:
            how = "somebody has deleted it"
        else:
            try:
                found = self._parsed(content)
            except LedgerError as error:
                how = str(error)
            else:
                if found.token == self.record.token:
                    return None
                how = f"{_described(found)} has taken it over"
        return (
            f"This run has lost the lease {self._storage.url}/{self._name}: it was silent for "
            f"{self.record.ttl_s:g} s or more, and {how}. It stops without publishing anything; what it "
            "completed is kept for the other run"
        )


def _wait_until_free(storage: Storage, name: str, content: Content) -> None:
    """Return once the lease of exactly this content may be replaced.

    Raises
    ------
    LeaseHeldError
        If the holder gives a sign of life.
    """
    where = f"{storage.url}/{name}"
    held = LeaseRecord.from_content(content, where)
    if held.released:
        return
    if held.process.is_dead():
        _log.info("lease of a dead process taken over", lease=where, holder=_described(held))
        return
    _log.info("lease is held; watching for a heartbeat", lease=where, holder=_described(held))
    began_s = time.monotonic()
    while time.monotonic() - began_s < held.ttl_s:
        time.sleep(min(held.ttl_s / _LOOKS_PER_TTL, _MAX_LOOK_INTERVAL_S))
        seen = storage.read(name)
        if seen is None:
            return
        if seen.version != content.version:
            now = LeaseRecord.from_content(seen, where)
            if now.released:
                return
            raise LeaseHeldError(_held_message(now, where))
    _log.info("silent lease taken over", lease=where, holder=_described(held))


def _held_message(held: LeaseRecord, where: str) -> str:
    expires = datetime.now(UTC) + timedelta(seconds=held.ttl_s)
    return (
        f"Another run works on this output: {_described(held)} holds {where}. It has just given a sign of "
        f"life, and its lease expires at {expires.isoformat(timespec='seconds')} unless it gives another. "
        "Wait until that run has ended, or stop it, or choose another output"
    )


def _described(held: LeaseRecord) -> str:
    process = held.process
    return f"{held.owner!r} (host {process.host}, pid {process.pid}, since {held.acquired_at})"


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return the state of a process and its start in clock ticks since boot; empty where it is not seen."""
    # After the name, which is in parentheses and may hold anything: state (field 3) to start time (field 22).
    fields = _read_or_empty(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) >= 20 else ("", "")


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
