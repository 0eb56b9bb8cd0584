"""The prompts of OpenIE by a language model, read from YAML (``configs/prompts/openie.yaml``).

In ``two-turn`` mode entities and triples are asked for in two turns of one conversation; in ``joint`` mode
one answer holds both. Everything before a passage is the same for all passages, and the second request of a
conversation begins with the whole of the first: both are prefixes that an inference engine has in its cache.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pydantic
import yaml

from hippoindex.errors import UsageError

#: What an instruction holds in the place of the passage.
PLACEHOLDER = "{passage}"

Message = dict[str, str]

_STRINGS = {"type": "array", "items": {"type": "string"}}
_LISTS: dict[str, dict[str, Any]] = {
    "entities": _STRINGS,
    "triples": {"type": "array", "items": _STRINGS | {"minItems": 3, "maxItems": 3}},
}


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class TwoTurnPrompt(_Model):
    """Entities, then triples; ``entities`` holds ``{passage}`` once."""

    system: str
    entities: str
    triples: str

    @pydantic.field_validator("entities")
    @classmethod
    def _one_placeholder(cls, instruction: str) -> str:
        return _with_placeholder(instruction)


class JointPrompt(_Model):
    """Both in one answer; ``instruction`` holds ``{passage}`` once."""

    system: str
    instruction: str

    @pydantic.field_validator("instruction")
    @classmethod
    def _one_placeholder(cls, instruction: str) -> str:
        return _with_placeholder(instruction)


class Example(_Model):
    """A passage and the right answers."""

    passage: str
    entities: tuple[str, ...]
    triples: tuple[tuple[str, str, str], ...]


class Prompts(_Model):
    """The wording of the OpenIE conversations."""

    version: int
    two_turn: TwoTurnPrompt
    joint: JointPrompt
    examples: tuple[Example, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the content, in hex; comments and layout of the file do not count."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()

    def ask_entities(self, passage: str) -> list[Message]:
        """Return the conversation up to the question for the entities of a passage."""
        return [*self._two_turn_beginning, _user(_filled(self.two_turn.entities, passage))]

    def ask_triples(self, conversation: Sequence[Message], answer: str) -> list[Message]:
        """Return the conversation continued by the answer to it and the question for the triples."""
        return [*conversation, _assistant(answer), _user(self.two_turn.triples)]

    def ask_both(self, passage: str) -> list[Message]:
        """Return the conversation up to the question for entities and triples in one answer."""
        return [*self._joint_beginning, _user(_filled(self.joint.instruction, passage))]

    @functools.cached_property
    def _two_turn_beginning(self) -> list[Message]:
        messages = [_system(self.two_turn.system)]
        for example in self.examples:
            messages += [
                _user(_filled(self.two_turn.entities, example.passage)),
                _assistant(_answer(example, "entities")),
                _user(self.two_turn.triples),
                _assistant(_answer(example, "triples")),
            ]
        return messages

    @functools.cached_property
    def _joint_beginning(self) -> list[Message]:
        messages = [_system(self.joint.system)]
        for example in self.examples:
            messages.append(_user(_filled(self.joint.instruction, example.passage)))
            messages.append(_assistant(_answer(example, "entities", "triples")))
        return messages


def answer_schema(*keys: str) -> dict[str, Any]:
    """Return the JSON schema of an answer with the lists ``entities``, ``triples`` or both."""
    return {
        "type": "object",
        "properties": {key: _LISTS[key] for key in keys},
        "required": list(keys),
        "additionalProperties": False,
    }


def _with_placeholder(instruction: str) -> str:
    if instruction.count(PLACEHOLDER) != 1:
        raise ValueError(f"must hold {PLACEHOLDER} exactly once")
    return instruction


def _filled(instruction: str, passage: str) -> str:
    return instruction.replace(PLACEHOLDER, passage)


def _system(content: str) -> Message:
    return {"role": "system", "content": content}


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


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
    name = str(path) if path is not None else "configs/prompts/openie.yaml"
    try:
        tree = yaml.safe_load(_read(path))
    except OSError as error:
        raise UsageError(f"Cannot read the prompts {name} (extract.prompts): {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"The prompts {name} are not valid YAML: {error}") from error
    try:
        return Prompts.model_validate(tree)
    except pydantic.ValidationError as error:
        raise UsageError(f"The prompts {name} are not usable: {'; '.join(_explain(error))}") from error


def _explain(error: pydantic.ValidationError) -> Iterator[str]:
    for item in error.errors():
        yield f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}"


def _read(path: str | Path | None) -> str:
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    packaged = resources.files("hippoindex") / "configs" / "prompts" / "openie.yaml"
    return packaged.read_text(encoding="utf-8")
