"""The page of an audit in a browser without a screen: nothing fails, nothing overflows, all shows.

Each width and colour scheme is one run of Chromium. The page stands in a frame of that width, since
windows have a least one; a script, put in by the test, measures it and tells what is around it.
"""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from audited import predicted, subject

from cadenza.tools.audit.options import AuditOptions
from cadenza.tools.audit.page import WIDTHS, page
from cadenza.tools.audit.report import Report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
VOID = ("meta", "link", "br", "input")
MEASURE = """
<script>
addEventListener("load", () => {
  const seen = [...document.querySelectorAll("svg")].filter((s) => s.getBoundingClientRect().width);
  parent.postMessage({
    window: innerWidth, page: document.documentElement.scrollWidth,
    pictures: seen.map((s) => [s.getBoundingClientRect().width, s.getBoundingClientRect().height]),
    paper: getComputedStyle(document.body).backgroundColor,
    escaping: seen.flatMap((s) => [...s.querySelectorAll("text")].filter((t) => {
      const a = t.getBoundingClientRect(), b = s.getBoundingClientRect();
      return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1;
    }).map((t) => t.textContent)),
  }, "*");
});
</script>
"""
FRAME = """<!doctype html><meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<script>addEventListener("message", (event) => {
  const out = document.createElement("pre");
  out.id = "measured"; out.textContent = JSON.stringify(event.data); document.body.append(out);
});</script>
<body><iframe src="page.html" width="WIDTH" height="900" style="border: 0"></iframe></body>
"""


@pytest.fixture(scope="module")
def report():
    """A report with everything on its page: hours, money, and what was measured of two variants."""
    name = "a <small> & long/path/to/a/model/that/has/no/place/to/break/on/a/telephone"
    share = {"ms": 1.5, "classes": {"products": 1.0, "memory": 0.5}}
    measured = [
        {"variant": "compiled", "device": "H", "layers": 3, "predicted": share, "measured": share,
         "quartiles": [1.4, 1.5, 1.6]},
        {"variant": "cadenza", "device": "H", "layers": 3, "failed": "RuntimeError: <no>"},
    ]  # fmt: skip
    options = AuditOptions(hours=1e5, price=2.5)
    return Report(name, subject().about(), predicted(), options, measured)


@pytest.fixture(scope="module")
def browser():
    """The browser's command."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    return found


def measured(browser, text, folder, width, dark=False):
    """What a page measures in a window of a width, and what the browser complains about."""
    (folder / "page.html").write_text(text.replace("</body>", f"{MEASURE}</body>"), "utf-8")
    frame = folder / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)), "utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}",
         "--window-size=1400,950", "--virtual-time-budget=5000", *scheme, "--dump-dom",
         frame.as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    numbers = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout)
    assert numbers, done.stdout[-500:]
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(numbers[1].replace("&lt;", "<").replace("&amp;", "&")), complaints


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)])
@pytest.mark.slow
def test_the_page_fits_and_shows_everything(report, browser, tmp_path, width, dark):
    found, complaints = measured(browser, page(report), tmp_path, width, dark)
    assert complaints == []
    assert found["window"] == width
    assert found["page"] <= width
    assert len(found["pictures"]) == 3
    assert all(min(size) > 100 for size in found["pictures"])
    assert found["escaping"] == []
    assert (found["paper"] == "rgb(255, 255, 255)") is not dark


def test_the_browser_notices_what_is_wrong(report, browser, tmp_path):
    wide = '<div style="width: 2000px">wide</div><script>nothing()</script></main>'
    found, complaints = measured(browser, page(report).replace("</main>", wide), tmp_path, 390)
    assert found["page"] > 390
    assert any("nothing is not defined" in line for line in complaints)


class Balanced(HTMLParser):
    """Notices elements that are closed in another order than they were opened in."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses = [], []

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_stands_alone(report):
    text = page(report)
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert parser.addresses == ["data:,"]
    assert "url(" not in text
    assert "a &lt;small&gt; &amp; long" in text
    assert "RuntimeError: &lt;no&gt;" in text
    assert text.count("<svg") == 3 * len(WIDTHS)


def test_a_page_of_a_model_without_layers_or_cadenza(report):
    parts = [part for part in report.prediction.variants["eager"] if not part.is_layer]
    alone = type(report.prediction)(report.prediction.rates, {"eager": parts}, {"cadenza": "why"})
    text = page(Report("a", [], alone, AuditOptions()))
    assert text.count("<svg") == len(WIDTHS)
    assert "no cadenza: why" in text
