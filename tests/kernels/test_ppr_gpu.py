"""The GPU backends: on a device where there is one, and always as far as a host can run them.

``host`` is numpy in CuPy's place and ``step.cu`` compiled by g++; ``cuda`` is skipped without a device.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr import Graph, cugraph_backend, cupy_backend, power, reference, spec
from hippoindex.kernels.ppr.cupy_backend import Device, Solver, block_width, cuda_device, segments
from hippoindex.kernels.ppr.spec import check, generate

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ("segments_float32", "step_float32", "segments_float16", "step_float16")
TYPES = {np.int64: ctypes.c_longlong, np.float32: ctypes.c_float}
KINDS = [("float32", "fused"), ("float16", "fused"), ("float32", "spmm")]
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not on PATH; the CUDA source cannot be compiled for the host")
    version = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True, check=True).stdout
    if int(version.split(".")[0]) < 12:
        pytest.skip(f"g++ {version.strip()} has no _Float16; 12 or newer has it")
    folder = tmp_path_factory.mktemp("host")
    launchers = "".join(f"auto *launch_{name} = &Launch<{name}>::run;\n" for name in KERNELS)
    (folder / "host.cpp").write_text(
        f'#include "cuda_on_host.h"\n#include "step.cu"\nextern "C" {{\n{launchers}}}\n'
        'extern "C" unsigned narrowed(float value) { return narrow(value); }\n'
        'extern "C" float widened(unsigned bits) { return widen(bits); }\n'
    )
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    include = [f"-I{Path(__file__).parent}", f"-I{cupy_backend.SOURCE.parent}"]
    command = [compiler, *flags, *include, "host.cpp", "-o", "host.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "host.so"))


def host_device(library: ctypes.CDLL, backwards: bool = False) -> Device:
    def launch(name: str, grid: tuple[int, int], block: tuple[int, int], arguments: tuple[Any, ...]) -> None:
        types, values = [], []
        for argument in arguments:
            is_array = isinstance(argument, np.ndarray)
            assert not is_array or argument.flags.c_contiguous
            types.append(ctypes.c_void_p if is_array else TYPES[type(argument)])
            values.append(argument.ctypes.data if is_array else argument.item())
        address = ctypes.c_void_p.in_dll(library, f"launch_{name}").value
        assert address is not None
        shape = (ctypes.c_uint * 5)(*grid, *block, backwards)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, *types)(address)(shape, *values)

    return Device(np, sp.csr_matrix, launch, np.asarray, lambda: 2**30)


@pytest.fixture(scope="module", params=["host", "cuda"])
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "host":
        return host_device(request.getfixturevalue("library"))
    reason = cupy_backend.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return cuda_device()


@pytest.fixture(autouse=True, scope="module")
def _cut_rows_of_small_graphs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy_backend, "SEGMENT_EDGES", 5)
        patch.setattr(cupy_backend, "CHUNK_ROWS", 3)
        yield


def dense_step(graph: Graph, s: np.ndarray, damping: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return ``x -> d W D^-1 x + (1 - d) s`` in float64."""
    degrees = np.where(graph.degrees > 0, graph.degrees, 1.0)
    transition = graph.matrix(np.float64).toarray() / degrees
    return lambda x: damping * transition @ x + (1 - damping) * s


