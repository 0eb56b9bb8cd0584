"""The interface that every extraction engine implements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Passage(NamedTuple):
    """What an engine sees of a passage."""

    passage_id: str
    title: str
    text: str


class Triple(NamedTuple):
    """One extracted fact in surface form."""

    subject: str
    predicate: str
    object: str


class RejectedTriple(NamedTuple):
    """A triple that is not one (wrong arity, null or empty end), and why."""

    reason: str
    raw: str


@dataclass(frozen=True, slots=True)
class Extraction:
    """What was found in one passage.

    ``error`` is ``None``, or why the passage could not be processed: it is then quarantined with ``raw`` and
    the other fields are ignored. ``missing`` says that an extraction file holds nothing for the passage.
    """

    entities: Sequence[str] = ()
    triples: Sequence[Triple] = ()
    rejected: Sequence[RejectedTriple] = field(default=())
    missing: bool = False
    error: str | None = None
    raw: str = ""


class Extractor(Protocol):
    """An opened engine. It never raises for a single bad passage: that is ``Extraction.error``."""

    def extract(self, passages: Sequence[Passage]) -> list[Extraction]:
        """Return one extraction per passage, in order."""
        ...
