"""Every backend of every kernel against its reference, on random inputs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.errors import KernelError
from hippoindex.kernels import nearest, ppr, simjoin
from hippoindex.kernels.spec import REGISTRY, Backend

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
CASES = [(spec.name, backend) for spec in (nearest.spec, ppr.spec, simjoin.spec) for backend in spec.backends]


@pytest.mark.parametrize(("kernel", "backend"), CASES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 150))
def test_backend_agrees_with_the_reference(kernel: str, backend: str, seed: int, size: int) -> None:
    spec = REGISTRY[kernel]
    reason = spec.backends[backend].unavailable()
    if reason is not None:
        pytest.skip(reason)
    inputs = spec.generate(np.random.default_rng(seed), size)
    spec.check(spec.get(backend).run(**inputs), spec.reference(**inputs), inputs)


def test_every_kernel_folder_has_a_spec_in_the_registry() -> None:
    folders = {path.parent.name for path in KERNELS.glob("*/__init__.py")}
    assert folders == set(REGISTRY)


def test_every_spec_describes_the_arguments_of_its_reference() -> None:
    for spec in REGISTRY.values():
        arguments = set(spec.generate(np.random.default_rng(0), 5))
        assert arguments <= set(spec.inputs)


def test_kernels_import_neither_gpu_libraries_nor_io_when_loaded() -> None:
    forbidden = {"ray", "fsspec", "pydantic", "torch", "cupy", "cupyx", "pylibcugraph", "pyarrow", "faiss"}
    for file in KERNELS.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = {alias.name.split(".")[0] for alias in getattr(node, "names", [])}
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not (names | {module.split(".")[0]}) & forbidden, file


def test_an_unavailable_or_unknown_backend_is_refused_with_the_reason() -> None:
    names = re.escape(str(sorted(ppr.spec.backends)))
    with pytest.raises(KernelError, match=f"no backend 'quantum'; it has {names}"):
        ppr.spec.get("quantum")
    spec = type(ppr.spec)(**{**vars(ppr.spec), "backends": {}})
    spec.register(Backend("gpu", ppr.power, lambda: "no GPU; pip install cupy"))
    with pytest.raises(KernelError, match="cannot run here: no GPU; pip install cupy"):
        spec.get("gpu")
    with pytest.raises(KernelError, match="already has"):
        spec.register(Backend("gpu", ppr.power))
