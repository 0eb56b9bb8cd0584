"""``graphml``: the graph with the names of its nodes, for igraph, networkx, Gephi or Cytoscape."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.export.walk import EdgeBlock, edges
from hippoindex.pipeline.progress import Advance

HEAD = """<?xml version="1.0" encoding="UTF-8"?>
<graphml xmlns="http://graphml.graphdrawing.org/xmlns">
<key id="kind" for="node" attr.name="kind" attr.type="string"/>
<key id="label" for="node" attr.name="label" attr.type="string"/>
<key id="phrase_id" for="node" attr.name="phrase_id" attr.type="string"/>
<key id="passage_id" for="node" attr.name="passage_id" attr.type="string"/>
<key id="weight" for="edge" attr.name="weight" attr.type="double"/>
<key id="edge_kind" for="edge" attr.name="kind" attr.type="string"/>
<graph edgedefault="undirected">
"""
TAIL = "</graph>\n</graphml>\n"
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write(index: Index, file: BinaryIO, advance: Advance) -> None:
    """Write node ``nI`` for node number I, its kind, label and id, and every edge once with weight and kind.

    The label is the phrase or the passage's title. Characters that XML cannot hold become U+FFFD.
    """
    file.write(HEAD.encode())
    number = 0
    for table, id_column, label_column in (
        ("phrases", "phrase_id", "phrase"),
        ("passages", "passage_id", "title"),
    ):
        for batch in index.reader.batches(table, [id_column, label_column]):
            nodes = []
            for row in batch.to_pylist():
                data = {
                    "kind": table.removesuffix("s"),
                    "label": row[label_column],
                    id_column: row[id_column],
                }
                nodes.append(_node(number, data))
                number += 1
            file.write("".join(nodes).encode())
            advance(batch.num_rows)
    for block in edges(index):
        file.write("".join(_edges(block).to_pylist()).encode())
        advance(len(block.source))
    file.write(TAIL.encode())


def _node(number: int, data: Mapping[str, object]) -> str:
    values = "".join(f'<data key="{key}">{_text(str(value))}</data>' for key, value in data.items())
    return f'<node id="n{number}">{values}</node>\n'


def _text(value: str) -> str:
    return html.escape(_NO_XML.sub("\ufffd", value), quote=False).replace("\r", "&#13;")


def _edges(block: EdgeBlock) -> pa.StringArray:
    source, target, weight = (pa.array(values).cast(pa.string()) for values in block[:3])
    parts = ['<edge source="n', source, '" target="n', target, '"><data key="weight">', weight]
    parts += ['</data><data key="edge_kind">', block.kinds(), "</data></edge>\n"]
    return pc.binary_join_element_wise(*parts, "")
