"""Every error that hippoindex raises on purpose.

One root, :class:`HippoIndexError`, and one subclass per thing a caller may want to handle differently.
A message says what was wrong, where (file, line, row id), and what to do about it.
"""

from __future__ import annotations

import copyreg
from typing import Any


class HippoIndexError(Exception):
    """Root of all errors of this package.

    Attributes
    ----------
    exit_code : int
        What the command line exits with: 1 a threshold was not met, 2 wrong usage or input,
        3 anything else that stopped the work.
    """

    exit_code = 3

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without calling ``__init__``, whose parameters a subclass may choose freely."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class UsageError(HippoIndexError):
    """Options, configuration or calls that cannot be carried out as given."""

    exit_code = 2


class InputError(HippoIndexError):
    """A corpus, query file or extraction file that cannot be used."""

    exit_code = 2


class ArtifactError(HippoIndexError):
    """An index that is missing, incomplete, damaged, or of another schema version."""

    exit_code = 2


class MissingPackageError(UsageError):
    """A requested backend whose package is not installed.

    Parameters
    ----------
    package : str
        Import name of the missing package.
    needed_for : str
        What was asked for, e.g. ``"--executor ray"``.
    install : str
        The pip command that brings it.
    """

    def __init__(self, package: str, needed_for: str, install: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed. Run: {install}"
        )
        self.package = package


class ModelError(HippoIndexError):
    """A model that cannot be found, or whose files are not the ones expected."""


class ExecutorError(HippoIndexError):
    """A shard could not be processed, or no worker can be had."""


class WorkerLostError(HippoIndexError):
    """A worker that cannot go on, such as one whose engine has died; another one could."""


class KernelError(HippoIndexError, ValueError):
    """Arrays that break a kernel's contract. Also a ``ValueError``."""

    exit_code = 2


class InterruptedRunError(HippoIndexError):
    """The process was asked to stop by a signal.

    Parameters
    ----------
    signal_number : int
        The exit code is 128 more, as a shell has it.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__("Interrupted. What was done is kept: run the same command again to go on")
        self.exit_code = 128 + signal_number


class ThresholdError(HippoIndexError):
    """The work finished, but a figure the caller demanded was not reached."""

    exit_code = 1


class SpendLimitError(ThresholdError):
    """The next request could cost more than may still be spent.

    Parameters
    ----------
    spent_usd, max_usd : float
        Of the worker that stopped.
    section : str
        Section of the configuration that sets the limit.
    """

    def __init__(self, spent_usd: float, max_usd: float, section: str = "extract") -> None:
        super().__init__(
            f"Stopped at the spend limit: ${spent_usd:.4f} of ${max_usd:.4f} are spent (a worker's share of "
            f"{section}.max_usd), and the next request could cost more than the rest. What was done is kept: "
            "raise the limit and run again to go on"
        )
        self.spent_usd = spent_usd
        self.max_usd = max_usd
