"""Models built from Cadenza's programs, each beside its twin in stock PyTorch modules."""

from cadenza.library.models.checkpoint import load, save
from cadenza.library.models.config import LlamaConfig
from cadenza.library.models.decoder import Decoder, checkpoint_layers
from cadenza.library.models.decoder_config import DecoderConfig
from cadenza.library.models.hugging_face import CheckpointError
from cadenza.library.models.llama import Llama
from cadenza.library.models.sizes import LLAMA3, QWEN3, llama3, qwen3
from cadenza.library.models.stock import StockLlama
from cadenza.library.models.stock_decoder import StockDecoder

__all__ = [
    "LLAMA3", "QWEN3", "CheckpointError", "Decoder", "DecoderConfig", "Llama", "LlamaConfig",
    "StockDecoder", "StockLlama", "checkpoint_layers", "llama3", "load", "qwen3", "save",
]  # fmt: skip
