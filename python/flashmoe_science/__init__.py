"""Attention kernels for models of materials, molecules and proteins."""

from .attention import flash_attention, flash_attention_varlen
from .explanation import explain
from .sdpa import enable_sdpa

__version__ = "0.1.0"
__all__ = ["enable_sdpa", "explain", "flash_attention", "flash_attention_varlen"]
