"""`cadenza audit`: predicts a step before and after Cadenza, measures it where a GPU is there."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from cadenza.core.cost import GPUS
from cadenza.tools.atomic import write_whole
from cadenza.tools.audit import savings
from cadenza.tools.audit.fakes import fake
from cadenza.tools.audit.measure import measure, that_fits
from cadenza.tools.audit.options import AuditOptions
from cadenza.tools.audit.page import page
from cadenza.tools.audit.prediction import VARIANTS, Prediction, predict
from cadenza.tools.audit.rates import Rates, rates_of
from cadenza.tools.audit.report import Report, as_json
from cadenza.tools.audit.subject import Subject, find_subject
from cadenza.tools.audit.tables import show
from cadenza.tools.bench.machine import known_gpu
from cadenza.tools.fault import Fault

ANY_GPU = "h100"


def run_audit(target: str, options: AuditOptions, machine: bool) -> int:
    """Prints the audit of a target, and writes its page where asked for."""
    report = audit(target, options)
    if options.html is not None:
        _write(Path(options.html), page(report))
    if machine:
        json.dump(as_json(report), sys.stdout, indent=2)
        print()
    else:
        show(report)
    return 0


def audit(target: str, options: AuditOptions) -> Report:
    """The audit of a target. Raises Fault for bad input."""
    savings.check(options)
    _check_page(options)
    variants, measuring = _variants(options), _measuring(options)
    rates = rates_of(_gpu(options), options.computing, options.moving, options.attention)
    subject = find_subject(target, options.batch, options.sequence)
    if options.layers is not None:
        subject = subject.cut(options.layers)
    report = Report(subject.name, subject.about(), predicted(subject, rates), options)
    if not measuring:
        return report
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    fitting = subject if options.layers is not None else that_fits(subject, memory)
    fitting = fitting.whole()
    compared = report.prediction if fitting == subject else predicted(fitting, rates)
    found = measure(fitting, compared, variants, options.steps)
    return replace(report, measured=found)


def predicted(subject: Subject, rates: Rates) -> Prediction:
    """The prediction of a subject."""
    with fake():
        return predict(rates, subject.before, subject.after)


def _check_page(options: AuditOptions) -> None:
    """Raises Fault, before anything takes long, where the page has no place."""
    if options.html is None:
        return
    path = Path(options.html)
    if path.is_dir() or not path.parent.is_dir():
        found = "is a folder" if path.is_dir() else "lies in a folder that is not there"
        raise Fault(f"--html {path} {found}: name a file")


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode())
    except Fault as error:
        raise Fault(str(error).replace("--out", "--html")) from None


def _variants(options: AuditOptions) -> list[str]:
    names = [name.strip() for name in options.variants.split(",") if name.strip()]
    for name in names:
        if name not in VARIANTS:
            raise Fault(f"--variants {name!r}: choose of {', '.join(VARIANTS)}")
    if options.steps < 1:
        raise Fault(f"--steps {options.steps}: choose 1 or more")
    return names


def _measuring(options: AuditOptions) -> bool:
    """Whether real steps are to be run."""
    there = torch.cuda.is_available()
    if options.measure and not there:
        raise Fault("--measure needs a GPU, and there is none: leave it out for a prediction")
    return there if options.measure is None else options.measure


def _gpu(options: AuditOptions) -> str:
    """The GPU asked for, else the one in this machine if its rates are known, else any."""
    if options.gpu is not None:
        return options.gpu
    if not torch.cuda.is_available():
        return ANY_GPU
    found = known_gpu(torch.cuda.get_device_name())
    return next((key for key, gpu in GPUS.items() if gpu == found), ANY_GPU)
