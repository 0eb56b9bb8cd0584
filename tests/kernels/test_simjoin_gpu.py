"""The join's GPU backends: on a device where there is one, and always as far as a host can run them.

``host`` is numpy in CuPy's place and ``nominate.cu`` compiled by g++; ``cuda`` is skipped without a device.
The stand-ins' products are as wrong as the backends allow for.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr import cupy_backend as ppr_cupy
from hippoindex.kernels.simjoin import Pairs, cupy_backend, exact, faiss_backend, reference, spec
from hippoindex.kernels.simjoin.cupy_backend import Device, cuda_device, gemm, layout, margin, tile_bytes
from hippoindex.kernels.simjoin.faiss_backend import Devices
from hippoindex.kernels.simjoin.rows import NORM_TOLERANCE
from hippoindex.kernels.simjoin.spec import check, generate

ROOT = Path(__file__).resolve().parents[2]
TYPES = {np.int64: ctypes.c_longlong}
ATOMIC = """
static unsigned long long atomicAdd(unsigned long long *cell, unsigned long long value) {
  const unsigned long long before = *cell;
  *cell += value;
  return before;
}
"""
STORAGES: Any = ["float16", "float32"]
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
    (folder / "host.cpp").write_text(
        f'#include "cuda_on_host.h"\n{ATOMIC}#include "nominate.cu"\n'
        'extern "C" { auto *launch_nominate = &Launch<nominate>::run; }\n'
    )
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    include = [f"-I{Path(__file__).parent}", f"-I{cupy_backend.SOURCE.parent}"]
    command = [compiler, *flags, *include, "host.cpp", "-o", "host.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "host.so"))


@dataclass
class Seen:
    """What a stand-in was asked for: height, width and nominated cells of launches, and buffers."""

    launches: list[tuple[int, int, int]] = field(default_factory=list)
    allocated_bytes: int = 0


def host_device(library: ctypes.CDLL, seen: Seen | None = None, backwards: bool = False) -> Device:
    seen = Seen() if seen is None else seen

    def empty(shape: Any, dtype: Any) -> NDArray:
        out = np.full(shape, 99, dtype=dtype)  # whatever lay there before
        seen.allocated_bytes += out.nbytes
        return out

    def zeros(shape: Any, dtype: Any) -> NDArray:
        out = empty(shape, dtype)
        out.fill(0)
        return out

    def multiply(a: NDArray, b: NDArray, out: NDArray) -> None:
        assert a.dtype == b.dtype
        assert a.shape[1] % 8 == 0
        out[...] = misleading(a, b, a.dtype)

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
        seen.launches.append((int(arguments[0]), int(arguments[1]), int(arguments[-2][0])))

    def write(target: NDArray, values: NDArray) -> None:
        assert (target.shape, target.dtype) == (values.shape, values.dtype)
        assert target.flags.c_contiguous
        target[...] = values

    xp = SimpleNamespace(empty=empty, zeros=zeros, asarray=np.ascontiguousarray)
    return Device(xp, multiply, launch, write, np.array, lambda: 2**30)


def misleading(a: NDArray, b: NDArray, dtype: Any) -> NDArray[np.float32]:
    """Return products that are as far from the true ones as sums in float32 may be, up or down at random."""
    full = a.astype(np.float64) @ b.astype(np.float64).T
    least_dimension = max(a.shape[1] - 7, 1)  # the rest may be padding
    error = 0.99 * margin(dtype, dtype.name, least_dimension)
    return (full + error * np.random.default_rng(full.size).choice([-1, 1], full.shape)).astype(np.float32)


@pytest.fixture(scope="module", params=["host", "cuda"])
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "host":
        return host_device(request.getfixturevalue("library"))
    reason = cupy_backend.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return cuda_device()


@pytest.fixture(autouse=True, scope="module")
def _small_parts_for_small_cases() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy_backend, "TILES", (40, 16))
        patch.setattr(cupy_backend, "UPLOAD_ROWS", 7)
        patch.setattr(cupy_backend, "RECHECK_PAIRS", 50)
        patch.setattr("hippoindex.kernels.simjoin.problem.FRESH_PAIRS", 100)  # so that floors rise
        patch.setattr(faiss_backend, "QUERY_ROWS", 40)
        patch.setattr(faiss_backend, "SPARE_NEIGHBORS", 0)
        yield


def hub(n: int, spread: float, d: int = 16) -> NDArray[np.float32]:
    """Unit vectors around one."""
    x = np.eye(d)[0] + spread * np.random.default_rng(0).standard_normal((n, d))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def near_threshold(n: int, threshold: float, d: int = 40) -> NDArray[np.float32]:
    """Pairs of vectors, rows 2i and 2i + 1, whose cosines are within 5e-5 of the threshold."""
    rng = np.random.default_rng(1)
    first = rng.standard_normal((n, d))
    first /= np.linalg.norm(first, axis=1, keepdims=True)
    across = rng.standard_normal((n, d))
    across -= (across * first).sum(axis=1, keepdims=True) * first
    across /= np.linalg.norm(across, axis=1, keepdims=True)
    cosine = threshold + np.linspace(-5e-5, 5e-5, n)[:, None]
    second = cosine * first + np.sqrt(1 - cosine**2) * across
    return np.stack([first, second], axis=1).reshape(2 * n, d).astype(np.float32)


def assert_same(left: Pairs, right: Pairs) -> None:
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, other)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, n_rows=st.integers(1, 70), n_columns=st.integers(1, 300), share=st.floats(0.0, 1.0))
def test_the_kernel_nominates_what_the_formula_does(
    device: Device, seed: int, n_rows: int, n_columns: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    products = rng.random((n_rows, n_columns), np.float32)
    first_column = int(rng.integers(0, 50))
    rows = np.sort(rng.choice(400, n_rows, replace=False))
    asks = rng.random(n_columns) < rng.random()
    row_low, column_low = (
        rng.choice(np.array([0.0, 0.5, 0.9, 0.99, np.inf], np.float32), size) for size in products.shape
    )
    nodes = first_column + np.arange(n_columns)
    taken = np.where(asks, rows[:, None] < nodes, rows[:, None] != nodes)
    wanted = np.flatnonzero(taken & (products >= np.minimum(row_low[:, None], column_low)))
    capacity = int(share * len(wanted) * 1.2)
    xp = device.xp
    count, cells = xp.zeros(1, np.uint64), xp.zeros(capacity + 3, np.uint32)
    arguments = (
        *(np.int64(n_rows), np.int64(n_columns), xp.asarray(products)),
        *(xp.asarray(rows), np.int64(first_column), xp.asarray(asks.view(np.uint8))),
        *(xp.asarray(row_low), xp.asarray(column_low)),
        *(np.int64(capacity), count, cells),
    )
    device.launch("nominate", (-(-n_columns // 256), -(-n_rows // 32)), (256, 1), arguments)

    assert device.to_host(count).tolist() == [len(wanted)]
    got = device.to_host(cells)
    written = min(len(wanted), capacity)
    assert not got[written:].any()
    if len(wanted) <= capacity:
        np.testing.assert_array_equal(np.sort(got[:written]), wanted)
    else:
        assert len(np.unique(got[:written])) == written
        assert np.isin(got[:written], wanted).all()


@pytest.mark.parametrize("storage", STORAGES)
@settings(max_examples=40, deadline=None)
@given(seed=seeds, size=st.integers(1, 150), share=st.floats(0.0, 1.0))
def test_the_join_is_the_reference_in_any_amount_of_memory(
    device: Device, storage: Any, seed: int, size: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    inputs = generate(rng, size)
    inputs["vectors"] = inputs["vectors"].astype(rng.choice(["float16", "float32", "float64"]))
    node_bytes = np.dtype(storage).itemsize * (-(-inputs["vectors"].shape[1] // 8) * 8)
    least = tile_bytes(min(16, size)) + 2 * min(16, size) * node_bytes
    budget = int(least + share * 4 * size * node_bytes)
    result = cupy_backend.exact(**inputs, storage=storage, memory_bytes=budget, device=device)
    check(result, reference(**inputs), inputs)
    assert_same(result, exact(**inputs))


@settings(max_examples=20, deadline=None)
@given(seed=seeds, size=st.integers(1, 150), share=st.floats(0.0, 1.0), tight=st.booleans())
def test_joining_new_rows_with_all_gives_the_full_join(
    device: Device, seed: int, size: int, share: float, tight: bool
) -> None:
    rng = np.random.default_rng(seed)
    inputs = generate(rng, size)
    new = rng.random(size) < share
    old = np.flatnonzero(~new)
    before = reference(**{**inputs, "vectors": inputs["vectors"][old], "searches": inputs["searches"][old]})
    known = Pairs(old[before.first], old[before.second], before.cosine)
    budget = tile_bytes(16) + 2 * 16 * 48 if tight else None
    result = cupy_backend.exact(**inputs, known=known, new=new, memory_bytes=budget, device=device)
    check(result, reference(**inputs), inputs)


@pytest.mark.parametrize("storage", STORAGES)
def test_pairs_at_the_threshold_are_decided_in_float64(
    device: Device, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = near_threshold(60, 0.8)
    expected = reference(vectors, 0.8)
    paired = (expected.first % 2 == 0) & (expected.second == expected.first + 1)
    assert 20 < paired.sum() < 40
    assert_same(cupy_backend.exact(vectors, 0.8, storage=storage, device=device), exact(vectors, 0.8))
    if storage == "float16":
        monkeypatch.setattr(cupy_backend, "margin", lambda *_: 0.0)
        without = cupy_backend.exact(vectors, 0.8, storage=storage, device=device)
        assert len(without.first) < len(expected.first)


def test_a_result_depends_neither_on_the_order_of_threads_nor_on_how_many(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = hub(150, 0.2)
    expected = exact(vectors, max_neighbors=4)
    for backwards in (False, True):
        for count in (1, 3):
            monkeypatch.setattr(cupy_backend, "n_threads", lambda count=count: count)
            turned = host_device(library, backwards=backwards)
            assert_same(cupy_backend.exact(vectors, max_neighbors=4, device=turned), expected)


def test_a_hub_that_overflows_is_nominated_in_parts_and_in_bounded_memory(library: ctypes.CDLL) -> None:
    seen = Seen()
    vectors = hub(300, 0.05)
    result = cupy_backend.exact(vectors, max_neighbors=5, device=host_device(library, seen))
    assert_same(result, exact(vectors, max_neighbors=5))
    capacity = 40 * 40 // 16
    overflowed = [n for n, launch in enumerate(seen.launches) if launch[2] > capacity]
    assert len(overflowed) > 10
    for n in overflowed:
        height, width, _ = seen.launches[n]
        assert seen.launches[n + 1][:2] == (-(-height // 2), width)
    done = [height * width for height, width, count in seen.launches if count <= capacity]
    tops = range(0, 300, 40)
    assert sum(done) == sum(min(40, 300 - top) * (300 - top) for top in tops)  # every cell once


def test_no_more_memory_is_taken_than_allowed(library: ctypes.CDLL) -> None:
    vectors = hub(200, 0.3)
    least = tile_bytes(16) + 2 * 16 * 16 * 2
    amounts = []
    for budget in (least, least + 1000, 3 * least, 10 * least, 10**6):
        seen = Seen()
        assert_same(
            cupy_backend.exact(vectors, memory_bytes=budget, device=host_device(library, seen)),
            exact(vectors),
        )
        assert seen.allocated_bytes <= budget
        amounts.append(seen.allocated_bytes)
    assert amounts == sorted(amounts)
    message = rf"needs {least} bytes for one tile of 16 x 16 nodes of dimension 16 as float16; the budget is "
    with pytest.raises(KernelError, match=f"{message}{least - 1}"):
        cupy_backend.exact(vectors, memory_bytes=least - 1, device=host_device(library))


def test_memory_holds_all_vectors_if_it_can_and_blocks_of_whole_tiles_if_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cupy_backend, "TILES", (8192, 4096, 2048, 1024, 512, 256))
    gib = 2**30
    assert layout(10**6, 10**6, 768, "float16", 2 * gib).block == 10**6
    assert layout(10**6, 10**6, 768, "float32", 2 * gib).block < 10**6 / 2
    assert layout(10**6, 10, 768, "float16", 2 * gib).block == 10**6
    assert layout(10**6, 9 * 10**5, 768, "float16", 2 * gib).block < 10**6
    for budget in (gib, gib // 4, gib // 64):
        plan = layout(10**7, 10**7, 768, "float16", budget)
        assert plan.block % plan.tile == 0
        assert tile_bytes(plan.tile) + 2 * plan.block * 768 * 2 <= budget
        assert plan.capacity >= plan.tile
    assert layout(10**7, 10**7, 768, "float16", gib).tile > plan.tile
    assert layout(0, 0, 0, "float16", 100).block == 1
    with pytest.raises(KernelError, match=r"one tile of 256 x 256 nodes .* as float32; the budget is 1000"):
        layout(10**7, 10**7, 768, "float32", 1000)


@settings(max_examples=100, deadline=None)
@given(
    seed=seeds,
    d=st.integers(1, 400),
    storage=st.sampled_from(STORAGES),
    stored=st.sampled_from([np.float16, np.float32, np.float64]),
    decades=st.floats(0, 12),
    block=st.sampled_from([4, 8, 16]),
)
def test_products_are_within_the_margin(
    seed: int, d: int, storage: Any, stored: Any, decades: float, block: int
) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, d)) * 10.0 ** -rng.uniform(0, decades, (2, d))
    if rng.random() < 0.5:
        y = np.abs(y) * np.sign(x)  # nothing cancels
    x, y = ((v / np.linalg.norm(v) * (1 + 0.9 * NORM_TOLERANCE)).astype(stored) for v in (x, y))
    cosine = float(x.astype(np.float64) @ y.astype(np.float64))
    a, b = x.astype(storage), y.astype(storage)
    assert abs(of_tensor_core(a, b, block) - cosine) <= margin(stored, storage, d)


def of_tensor_core(a: NDArray, b: NDArray, block: int) -> float:
    """Sum products as tensor cores are known to: aligned to the largest of a block and cut to 24 bits."""
    terms, total = a.astype(np.float64) * b.astype(np.float64), 0.0
    for start in range(0, len(terms), block):
        parts = np.append(terms[start : start + block], total)
        total = float(cut(cut(parts, np.abs(parts).max()).sum()))
    return total


def cut(values: Any, largest: float | None = None) -> Any:
    largest = abs(values) if largest is None else largest
    if largest == 0:
        return values
    quantum = 2.0 ** (np.floor(np.log2(largest)) - 23)
    return np.trunc(values / quantum) * quantum


def test_the_margin_is_no_loose_bound() -> None:
    d = 64
    worst = np.full(d, 0.125) * (1 + 0.999 * 2.0**-11)  # all rounded down by half a unit
    half = worst.astype(np.float16).astype(np.float64)
    assert abs((half**2).sum() - (worst**2).sum()) > 0.9 * margin(np.float64, "float16", d)
    assert margin(np.float16, "float16", 768) == margin(np.float32, "float32", 768)
    assert margin(np.float16, "float16", 768) == pytest.approx(3.8e-4, rel=0.02)
    assert margin(np.float32, "float16", 768) == pytest.approx(1.4e-3, rel=0.04)
    assert margin(np.float64, "float32", 768) < 3.9e-4


def array_on_device(values: NDArray) -> SimpleNamespace:
    data = SimpleNamespace(ptr=values.ctypes.data)
    return SimpleNamespace(data=data, dtype=values.dtype, shape=values.shape)


@pytest.mark.parametrize(
    ("storage", "compute"), [("float16", "COMPUTE_32F"), ("float32", "COMPUTE_32F_PEDANTIC")]
)
def test_cublas_is_asked_for_the_product_of_row_major_arrays(storage: str, compute: str) -> None:
    names = ("OP_N", "OP_T", "COMPUTE_32F", "COMPUTE_32F_PEDANTIC", "GEMM_DEFAULT")
    kinds: dict[int, np.dtype] = {0: np.dtype(np.float32), 2: np.dtype(np.float16)}  # of cudaDataType

    def at(address: int, kind: int, columns: int, stride: int) -> NDArray:
        size = columns * stride * kinds[kind].itemsize
        memory: Any = (ctypes.c_char * size).from_address(address)
        return np.frombuffer(memory, kinds[kind]).reshape(columns, -1)

    def gemm_ex(handle: int, op_a: str, op_b: str, m: int, n: int, k: int, *rest: Any) -> None:
        alpha, a, kind_a, lda, b, kind_b, ldb, beta, c, kind_c, ldc, asked, algorithm = rest
        assert (handle, op_a, op_b, asked, algorithm) == (7, "OP_T", "OP_N", compute, "GEMM_DEFAULT")
        assert (at(alpha, 0, 1, 1)[0, 0], at(beta, 0, 1, 1)[0, 0]) == (1.0, 0.0)
        left, right = at(a, kind_a, m, lda)[:, :k], at(b, kind_b, n, ldb)[:, :k]  # columns, of k each
        assert kind_c == 0
        at(c, kind_c, n, ldc)[:, :m] = right.astype(np.float32) @ left.astype(np.float32).T

    cublas = SimpleNamespace(gemmEx=gemm_ex, **{f"CUBLAS_{name}": name for name in names})
    rng = np.random.default_rng(0)
    a, b = rng.random((5, 16)).astype(storage), rng.random((3, 16)).astype(storage)
    out = np.full((5, 3), np.nan, np.float32)
    gemm(cublas, 7, *(array_on_device(values) for values in (a, b, out)))
    np.testing.assert_allclose(out, a.astype(np.float64) @ b.astype(np.float64).T, rtol=1e-5)


def test_the_installed_cupy_has_the_call_that_is_made() -> None:
    # the module cannot be imported where cuBLAS is missing, so its compiled form is read
    found = importlib.util.find_spec("cupy_backends.cuda.libs.cublas")
    assert found is not None
    assert found.origin is not None
    binary = Path(found.origin).read_bytes()
    signature = re.search(rb"\bgemmEx\(([\w ,]+)\)", binary)
    assert signature is not None
    names = [part.split()[-1].decode() for part in signature[1].split(b",")]
    wanted = "handle transa transb m n k alpha A Atype lda B Btype ldb beta C Ctype ldc computeType algo"
    assert names == wanted.split()
    for name in ("OP_N", "OP_T", "COMPUTE_32F", "COMPUTE_32F_PEDANTIC", "GEMM_DEFAULT"):
        assert f"CUBLAS_{name}\0".encode() in binary


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_90"])
def test_nvrtc_compiles_the_kernel(architecture: str) -> None:
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(cupy_backend.SOURCE.read_text(), cupy_backend.SOURCE.name, (), ())
    try:
        nvrtc.compileProgram(program, (*ppr_cupy.OPTIONS, f"--gpu-architecture={architecture}"))
        assert not [line for line in nvrtc.getProgramLog(program).splitlines() if "warning" in line]
        cubin = nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
    assert cubin.startswith(b"\x7fELF")
    assert b".text.nominate" in cubin


def test_host_and_source_agree_on_the_rows_of_a_thread() -> None:
    assert f"#define ROWS {cupy_backend.THREAD_ROWS}\n" in cupy_backend.SOURCE.read_text()


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_than_two_vectors_make_no_pairs(library: ctypes.CDLL, n: int) -> None:
    vectors = np.eye(4, dtype=np.float32)[:n]
    assert len(cupy_backend.exact(vectors, device=host_device(library)).first) == 0
    assert len(faiss_backend.exact(vectors, devices=numpy_devices()).first) == 0
    assert len(faiss_backend.exact(vectors, 0.5, 3, np.zeros(n, bool), devices=numpy_devices()).first) == 0


def test_a_memory_map_is_joined_like_an_array(library: ctypes.CDLL, tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", hub(100, 0.3).astype(np.float16))
    mapped = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    assert_same(cupy_backend.exact(mapped, device=host_device(library)), exact(np.array(mapped)))
    assert_same(faiss_backend.exact(mapped, devices=numpy_devices()), exact(np.array(mapped)))


def test_bad_arguments_are_refused(library: ctypes.CDLL) -> None:
    device = host_device(library)
    with pytest.raises(KernelError, match=r"no storage 'bfloat16'; choose one of \['float16', 'float32'\]"):
        cupy_backend.exact(np.eye(3), storage="bfloat16", device=device)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="come together"):
        cupy_backend.exact(np.eye(3), new=np.ones(3, bool), device=device)
    with pytest.raises(KernelError, match=r"Row 0 has norm 1\.4142"):
        cupy_backend.exact(np.ones((2, 2)), device=device)
    with pytest.raises(KernelError, match=r"Row 0 has norm 1\.4142"):
        faiss_backend.exact(np.ones((2, 2)), devices=numpy_devices())


def test_progress_ends_at_one(library: ctypes.CDLL) -> None:
    by_cupy: list[float] = []
    by_faiss: list[float] = []
    cupy_backend.exact(hub(150, 0.3), device=host_device(library), on_progress=by_cupy.append)
    faiss_backend.exact(hub(150, 0.3), devices=numpy_devices(), on_progress=by_faiss.append)
    for seen in (by_cupy, by_faiss):
        assert len(seen) > 3
        assert seen == sorted(seen)
        assert seen[-1] == 1.0
        assert seen.count(1.0) == 1


def fake_cupy(cublas: Exception | None) -> SimpleNamespace:
    def handle() -> int:
        if cublas is not None:
            raise cublas
        return 1

    runtime = SimpleNamespace(
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13020,
        getDeviceCount=lambda: 1,
        CUDARuntimeError=RuntimeError,
    )
    nvrtc = SimpleNamespace(getVersion=lambda: (13, 2))
    device = SimpleNamespace(get_cublas_handle=handle)
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, nvrtc=nvrtc, device=device))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, r"package 'cupy' is not installed\. Run: pip install 'hippoindex\[gpu\]'"),
        (fake_cupy(ImportError("libcublas.so.13")), r"start cuBLAS \(libcublas\.so\.13\)\. Run: pip install"),
        (fake_cupy(RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")), "CUBLAS_STATUS_NOT_INITIALIZED"),
    ],
)
def test_the_reason_why_cupy_cannot_be_used_is_said(
    monkeypatch: pytest.MonkeyPatch, module: Any, reason: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", module)
    for backend in ("cupy", "cupy-float32"):
        with pytest.raises(KernelError, match=reason):
            spec.get(backend)
    with pytest.raises(KernelError, match=reason):
        cuda_device.__wrapped__()
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(None))
    assert cupy_backend.unavailable() is None


class NumpyIndex:
    """An index of inner products on the host, with a GPU's limit and misleading products."""

    def __init__(self, dimension: int, asked: list[int]) -> None:
        self.x, self.asked = np.empty((0, dimension), np.float32), asked

    def add(self, x: NDArray[np.float32]) -> None:
        assert x.dtype == np.float32
        assert x.flags.c_contiguous
        self.x = np.concatenate([self.x, x])

    def search(self, queries: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        assert k <= faiss_backend.LIMIT
        self.asked.append(k)
        padded, others = (np.pad(values, ((0, 0), (0, 7))) for values in (queries, self.x))
        products = misleading(padded, others, queries.dtype)
        best = np.argsort(-products, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(products, best, axis=1), best


def numpy_devices(count: int = 2, asked: list[int] | None = None) -> Devices:
    seen: list[int] = [] if asked is None else asked
    return Devices(count, lambda _number, dimension: NumpyIndex(dimension, seen))


@settings(max_examples=60, deadline=None)
@given(seed=seeds, size=st.integers(1, 150), count=st.integers(1, 3))
def test_what_nearest_neighbours_prove_is_the_reference(seed: int, size: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = generate(rng, size)
    inputs["vectors"] = inputs["vectors"].astype(rng.choice(["float16", "float32", "float64"]))
    result = faiss_backend.exact(**inputs, devices=numpy_devices(count))
    check(result, reference(**inputs), inputs)
    assert_same(result, exact(**inputs))


@settings(max_examples=15, deadline=None)
@given(seed=seeds, size=st.integers(1, 150))
def test_faiss_on_the_host_gives_the_reference(seed: int, size: int) -> None:
    faiss = pytest.importorskip("faiss")
    inputs = generate(np.random.default_rng(seed), size)
    devices = Devices(2, lambda _number, dimension: faiss.IndexFlatIP(dimension))
    check(faiss_backend.exact(**inputs, devices=devices), reference(**inputs), inputs)


def test_more_neighbours_are_asked_for_until_what_is_kept_is_proven() -> None:
    asked: list[int] = []
    vectors = near_threshold(30, 0.8)
    assert_same(
        faiss_backend.exact(vectors, 0.8, 1, devices=numpy_devices(asked=asked)), exact(vectors, 0.8, 1)
    )
    assert min(asked) == 2
    assert max(asked) == 4
    asked.clear()
    vectors = hub(120, 0.002)  # many are as near as the margin can tell
    assert_same(
        faiss_backend.exact(vectors, 0.8, 3, devices=numpy_devices(asked=asked)), exact(vectors, 0.8, 3)
    )
    assert max(asked) > 8


def test_a_row_with_more_neighbours_than_a_gpu_returns_is_answered_if_its_best_stand_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faiss_backend, "LIMIT", 16)
    angle = np.linspace(0, 0.63, 40)
    fan = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    assert (fan @ fan.T >= 0.8).all()
    assert_same(faiss_backend.exact(fan, 0.8, 2, devices=numpy_devices()), exact(fan, 0.8, 2))
    with pytest.raises(KernelError, match=r"Row 0 has so many neighbours .* that 16 do not show .*'cupy'"):
        faiss_backend.exact(fan, 0.8, 16, devices=numpy_devices())
    crowd = np.concatenate([np.eye(16, dtype=np.float32)[1:4], hub(50, 1e-5)])
    with pytest.raises(KernelError, match="Row 3 has so many neighbours"):
        faiss_backend.exact(crowd, 0.8, 2, devices=numpy_devices())


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, r"package 'faiss' is not installed\. Run: pip install 'hippoindex\[faiss-gpu\]'"),
        (
            SimpleNamespace(get_num_gpus=lambda: 0),
            r"it is faiss-cpu, which the extra 'bench' brings .* only one .* uninstall faiss-cpu faiss-gpu;",
        ),
        (SimpleNamespace(StandardGpuResources=object, get_num_gpus=lambda: 0), "faiss sees no CUDA device"),
    ],
)
def test_the_reason_why_faiss_cannot_be_used_is_said(
    monkeypatch: pytest.MonkeyPatch, module: Any, reason: str
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", module)
    with pytest.raises(KernelError, match=reason):
        spec.get("faiss-gpu")
    with pytest.raises(KernelError, match=reason):
        faiss_backend.exact(np.eye(3))


def test_every_gpu_gets_an_index_of_inner_products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int, bool]] = []

    def index(resources: object, dimension: int, config: Any) -> NumpyIndex:
        assert isinstance(resources, Resources)
        assert config.useFloat16 is False
        made.append((config.device, dimension, config.use_cuvs))
        return NumpyIndex(dimension, [])

    class Resources:
        pass

    faiss = SimpleNamespace(
        StandardGpuResources=Resources,
        GpuIndexFlatConfig=lambda: SimpleNamespace(device=0, useFloat16=False, use_cuvs=True),
        GpuIndexFlatIP=index,
        get_num_gpus=lambda: 3,
    )
    monkeypatch.setitem(sys.modules, "faiss", faiss)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    vectors = hub(100, 0.3)
    assert_same(faiss_backend.exact(vectors), exact(vectors))
    assert made == [(0, 16, False), (1, 16, False), (2, 16, False)]
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(KernelError, match="NVIDIA_TF32_OVERRIDE=1 makes products less precise"):
        spec.get("faiss-gpu")


