"""Attention and mixtures of experts for models of materials, molecules and proteins."""

from .attention import flash_attention, flash_attention_varlen
from .explanation import explain
from .moe import explain_moe, moe, route
from .paged import explain_append, explain_paged, flash_attention_paged, kv_cache_append
from .sdpa import enable_sdpa
from .transformers import register_attention, register_experts

__version__ = "0.1.0"
__all__ = [
    "enable_sdpa",
    "explain",
    "explain_append",
    "explain_moe",
    "explain_paged",
    "flash_attention",
    "flash_attention_paged",
    "flash_attention_varlen",
    "kv_cache_append",
    "moe",
    "register_attention",
    "register_experts",
    "route",
]
