"""Rewriting documents: outputs become what code prints, everything else stays."""

import pytest
from rewrite_docs import rewritten
from test_docs import DOCUMENTS, broken_blocks, read

STALE = "# T\n\n```python\nfor x in 1, 2, 3:\n    print(x)\n```\n\n```text\nold\n```\n\nWords.\n"


def test_outputs_become_what_code_prints():
    fresh = rewritten("a.md", STALE)
    assert fresh == STALE.replace("old\n", "1\n2\n3\n")
    assert broken_blocks("a.md", fresh) == []
    assert rewritten("a.md", fresh) == fresh


def test_several_outputs_and_an_empty_one():
    twice = STALE + STALE.replace("old\n", "").replace("3:", "len(str(x)) + 4:")
    assert rewritten("a.md", twice).count("1\n2\n") == 2


def test_text_that_follows_no_code_stays():
    text = STALE.replace("```text", "Words.\n\n```text")
    assert rewritten("a.md", text) == text


def test_code_that_fails_is_named_and_nothing_is_written():
    with pytest.raises(ValueError, match=r"a\.md:5: NameError"):
        rewritten("a.md", STALE.replace("print(x)", "print(y)"))


@pytest.mark.parametrize("path", ["README.md", "docs/how-it-works.md"])
def test_documents_are_as_they_would_be_written(path):
    assert path in DOCUMENTS
    assert rewritten(path, read(path)) == read(path)
