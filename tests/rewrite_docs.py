"""Rewrites what the documents show as printed: `python tests/rewrite_docs.py [document ...]`.

Each ```text block that directly follows a Python block becomes what that block prints. Look at the
difference before keeping it: a wrong output is rewritten as well as a right one.
"""

import sys

from test_docs import DOCUMENTS, ROOT, blocks, read, run_block


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


def main(paths: list[str]) -> int:
    """Rewrites these documents, or all; returns how many failed."""
    failed = 0
    for path in paths or DOCUMENTS:
        old = read(path)
        try:
            new = rewritten(path, old)
        except ValueError as error:
            failed += 1
            print(error)
            continue
        (ROOT / path).write_text(new, encoding="utf-8")
        print(f"{path}: {'rewritten' if new != old else 'as it was'}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
