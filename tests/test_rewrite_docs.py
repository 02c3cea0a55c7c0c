"""What documents show of the code: outputs, pages made of tables and cases, pictures of results."""

import ast
import json
import math
import re
import sys
from pathlib import Path

import errors_page
import pytest
import reference_page
from doc_pictures import FOLDER, draw, drawable, figures, shown
from rewrite_docs import PAGES, rewritten
from test_docs import DOCUMENTS, ROOT, broken_blocks, read, table_rows

from cadenza.core import lang
from cadenza.core.errors import CadenzaError
from cadenza.core.ops import Op, Type
from cadenza.tools.bench.pictures import LABELLED
from cadenza.tools.bench.results import Results, cases, load, ratio
from cadenza.tools.bench.tables import error_ratio

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


# --- the reference --------------------------------------------------------------------------------

WRITE = "python tests/rewrite_docs.py writes it anew: look at the difference"


def test_the_reference_is_as_it_would_be_made():
    assert read(reference_page.PATH) == PAGES[reference_page.PATH](), WRITE


def test_every_operation_and_every_function_has_an_entry():
    lines = read(reference_page.PATH).splitlines()
    headings = {line.strip("#` ") for line in lines if line.startswith("###")}
    assert {op.label for op in Op} | set(lang.__all__) <= headings


@pytest.mark.parametrize(
    ("op", "types", "table"),
    [
        (Op.SQRT, "x `[M, N]` → `[M, N]`", "x: `g / (2.0 * y)`"),
        (Op.SPLIT, "x `[M, N]` → `[M, N/2]`, with part, inner", "x: `join(g, constant("),
        (Op.GROUP_SUM, "x `[M, N]` → `[M, N/size]`, with size", "x: `repeat(g, times=4)`"),
        (Op.LOGSUMEXP, "x `[M, N]`, shift `[M, 1]` → `[M, 1]`", "; shift: `-g`"),
        (Op.MATMUL, "a `[M, K]`, b `[K, N]` → `[M, N]`, with", "a: `g @ b.T`; b: `a.T @ g`"),
        (Op.COMPARE, "a `[M, N]`, b `[M, N]` → `[M, N]`, boolean, with relation", None),
    ],
)
def test_an_entry_says_what_the_tables_do(op, types, table):
    assert reference_page.types(op).startswith(types)
    found = reference_page.derivatives(op, "words")
    assert table is None if not found else table in found[0]


def test_a_size_without_a_name_is_no_formula():
    with pytest.raises(KeyError):
        reference_page.formula(Type("M", 1000))


def measured(pattern: str, times: dict[str, list[float]]) -> list[dict]:
    about = {"device": "NVIDIA H200", "size": "16384x4096x4096", "dtype": "bf16", "run": "one"}
    about |= {"mode": "sustained", "pattern": pattern}
    return [{**about, "variant": name, "samples": time} for name, time in times.items()]


def test_costs_are_told_where_they_were_measured_and_nowhere_else():
    records = measured("square-sum", {"ours": [103.0, 206.0], "products": [100.0, 200.0]})
    records += measured("square-sum+bias", {"ours": [150.0], "products": [100.0]})
    records += measured("column-sum", {"ours": [150.0]})
    found = dict(reference_page.measured(Results("primitives", {"one": {}}, records)))
    assert list(found) == ["row_sum"]
    assert (
        "+3.0 % over the product alone (16384x4096x4096, bf16, sustained, NVIDIA"
        in found["row_sum"]
    )
    assert found["row_sum"] in reference_page.entry(Op.ROW_SUM, found)
    assert dict(reference_page.measured(Results("primitives"))) == {}


# --- errors ---------------------------------------------------------------------------------------

