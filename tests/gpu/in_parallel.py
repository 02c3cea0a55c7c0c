"""Runs the GPU tests in processes side by side: compiling their kernels takes most of the time.

    python tests/gpu/in_parallel.py [--workers N] [--part I/N] [--limit S] [--logs FOLDER]

Each process takes a shard, and all share the caches of kernels; with `--part` only a part of the
shards runs, to go on where a machine was taken away. The tests that need the GPU for themselves run
after the last part. Other options are pytest's; the exit code is its first that is not 0.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ALL = "all.log"
NO_TESTS = 5  # pytest's exit code for a shard without tests
STOPPED = 124


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """Own options, and those for pytest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--part", default="1/1", help="I/N: only the Ith of N parts")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds that a shard may take")
    parser.add_argument("--logs", type=Path, help="where the output of each process is kept")
    return parser.parse_known_args()


def command(marked: str, *options: str) -> list[str]:
    """A run of pytest on the tests marked so."""
    usual = ["-v", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=240", "--durations=12"]
    usual += ["-m", marked]
    return [sys.executable, "-m", "pytest", *usual, str(FOLDER), *options]


def environment() -> dict[str, str]:
    """That of every process: the checkout on the path, one thread each, nothing interpreted."""
    path = os.pathsep.join(filter(None, [str(FOLDER.parents[1]), os.environ.get("PYTHONPATH")]))
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def run(commands: dict[str, list[str]], logs: Path, limit: float) -> int:
    """Runs commands side by side, says how each ended and what failed; an exit code."""
    started, running = time.monotonic(), {}
    for name, line in commands.items():
        with (logs / f"{name}.log").open("w") as log:
            running[name] = subprocess.Popen(
                line, stdout=log, stderr=subprocess.STDOUT, env=environment(), cwd=FOLDER.parents[1]
            )
    codes = {name: ended(process, started + limit) for name, process in running.items()}
    for name, code in codes.items():
        text = (logs / f"{name}.log").read_text()
        with (logs / ALL).open("a") as log:
            log.write(f"==== {name}, exit code {code}\n{text}\n")
        lines = text.strip().splitlines() or ["nothing was said"]
        said = [line for line in lines[:-1] if line.startswith(("FAILED", "ERROR"))]
        late = " (stopped at the limit of time)" if code == STOPPED else ""
        print(f"{name}: {lines[-1]}{late}", *said, sep="\n  ", flush=True)
    print(f"{len(codes)} processes, {time.monotonic() - started:.0f} s", flush=True)
    return next((code for code in codes.values() if code not in (0, NO_TESTS)), 0)


def ended(process: subprocess.Popen[bytes], deadline: float) -> int:
    """The exit code of a process, which is stopped at the deadline: a kernel may hang."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return STOPPED


def main() -> int:
    """The shards of a part side by side, then what needs the GPU alone."""
    own, options = arguments()
    part, parts = map(int, own.part.split("/"))
    logs = own.logs or Path(tempfile.mkdtemp(prefix="gpu-tests-"))
    logs.mkdir(parents=True, exist_ok=True)
    (logs / ALL).unlink(missing_ok=True)
    first, total = (part - 1) * own.workers + 1, parts * own.workers
    shards = {
        f"shard-{i}-of-{total}": command("gpu and not alone", "--shard", f"{i}/{total}", *options)
        for i in range(first, first + own.workers)
    }
    code = run(shards, logs, own.limit)
    if part == parts:
        code = run({"alone": command("gpu and alone", "-s", *options)}, logs, own.limit) or code
        print((logs / "alone.log").read_text())
    print(f"all that was said: {logs / ALL}")
    return code


if __name__ == "__main__":
    sys.exit(main())
