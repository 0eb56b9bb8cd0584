"""Synonym edges: which phrases are joined, by which method, and how many of the pairs that exist were found.

Vectors without a direction are set aside with their phrases, which then have no synonym edge. Every run
measures the recall of its join on a sample; the manifest holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import structlog
from numpy.typing import NDArray

from hippoindex.kernels import simjoin
from hippoindex.kernels.simjoin import JoinResult, KeptLists, Pairs
from hippoindex.pipeline import schemas
from hippoindex.pipeline.artifact import LIST_ARRAYS, Index
from hippoindex.pipeline.config import SynonymsConfig
from hippoindex.pipeline.names_guard import guard
from hippoindex.pipeline.normalise import count_alphanumerics
from hippoindex.pipeline.progress import Advance
from hippoindex.pipeline.stage import quarantine_table

log = structlog.get_logger("hippoindex")

VERSION = 1
SEED = 0
DECIMALS = 6
IN_MANIFEST = ("lists", "probes", "sample_pairs")
"""What a join tells about itself that does not depend on the machine's speed."""


@dataclass(frozen=True, eq=False)
class Synonyms:
    """Synonym edges of phrases.

    Attributes
    ----------
    pairs : Pairs
        Of phrase rows.
    report : dict
        What the manifest says of the stage: version, method, measured recall, and what was set aside.
    effort : dict
        What depends on the machine: seconds expected and taken.
    quarantine : pyarrow.Table
        Phrases whose vectors cannot be compared, ``schemas.QUARANTINE``.
    lists : KeptLists or None
        What the next append takes.
    """

    pairs: Pairs
    report: dict[str, Any]
    effort: dict[str, Any]
    quarantine: pa.Table
    lists: KeptLists | None


@dataclass(frozen=True, eq=False)
class Known:
    """What of a join is known.

    Attributes
    ----------
    pairs : Pairs
        Pairs of rows that are not new, with the same threshold and cap.
    new : ndarray of bool, shape (phrases,)
        Rows to join with all.
    lists : KeptLists or None
        Of the rows that are not new.
    """

    pairs: Pairs
    new: NDArray[np.bool_]
    lists: KeptLists | None = None


def known_pairs(index: Index, phrases: pa.Table, config: SynonymsConfig) -> Known | None:
    """Return the synonym edges of an index between phrases that are still there.

    A phrase that lost an edge and had as many as ``max_neighbors`` allows may have others instead: it is new.

    Parameters
    ----------
    index : Index
        Made with the same configuration.
    phrases : pyarrow.Table
        ``schemas.PHRASE``.
    config : SynonymsConfig

    Returns
    -------
    Known or None
        ``None`` with a guard: what it rejected took part in the cap and is not in the index.
    """
    if config.guard != "none":
        return None
    ids, held = phrases["phrase_id"].to_numpy(), index.phrases["phrase_id"].to_numpy()
    first, second = (index.synonyms[name].to_numpy() for name in ("phrase_id", "other_id"))
    kept = np.isin(first, ids) & np.isin(second, ids)
    edges = np.searchsorted(held, np.concatenate([first, second]))
    lost = np.searchsorted(held, np.concatenate([first[~kept], second[~kept]]))
    full = np.bincount(edges, minlength=len(held)) >= config.max_neighbors
    full &= np.bincount(lost, minlength=len(held)) > 0
    new = ~np.isin(ids, held) | np.isin(ids, held[full])
    left, right = (np.searchsorted(ids, end[kept]).astype(np.int64) for end in (first, second))
    pairs = Pairs(left, right, index.synonyms["cosine"].to_numpy()[kept])
    lists, stay = index.synonym_lists, np.isin(held, ids) & ~full
    if lists is not None:
        lists = replace(lists, owner=lists.owner[stay], sketches=lists.sketches[stay]).placed(new)
    return Known(pairs, new, lists)