def test_vectors_that_do_not_fit_a_gpu_are_reported() -> None:
    def make_index(number: int, dimension: int) -> NumpyIndex:
        if number == 1:
            raise RuntimeError("cudaMalloc error out of memory")
        return NumpyIndex(dimension, [])

    message = r"put 3 vectors of dimension 3 \(36 bytes\) on GPU 1: cudaMalloc .* 'cupy'"
    with pytest.raises(KernelError, match=message):
        faiss_backend.exact(np.eye(3), devices=Devices(2, make_index))


def test_the_extra_does_not_bring_both_packages_of_the_module() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name for name in extras["faiss-gpu"] if name.startswith("faiss-gpu")]
    assert not [name for name in extras["faiss-gpu"] if name.startswith("faiss-cpu")]
    assert "hippoindex[faiss-gpu]" in faiss_backend.INSTALL


def test_the_check_script_joins_when_dry(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    script = str(ROOT / "benchmarks" / "gpu_check.py")
    sizes = ["--nodes", "500", "--widths", "2", "--vectors", "300", "--dimension", "24", "--examples", "12"]
    command = [sys.executable, script, "--dry-run", *sizes, "--passes", "1", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["checks"]["simjoin tiles with numpy"] == "passed"
    [row] = record["joins"]
    assert (row["vectors"], row["dimension"], row["same_pairs"]) == (300, 24, True)
    assert row["pairs"] > 100
