"""Well-known models by name, as the configurations that their authors published."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size",
)  # fmt: skip


def _sizes(kind: str, *numbers: int, **more: Any) -> Config:
    """A configuration, by the numbers of FIELDS."""
    return {"model_type": kind, **dict(zip(FIELDS, numbers, strict=True)), **more}


def _gpt2(width: int, layers: int, heads: int) -> Config:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads}
    return {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, **sizes}


TIED = {"tie_word_embeddings": True}
QWEN = 151936
SIZES: dict[str, Config] = {
    "llama3-1b": _sizes("llama", 128256, 2048, 16, 32, 8, 64, 8192, **TIED),
    "llama3-3b": _sizes("llama", 128256, 3072, 28, 24, 8, 128, 8192, **TIED),
    "llama3-8b": _sizes("llama", 128256, 4096, 32, 32, 8, 128, 14336),
    "llama3-70b": _sizes("llama", 128256, 8192, 80, 64, 8, 128, 28672),
    "llama3-405b": _sizes("llama", 128256, 16384, 126, 128, 8, 128, 53248),
    "mistral-7b": _sizes("mistral", 32768, 4096, 32, 32, 8, 128, 14336, sliding_window=None),
    "qwen2.5-0.5b": _sizes("qwen2", QWEN, 896, 24, 14, 2, 64, 4864, **TIED),
    "qwen2.5-7b": _sizes("qwen2", 152064, 3584, 28, 28, 4, 128, 18944),
    "qwen3-0.6b": _sizes("qwen3", QWEN, 1024, 28, 16, 8, 128, 3072, **TIED),
    "qwen3-1.7b": _sizes("qwen3", QWEN, 2048, 28, 16, 8, 128, 6144, **TIED),
    "qwen3-4b": _sizes("qwen3", QWEN, 2560, 36, 32, 8, 128, 9728, **TIED),
    "qwen3-8b": _sizes("qwen3", QWEN, 4096, 36, 32, 8, 128, 12288),
    "qwen3-14b": _sizes("qwen3", QWEN, 5120, 40, 40, 8, 128, 17408),
    "qwen3-32b": _sizes("qwen3", QWEN, 5120, 64, 64, 8, 128, 25600),
    "gemma2-2b": _sizes("gemma2", 256000, 2304, 26, 8, 4, 256, 9216),
    "gemma2-9b": _sizes("gemma2", 256000, 3584, 42, 16, 8, 256, 14336),
    "gemma2-27b": _sizes("gemma2", 256000, 4608, 46, 32, 16, 128, 36864),
    "gemma3-1b": _sizes("gemma3_text", 262144, 1152, 26, 4, 1, 256, 6912, sliding_window=512),
    "gemma3-4b": _sizes("gemma3_text", 262208, 2560, 34, 8, 4, 256, 10240, sliding_window=1024),
    "gemma3-12b": _sizes("gemma3_text", 262208, 3840, 48, 16, 8, 256, 15360, sliding_window=1024),
    "phi3-mini": _sizes("phi3", 32064, 3072, 32, 32, 32, 96, 8192, sliding_window=2047),
    "phi4": _sizes("phi3", 100352, 5120, 40, 40, 10, 128, 17920),
    "olmo2-7b": _sizes("olmo2", 100352, 4096, 32, 32, 32, 128, 11008),
    "olmo2-13b": _sizes("olmo2", 100352, 5120, 40, 40, 40, 128, 13824),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
}
