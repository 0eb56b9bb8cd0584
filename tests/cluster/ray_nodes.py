"""Nodes of a Ray cluster as processes of this machine.

Used by the tests of this folder and by ``benchmarks/faults.py``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

#: The head finds out quickly that a node is dead.
_HEALTH = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


def wait_until(holds: Callable[[], object], message: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, message
        time.sleep(0.05)


class Node:
    """The processes of a node: ``ray start`` in the foreground and what it starts."""

    def __init__(self, *arguments: str, log: Path, **environment: str) -> None:
        command = [str(Path(sys.executable).with_name("ray")), "start", *arguments, "--block"]
        command += ["--object-store-memory=80000000", "--disable-usage-stats"]
        variables = os.environ | _HEALTH | environment
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        wait_until(
            lambda: self.process.poll() is not None or "Ray runtime started" in log.read_text(),
            f"a node did not start: {log.read_text()}",
        )
        assert self.process.poll() is None, log.read_text()

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill_raylet(self) -> None:
        """Kill what makes it a node, and wait until its workers are gone."""
        processes = self.processes()
        (raylet,) = (p for p in processes if Path(p.cmdline()[0]).name == "raylet")
        workers = [process for process in processes if "_Actor" in "".join(process.cmdline())]
        raylet.kill()
        assert psutil.wait_procs([raylet, *workers], timeout=60)[1] == []

    def remove(self) -> None:
        if self.process.poll() is None:
            left = self.processes()
            self.process.kill()
            for process in left:
                if process.is_running():
                    process.kill()
        self.process.wait()


class Cluster:
    """A head without room for workers, and nodes for one worker each."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="c-", dir="/tmp"))  # short: Ray puts sockets there
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        port = self.address.rpartition(":")[2]
        head = ["--head", f"--port={port}", "--num-cpus=0", f"--temp-dir={self.folder}"]
        self.nodes: list[Node] = []
        self._add(*head, "--include-dashboard=false")

    def _add(self, *arguments: str, **environment: str) -> Node:
        log = self.folder / f"node-{secrets.token_hex(4)}.log"
        self.nodes.append(Node(*arguments, log=log, **environment))
        return self.nodes[-1]

    def add_node(self, *arguments: str, **environment: str) -> Node:
        return self._add(f"--address={self.address}", "--num-cpus=1", *arguments, **environment)

    def remove(self) -> None:
        for node in reversed(self.nodes):
            node.remove()
        shutil.rmtree(self.folder, ignore_errors=True)
