"""One specification per kernel, against which every backend is registered, tested and measured.

A specification names the axes, the inputs and the outputs, holds the slow float64 reference, a generator of
random inputs and the check that compares a backend's result with the reference's. One parametrised test
(``tests/kernels/test_registry.py``) and one benchmark (``benchmarks/kernels.py``) walk :data:`REGISTRY`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hippoindex.errors import KernelError

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Backend:
    """One way to compute a kernel.

    Attributes
    ----------
    name : str
    run : callable
        Takes the kernel's inputs by keyword.
    unavailable : callable
        Returns why the backend cannot run on this machine, or ``None``.
    """

    name: str
    run: Callable[..., Any]
    unavailable: Callable[[], str | None] = lambda: None


@dataclass(frozen=True)
class KernelSpec:
    """What a kernel computes, independent of how.

    Attributes
    ----------
    name : str
    axes, inputs, outputs : mapping of str to str
        Symbol or argument name to meaning, shape and dtype.
    reference : callable
        Slow and obvious float64 implementation.
    generate : callable
        ``generate(rng, size) -> inputs``; ``size`` scales the first axis.
    check : callable
        ``check(result, expected, inputs)`` raises :class:`KernelError` where they disagree.
    backends : dict
        Registered implementations by name.
    """

    name: str
    axes: Mapping[str, str]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    reference: Callable[..., Any]
    generate: Callable[[np.random.Generator, int], Inputs]
    check: Callable[[Any, Any, Inputs], None]
    backends: dict[str, Backend] = field(default_factory=dict)

    def register(self, backend: Backend) -> None:
        """Add a backend; a name can be taken once."""
        if backend.name in self.backends:
            raise KernelError(f"Kernel {self.name!r} already has a backend {backend.name!r}")
        self.backends[backend.name] = backend

    def get(self, name: str) -> Backend:
        """Return a backend that can run here.

        Raises
        ------
        KernelError
            If there is no such backend, or it cannot run on this machine; the message says why.
        """
        backend = self.backends.get(name)
        if backend is None:
            raise KernelError(f"Kernel {self.name!r} has no backend {name!r}; it has {sorted(self.backends)}")
        reason = backend.unavailable()
        if reason is not None:
            raise KernelError(f"Backend {name!r} of kernel {self.name!r} cannot run here: {reason}")
        return backend


REGISTRY: dict[str, KernelSpec] = {}


def add_spec(spec: KernelSpec) -> KernelSpec:
    """Put a specification into :data:`REGISTRY` and return it."""
    if spec.name in REGISTRY:
        raise KernelError(f"There already is a kernel {spec.name!r}")
    REGISTRY[spec.name] = spec
    return spec
