"""The prompts of OpenIE by a language model, read from YAML (``configs/prompts/openie.yaml``).

Entities and triples are asked for in two turns of one conversation. Everything before a passage is the same
for all passages, and the second request begins with the whole of the first: both are prefixes that an
inference engine has in its cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import pydantic
import yaml

from hippoindex.errors import UsageError

#: What an instruction holds in the place of the passage.
PLACEHOLDER = "{passage}"

Message = dict[str, str]


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class NerExample(_Model):
    """A passage and its entities."""

    passage: str
    answer: tuple[str, ...]


class NerPrompt(_Model):
    """First turn. ``instruction`` holds ``{passage}`` once."""

    system: str
    instruction: str
    example: NerExample

    @pydantic.field_validator("instruction")
    @classmethod
    def _one_placeholder(cls, instruction: str) -> str:
        if instruction.count(PLACEHOLDER) != 1:
            raise ValueError(f"must hold {PLACEHOLDER} exactly once")
        return instruction


class TriplesExample(_Model):
    """The triples of the example passage."""

    answer: tuple[tuple[str, str, str], ...]


class TriplesPrompt(_Model):
    """Second turn; the entities are in the answer before it."""

    instruction: str
    example: TriplesExample


class Prompts(_Model):
    """The wording of one OpenIE conversation."""

    version: int
    ner: NerPrompt
    triples: TriplesPrompt

    @property
    def digest(self) -> str:
        """SHA-256 of the content, in hex; comments and layout of the file do not count."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()

    def ask_entities(self, passage: str) -> list[Message]:
        """Return the conversation up to the question for the entities of a passage."""
        return [
            {"role": "system", "content": self.ner.system},
            self._ner_question(self.ner.example.passage),
            _answer("entities", self.ner.example.answer),
            self._triples_question(),
            _answer("triples", self.triples.example.answer),
            self._ner_question(passage),
        ]

    def ask_triples(self, conversation: Sequence[Message], answer: str) -> list[Message]:
        """Return the conversation continued by the answer to it and the question for the triples."""
        return [*conversation, {"role": "assistant", "content": answer}, self._triples_question()]

    def _ner_question(self, passage: str) -> Message:
        return {"role": "user", "content": self.ner.instruction.replace(PLACEHOLDER, passage)}

    def _triples_question(self) -> Message:
        return {"role": "user", "content": self.triples.instruction}


def _answer(key: str, values: Sequence[object]) -> Message:
    return {"role": "assistant", "content": json.dumps({key: values}, ensure_ascii=False)}


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
        details = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
        raise UsageError(f"The prompts {name} are not usable: {details}") from error


def _read(path: str | Path | None) -> str:
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    packaged = resources.files("hippoindex") / "configs" / "prompts" / "openie.yaml"
    return packaged.read_text(encoding="utf-8")
