"""What other processes do in the tests of storage and ledger, in a module that they can import."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hippoindex.cluster.ledger import Lease, Ledger
from hippoindex.cluster.storage import Storage
from hippoindex.errors import HippoIndexError


def add(storage: Storage, times: int) -> None:
    """Add 1 to the number in the object ``sum``, by compare and swap."""
    while times:
        content = storage.read("sum")
        assert content is not None
        times -= storage.replace("sum", b"%d" % (int(content.data) + 1), content.version) is not None


def race(storage: Storage, barrier: Any, number: int, results: Any) -> None:
    """Create one object with four threads at once and report how many have won; then add 4."""
    storage.exists("warm-up")
    barrier.wait(30)

    def create(thread: int) -> bool:
        return storage.create("created", b"%d" % (4 * number + thread)) is not None

    with ThreadPoolExecutor(4) as pool:
        results.put(sum(pool.map(create, range(4))))
    add(storage, 4)


def commit(storage: Storage, barrier: Any, number: int, results: Any) -> None:
    """Commit a unit whose outputs name this process; report whether they count."""
    ledger = Ledger(storage, "extract")
    ledger.has("warm-up")
    barrier.wait(30)
    mine = b"process %d" % number
    roles = {"rows.arrow": lambda out: out.write(mine), "quarantine.arrow": lambda out: out.write(mine)}
    results.put(ledger.commit("a", roles))


def hold(storage: Storage, ttl_s: float, events: Any) -> None:
    """Hold a lease until it is lost, checking it all the time; report "held", and then what happened."""
    try:
        with Lease.acquire(storage, "the other run", ttl_s) as lease:
            events.put("held")
            while True:
                time.sleep(0.05)
                lease.check()
    except HippoIndexError as error:
        events.put(f"{type(error).__name__}: {error}")