def find_synonyms(
    file: Path, phrases: pa.Table, config: SynonymsConfig, advance: Advance, known: Known | None = None
) -> Synonyms:
    """Join the phrases of an index.

    Parameters
    ----------
    file : Path
        ``.npy`` with the vectors of the phrases, shape (phrases, dimension). Rows that are not finite are
        set to zero in it: retrieval multiplies with all of them.
    phrases : pyarrow.Table
        ``schemas.PHRASE``, row by row the phrases of the vectors.
    config : SynonymsConfig
    advance : callable
        Called with the number of phrases that are done.
    known : Known, optional

    Returns
    -------
    Synonyms

    Raises
    ------
    KernelError
        If the method cannot run on this machine; the message says what is missing.
    """
    texts = phrases["phrase"].to_pylist()
    vectors = np.load(file, mmap_mode="r", allow_pickle=False)
    unusable = simjoin.unusable_rows(vectors)
    if unusable:
        _clear(file, [row for row, reason in unusable.items() if reason != "zero"])
        log.warning("phrases without a usable vector", phrases=len(unusable), first=texts[min(unusable)])
    rows = np.delete(np.arange(len(texts)), list(unusable))
    usable, changed = simjoin.normalised(vectors[rows] if unusable else vectors)
    joined = _join(
        usable, [texts[row] for row in rows.tolist()], config, advance, _among(rows, known, len(texts))
    )
    pairs = Pairs(rows[joined.pairs.first], rows[joined.pairs.second], joined.pairs.cosine)
    allowed = _allowed(pairs, texts, config)
    recall = {
        name: round(value, DECIMALS) if isinstance(value, float) else value
        for name, value in asdict(joined.recall).items()
    }
    report = {
        "version": VERSION,
        "method": joined.method,
        "recall": recall,
        **{name: joined.details[name] for name in IN_MANIFEST if name in joined.details},
        "vectors_normalised": changed,
        "vectors_unusable": len(unusable),
        "rejected_by_guard": int(np.sum(~allowed)),
    }
    effort = {
        "method": joined.method,
        "estimate_s": None if joined.estimate_s is None else round(joined.estimate_s, 3),
        "seconds_s": round(joined.seconds_s, 3),
        **{name: value for name, value in joined.details.items() if name not in IN_MANIFEST},
    }
    kept = Pairs(pairs.first[allowed], pairs.second[allowed], pairs.cosine[allowed])
    lists = None if unusable else joined.lists  # they know usable rows alone
    if lists is not None:
        report["kept_lists"] = {
            field.name: getattr(lists, field.name) for field in fields(lists) if field.name not in LIST_ARRAYS
        }
    made = Synonyms(kept, report, effort, _quarantine(unusable, phrases), lists)
    if (shortfall := recall_shortfall(report, config)) is not None:
        log.warning(shortfall)
    return made


def recall_shortfall(report: Mapping[str, Any], config: SynonymsConfig) -> str | None:
    """Say by how much the measured recall is below the target, and what to do; ``None`` if it is not.

    Parameters
    ----------
    report : mapping
        Of :class:`Synonyms`, or the manifest's entry of the stage.
    config : SynonymsConfig

    Returns
    -------
    str or None
    """
    recall = report["recall"]
    if recall["estimate"] >= config.target_recall:
        return None
    return (
        f"only {recall_text(report)} of the synonym pairs were found; synonyms.target_recall is "
        f"{config.target_recall:.1%}. Ask for more than you need, or set synonyms.method=exact"
    )


def recall_text(report: Mapping[str, Any]) -> str:
    """Say what share of the synonym pairs a join found, with its 95 % interval and the size of the sample.

    Parameters
    ----------
    report : mapping
        Of :class:`Synonyms`, or the manifest's entry of the stage.

    Returns
    -------
    str
    """
    recall = report["recall"]
    if not recall["pairs"]:
        return "an unknown share (there are no pairs in the sample)"
    interval = f"{recall['estimate']:.1%} [{recall['low']:.1%}, {recall['high']:.1%}]"
    return f"{interval} ({recall['hard_estimate']:.1%} near the threshold, {recall['pairs']:,} pairs sampled)"


def _among(rows: NDArray[np.int64], known: Known | None, n_phrases: int) -> Known | None:
    """Give what is known the numbers of usable rows; a row that became unusable has no pairs any more."""
    if known is None or len(rows) == n_phrases:
        return known
    place = np.full(n_phrases, -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    first, second = place[known.pairs.first], place[known.pairs.second]
    kept = (first >= 0) & (second >= 0)
    return Known(Pairs(first[kept], second[kept], known.pairs.cosine[kept]), known.new[rows])


def _join(
    vectors: NDArray[np.floating],
    texts: Sequence[str],
    config: SynonymsConfig,
    advance: Advance,
    known: Known | None,
) -> JoinResult:
    searches = np.array([count_alphanumerics(text) >= config.min_alphanumerics for text in texts], bool)
    done = 0.0

    def on_progress(share: float) -> None:
        nonlocal done
        advance((share - done) * len(texts))
        done = share

    return simjoin.join(
        vectors,
        config.threshold,
        config.max_neighbors,
        searches,
        method=config.method,
        target_recall=config.target_recall,
        known=None if known is None else known.pairs,
        new=None if known is None else known.new,
        lists=None if known is None else known.lists,
        sample=config.recall_sample if known is None else None,
        seed=SEED,
        memory_bytes=config.memory_bytes,
        on_progress=on_progress,
    )


def _allowed(pairs: Pairs, texts: Sequence[str], config: SynonymsConfig) -> NDArray[np.bool_]:
    if config.guard == "none":
        return np.ones(len(pairs.first), dtype=bool)
    first, second = ([texts[row] for row in end.tolist()] for end in (pairs.first, pairs.second))
    return guard(first, second)


def _clear(file: Path, rows: list[int]) -> None:
    if rows:
        stored = np.load(file, mmap_mode="r+", allow_pickle=False)
        stored[rows] = 0
        stored.flush()


def _quarantine(unusable: Iterable[int], phrases: pa.Table) -> pa.Table:
    ids, texts = phrases["phrase_id"], phrases["phrase"]
    return quarantine_table(
        schemas.quarantine_row(
            "synonyms",
            str(ids[row].as_py()),
            "the vector is zero or not finite: the phrase has no synonym edge",
            texts[row].as_py(),
            kind="phrase",
        )
        for row in unusable
    )
