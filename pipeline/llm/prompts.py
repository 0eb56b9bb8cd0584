"""Prompts as YAML files: read, checked, and known by a digest of their content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TypeVar

import pydantic
import yaml

from hippoindex.errors import UsageError

Message = dict[str, str]


class PromptModel(pydantic.BaseModel):
    """A part of a file of prompts; it refuses unknown keys."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class PromptFile(PromptModel):
    """A whole file of prompts."""

    version: int

    @property
    def digest(self) -> str:
        """SHA-256 of the content, in hex; comments and layout of the file do not count."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


File = TypeVar("File", bound=PromptFile)


def read_prompts(kind: type[File], path: str | Path | None, packaged: str, setting: str) -> File:
    """Read prompts.

    Parameters
    ----------
    kind : type
        What the file must hold.
    path : str or Path, optional
        A YAML file; without it the packaged one.
    packaged : str
        Name of that, in ``configs/prompts``.
    setting : str
        Names the path, for messages.

    Returns
    -------
    PromptFile
        Of the given kind.

    Raises
    ------
    UsageError
        If the file cannot be read, is not YAML, or lacks or adds a field.
    """
    name = str(path) if path is not None else f"configs/prompts/{packaged}"
    try:
        tree = yaml.safe_load(_read(path, packaged))
    except OSError as error:
        raise UsageError(f"Cannot read the prompts {name} ({setting}): {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"The prompts {name} are not valid YAML: {error}") from error
    try:
        return kind.model_validate(tree)
    except pydantic.ValidationError as error:
        raise UsageError(f"The prompts {name} are not usable: {'; '.join(_explain(error))}") from error


def with_placeholders(instruction: str, *names: str) -> str:
    """Return an instruction that holds each of its placeholders once.

    Raises
    ------
    ValueError
        If it does not.
    """
    for name in names:
        if instruction.count(name) != 1:
            raise ValueError(f"must hold {name} exactly once")
    return instruction


def system(content: str) -> Message:
    """Return what comes before a conversation."""
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    """Return what the model is asked."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """Return what the model has answered."""
    return {"role": "assistant", "content": content}


def _explain(error: pydantic.ValidationError) -> Iterator[str]:
    for item in error.errors():
        yield f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}"


def _read(path: str | Path | None, packaged: str) -> str:
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    return (resources.files("hippoindex") / "configs" / "prompts" / packaged).read_text(encoding="utf-8")
