"""Models built from Cadenza's programs, each beside its twin in stock PyTorch modules."""

from cadenza.library.models.config import LlamaConfig
from cadenza.library.models.llama import Llama
from cadenza.library.models.stock import StockLlama

__all__ = ["Llama", "LlamaConfig", "StockLlama"]
