"""Which weights of pairs of passages and of the dense score do other questions choose?

Ranks the questions of all cases of readme_table.py by every setting of a grid. The figure that is maximised
is the mean of R@2 and R@5, every case counting alike. Choices are made on four fifths of the questions and
judged by the rest, and on all data sets but one and judged by that one. Indexes are built where --work has
none.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from common import ROOT, data_folder, write_record
from numpy.typing import NDArray
from readme_table import CASES, Case
from reproduce import index_of

from hippoindex.pipeline.answer import open_retriever, read_gold
from hippoindex.pipeline.evaluate import Gold, judged_queries
from hippoindex.pipeline.retrieve.engine import Retriever

METRICS = ("recall@2", "recall@5", "recall@10")
CHOSEN_BY = ("recall@2", "recall@5")
FOLDS = 5
WEIGHTS, EXPONENTS, DENSE = (9, 12, 18, 24), (1, 2, 3, 4), (6, 8, 10, 12)
BEFORE = {"pair_weight": 0, "pair_exponent": 3, "dense_weight": 12}
SETTINGS = [
    BEFORE,
    *(
        {"pair_weight": weight, "pair_exponent": exponent, "dense_weight": dense}
        for weight, exponent, dense in itertools.product(WEIGHTS, EXPONENTS, DENSE)
    ),
]

Recalls = Mapping[str, NDArray[np.float64]]
"""By case, percent: shape (settings, questions, metrics)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "reproduce", help="where indexes are")
    arguments = parser.parse_args()
    recalls: dict[str, NDArray[np.float64]] = {}
    folds: dict[str, NDArray[np.int64]] = {}
    for case in CASES:
        recalls[case.name], folds[case.name] = ranked(case, arguments.work)
    result = {
        "settings": [text(setting) for setting in SETTINGS],
        "in_sample": [round(value, 2) for value in figure(recalls)],
        "before": means({name: values[0] for name, values in recalls.items()}),
        "out_of_fold": out_of_fold(recalls, folds),
        "held_out": {data: held_out(recalls, data) for data in dict.fromkeys(case.data for case in CASES)},
    }
    print(markdown(result))
    print("record:", write_record("pair_weights", result))


def text(setting: Mapping[str, float]) -> str:
    if not setting["pair_weight"]:
        return f"no pairs, dense {setting['dense_weight']:g}"
    return "pairs {pair_weight:g} h^{pair_exponent:g}, dense {dense_weight:g}".format(**setting)


def ranked(case: Case, work: Path) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the recalls of every setting on a case, and the fold of each question, by its id."""
    plain = open_retriever(index_of(case, work))
    asked = judged_queries(read_gold(plain.index, data_folder() / case.data / "queries.jsonl").queries)
    gold, batch = Gold(plain.index, asked), plain.encode(asked)
    rows = []
    for setting in SETTINGS:
        config = plain.config.model_copy(update=setting)
        recalls = gold.recalls(Retriever(plain.index, config).rank(batch, "hippoindex", top_k=gold.depth))
        rows.append(np.stack([100 * recalls[metric] for metric in METRICS], axis=1))
    fold = [xxhash.xxh3_64_intdigest(query.query_id.encode()) % FOLDS for query in asked]
    return np.stack(rows), np.array(fold)


def figure(recalls: Recalls) -> NDArray[np.float64]:
    """Return what is maximised, shape (settings,)."""
    columns = [METRICS.index(metric) for metric in CHOSEN_BY]
    return np.mean([values[:, :, columns].mean(axis=(1, 2)) for values in recalls.values()], axis=0)


def out_of_fold(recalls: Recalls, folds: Mapping[str, NDArray[np.int64]]) -> dict[str, Any]:
    """Return the setting chosen without each fold, and the recalls of every fold by that setting."""
    chosen = []
    judged = {name: np.zeros_like(values[0]) for name, values in recalls.items()}
    for fold in range(FOLDS):
        others = {name: values[:, folds[name] != fold] for name, values in recalls.items()}
        best = int(np.argmax(figure(others)))
        chosen.append(text(SETTINGS[best]))
        for name, values in recalls.items():
            of_fold = folds[name] == fold
            judged[name][of_fold] = values[best][of_fold]
    return {"chosen": chosen, **means(judged)}


def held_out(recalls: Recalls, data: str) -> dict[str, Any]:
    """Return the setting chosen without the cases of a data set, and their recalls by it."""
    apart = [case.name for case in CASES if case.data == data]
    best = int(np.argmax(figure({name: values for name, values in recalls.items() if name not in apart})))
    return {"chosen": text(SETTINGS[best]), **means({name: recalls[name][best] for name in apart})}


def means(judged: Mapping[str, NDArray[np.float64]]) -> dict[str, list[float]]:
    return {name: [round(float(mean), 2) for mean in values.mean(axis=0)] for name, values in judged.items()}


def markdown(result: Mapping[str, Any]) -> str:
    names = [case.name for case in CASES]
    lines = [f"| | chosen | {' | '.join(names)} |", "|---|---|" + "--:|" * len(names)]

    def add(label: str, chosen: str, figures: Mapping[str, Sequence[float]]) -> None:
        cells = [
            " / ".join(f"{mean:.1f}" for mean in figures[name]) if name in figures else "" for name in names
        ]
        lines.append(f"| {label} | {chosen} | {' | '.join(cells)} |")

    add("before", text(BEFORE), result["before"])
    add("out of fold", "; ".join(result["out_of_fold"]["chosen"]), result["out_of_fold"])
    for data, row in result["held_out"].items():
        add(f"without {data}", row["chosen"], row)
    order = np.argsort(-np.array(result["in_sample"]), kind="stable")[:12]
    best = [f"{result['settings'][number]}: {result['in_sample'][number]:.2f}" for number in order]
    return "\n".join([*lines, "", "in sample: " + "; ".join(best)])


if __name__ == "__main__":
    main()
