"""The documentation as a site: built whole, without a warning, loading nothing from elsewhere.

The build runs in a process that may connect to nothing. Each checker is also given a page that is
wrong.
"""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from site_links import on_page_markdown

pytest.importorskip("mkdocs", reason="needs mkdocs, of the extra docs")
import yaml

ROOT = Path(__file__).resolve().parent.parent
OFFLINE = """
import sys
def refuse(event, _):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise RuntimeError(f"the build asks for {event}")
sys.addaudithook(refuse)
from mkdocs.__main__ import cli
cli()
"""
LOADING = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src",
           "video": "src", "audio": "src", "object": "data", "embed": "src"}  # fmt: skip


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site of a folder that has a mkdocs.yml."""
    command = [sys.executable, "-c", OFFLINE, "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built."""
    folder = tmp_path_factory.mktemp("site") / "out"
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


class Loaded(HTMLParser):
    """What a page makes a browser load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.places: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.places += [value or "" for name, value in attrs if name == LOADING.get(tag)]


def from_elsewhere(name: str, text: str) -> list[str]:
    """What a page or a style sheet loads from another host."""
    places = Loaded(text).places if name.endswith(".html") else []
    places += re.findall(r"url\(\s*['\"]?([^'\")]+)", text)
    places += re.findall(r"@import\s+['\"]([^'\"]+)", text)
    return [f"{name}: {place}" for place in places if re.match(r"\s*(https?:)?//", place)]


def navigation(entries: list) -> list[str]:
    """The pages of a navigation, in order."""
    values = [value for entry in entries for value in entry.values()]
    return [page for v in values for page in (navigation(v) if isinstance(v, list) else [v])]


def test_nothing_in_docs_is_missing_from_the_navigation():
    pages = navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    there = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert there - set(pages) == set(), "add it to nav in mkdocs.yml"
    assert len(pages) == len(set(pages))
    assert set(pages) <= there


def test_a_build_that_connects_would_fail():
    code = (
        OFFLINE.partition("from mkdocs")[0] + "import socket; socket.create_connection(('::1', 9))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "the build asks for socket." in done.stderr


@pytest.mark.slow
def test_every_page_is_built(site):
    built = {path.name for path in site.glob("*.html")}
    assert {path.stem + ".html" for path in ROOT.glob("docs/*.md")} <= built
    assert (site / "index.html").read_text(encoding="utf-8").count("norm_swiglu") >= 3


def test_pages_load_nothing_from_elsewhere(site):
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    texts = {path.relative_to(site).as_posix(): path.read_text("utf-8") for path in files}
    assert [place for name, text in texts.items() for place in from_elsewhere(name, text)] == []
    assert any("theme.css" in place for place in Loaded(texts["index.html"]).places)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<link rel="stylesheet" href="https://a.org/b.css">'),
        ("a.html", '<script src="//a.org/b.js"></script>'),
        ("a.html", '<p><img alt="" src="http://a.org/b.png"></p>'),
        ("a.html", "<style>@font-face { src: url('https://a.org/b.woff') }</style>"),
        ("a.css", '@import "https://a.org/b.css";'),
    ],
)
def test_what_is_loaded_from_elsewhere_is_caught(name, text):
    (found,) = from_elsewhere(name, text)
    assert "//a.org/b" in found
    assert from_elsewhere(name, re.sub(r"(https?:)?//a.org/", "a/", text)) == []


def test_a_link_to_a_page_is_none_that_loads():
    assert from_elsewhere("a.html", '<a href="https://a.org">a</a>') == []


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("[a](nowhere.md)", "nowhere.md"),
        ("[a](#no-such)", "no-such"),
        ("![a](pictures/none.svg)", "none.svg"),
    ],
)
def test_a_broken_link_fails_the_build(tmp_path, page, said):
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    settings |= {"nav": [{"Start": "index.md"}], "hooks": [], "extra_css": []}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# T\n\n{page}\n")
    done = build(tmp_path, tmp_path / "out")
    assert done.returncode != 0
    assert said in done.stderr


def test_links_out_of_the_documents_lose_their_link_and_bars_their_backslash():
    text = "[`core/ir`](../cadenza/core/ir.py) and [b](b.md)\n\n| `a \\| <b>` | `c` |\n`d \\| e`"
    assert on_page_markdown(text, page=None) == (
        "`core/ir` and [b](b.md)\n\n| <code>a &#124; &lt;b&gt;</code> | `c` |\n`d \\| e`"
    )
