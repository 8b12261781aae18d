"""Models of transformers by our kernels: their experts, their attention, and batches in flight."""

from .attention import register_attention
from .experts import register_experts

__all__ = ["register_attention", "register_experts"]