@pytest.mark.parametrize(("storage", "method"), KINDS)
@settings(max_examples=40, deadline=None)
@given(seed=seeds, size=st.integers(2, 60), data=st.data())
def test_one_step_is_that_of_the_formula(
    device: Device, storage: Any, method: Any, seed: int, size: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    graph: Graph = generate(rng, size)["graph"]
    n, width = graph.n_nodes, data.draw(st.sampled_from([1, 3, 33]))
    first = int(rng.integers(0, n))
    m = int(rng.integers(0, n - first + 1))
    restart = rng.normal(size=(m, width)).astype(np.float32)
    x = rng.normal(size=(n, width)).astype(storage)
    active = rng.random(width) < 0.7
    solver = Solver(graph, storage, method, device=device)
    xp, order = device.xp, "F" if method == "spmm" else "C"
    before, after = xp.asarray(x, order=order), xp.empty((n, width), dtype=storage, order=order)
    step = solver.step(xp.asarray(restart, order=order), first, 0.4)
    change = step(before, after, active)

    s = np.zeros((n, width))
    s[first : first + m] = restart
    expected = dense_step(graph, s, 0.4)(x.astype(np.float64))
    got = device.to_host(after)
    np.testing.assert_array_equal(got[:, ~active], x[:, ~active])
    ulp = 2.0**-11 if storage == "float16" else 2.0**-22
    np.testing.assert_allclose(got[:, active], expected[:, active], rtol=ulp, atol=2e-6)
    moved = np.where(active, np.abs(expected - x).sum(axis=0), 0.0)
    np.testing.assert_allclose(change, moved, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("storage", "method"), KINDS)
@settings(max_examples=40, deadline=None)
@given(seed=seeds, size=st.integers(1, 120))
def test_a_solve_agrees_with_the_reference(
    device: Device, storage: Any, method: Any, seed: int, size: int
) -> None:
    inputs = generate(np.random.default_rng(seed), size)
    solver = Solver(inputs["graph"], storage, method, device=device)
    result = solver.solve(inputs["restart"], inputs["damping"])
    check(result, reference(**inputs), inputs)
    np.testing.assert_allclose(result.scores.sum(axis=0), 1.0, atol=5e-6 if storage == "float32" else 2e-3)


@pytest.mark.parametrize(("storage", "method"), KINDS)
@settings(max_examples=25, deadline=None)
@given(seed=seeds, size=st.integers(2, 80), magnitude=st.sampled_from([1e-4, 1.0, 3e3]))
def test_the_linear_operator_is_the_inverse_of_its_equation(
    device: Device, storage: Any, method: Any, seed: int, size: int, magnitude: float
) -> None:
    rng = np.random.default_rng(seed)
    graph: Graph = generate(rng, size)["graph"]
    first = int(rng.integers(0, graph.n_nodes))
    restart = (magnitude * rng.normal(size=(graph.n_nodes - first, 4))).astype(np.float32)
    restart[:, 2] = 0.0
    s = np.zeros((graph.n_nodes, 4))
    s[first:] = restart
    system = np.eye(graph.n_nodes) - dense_step(graph, np.zeros((graph.n_nodes, 1)), 0.6)(
        np.eye(graph.n_nodes)
    )
    result = Solver(graph, storage, method, device=device).propagate(restart, first, 0.6)
    error = np.abs(result.scores - np.linalg.solve(system, 0.4 * s)).sum(axis=0)
    norm = np.abs(restart).sum(axis=0, dtype=np.float64)
    assert np.all(error <= (result.residual + 2e-6) * norm)
    assert result.converged.all()
    assert not result.scores[:, 2].any()
    with pytest.raises(KernelError, match="restart rows are nodes"):
        Solver(graph, storage, method, device=device).propagate(restart, first + 1)


@settings(max_examples=15, deadline=None)
@given(seed=seeds)
def test_values_depend_neither_on_the_blocks_nor_on_the_order_of_threads(
    library: ctypes.CDLL, seed: int
) -> None:
    inputs = generate(np.random.default_rng(seed), 90)
    graph: Graph = inputs["graph"]
    forwards, backwards = host_device(library), host_device(library, backwards=True)
    for storage in ("float32", "float16"):
        whole = Solver(graph, storage, device=forwards).solve(inputs["restart"], inputs["damping"])
        budget = next(size for size in range(1, 2**20, 64) if _fits(graph, size, storage))
        assert block_width(graph, budget, storage) == 1
        narrow = Solver(graph, storage, memory_bytes=budget, device=forwards)
        turned = Solver(graph, storage, device=backwards)
        for solver in (narrow, turned):
            result = solver.solve(inputs["restart"], inputs["damping"])
            np.testing.assert_array_equal(result.scores, whole.scores)
            np.testing.assert_array_equal(result.iterations, whole.iterations)


def _fits(graph: Graph, size: int, storage: Any) -> bool:
    try:
        return block_width(graph, size, storage) > 0
    except KernelError:
        return False


def test_block_width_counts_the_graph_and_says_what_is_missing() -> None:
    graph: Graph = generate(np.random.default_rng(1), 500)["graph"]
    widths = {
        kind: block_width(graph, 10**6, *kind)  # type: ignore[arg-type]
        for kind in KINDS
    }
    assert widths["float16", "fused"] > widths["float32", "fused"] > widths["float32", "spmm"] > 0
    assert block_width(graph, 2 * 10**6) > 2 * widths["float32", "fused"]
    with pytest.raises(KernelError, match=r"needs \d+ bytes for a graph of 500 nodes .*; the budget is 9999"):
        block_width(graph, 9999)


def test_a_cut_row_is_covered_once_and_a_short_one_is_not_cut() -> None:
    indptr = np.array([0, 0, 5, 11, 11, 31, 32])  # rows of 0, 5, 6, 0, 20 and 1, cut beyond 5
    first, begins, ends = segments(indptr)
    assert first.tolist() == [0, 0, 0, 2, 2, 6, 6]
    assert begins.tolist() == [5, 10, 11, 16, 21, 26]
    assert ends.tolist() == [10, 11, 16, 21, 26, 31]


def test_float16_keeps_a_lone_seed_and_the_best_twenty(device: Device) -> None:
    rng = np.random.default_rng(5)
    graph = Graph.from_edges(
        3000, (3000 * rng.random(15000) ** 3).astype(int), rng.integers(0, 3000, 15000), np.ones(15000)
    )
    restart = np.zeros((3000, 20))
    restart[rng.integers(0, 3000, 20), np.arange(20)] = 1.0  # scaled, the largest value there is
    restart[graph.isolated, :] = 0.0
    restart[0, restart.sum(axis=0) == 0] = 1.0
    half = Solver(graph, "float16", device=device).solve(restart)
    exact = reference(graph, restart)
    assert np.isfinite(half.scores).all()
    assert half.converged.all()
    for column in range(20):
        twentieth = np.sort(exact.scores[:, column])[-20]
        best = np.argsort(-half.scores[:, column], kind="stable")[:20]
        assert np.all(exact.scores[best, column] >= twentieth * (1 - 2e-3))


def test_kinds_and_tolerances_that_cannot_be_had_are_refused(library: ctypes.CDLL) -> None:
    inputs = generate(np.random.default_rng(2), 30)
    graph, device = inputs["graph"], host_device(library)
    with pytest.raises(KernelError, match=r"float16 storage alone may be off by 4\.9e-04"):
        Solver(graph, "float16", device=device).solve(inputs["restart"], tolerance=1e-6)
    with pytest.raises(KernelError, match="'spmm' stores float32"):
        Solver(graph, "float16", "spmm", device=device)
    with pytest.raises(KernelError, match="no storage 'bfloat16'"):
        Solver(graph, "bfloat16", device=device)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="indices are int64"):
        Solver(Graph(graph.indptr, graph.indices.astype(np.int64), graph.weights), device=device)


