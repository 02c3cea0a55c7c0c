"""Rewrites what documents show of the code: `python tests/rewrite_docs.py [document ...]`.

Each ```text block that directly follows a Python block becomes what that block prints; the pages in
PAGES are made anew of the compiler's tables and the tests' cases; and pictures are drawn anew of
what was measured, those that the documents show. Look at the difference before keeping it: a wrong
output is rewritten as well as a right one.
"""

import sys
from collections.abc import Callable

import errors_page
import reference_page
from doc_pictures import draw
from test_docs import DOCUMENTS, ROOT, blocks, read, run_block

PAGES: dict[str, Callable[[], str]] = {
    reference_page.PATH: reference_page.page,
    errors_page.PATH: errors_page.page,
}


def rewritten(path: str, text: str) -> str:
    """The document with fresh outputs. Raises ValueError, naming the line, where code fails."""
    lines, namespace, printed, before = text.splitlines(), {"__name__": path}, "", ""
    replaced = []
    for block in blocks(text):
        if block.language == "python":
            printed, problems = run_block(path, block, namespace)
            if problems:
                raise ValueError("\n".join(problems))
        elif block.language == "text" and block.follows and before == "python":
            replaced.append((block.line - 1, block.text.count("\n"), printed.rstrip().splitlines()))
        before = block.language
    for first, length, new in reversed(replaced):
        lines[first : first + length] = new
    return "\n".join(lines) + "\n"


def fresh(path: str, old: str) -> str:
    """What a document should be: a page that is made, or its text with fresh outputs."""
    return PAGES[path]() if path in PAGES else rewritten(path, old)


def main(paths: list[str]) -> int:
    """Rewrites these documents, or all with their pictures; returns how many failed."""
    failed = 0
    for path in paths or sorted({*DOCUMENTS, *PAGES}):
        old = read(path) if (ROOT / path).exists() else ""
        try:
            new = fresh(path, old)
        except ValueError as error:
            failed += 1
            print(error)
            continue
        (ROOT / path).write_text(new, encoding="utf-8")
        print(f"{path}: {'rewritten' if new != old else 'as it was'}")
    for picture in [] if paths else draw():
        print(f"{picture.relative_to(ROOT)}: drawn")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