KINDS = ("ProgramError", "UnknownOperationError", "BackEndError", "CadenzaError")
# Raised where no case of this page can be: by a fault of ours, or with kernels on a GPU only.
UNREACHED = {
    "cadenza/core/vjp.py:_row": "a missing row of a table, which a test demands",
    "cadenza/backends/triton/executable.py:_choose": "a capture on a GPU",
    "cadenza/backends/triton/launch.py:__call__": "a capture on a GPU",
    "cadenza/library/eager.py:run": "kernels that have written over what was saved",
}


def raising(path: Path) -> dict[str, range]:
    """The lines of each place of a file that makes an error, by file and function."""
    found = {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in KINDS:
            around = [f for f in functions if f.lineno <= node.lineno <= f.end_lineno]
            name = f"{path.relative_to(ROOT).as_posix()}:{around[-1].name}"
            found[f"{name}:{node.lineno}"] = range(node.lineno, node.end_lineno + 1)
    return found


@pytest.fixture(scope="module")
def errors_made():
    """The page of errors made anew, and the places that made one meanwhile, by file and line."""
    made = set()

    def noted(kind, *args, **_):
        frame = sys._getframe(1)
        made.add((frame.f_code.co_filename, frame.f_lineno))
        return Exception.__new__(kind, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CadenzaError, "__new__", noted)
        return PAGES[errors_page.PATH](), made


def test_the_page_of_errors_is_as_it_would_be_made(errors_made):
    assert read(errors_page.PATH) == errors_made[0], WRITE


def test_every_error_that_the_compiler_makes_is_on_its_page(errors_made):
    missing = set()
    for layer in ("core", "backends", "library"):
        for path in sorted(ROOT.glob(f"cadenza/{layer}/**/*.py")):
            lines = {line for file, line in errors_made[1] if file == str(path)}
            found = raising(path) if path.name != "errors.py" else {}
            missing |= {place for place, inside in found.items() if not lines & set(inside)}
    unknown = sorted(place for place in missing if place.rpartition(":")[0] not in UNREACHED)
    assert not unknown, f"{unknown}: add a case, to a list of errors_page.SECTIONS"
    assert {place.rpartition(":")[0] for place in missing} == set(UNREACHED)


def test_a_case_that_raises_nothing_is_caught():
    with pytest.raises(AssertionError, match="raises nothing"):
        errors_page.raised(lambda: None)


def test_no_message_shows_a_place_or_an_address():
    page = read(errors_page.PATH)
    assert ".py:" not in page
    assert " at 0x" not in page
    assert str(ROOT) not in page


# --- pictures and figures -------------------------------------------------------------------------


def test_pictures_show_what_was_measured():
    assert shown()
    known = drawable()
    for name in shown():
        picture = (FOLDER / f"{name}.svg").read_bytes()
        assert figures(picture) == figures(known[name]("svg")), f"{name}: {WRITE}"
    assert {path.stem for path in FOLDER.iterdir()} == shown()


@pytest.mark.slow
def test_a_picture_holds_its_figures_as_text(tmp_path):
    """Those of few bars; what was drawn twice is the same."""
    drawn = {path: path.read_bytes() for path in draw(tmp_path)}
    labelled = 0
    for picture in (content for path, content in drawn.items() if path.stem.endswith("bars")):
        found = figures(picture)
        variants = found.keys() - {"title", "over", "cases"}
        if (1 + len(variants)) * len(found["cases"]) <= LABELLED:
            labelled += 1
            for value in (*found["ours"], *found["compile"]):
                assert f">{value:.2f}</text>" in picture.decode()
    assert labelled
    assert drawn == {path: path.read_bytes() for path in draw(tmp_path)}


PATTERNS = {
    "residual + RMSNorm": "residual_rms", "SwiGLU, product saved": "swiglu", "RoPE + scale": "rope",
    "RMSNorm backward + residual + dγ": "rms_backward", "dW with a column factor": "dw",
    "SwiGLU backward, activation again": "swiglu_backward", "dX": "dx",
    "cross-entropy": "cross_entropy", "forward": "forward", "forward-backward": "forward-backward",
}  # fmt: skip


def figures_of(case: dict) -> dict[str, float]:
    """What the tables of performance say of a case, by their columns."""
    times = {name: record["us"] for name, record in case.items()}
    ratios = [ratio(case[n], case["ours"]) for n in ("compile", "autotune") if n in case]
    least = {"compile / ours": ratios[0], "compiled / ours": min(ratios)}
    return times | least | {"ours / bare": ratio(case["ours"], case["bare"])}


def test_the_tables_of_performance_say_what_was_measured():
    suites = [load(ROOT / "benchmarks" / "results", suite) for suite in ("kernels", "layer")]
    known = {
        (first["pattern"], first["size"], first["mode"]): case
        for suite in suites
        for case in cases(suite.records)
        for first in [next(iter(case.values()))]
    }
    rows = [row for row in table_rows(read("docs/performance.md")) if "ours / bare" in row]
    rows = [row for row in rows if "---" not in row["ours"]]
    keys = [(PATTERNS[r["pattern"]], r["size"], r.get("mode", "sustained")) for r in rows]
    assert set(keys) == set(known)
    for key, row in zip(keys, rows, strict=True):
        found = figures_of(known[key])
        assert (row.get("autotune", "–") == "–") == ("autotune" not in found), row
        said(row, {column: found[column] for column in found if column in row})


def said(row: dict[str, str], found: dict[str, float]) -> None:
    """A row of a table has these figures, as far as it has digits."""
    for column, value in found.items():
        digits = len(row[column].partition(".")[2])
        assert abs(float(row[column]) - value) <= 0.501 * 10**-digits, (row, column, value)


def test_the_table_of_host_times_says_what_was_measured():
    records = load(ROOT / "benchmarks" / "results", "host").records
    known = {f"{r['pattern']}, {r['variant']}": r["host_us"] for r in records}
    rows = [row for row in table_rows(read("docs/performance.md")) if "layer, ours" in row][1:]
    assert {row["µs"] for row in rows} == set(known["layer, ours"])
    for row in rows:
        found = {name: times[row["µs"]] for name, times in known.items() if row["µs"] in times}
        said(row, found)
        assert all(row[name] == "–" for name in known.keys() - found.keys()), row


def test_the_table_of_losses_says_what_was_measured():
    known = {
        case["ours"]["size"]: case
        for case in cases(load(ROOT / "benchmarks" / "results", "loss").records)
    }
    rows = [row for row in table_rows(read("docs/performance.md")) if "lean / ours" in row]
    rows = [row for row in rows if "---" not in row["ours"]]
    assert {row["loss"] for row in rows} == set(known)
    for row in rows:
        case = known[row["loss"]]
        found = {name: case[name]["us"] for name in case}
        found |= {f"{n} / ours": ratio(case[n], case["ours"]) for n in case if n != "ours"}
        found |= {f"{name} GiB": case[name]["peak_bytes"] / 2**30 for name in case}
        assert [name for name in row if row[name] == "–"] == (
            [] if "lean" in case else ["lean", "lean / ours", "lean GiB"]
        )
        said(row, found)


def test_the_table_of_models_says_what_was_measured():
    known = {
        (first["pattern"], first["mode"]): case
        for case in cases(load(ROOT / "benchmarks" / "results", "model").records)
        for first in [next(iter(case.values()))]
    }
    rows = [row for row in table_rows(read("docs/performance.md")) if "liger / ours" in row]
    rows = [row for row in rows if "---" not in row["ours ms"]]
    assert {(row["model"], row["mode"]) for row in rows} == set(known)
    for row in rows:
        case = known[row["model"], row["mode"]]
        found = {f"{name} ms": case[name]["us"] / 1000 for name in RIVALS}
        found |= {f"{name} / ours": ratio(case[name], case["ours"]) for name in RIVALS[1:]}
        found |= {f"{name} GiB": case[name]["peak_bytes"] / 2**30 for name in RIVALS}
        said(row, found)


RIVALS = ("ours", "compile", "liger")


def test_what_the_audit_s_page_tells_of_a_step_was_measured():
    record = json.loads((ROOT / "benchmarks/audit/llama3-8b.json").read_text(encoding="utf-8"))
    names = {"products": "matrix products", "memory": "memory-bound", "step": "step"}
    rows = {
        row["class"]: list(row.values())[1:]
        for row in table_rows(read("docs/audit.md"))
        if "eager, predicted" in row
    }
    variants = record["measured"]
    assert [one["variant"] for one in variants] == ["eager", "compiled", "cadenza"]
    for place, times in enumerate(f for one in variants for f in (one["predicted"], one)):
        for kind, milliseconds in {**times["classes"], "step": times["ms"]}.items():
            told = float(rows[names.get(kind, kind)][place])
            assert abs(told - milliseconds) <= 0.0501, (place, kind)


def test_what_performance_tells_of_primitives_was_measured():
    found = cases(load(ROOT / "benchmarks" / "results", "primitives").records)
    known = {next(iter(case.values()))["pattern"]: case for case in found}
    rows = [row for row in table_rows(read("docs/performance.md")) if "over the product" in row]
    rows = [row for row in rows if "---" not in row["primitive"]]
    assert {row["primitive"] for row in rows} == {name for name in known if "+" not in name}
    for row in rows:
        case = known[row["primitive"]]
        ours, product, bare = (case[name] for name in ("ours", "products", "bare"))
        assert row["µs"] == f"{ours['us']:.0f}"
        assert row["over the product"] == f"{ratio(ours, product):.3f}"
        assert row["over cuBLAS's"] == f"{ratio(ours, bare):.3f}"
    pairs = {name: case for name, case in known.items() if "+" in name}
    shares = [ratio(case["ours"], case["products"]) for case in pairs.values()]
    least, most = (100 * share - 100 for share in (min(shares), max(shares)))
    assert len(pairs) == 45
    told = f"The 45 pairs add {least:.1f} to {most:.1f} %"
    assert told in " ".join(read("docs/performance.md").split())


def test_what_the_readme_says_of_models_was_measured():
    known = {
        first["pattern"]: case
        for case in cases(load(ROOT / "benchmarks" / "results", "model").records)
        for first in [next(iter(case.values()))]
    }
    names = {"eager": "stock", "compile": "torch.compile", "liger": "Liger-Kernel"}
    names["ours"] = "accelerated"
    rows = [row for row in table_rows(read("README.md")) if "accelerated" in row]
    rows = [row for row in rows if "---" not in row["stock"]]
    for row, pattern in zip(rows, ("8b-width", "1b"), strict=True):
        for variant, column in names.items():
            record = known[pattern].get(variant)
            told = "–"
            if record is not None:
                told = f"{record['us'] / 1000:.0f} ms, {record['peak_bytes'] / 2**30:.1f} GiB"
            assert row[column] == told
        shares = known[pattern]["ours"]["peak_bytes"] / known[pattern]["compile"]["peak_bytes"]
        assert 0.635 < shares < 0.675


def test_errors_that_performance_tells_were_measured():
    """`geometric mean …, at most …`, in the order of the suites."""
    text = read("docs/performance.md")
    told = re.findall(r"geometric\s+mean\s+([\d.]+),\s+at\s+most\s+([\d.]+)", text)
    found = []
    for suite, other in (("accuracy", "compile"), ("model-accuracy", "eager")):
        ratios = []
        for case in cases(load(ROOT / "benchmarks" / "results", suite).records):
            shares = [error_ratio(case, name, other) for name in case["ours"]["errors"]]
            ratios += [share for share in shares if share is not None]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        found.append((f"{mean:.3f}", f"{max(ratios):.3f}"))
    assert told == found
