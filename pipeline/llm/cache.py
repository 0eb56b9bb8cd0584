"""Answers that are known: a request is paid once, whatever happens to the run that made it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hippoindex.errors import HippoIndexError

_TABLE = """
create table if not exists responses (key blob primary key, response text not null) without rowid, strict
"""
_BUSY_TIMEOUT_S = 60.0


class ResponseCache:
    """JSON objects by the hash of what was asked, in one SQLite file.

    Processes of one machine may use it at once. Its write-ahead log needs a disk of that machine: on a
    cluster every machine has its own.

    Parameters
    ----------
    folder : Path
        Made if it is not there; the file is ``responses.sqlite``.
    section : str
        Section of the configuration that messages refer to.

    Raises
    ------
    HippoIndexError
        If the folder cannot be written to, or the file is not such a cache.
    """

    def __init__(self, folder: Path, section: str = "extract") -> None:
        self._section = section
        self._file = folder / "responses.sqlite"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HippoIndexError(f"Cannot make the folder of answers {folder}: {error.strerror}") from error
        with self._explained():
            self._database = sqlite3.connect(
                self._file, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._database.execute("pragma journal_mode=wal")
            self._database.execute("pragma synchronous=normal")
            self._database.execute(_TABLE)

    def get(self, key: bytes) -> dict[str, Any] | None:
        """Return what was put under a key."""
        with self._explained():
            row = self._database.execute("select response from responses where key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: bytes, response: Mapping[str, Any]) -> None:
        """Keep an answer; the first one under a key stays."""
        with self._explained():
            self._database.execute(
                "insert or ignore into responses values (?, ?)",
                (key, json.dumps(response, ensure_ascii=False)),
            )

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise HippoIndexError(
                f"The cache of answers {self._file} ({self._section}.cache) cannot be used: {error}. If it "
                "is damaged, remove it"
            ) from error


def request_key(body: Mapping[str, Any]) -> bytes:
    """Return the SHA-256 of a request's content; the order of its fields does not count."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
