"""Work in bulk, cut into shards for an executor: PPR of many restarts, rankings of many questions.

Workers open the graph, or the index, as memory maps of its files. The operating system keeps one copy of a
mapped file in its page cache, so a machine holds the edges once however many workers it runs.

A shard's result is a ``.npz`` file of plain arrays, written atomically. The results are joined in order: what
comes out does not depend on the executor, the number of workers or the size of the shards.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import scipy.sparse as sp
import structlog
import xxhash
from numpy.typing import NDArray

from hippoindex.cluster.atomic import atomic_write
from hippoindex.cluster.executor import Executor
from hippoindex.errors import ArtifactError, HippoIndexError, UsageError
from hippoindex.kernels.ppr import Graph, Ranked, solve
from hippoindex.kernels.ppr.restart import SparseRestarts, sparse_restarts
from hippoindex.kernels.ppr.solve import choose_method
from hippoindex.pipeline.artifact import open_index
from hippoindex.pipeline.config import RetrieveConfig
from hippoindex.pipeline.progress import Monitor
from hippoindex.pipeline.queries import Query
from hippoindex.pipeline.remote import is_remote
from hippoindex.pipeline.retrieve.base import PARTS, Ranking, find_method
from hippoindex.pipeline.retrieve.engine import METHODS, Retriever

log = structlog.get_logger("hippoindex")

SOLVE_VERSION = 1
"""Raised whenever the code of the solvers changes what comes out: stored results are then solved again."""
RANK_VERSION = 3
"""Likewise for the methods of retrieval."""
SHARD_RESTARTS = 1024
SHARD_QUESTIONS = 512
GRAPH_ARRAYS = ("indptr", "indices", "weights")

Result = TypeVar("Result", Ranked, Ranking)


@dataclass(frozen=True)
class GraphFiles:
    """Where a graph lies on disk.

    Attributes
    ----------
    folder : Path
        Holds ``indptr.npy``, ``indices.npy`` and ``weights.npy``.
    transition : Path
        Holds :attr:`Graph.transition`.
    """

    folder: Path
    transition: Path

    def open(self) -> Graph:
        """Return the graph; its arrays are read-only memory maps.

        Raises
        ------
        ArtifactError
            If a file is missing or no plain array.
        KernelError
            If the transition is not of this graph's shape.
        """
        return _open_graph(self.folder).with_transition(_map_array(self.transition))


def solve_in_shards(
    graph_folder: str | Path,
    restarts: SparseRestarts,
    executor: Executor,
    *,
    transition: str | Path | None = None,
    shard_restarts: int = SHARD_RESTARTS,
    work: str | Path | None = None,
    monitor: Monitor | None = None,
    **options: Any,
) -> Ranked:
    """Solve PPR for many restarts on the workers of an executor.

    The result is that of :func:`hippoindex.kernels.ppr.solve`, byte for byte.

    Parameters
    ----------
    graph_folder : str or Path
        Holds ``indptr.npy``, ``indices.npy`` and ``weights.npy`` of a :class:`Graph`, as an index does in
        ``graph/``.
    restarts : sparse array, shape (Q, N)
        Not negative, finite, every row with a positive sum.
    executor : Executor
    transition : str or Path, optional
        File of the graph's transition cells, as an index has it in ``ppr/``. By default ``transition.npy`` in
        ``graph_folder``; where there is none it is computed once and written to ``work``.
    shard_restarts : int
        Restarts solved at a time by one worker.
    work : str or Path, optional
        Folder of the shards and their results. It is kept: results found there are not solved again. On a
        cluster all machines must see it, and the graph, under the same path. By default a temporary folder.
    monitor : Monitor, optional
        Shows progress.
    **options
        ``method``, ``top_k``, ``candidates``, ``damping``, ``goal``, ``tolerance`` and ``memory_bytes`` of
        :func:`hippoindex.kernels.ppr.solve`; the memory is that of one worker.

    Returns
    -------
    Ranked

    Raises
    ------
    KernelError
        If the graph, the restarts or an option break the contract of ``solve``.
    ArtifactError
        If a file of the graph is missing or no plain array.
    UsageError
        If ``shard_restarts`` is less than 1.
    ExecutorError
        If a worker failed, or was lost too often; the message names its shard.
    """
    if shard_restarts < 1:
        raise UsageError(f"shard_restarts must be at least 1; got {shard_restarts}")
    with _work_folder(work) as folder:
        files = _graph_files(Path(graph_folder).resolve(), transition, folder)
        graph = files.open()
        matrix: Any = sp.csr_array(restarts, dtype=np.float64)  # type: ignore[arg-type] # stubs: 1-d
        arguments = _solve_arguments(graph, matrix, options)
        nothing = solve(graph, matrix[:0], **arguments)  # refuses what is wrong before any worker starts
        key = _solve_key(files, arguments)
        shards = [
            matrix[start : start + shard_restarts] for start in range(0, matrix.shape[0], shard_restarts)
        ]
        tasks = _restart_tasks(shards, folder, key)
        _solve_missing(executor, tasks, shards, functools.partial(_Solver, files, arguments), monitor)
        return _joined(Ranked, [nothing, *(_read_result(Ranked, Path(task.output)) for task in tasks)])


def rank_in_shards(
    index: str | Path,
    queries: Sequence[Query],
    executor: Executor,
    config: RetrieveConfig,
    *,
    method: str,
    top_k: int | None = None,
    shard_questions: int | None = None,
    work: str | Path | None = None,
    monitor: Monitor | None = None,
) -> Ranking:
    """Embed and rank many questions on the workers of an executor, each of which opens the index once.

    Passages are those of :meth:`Retriever.rank` in one process; scores can differ in their last bits, as
    matrix products round by the size of the batch.

    Parameters
    ----------
    index : str or Path
    queries : sequence of Query
        At least one.
    executor : Executor
    config : RetrieveConfig
    method : str
    top_k : int, optional
        By default ``config.top_k``.
    shard_questions : int, optional
        Questions ranked at a time by one worker; by default 512, or fewer so that every worker has some.
    work : str or Path, optional
        Folder for the shards' results: those of an interrupted call are found there and not ranked again; at
        the end it is emptied. On a cluster all machines must see it, and the index, under the same path. By
        default a temporary folder.
    monitor : Monitor, optional
        Shows progress.

    Returns
    -------
    Ranking

    Raises
    ------
    UsageError
        If there is no question or no such method, or ``shard_questions`` is less than 1.
    ExecutorError
        If a worker failed, or was lost too often; the message names its questions.
    """
    find_method(METHODS, method)
    if not queries:
        raise UsageError("There is no question to rank passages for")
    size = min(SHARD_QUESTIONS, -(-len(queries) // executor.workers))
    size = size if shard_questions is None else shard_questions
    if size < 1:
        raise UsageError(f"shard_questions must be at least 1; got {shard_questions}")
    where = str(index) if is_remote(index) else str(Path(index).resolve())
    factory = functools.partial(_Ranker, where, config, method, top_k)
    key = "" if work is None else _rank_key(index, config, method, top_k)
    with (
        _work_folder(work) as folder,
        (monitor or Monitor()).stage("retrieve", len(queries), "questions") as advance,
    ):
        tasks = []
        for number, first in enumerate(range(0, len(queries), size)):
            part = tuple(queries[first : first + size])
            digest = xxhash.xxh3_128_hexdigest(f"{key} {first} {part!r}".encode(errors="surrogatepass"))
            tasks.append(QuestionTask(number, first, part, f"{folder}/{digest}.npz"))
        pending = [task for task in tasks if not Path(task.output).is_file()]
        if done := len(queries) - sum(len(task.queries) for task in pending):
            log.info("shards found done", stage="retrieve", questions=done)
            advance(done)
        executor.run(factory, pending, lambda task: advance(len(task.queries)))
        ranking = _joined(Ranking, [_read_result(Ranking, Path(task.output)) for task in tasks])
        for task in tasks:
            Path(task.output).unlink()
    if work is not None:
        with contextlib.suppress(OSError):  # something else is in it
            Path(work).rmdir()
    return ranking


def _rank_key(index: str | Path, config: RetrieveConfig, method: str, top_k: int | None) -> str:
    """Describe all that decides a ranking beside the questions."""
    made = open_index(index).manifest.model_dump_json()
    return repr(
        (RANK_VERSION, xxhash.xxh3_128_hexdigest(made.encode()), config.model_dump_json(), method, top_k)
    )


@dataclass(frozen=True)
class RestartTask:
    """One unit of PPR: read the restart vectors in ``input``, write ``output``. Paths are absolute."""

    index: int
    input: str
    output: str


@dataclass(frozen=True)
class QuestionTask:
    """One unit of retrieval: rank for ``queries``, write ``output``.

    Attributes
    ----------
    index : int
    first : int
        Position of the first question among all, from 0.
    queries : tuple of Query
    output : str
        Absolute path.
    """

    index: int
    first: int
    queries: tuple[Query, ...]
    output: str

    @property
    def input(self) -> str:
        """Name the questions in error messages."""
        ids = f"{self.queries[0].query_id!r} to {self.queries[-1].query_id!r}"
        return f"questions {self.first}..{self.first + len(self.queries) - 1}, ids {ids}"


class _Solver:
    """A worker of :func:`solve_in_shards`."""

    def __init__(self, files: GraphFiles, arguments: Mapping[str, Any]) -> None:
        self._graph = files.open()
        self._arguments = arguments

    def __call__(self, task: RestartTask) -> None:
        restarts: Any = sp.load_npz(task.input)
        _write_result(solve(self._graph, restarts, **self._arguments), Path(task.output))


class _Ranker:
    """A worker of :func:`rank_in_shards`."""

    def __init__(self, index: str, config: RetrieveConfig, method: str, top_k: int | None) -> None:
        self._retriever = Retriever(index, config)
        self._method, self._top_k = method, top_k

    def __call__(self, task: QuestionTask) -> None:
        batch = self._retriever.encode(task.queries)
        ranking = self._retriever.rank(batch, self._method, top_k=self._top_k)
        parts_s = np.array([[batch.clock.seconds_s.get(part, 0.0) for part in PARTS]])
        _write_result(replace(ranking, parts_s=parts_s), Path(task.output))


@contextlib.contextmanager
def _work_folder(work: str | Path | None) -> Iterator[Path]:
    """Yield an absolute path: a folder that stays, or a temporary one."""
    if work is None:
        with tempfile.TemporaryDirectory(prefix="hippoindex-") as temporary:
            yield Path(temporary)
        return
    folder = Path(work).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def _graph_files(folder: Path, transition: str | Path | None, work: Path) -> GraphFiles:
    """Find and check the graph's files; compute the transition where there is none."""
    graph = _open_graph(folder)
    graph.validate()  # compiled loops follow its numbers unchecked
    file = folder / "transition.npy" if transition is None else Path(transition).resolve()
    if transition is None and not file.is_file():
        file = work / f"transition-{_digest(_array_files(folder))}.npy"
        if not file.is_file():
            with atomic_write(file) as stream:
                np.save(stream, graph.transition, allow_pickle=False)
    return GraphFiles(folder, file)


