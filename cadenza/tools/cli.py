"""The command line: `cadenza COMMAND …`. Bad input is one line on standard error, exit code 2.

A command's own module, and with it torch, is imported when the command runs, so that `--help`
answers at once.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, Signature
from io import TextIOWrapper
from itertools import pairwise
from typing import Any, get_type_hints

import typer

from cadenza import __version__
from cadenza.core.errors import BackEndError
from cadenza.tools.audit.options import AuditOptions
from cadenza.tools.bench.options import Options
from cadenza.tools.check.options import Options as CheckOptions
from cadenza.tools.fault import Fault, one_line
from cadenza.tools.question import Question, Sizes
from cadenza.tools.settings import COMPARED_STEPS, DEFAULT_STEPS, Settings

# Typer doesn't name the base of its usage errors in public, and has moved it between releases.
USAGE_ERROR = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")

STEPS_HELP = (
    f"steps in all (default {DEFAULT_STEPS}, {COMPARED_STEPS['float64']} to compare in float64)"
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the arguments name (the process's own by default); the exit code."""
    _never_fail_to_print()
    try:
        words = _completed(sys.argv[1:] if arguments is None else arguments)
        code = app(words, prog_name="cadenza", standalone_mode=False)
    except USAGE_ERROR as error:
        return _refuse(f"{error.format_message()} (cadenza --help lists what there is)")
    except (Fault, BackEndError) as error:
        return _refuse(str(error))
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return _refuse(f"{error.filename!s:.40}… is longer than a file's name may be")
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return code if isinstance(code, int) else 0


def _completed(words: list[str]) -> list[str]:
    """The arguments, `--source` with its value: typer has no option whose value may be left out."""
    return [
        "--source=all" if word == "--source" and following.startswith("-") else word
        for word, following in pairwise([*words, "-"])
    ]


def _never_fail_to_print() -> None:
    # Trained models write any character, and some terminals have an encoding that lacks it.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def _refuse(problem: str) -> int:
    print("cadenza:", one_line(problem), file=sys.stderr)
    return 2


@app.callback(invoke_without_command=True)
def cadenza(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """Compile Transformer blocks, written as plain Python, to GEMM-epilogue programs."""
    if version:
        print(f"cadenza {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def taking(options: type) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command that ends in **given one option for each field of a dataclass.

    An option left out is passed as None, since the default it stands for is that of a new run.
    """

    def extended(command: Callable[..., int]) -> Callable[..., int]:
        kinds = get_type_hints(options)
        own = list(Signature.from_callable(command, eval_str=True).parameters.values())[:-1]
        more = [_option(one.name, kinds[one.name], one) for one in fields(options)]
        command.__signature__ = Signature([*own, *more])
        command.__annotations__ = {one.name: one.annotation for one in [*own, *more]}
        return command

    return extended


def _within_64_bits(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise typer.BadParameter(f"{value} is no number of 64 bits")
    return value


def _option(name: str, kind: Any, setting: Any) -> Parameter:
    default = "" if setting.default is None else f" (default {setting.default})"
    about = setting.metadata["help"] + default
    option = typer.Option(None, help=about, show_default=False, callback=_within_64_bits)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


@app.command()
@taking(Settings)
def train(
    *,
    steps: int | None = typer.Option(None, help=STEPS_HELP),
    out: str | None = typer.Option(None, help="folder of the run; a new one in runs/ if left out"),
    resume: bool = typer.Option(False, "--resume", help="go on with the run that --out holds"),
    compare: bool = typer.Option(False, "--compare", help="measure it against its stock twin"),
    **given: Any,
) -> int:
    """Train a small Llama, or a whole model, on real text, through programs of Cadenza's own."""
    given = {name: value for name, value in given.items() if value is not None}
    if compare and resume:
        raise Fault("--compare starts afresh each time: leave --resume out")
    if compare:
        from cadenza.tools.compare import compare as run_comparison

        return run_comparison(given, out=out, steps=steps)
    from cadenza.tools.train import train as run_training

    return run_training(given, out=out, resume=resume, steps=steps)


@app.command()
@taking(Question)
def explain(
    target: str = typer.Argument(help="a built-in block, FILE.py:function or module:function"),
    json: bool = typer.Option(False, "--json", help="print data for programs"),
    **given: Any,
) -> int:
    """Show what a block compiles to: kernels forward and backward, what is saved, what it costs."""
    from cadenza.tools.explain import run_explain

    question = Question(**{name: value for name, value in given.items() if value is not None})
    return run_explain(target, question, json)


@app.command()
@taking(Sizes)
def tune(
    target: str = typer.Argument(help="a built-in block, FILE.py:function or module:function"),
    full: bool = typer.Option(False, "--full", help="the long list of candidates"),
    **given: Any,
) -> int:
    """Measure which kernels are fastest for a block on this GPU, and keep it for later runs."""
    from cadenza.tools.tune import run_tune

    sizes = Sizes(**{name: value for name, value in given.items() if value is not None})
    return run_tune(target, sizes, full)


@app.command()
@taking(CheckOptions)
def check(
    target: str = typer.Argument(help="FILE.py, FILE.py:function, module:function, a block"),
    json: bool = typer.Option(False, "--json", help="print data for programs"),
    watch: bool = typer.Option(False, "--watch", help="run again each time the file is saved"),
    **given: Any,
) -> int:
    """Judge programs: types, values, gradients, kernels, what they take; say what to change."""
    from cadenza.tools.check.run import run_check

    options = CheckOptions(**{name: value for name, value in given.items() if value is not None})
    return run_check(target, options, as_json=json, watched=watch)


@app.command()
@taking(Options)
def bench(
    suite: str | None = typer.Argument(None, help="kernels, layer, loss, accuracy, …"),
    burst: bool = typer.Option(False, "--burst", help="single launches, each after a pause"),
    alone: bool = typer.Option(False, "--alone", help="each at a clock of its own"),
    show: bool = typer.Option(False, "--show", help="print results in --out, measure nothing"),
    json: bool = typer.Option(False, "--json", help="print data for programs"),
    **given: Any,
) -> int:
    """Measure a suite side by side: ours, torch.compile, eager, other libraries, bare products."""
    from cadenza.tools.bench.run import run_bench

    options = Options(**{name: value for name, value in given.items() if value is not None})
    if burst and alone:
        raise Fault("--burst and --alone are two ways to measure: give one of them")
    mode = "burst" if burst else "alone" if alone else "sustained"
    return run_bench(suite, options, mode=mode, shown=show, as_json=json)


@app.command()
@taking(AuditOptions)
def audit(
    target: str = typer.Argument(
        help="a size such as llama3-8b, a config.json or its folder, FILE.py:function"
    ),
    json: bool = typer.Option(False, "--json", help="print data for programs"),
    **given: Any,
) -> int:
    """Say what a model's training step spends its time on, before and after Cadenza."""
    from cadenza.tools.audit.run import run_audit

    options = AuditOptions(**{name: value for name, value in given.items() if value is not None})
    return run_audit(target, options, json)


@app.command()
def doctor(json: bool = typer.Option(False, "--json", help="print data for programs")) -> int:
    """Say what is installed, which back ends run here and why not, and what to install."""
    from cadenza.tools.doctor import run_doctor

    return run_doctor(json)


if __name__ == "__main__":
    sys.exit(main())
