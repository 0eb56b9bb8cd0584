"""The drawing of the paths to a question's passages."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

from hippoindex.pipeline.explanation_svg import MAX_PASSAGES, MAX_TEXT, explanation_svg
from hippoindex.pipeline.retrieve.explain import Explanation, GraphPath, Pair, Step

SVG = {"svg": "http://www.w3.org/2000/svg"}
LONG = "the long name of a phrase that no box has room for"


def explanation(passage_id: str, *paths: GraphPath) -> Explanation:
    terms = {"facts": 1.25, "dense": -0.5}
    return Explanation(passage_id, 0.75, terms, {"facts": 0.1}, (), paths)


def path(passage_id: str, *steps: Step) -> GraphPath:
    return GraphPath(passage_id, 0.01, (*steps, Step(passage_id, "passage", "mention")))


def test_nodes_stand_once_and_edges_join_them() -> None:
    seed = Step("a < b", "phrase", "seed: entity a < b")
    near = path("p1", seed)
    far = path(
        "p2",
        seed,
        Step(LONG, "phrase", "fact: a < b | is | long"),
        Step("c", "phrase", "synonym: cosine 0.90"),
    )
    found = Step("p1", "passage", "seed: found passage")
    root = ET.fromstring(  # noqa: S314 - our own text
        explanation_svg("Who & why?", [explanation("p1", near), explanation("p2", far, path("p2", found))])
    )
    boxes = {
        (title.text or "").split(" (seed")[0]: (float(box.attrib["x"]), float(box.attrib["y"]))
        for node in root.findall("svg:g", SVG)
        for title, box in [(node.find("svg:title", SVG), node.find("svg:rect", SVG))]
        if title is not None and box is not None
    }
    texts = [text.text for text in root.iter(f"{{{SVG['svg']}}}text")]
    assert {"a < b", LONG, "c", "p1", "p2"} == boxes.keys()
    assert f"{LONG[: MAX_TEXT - 1]}…" in texts
    assert texts.count("0.750 = +1.25 facts -0.50 dense") == 2
    assert "Who & why?" in texts
    lines = {
        (line.find("svg:title", SVG).text, float(line.attrib["x2"]), float(line.attrib["y2"]) - 10)  # type: ignore[union-attr]
        for line in root.findall("svg:line", SVG)
    }
    assert ("synonym: cosine 0.90", *boxes["c"]) in lines
    assert ("fact: a < b | is | long", *boxes[LONG]) in lines
    assert sum(by == "mention" for by, *_ in lines) == 2  # to p1, and to p2 from both of its paths


def test_what_a_pair_says_stands_below_the_score_and_fits() -> None:
    pair = Pair(0.545, ("bridge", "tamsin"), "ellwood", "ellwood bridge", ("designed",))
    alone = Pair(0.2, (), "", "", ())
    shown = [replace(explanation(name), pair=said) for name, said in (("p1", pair), ("p2", alone))]
    root = ET.fromstring(explanation_svg("?", shown))  # noqa: S314 - our own text
    texts = {text.text: float(text.attrib["x"]) for text in root.iter(f"{{{SVG['svg']}}}text")}
    said = "55% of the question: bridge, tamsin; with ellwood: designed"
    assert "20% of the question: nothing" in texts
    assert float(root.attrib["viewBox"].split()[2]) > texts[said] + 5 * len(said)


def test_passages_without_a_path_are_drawn_and_only_the_first_ones() -> None:
    root = ET.fromstring(  # noqa: S314 - our own text
        explanation_svg("?", [explanation(f"p{number}") for number in range(MAX_PASSAGES + 2)])
    )
    titles = [node.findtext("svg:title", namespaces=SVG) for node in root.findall("svg:g", SVG)]
    assert titles == [f"p{number}" for number in range(MAX_PASSAGES)]
    assert not root.findall("svg:line", SVG)
