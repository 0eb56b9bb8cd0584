"""Which phrase is the title of a passage."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hippoindex.pipeline.normalise import clean_title, normaliser, phrase_id


def title_rows(
    passages: pa.Table, phrases: pa.Table, normalisation: Literal["unicode", "hipporag"]
) -> NDArray[np.int64]:
    """Return the phrase rows by which each passage's title may be called.

    Parameters
    ----------
    passages : pyarrow.Table
        With ``title``.
    phrases : pyarrow.Table
        With ``phrase_id``, sorted by it.
    normalisation : {"unicode", "hipporag"}

    Returns
    -------
    ndarray of int64, shape (passages, 2)
        The title as it is, and without a qualifier in brackets at its end; -1 where that is no phrase.
    """
    normalise = normaliser(normalisation)
    wanted = np.zeros((passages.num_rows, 2), np.uint64)
    named = np.zeros(wanted.shape, bool)
    row = 0
    for batch in passages.select(["title"]).to_batches():
        for title in batch["title"].to_pylist():
            for column, text in enumerate((title, clean_title(title))):
                if phrase := normalise(text):
                    wanted[row, column], named[row, column] = phrase_id(phrase), True
            row += 1
    ids = phrases["phrase_id"].to_numpy()
    if not len(ids):
        return np.full(wanted.shape, -1)
    rows = np.searchsorted(ids, wanted).clip(max=len(ids) - 1)
    return np.where(named & (ids[rows] == wanted), rows, -1).astype(np.int64)
