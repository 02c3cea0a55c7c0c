"""Draws the pictures that the documents show, of what the repository holds as measured.

A document shows `pictures/NAME.svg`, where NAME is that of a picture that `cadenza bench` draws of
the results in benchmarks/results. A picture holds its figures, so a test can tell a stale one.
"""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

from test_docs import DOCUMENTS, ROOT, read

from cadenza.tools.atomic import write_whole
from cadenza.tools.bench.pictures import drawings
from cadenza.tools.bench.results import load

FOLDER = ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results"
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


def shown() -> set[str]:
    """The names of the pictures that documents show."""
    return set(re.findall(r"\(pictures/([\w.-]+)\.svg\)", "\n".join(map(read, DOCUMENTS))))


def drawable() -> dict[str, Callable[[str], bytes]]:
    """All pictures that there are of results in the repository, by name."""
    suites = [load(RESULTS, path.stem) for path in sorted(RESULTS.glob("*.json"))]
    return {name: draw for suite in suites for name, draw in drawings(suite).items()}


def figures(picture: bytes) -> dict:
    """The figures that a picture shows."""
    return json.loads(ElementTree.fromstring(picture).find(f".//{DESCRIPTION}").text)


def draw(folder: Path = FOLDER) -> list[Path]:
    """Draws what documents show, and takes away what they don't; the paths of what was drawn."""
    folder.mkdir(exist_ok=True)
    known = drawable()
    made = {folder / f"{name}.svg": known[name]("svg") for name in sorted(shown())}
    for path in set(folder.glob("*.svg")) - set(made):
        path.unlink()
    for path, content in made.items():
        write_whole(path, content)
    return list(made)
