"""HippoRAG as its authors' code does it, where that differs from what their papers say.

``docs/evaluation.md`` has the table of differences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hippoindex.errors import UsageError

INDEX_SETTINGS: dict[str, dict[str, Any]] = {
    "graph": {
        "ner_nodes": False,
        "weights": "hipporag",
        "normalisation": "hipporag",
        "title_weight": 0.0,
    },
    "synonyms": {"threshold": 0.8, "max_neighbors": 101, "min_alphanumerics": 3, "guard": "none"},
}
_SAME: dict[str, Any] = {
    "damping": 0.5,
    "linking": None,  # each method's own, so that an index built for one does not change the other
    "passage_nodes": None,
    "node_specificity": True,
    "synonym_edges": True,
    "walk": "ppr",
    "ties": "last",
    "ensemble_cosine": None,
}
RETRIEVE_SETTINGS: dict[str, dict[str, Any]] = {
    "hipporag1": _SAME | {"mentions": "per-fact"},
    "hipporag2": _SAME | {"passage_weight": 0.05, "fact_top_k": 5, "phrase_top_k": None},
}


def index_settings() -> list[str]:
    """Return the ``section.key=value`` settings of an index that HippoRAG's code would build."""
    return [
        f"{section}.{key}={_yaml(value)}"
        for section, keys in INDEX_SETTINGS.items()
        for key, value in keys.items()
    ]


def retrieve_settings(name: str) -> list[str]:
    """Return the ``retrieve.key=value`` settings of a version of HippoRAG.

    Raises
    ------
    UsageError
        If there is no such version.
    """
    if name not in RETRIEVE_SETTINGS:
        raise UsageError(f"There is no parity with {name!r}; there is with {', '.join(RETRIEVE_SETTINGS)}")
    settings = {"method": name, **RETRIEVE_SETTINGS[name]}
    return [f"retrieve.{key}={_yaml(value)}" for key, value in settings.items()]


def check_methods(name: str, methods: Iterable[str]) -> None:
    """Make sure that the settings of a version of HippoRAG are for the methods that are ranked by.

    Raises
    ------
    UsageError
        If a method is another walk: it would take on that version's seeds and graph, under its own name.
    """
    others = [method for method in methods if method not in ("bm25", "dense", name)]
    if others:
        raise UsageError(
            f"--parity {name} says how {name} ranks, not {', '.join(others)}; with it there are {name}, bm25 "
            "and dense"
        )


def check_index(path: object, config: Mapping[str, Any]) -> None:
    """Make sure that an index is one that HippoRAG's code would build.

    Parameters
    ----------
    path : Path or str
        Named in the message.
    config : mapping
        That of the index.

    Raises
    ------
    UsageError
        Naming each setting that differs, and the command that builds the right one.
    """
    differing = [
        f"{section}.{key} is {config.get(section, {}).get(key)!r}, not {value!r}"
        for section, keys in INDEX_SETTINGS.items()
        for key, value in keys.items()
        if config.get(section, {}).get(key) != value
    ]
    if differing:
        raise UsageError(
            f"{path} is not as HippoRAG builds it: {'; '.join(differing)}. Build it with "
            "`hippoindex index --parity`"
        )


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
