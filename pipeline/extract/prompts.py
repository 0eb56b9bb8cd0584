"""The prompts of OpenIE by a language model, read from YAML (``configs/prompts/openie.yaml``).

In ``two-turn`` mode entities and triples are asked for in two turns of one conversation; in ``joint`` mode
one answer holds both. Everything before a passage is the same for all passages, and the second request of a
conversation begins with the whole of the first: both are prefixes that an inference engine has in its cache.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic

from hippoindex.pipeline.llm.prompts import (
    Message,
    PromptFile,
    PromptModel,
    assistant,
    read_prompts,
    system,
    user,
    with_placeholders,
)

#: What an instruction holds in the place of the passage.
PLACEHOLDER = "{passage}"

_STRINGS = {"type": "array", "items": {"type": "string"}}
_LISTS: dict[str, dict[str, Any]] = {
    "entities": _STRINGS,
    "triples": {"type": "array", "items": _STRINGS | {"minItems": 3, "maxItems": 3}},
}


class TwoTurnPrompt(PromptModel):
    """Entities, then triples; ``entities`` holds ``{passage}`` once."""

    system: str
    entities: str
    triples: str

    @pydantic.field_validator("entities")
    @classmethod
    def _one_placeholder(cls, instruction: str) -> str:
        return with_placeholders(instruction, PLACEHOLDER)


class JointPrompt(PromptModel):
    """Both in one answer; ``instruction`` holds ``{passage}`` once."""

    system: str
    instruction: str

    @pydantic.field_validator("instruction")
    @classmethod
    def _one_placeholder(cls, instruction: str) -> str:
        return with_placeholders(instruction, PLACEHOLDER)


class Example(PromptModel):
    """A passage and the right answers."""

    passage: str
    entities: tuple[str, ...]
    triples: tuple[tuple[str, str, str], ...]


class Prompts(PromptFile):
    """The wording of the OpenIE conversations."""

    two_turn: TwoTurnPrompt
    joint: JointPrompt
    examples: tuple[Example, ...]

    def ask_entities(self, passage: str) -> list[Message]:
        """Return the conversation up to the question for the entities of a passage."""
        return [*self._two_turn_beginning, user(_filled(self.two_turn.entities, passage))]

    def ask_triples(self, conversation: Sequence[Message], answer: str) -> list[Message]:
        """Return the conversation continued by the answer to it and the question for the triples."""
        return [*conversation, assistant(answer), user(self.two_turn.triples)]

    def ask_both(self, passage: str) -> list[Message]:
        """Return the conversation up to the question for entities and triples in one answer."""
        return [*self._joint_beginning, user(_filled(self.joint.instruction, passage))]

    @functools.cached_property
    def _two_turn_beginning(self) -> list[Message]:
        messages = [system(self.two_turn.system)]
        for example in self.examples:
            messages += [
                user(_filled(self.two_turn.entities, example.passage)),
                assistant(_answer(example, "entities")),
                user(self.two_turn.triples),
                assistant(_answer(example, "triples")),
            ]
        return messages

    @functools.cached_property
    def _joint_beginning(self) -> list[Message]:
        messages = [system(self.joint.system)]
        for example in self.examples:
            messages.append(user(_filled(self.joint.instruction, example.passage)))
            messages.append(assistant(_answer(example, "entities", "triples")))
        return messages


def answer_schema(*keys: str) -> dict[str, Any]:
    """Return the JSON schema of an answer with the lists ``entities``, ``triples`` or both."""
    return {
        "type": "object",
        "properties": {key: _LISTS[key] for key in keys},
        "required": list(keys),
        "additionalProperties": False,
    }


def _filled(instruction: str, passage: str) -> str:
    return instruction.replace(PLACEHOLDER, passage)


def _answer(example: Example, *keys: str) -> str:
    return json.dumps({key: getattr(example, key) for key in keys}, ensure_ascii=False)


def load_prompts(path: str | Path | None = None) -> Prompts:
    """Read prompts.

    Parameters
    ----------
    path : str or Path, optional
        A YAML file; without it the packaged one.

    Returns
    -------
    Prompts

    Raises
    ------
    UsageError
        If the file cannot be read, is not YAML, or lacks or adds a field.
    """
    return read_prompts(Prompts, path, "openie.yaml", "extract.prompts")
