"""What the site changes in pages. MkDocs calls the function below, as mkdocs.yml says.

Links that leave docs/ lead to files that the site doesn't hold: their words stay, without the link
(in a checkout they work, and a test follows them). And a bar inside of code inside of a table is
escaped, as GitHub reads it; Python-Markdown would show the backslash.
"""

import html
import re
from typing import Any

LEAVING = re.compile(r"\[([^\]]+)\]\(\.\./[^)\s]+\)")
CODE_WITH_BAR = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page's text for the site."""
    lines = LEAVING.sub(r"\1", markdown).splitlines()
    return "\n".join(_row(line) if line.startswith("|") else line for line in lines)


def _row(line: str) -> str:
    return CODE_WITH_BAR.sub(lambda code: f"<code>{_bars(code[1])}</code>", line)


def _bars(code: str) -> str:
    return html.escape(code.replace("\\|", "|")).replace("|", "&#124;")
