"""Cadenza: Transformer blocks as GEMM-epilogue programs, with derived gradients.

Importing it asks no device anything.
"""

from cadenza.core import lang
from cadenza.library import models, nn, ops
from cadenza.library.function import block, epilogue

__version__ = "0.1.0"
__all__ = ["block", "epilogue", "lang", "models", "nn", "ops"]
