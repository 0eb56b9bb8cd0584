"""What a language model answers, read as the lists that were asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import json_repair

from hippoindex.pipeline.extract.imported import raw_json

#: Without an end all of it is thoughts.
_THOUGHTS = re.compile(r"\s*<think>.*?(</think>|\Z)", re.DOTALL)
_DECODER = json.JSONDecoder()
_SPACE_OR_COMMA = re.compile(r"[\s,]*")


class Answer(NamedTuple):
    """The lists of an answer.

    Attributes
    ----------
    lists : mapping of str to list
        By key, as many as were asked for.
    text : str
        The answer as JSON, for the next turn of the conversation.
    repaired : bool
        Whether it was JSON only after a repair.
    cut : bool
        Whether the answer was cut, and these are the items that were complete.
    """

    lists: Mapping[str, list[Any]]
    text: str
    repaired: bool = False
    cut: bool = False


def read_answer(text: str, keys: Sequence[str]) -> Answer | None:
    """Read a complete answer; ``None`` if it is not a JSON object with a list under each key.

    What is no JSON is repaired where that is possible (a comma too many, a code fence, text around it).
    A reasoning model's thoughts before the answer are passed over.
    """
    text = without_thoughts(text)
    lists = _lists(_parsed(text), keys)
    if lists is not None:
        return Answer(lists, text)
    lists = _lists(_repaired(text), keys)
    if lists is not None:
        return Answer(lists, raw_json(lists), repaired=True)
    return None


def without_thoughts(text: str) -> str:
    """Return an answer without the thoughts that a reasoning model puts before it."""
    return _THOUGHTS.sub("", text, count=1) if text.lstrip().startswith("<think>") else text


def salvage_answer(text: str, keys: Sequence[str]) -> Answer:
    """Take the complete items out of an answer that was cut; there may be none, such as in mere thoughts."""
    text = without_thoughts(text)
    lists = {key: _complete_items(text, key) for key in keys}
    return Answer(lists, raw_json(lists), cut=True)


def _complete_items(text: str, key: str) -> list[Any]:
    """Return the items of a list up to the first that is not whole."""
    opening = re.search(rf'"{re.escape(key)}"\s*:\s*\[', text)
    items: list[Any] = []
    if opening is None:
        return items
    position = opening.end()
    while True:
        match = _SPACE_OR_COMMA.match(text, position)
        start = position if match is None else match.end()
        try:
            item, position = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            return items
        if position == len(text) and not text.endswith(("]", "}", '"')):
            return items  # a number or word may go on behind the cut
        items.append(item)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _repaired(text: str) -> Any:
    try:
        return json_repair.loads(text)
    except (ValueError, RecursionError):
        return None


def _lists(tree: Any, keys: Sequence[str]) -> dict[str, list[Any]] | None:
    if not isinstance(tree, dict):
        return None
    lists = {key: tree.get(key) for key in keys}
    return lists if all(isinstance(values, list) for values in lists.values()) else None  # type: ignore[return-value]
