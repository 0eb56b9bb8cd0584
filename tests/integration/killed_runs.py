"""What ``test_kills.py`` runs in processes of their own, forked from one that has imported everything."""

from __future__ import annotations

import os

from hippoindex.pipeline.build import build_index
from hippoindex.pipeline.config import load_config
from hippoindex.pipeline.progress import configure_logging


def index(settings: list[str], corpus: str, output: str) -> None:
    """Index a corpus as the leader of a process group."""
    os.setsid()
    configure_logging("critical")
    build_index(load_config(overrides=settings, corpus__path=[corpus], output=output))
