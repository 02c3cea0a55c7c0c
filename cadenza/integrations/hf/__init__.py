"""Hugging Face's models by Cadenza's programs: `cz.accelerate` and `cz.revert`."""

from __future__ import annotations

from cadenza.integrations.hf.acceleration import accelerate, revert
from cadenza.integrations.hf.report import Entry, Report

__all__ = ["Entry", "Report", "accelerate", "revert"]