def test_the_host_rounds_to_float16_as_numpy_does(library: ctypes.CDLL) -> None:
    library.widened.restype, library.widened.argtypes = ctypes.c_float, [ctypes.c_uint]
    library.narrowed.argtypes = [ctypes.c_float]
    rng = np.random.default_rng(0)
    values = (rng.normal(size=2000) * 10.0 ** rng.uniform(-9, 5, 2000)).astype(np.float32)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    bits = [library.narrowed(float(value)) for value in values]
    assert bits == expected.view(np.uint16).tolist()
    assert [library.widened(value) for value in bits] == expected.astype(float).tolist()


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_90"])
def test_nvrtc_compiles_the_kernels(architecture: str) -> None:
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(cupy_backend.SOURCE.read_text(), cupy_backend.SOURCE.name, (), ())
    try:
        nvrtc.compileProgram(program, (*cupy_backend.OPTIONS, f"--gpu-architecture={architecture}"))
        assert not [line for line in nvrtc.getProgramLog(program).splitlines() if "warning" in line]
        cubin = nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
    assert cubin.startswith(b"\x7fELF")
    assert all(f".text.{name}".encode() in cubin for name in KERNELS)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_90"])
def test_nvcc_compiles_the_kernels(architecture: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on PATH")
    cubin = tmp_path / "step.cubin"
    options = [*cupy_backend.OPTIONS, f"-arch={architecture}", "-Werror", "all-warnings", "-cubin"]
    command = [nvcc, *options, "-o", str(cubin), str(cupy_backend.SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert cubin.read_bytes().startswith(b"\x7fELF")


def test_the_cuda_source_is_package_data() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "*.cu" in project["tool"]["setuptools"]["package-data"]["*"]
    assert cupy_backend.SOURCE.suffix == ".cu"
    assert cupy_backend.SOURCE.is_file()


class CudaError(RuntimeError):
    pass


def fake_cupy(driver: int, devices: int | Exception, compiler: Exception | None = None) -> SimpleNamespace:
    def answer(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    runtime = SimpleNamespace(
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: 13020,
        getDeviceCount=lambda: answer(devices),
        CUDARuntimeError=CudaError,
    )
    nvrtc = SimpleNamespace(getVersion=lambda: answer(compiler))
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, nvrtc=nvrtc))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, r"package 'cupy' is not installed\. Run: pip install 'hippoindex\[gpu\]'"),
        (fake_cupy(0, CudaError("insufficient driver")), "there is no NVIDIA driver"),
        (fake_cupy(12040, CudaError("x")), r"supports CUDA 12\.4, which is too old for CuPy's CUDA 13\.2"),
        (fake_cupy(13000, CudaError("cudaErrorNoDevice: none")), "CUDA reports: cudaErrorNoDevice"),
        (fake_cupy(13000, 0), "no CUDA device is visible"),
        (fake_cupy(13000, 1, RuntimeError("libnvrtc.so")), r"NVRTC \(libnvrtc\.so\)\. Run: pip install"),
    ],
)
def test_the_reason_why_there_is_no_device_is_said(
    monkeypatch: pytest.MonkeyPatch, module: Any, reason: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "pylibcugraph", SimpleNamespace())
    for backend in ("cupy", "cupy-float16", "cugraph"):
        with pytest.raises(KernelError, match=reason):
            spec.get(backend)
    with pytest.raises(KernelError, match=reason):
        cuda_device.__wrapped__()


