"""The wording of what a language model is asked at question time (``configs/prompts/reader.yaml``)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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

#: By these words a chain of thought ends.
END_OF_THOUGHT = "So the answer is"

_FACT = {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3}
#: JSON schema of the answer of recognition memory.
FACTS_SCHEMA = {
    "type": "object",
    "properties": {"facts": {"type": "array", "items": _FACT}},
    "required": ["facts"],
    "additionalProperties": False,
}
_PLACEHOLDER = re.compile(r"\{(question|facts|passages|thoughts)\}")


class PassageText(NamedTuple):
    """What a language model is shown of a passage."""

    title: str
    text: str


class RecognitionExample(PromptModel):
    """A question, facts near it, and those that help."""

    question: str
    facts: tuple[tuple[str, str, str], ...]
    kept: tuple[tuple[str, str, str], ...]


class RecognitionPrompt(PromptModel):
    """``instruction`` holds ``{question}`` and ``{facts}`` once each."""

    system: str
    instruction: str
    examples: tuple[RecognitionExample, ...]

    @pydantic.field_validator("instruction")
    @classmethod
    def _placeholders(cls, instruction: str) -> str:
        return with_placeholders(instruction, "{question}", "{facts}")

    def ask(self, question: str, facts: Sequence[Sequence[str]]) -> list[Message]:
        """Return the conversation up to the question which facts to keep."""
        return [*self._beginning, self._user(question, facts)]

    def _user(self, question: str, facts: Sequence[Sequence[str]]) -> Message:
        return user(_filled(self.instruction, {"question": question, "facts": _json({"facts": facts})}))

    @functools.cached_property
    def _beginning(self) -> list[Message]:
        messages = [system(self.system)]
        for example in self.examples:
            messages.append(self._user(example.question, example.facts))
            messages.append(assistant(_json({"facts": example.kept})))
        return messages


class ExamplePassage(PromptModel):
    """A passage of an example."""

    title: str
    text: str


class ThoughtExample(PromptModel):
    """A chain of thought; the last one ends it."""

    passages: tuple[ExamplePassage, ...]
    question: str
    thoughts: tuple[str, ...]


class ThoughtPrompt(PromptModel):
    """``instruction`` holds ``{passages}``, ``{question}`` and ``{thoughts}`` once each."""

    system: str
    instruction: str
    example: ThoughtExample

    @pydantic.field_validator("instruction")
    @classmethod
    def _placeholders(cls, instruction: str) -> str:
        return with_placeholders(instruction, "{passages}", "{question}", "{thoughts}")

    def ask(self, passages: Sequence[PassageText], question: str, thoughts: Sequence[str]) -> list[Message]:
        """Return the conversation up to the request for the next thought."""
        return [*self._beginning, self._user(passages, question, thoughts)]

    def _user(self, passages: Sequence[PassageText], question: str, thoughts: Sequence[str]) -> Message:
        values = {
            "passages": _listed(passages),
            "question": question,
            "thoughts": "".join(f"\n{thought}" for thought in thoughts) or " none",
        }
        return user(_filled(self.instruction, values))

    @functools.cached_property
    def _beginning(self) -> list[Message]:
        messages, example = [system(self.system)], self.example
        passages = _texts(example.passages)
        for number, thought in enumerate(example.thoughts):
            messages.append(self._user(passages, example.question, example.thoughts[:number]))
            messages.append(assistant(thought))
        return messages


class AnswerExample(PromptModel):
    """A question, what there is to think of it, and the answer."""

    passages: tuple[ExamplePassage, ...]
    question: str
    thought: str
    answer: str


class AnswerPrompt(PromptModel):
    """``instruction`` holds ``{passages}`` and ``{question}`` once each."""

    system: str
    instruction: str
    example: AnswerExample

    @pydantic.field_validator("instruction")
    @classmethod
    def _placeholders(cls, instruction: str) -> str:
        return with_placeholders(instruction, "{passages}", "{question}")

    def ask(self, passages: Sequence[PassageText], question: str) -> list[Message]:
        """Return the conversation up to a question."""
        return [*self._beginning, self._user(passages, question)]

    def _user(self, passages: Sequence[PassageText], question: str) -> Message:
        return user(_filled(self.instruction, {"passages": _listed(passages), "question": question}))

    @functools.cached_property
    def _beginning(self) -> list[Message]:
        example = self.example
        return [
            system(self.system),
            self._user(_texts(example.passages), example.question),
            assistant(f"Thought: {example.thought}\nAnswer: {example.answer}"),
        ]


class ReaderPrompts(PromptFile):
    """All that a language model is asked at question time."""

    recognition: RecognitionPrompt
    thought: ThoughtPrompt
    answer: AnswerPrompt


def load_reader_prompts(path: str | Path | None = None) -> ReaderPrompts:
    """Read prompts, by default the packaged ones.

    Raises
    ------
    UsageError
        If the file cannot be read, is not YAML, or lacks or adds a field.
    """
    return read_prompts(ReaderPrompts, path, "reader.yaml", "reader.prompts")


def _filled(instruction: str, values: Mapping[str, str]) -> str:
    """Put values into an instruction; what looks like a placeholder in a value stays as it is."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), instruction)


def _listed(passages: Sequence[PassageText]) -> str:
    return "\n\n".join(
        f"[{number}] {passage.title}\n{passage.text}" for number, passage in enumerate(passages, 1)
    )


def _texts(passages: Sequence[ExamplePassage]) -> list[PassageText]:
    return [PassageText(passage.title, passage.text) for passage in passages]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
