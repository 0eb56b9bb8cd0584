"""Choosing settings on a question file without fooling oneself: a grid, by cross-validation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import xxhash
import yaml
from numpy.typing import NDArray

from hippoindex.cluster.atomic import atomic_write
from hippoindex.errors import UsageError
from hippoindex.pipeline.config import RetrieveConfig, load_config
from hippoindex.pipeline.evaluate import Gold, judged_queries
from hippoindex.pipeline.queries import Query
from hippoindex.pipeline.retrieve.engine import Retriever

log = structlog.get_logger("hippoindex")

GRID: dict[str, tuple[Any, ...]] = {
    "passage_weight": (0.02, 0.05, 0.1),
    "entity_min_cosine": (0.5, 0.6, 0.7),
    "fact_top_k": (3, 5, 10),
}
MOST_SETTINGS = 1000


def parse_grid(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Read ``retrieve.key=value,value,...`` texts.

    Raises
    ------
    UsageError
        If one is not of that form, is no setting of retrieval, or is there twice.
    """
    grid: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, separator, values = text.partition("=")
        name = key.strip().removeprefix("retrieve.")
        if not separator or not values.strip():
            raise UsageError(f"--grid {text!r}: expected retrieve.key=value,value,..., e.g. fact_top_k=3,5")
        if name not in RetrieveConfig.model_fields or name in ("method", "top_k"):
            raise UsageError(f"--grid {text!r}: {name!r} is no setting that rankings can be tuned by")
        if name in grid:
            raise UsageError(
                f"--grid {text!r}: {name} is there twice; give its values once, joined by commas"
            )
        try:
            grid[name] = tuple(yaml.safe_load(value) for value in values.split(","))
        except yaml.YAMLError as error:
            raise UsageError(f"--grid {text!r}: the values are not valid YAML, joined by commas") from error
    return grid


def tune(
    retriever: Retriever,
    queries: Sequence[Query],
    method: str,
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    metric: str = "recall@5",
    folds: int = 5,
    allow_missing: bool = False,
) -> dict[str, Any]:
    """Search a grid of settings by cross-validation.

    Each fold's questions are ranked by the setting that is best on all other folds: their mean is what the
    choice is worth on questions it has not seen. The setting that is best on all questions is returned; its
    own mean is beside it, and is the more flattering the larger the grid. Of equally good settings the one
    nearest to the retriever's own is taken.

    Parameters
    ----------
    retriever : Retriever
        Its configuration gives what the grid does not.
    queries : sequence of Query
        Those without gold passages are left out.
    method : str
    grid : mapping of str to sequence, optional
        Values of each setting of :class:`RetrieveConfig`; by default :data:`GRID`.
    metric : str
        As in an evaluation, e.g. "recall@5"; several joined by "+" are averaged.
    folds : int
    allow_missing : bool
        Whether gold passages that are not in the index are counted, as never found, instead of refused.

    Returns
    -------
    dict
        ``{"settings", "in_sample", "out_of_fold", "untuned", "chosen_by_fold", "gold_not_in_index", ...}``,
        figures in percent.

    Raises
    ------
    UsageError
        If there are fewer questions than folds, no such metric or setting, or too many settings.
    InputError
        If no question has a gold passage, or one is not in the index.
    """
    judged = judged_queries(queries)
    if not 2 <= folds <= len(judged):
        raise UsageError(f"{folds} folds of {len(judged)} questions: expected 2 or more, at most one each")
    candidates = _candidates(retriever.config, GRID if grid is None else grid)
    gold = Gold(retriever.index, judged)
    if not allow_missing:
        gold.require_found()
    batch = retriever.encode(judged)
    rows = []
    for number, (_, config) in enumerate(candidates):
        ranking = Retriever(retriever.index, config).rank(batch, method, top_k=gold.depth)
        rows.append(_metric(gold.recalls(ranking), metric))
        log.info("tuned", setting=number + 1, of=len(candidates), percent=round(100 * rows[-1].mean(), 2))
    values = np.stack(rows)  # (settings, questions)
    fold = _folds(judged, folds)
    best_without = [int(values[:, fold != f].mean(axis=1).argmax()) for f in range(folds)]
    held_out = values[np.array(best_without)[fold], np.arange(len(judged))]
    best = int(values.mean(axis=1).argmax())
    return {
        "method": method,
        "metric": metric,
        "questions": len(judged),
        "gold_not_in_index": gold.n_missing,
        "folds": folds,
        "settings_tried": len(candidates),
        "settings": candidates[best][0],
        "in_sample": round(100 * float(values[best].mean()), 2),
        "out_of_fold": round(100 * float(held_out.mean()), 2),
        "untuned": round(100 * float(_untuned(retriever, batch, method, gold, metric).mean()), 2),
        "chosen_by_fold": [candidates[number][0] for number in best_without],
    }


def write_tuned(result: Mapping[str, Any], path: Path) -> None:
    """Write the chosen settings as YAML that ``--config`` reads, the figures as its first lines."""
    head = (
        f"# {result['metric']} of {result['method']}, {result['questions']} questions, "
        f"{result['settings_tried']} settings tried:\n"
        f"# out of fold {result['out_of_fold']} ({result['folds']} folds), in sample {result['in_sample']}, "
        f"untuned {result['untuned']}.\n"
    )
    tree = {"retrieve": {"method": result["method"], **result["settings"]}}
    with atomic_write(path) as file:
        file.write((head + yaml.safe_dump(tree, sort_keys=True)).encode())


def _candidates(
    config: RetrieveConfig, grid: Mapping[str, Sequence[Any]]
) -> list[tuple[dict[str, Any], RetrieveConfig]]:
    """Return every combination, those that change the fewest settings first."""
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if not 1 <= len(combinations) <= MOST_SETTINGS:
        raise UsageError(f"The grid has {len(combinations)} settings; expected 1 to {MOST_SETTINGS}")
    combinations.sort(key=lambda c: sum(getattr(config, name) != value for name, value in c.items()))
    base = config.model_dump(mode="json")
    made = []
    for combination in combinations:
        retrieve = load_config(base={"retrieve": base | combination}).retrieve  # refuses bad values
        made.append((combination, retrieve))
    return made


def _metric(recalls: Mapping[str, NDArray[np.float64]], metric: str) -> NDArray[np.float64]:
    parts = metric.split("+")
    unknown = [part for part in parts if part not in recalls]
    if unknown:
        raise UsageError(f"There is no metric {unknown[0]!r}; there are {', '.join(recalls)}")
    return np.mean([recalls[part] for part in parts], axis=0)


def _folds(queries: Sequence[Query], folds: int) -> NDArray[np.int64]:
    """Return the fold of each question, by the order of the hashes of their ids."""
    order = np.argsort(
        [xxhash.xxh3_64_intdigest(query.query_id.encode()) for query in queries], kind="stable"
    )
    fold = np.empty(len(queries), dtype=np.int64)
    fold[order] = np.arange(len(queries)) % folds
    return fold


def _untuned(retriever: Retriever, batch: Any, method: str, gold: Gold, metric: str) -> NDArray[np.float64]:
    return _metric(gold.recalls(retriever.rank(batch, method, top_k=gold.depth)), metric)