def _array_files(folder: Path) -> list[Path]:
    return [folder / f"{name}.npy" for name in GRAPH_ARRAYS]


def _open_graph(folder: Path) -> Graph:
    return Graph(*map(_map_array, _array_files(folder)))


def _map_array(file: Path) -> NDArray:
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{file} cannot be opened as an array: {error}") from error


def _solve_arguments(graph: Graph, matrix: sp.csr_array, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of ``solve`` after the restarts, its method chosen for the restarts as a whole."""
    call = inspect.signature(solve).bind(graph, matrix, **options)
    call.apply_defaults()
    arguments = {name: value for name, value in call.arguments.items() if name not in ("graph", "restarts")}
    arguments["method"] = choose_method(arguments["method"], sparse_restarts(graph, matrix))
    return arguments


def _solve_key(files: GraphFiles, arguments: Mapping[str, Any]) -> str:
    """Describe all that decides a result beside the restarts. The memory budget does not."""
    decisive = {name: value for name, value in arguments.items() if name != "memory_bytes"}
    graph = _digest([*_array_files(files.folder), files.transition])
    return repr((SOLVE_VERSION, graph, sorted(decisive.items())))


def _digest(files: Iterable[Path]) -> str:
    """Return the 128-bit hex digest of the content of files."""
    total = xxhash.xxh3_128()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, xxhash.xxh3_128).digest())
    return total.hexdigest()


def _restart_tasks(shards: Sequence[sp.csr_array], folder: Path, key: str) -> list[RestartTask]:
    """Name input and output of each shard by its content, the graph and the arguments."""
    for name in ("restarts", "ranked"):
        (folder / name).mkdir(exist_ok=True)
    tasks = []
    for number, shard in enumerate(shards):
        digest = xxhash.xxh3_128(f"{key} {shard.shape}".encode())
        for array in (shard.indptr, shard.indices, shard.data):
            digest.update(array.tobytes())
        name = f"{digest.hexdigest()}.npz"
        tasks.append(RestartTask(number, str(folder / "restarts" / name), str(folder / "ranked" / name)))
    return tasks


def _solve_missing(
    executor: Executor,
    tasks: Sequence[RestartTask],
    shards: Sequence[sp.csr_array],
    factory: functools.partial[_Solver],
    monitor: Monitor | None,
) -> None:
    pending = {task.output: task for task in tasks if not Path(task.output).is_file()}
    rows = {task.output: 0 for task in tasks}
    for task, shard in zip(tasks, shards, strict=True):
        rows[task.output] += shard.shape[0]  # equal shards are solved once
    with (monitor or Monitor()).stage("solve", sum(rows.values()), "restarts") as advance:
        if done := sum(count for output, count in rows.items() if output not in pending):
            log.info("shards found done", stage="solve", restarts=done)
            advance(done)
        for task in pending.values():
            with atomic_write(task.input) as file:
                sp.save_npz(file, shards[task.index], compressed=False)
        executor.run(factory, list(pending.values()), lambda task: advance(rows[task.output]))


def _write_result(result: Ranked | Ranking, path: Path) -> None:
    """Write the attributes that are not ``None`` as arrays; a string becomes an array of characters."""
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    with atomic_write(path) as file:
        np.savez(file, **{name: value for name, value in values.items() if value is not None})


def _read_result(kind: type[Result], path: Path) -> Result:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise HippoIndexError(f"{path}, the result of a shard, cannot be read: {error}. Remove it") from error
    values: dict[str, Any] = {name: value if value.ndim else value.item() for name, value in found.items()}
    return kind(**values)


def _joined(kind: type[Result], parts: Sequence[Result]) -> Result:
    """Concatenate arrays that all parts have; of strings take the first that says something."""
    joined: dict[str, Any] = {}
    for field in fields(kind):
        values = [getattr(part, field.name) for part in parts]
        if all(isinstance(value, np.ndarray) for value in values):
            joined[field.name] = np.concatenate(values)
        else:
            joined[field.name] = next((v for v in values if isinstance(v, str) and v), values[0])
            if not isinstance(values[0], str):
                joined[field.name] = None
    return kind(**joined)