def test_a_device_that_can_be_used_has_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(13000, 1))
    assert cupy_backend.unavailable() is None
    monkeypatch.setitem(sys.modules, "pylibcugraph", None)
    with pytest.raises(KernelError, match=r"'pylibcugraph' is not installed.*hippoindex\[cugraph\]"):
        spec.get("cugraph")


class StandInForCuGraph:
    """What the library's source says it computes, in numpy: start, dangling mass, stop and flag.

    See ``cpp/src/link_analysis/pagerank_impl.cuh`` of RAPIDS cuGraph 26.10.
    """

    ResourceHandle = SimpleNamespace
    GraphProperties = SimpleNamespace

    def __init__(self) -> None:
        self.flags: list[bool] = []

    def SGGraph(  # noqa: N802 (the library's name)
        self, handle: Any, properties: Any, sources: Any, targets: Any, **options: Any
    ) -> Any:
        assert handle == SimpleNamespace()
        assert properties == SimpleNamespace(is_symmetric=True, is_multigraph=False)
        assert options.pop("store_transposed") is options.pop("renumber") is True
        weights = options.pop("weight_array")
        assert options == {"do_expensive_check": False}
        assert sources.dtype == targets.dtype == np.int32
        assert weights.dtype == np.float32
        nodes = np.unique(np.concatenate([sources, targets]))  # in the order of its own renumbering
        nodes = nodes[::-1]
        rank = {node: i for i, node in enumerate(nodes)}
        pairs = [rank[node] for node in targets], [rank[node] for node in sources]
        matrix = sp.csr_array((weights.astype(np.float64), pairs), shape=(len(nodes),) * 2)
        return SimpleNamespace(nodes=nodes, rank=rank, matrix=matrix, out=matrix.sum(axis=0))

    def personalized_pagerank(
        self,
        resource_handle: Any,
        graph: Any,
        precomputed_vertex_out_weight_vertices: Any,
        precomputed_vertex_out_weight_sums: Any,
        initial_guess_vertices: Any,
        initial_guess_values: Any,
        personalization_vertices: Any,
        personalization_values: Any,
        alpha: float,
        epsilon: float,
        max_iterations: int,
        do_expensive_check: bool,
        fail_on_nonconvergence: bool = True,
    ) -> tuple[Any, Any, bool]:
        given = precomputed_vertex_out_weight_vertices, precomputed_vertex_out_weight_sums
        assert (*given, initial_guess_vertices, initial_guess_values) == (None,) * 4
        assert resource_handle == SimpleNamespace()
        assert not do_expensive_check
        assert not fail_on_nonconvergence
        s = np.zeros(len(graph.nodes))
        s[[graph.rank[node] for node in personalization_vertices]] = personalization_values
        s /= s.sum()
        x, dangling = np.full(len(s), 1 / len(s)), graph.out == 0
        iteration, change = 0, np.inf
        while change >= epsilon and iteration < max_iterations:
            new = alpha * (graph.matrix @ (x / np.where(dangling, 1, graph.out)))
            new += (alpha * x[dangling].sum() + 1 - alpha) * s
            change, x, iteration = np.abs(new - x).sum(), new, iteration + 1
        self.flags.append(iteration < max_iterations)
        return graph.nodes.astype(np.int32), x.astype(np.float32), self.flags[-1]


@settings(max_examples=40, deadline=None)
@given(seed=seeds, size=st.integers(1, 60))
def test_cugraph_is_asked_for_what_the_specification_says(library: ctypes.CDLL, seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = generate(rng, size)
    graph: Graph = inputs["graph"]
    if len(graph.isolated):
        inputs["restart"][:, 0] = 0.0
        inputs["restart"][graph.isolated, 0] = 1.0  # nothing to walk on
    stand_in: Any = StandInForCuGraph()
    result = cugraph_backend.solve(**inputs, library=stand_in, device=host_device(library))
    check(result, reference(**inputs), inputs)
    np.testing.assert_allclose(result.scores.sum(axis=0), 1.0, atol=1e-5)


def test_cugraph_converged_on_its_last_iteration_counts_as_converged(library: ctypes.CDLL) -> None:
    inputs = generate(np.random.default_rng(8), 50)
    inputs["restart"], device = inputs["restart"][:, :1], host_device(library)
    outcomes = []
    for iterations in range(1, 60):
        stand_in: Any = StandInForCuGraph()
        result = cugraph_backend.solve(**inputs, max_iterations=iterations, library=stand_in, device=device)
        exact = reference(**inputs).scores
        assert np.all(np.abs(result.scores - exact).sum(axis=0) <= result.residual + 2e-6)
        outcomes.append((bool(result.converged[0]), stand_in.flags[0]))
    assert outcomes[0] == (False, False)
    assert (True, False) in outcomes  # the library's flag says no, the measured residual yes
    assert outcomes[-1] == (True, True)
    assert sorted(outcomes) == outcomes
    assert result.iterations.tolist() == [cugraph_backend.NOT_REPORTED]


@pytest.mark.parametrize("backend", ["cupy", "cugraph"])
def test_the_residual_is_a_bound_and_no_loose_one(library: ctypes.CDLL, backend: str) -> None:
    # two triangles with little between them mix so slowly that the bound is nearly the error itself
    ends = [0, 1, 2, 3, 4, 5, 2], [1, 2, 0, 4, 5, 3, 3]
    graph = Graph.from_edges(7, *ends, [1, 1, 1, 1, 1, 1, 0.3])
    restart, device = np.array([[0.1, 0, 0, 0, 0, 0, 0.9]]).T, host_device(library)
    stand_in: Any = StandInForCuGraph()
    if backend == "cupy":
        result = Solver(graph, device=device).solve(restart, max_iterations=9)
    else:
        result = cugraph_backend.solve(
            graph, restart, max_iterations=9, library=stand_in, device=device, tolerance=1e-9
        )
    error = np.abs(result.scores - reference(graph, restart).scores).sum(axis=0)
    assert error > 1e-5
    assert error < result.residual + 1e-6
    assert result.residual < 1.5 * error
    assert not result.converged.any()


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "benchmarks" / "gpu_check.py"
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=False, timeout=120
    )


def test_the_check_script_says_why_there_is_no_device(tmp_path: Path) -> None:
    reason = cupy_backend.unavailable()
    if reason is None:
        pytest.skip("there is a CUDA device")
    done = gpu_check("--json", str(tmp_path / "out.json"))
    assert done.returncode == 3, done.stderr
    assert reason in done.stderr
    assert not (tmp_path / "out.json").exists()


def test_the_check_script_runs_dry(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = gpu_check("--dry-run", "--nodes", "2000", "--widths", "4", "--json", str(out))
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["dry_run"] is True
    assert record["gpu"] is None
    assert record["checks"]["spmm with numpy"] == "passed"
    [row] = record["timings"]
    assert row["l1_to_cpu"] <= 4e-6
    assert row["top20_kept"] == 1.0


def test_a_column_of_power_is_what_the_device_is_held_to(library: ctypes.CDLL) -> None:
    inputs = generate(np.random.default_rng(4), 80)
    result = Solver(inputs["graph"], device=host_device(library)).solve(inputs["restart"], inputs["damping"])
    expected = power(**inputs)
    np.testing.assert_allclose(result.scores, expected.scores, atol=1e-6)
    np.testing.assert_array_equal(result.iterations, expected.iterations)
