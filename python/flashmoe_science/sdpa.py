"""Routes PyTorch's own attention to ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor
from torch.backends import mha
from torch.nn.attention import _registry as registry

from .attention import flash_attention

__all__ = ["enable_sdpa"]

NAME = "flashmoe"
KEYS = ("CPU", "AutogradCPU", "CUDA", "AutogradCUDA")


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` in our terms."""
    if is_causal and attn_mask is not None:
        raise RuntimeError("attn_mask must be None when is_causal=True, as in PyTorch")
    rank = max(query.dim(), key.dim(), value.dim())
    # Views cost host time, and their nodes in the graph as much again: none where none is needed.
    keep = 3 if enable_gqa else 2
    if rank < 4 or not (query.shape[:-keep] == key.shape[:-keep] == value.shape[:-keep]):
        # PyTorch's (S, D) and (N, S, D) have one head.
        query, key, value = (t[(None,) * max(4 - t.dim(), 0)] for t in (query, key, value))
        query, key, value = _broadcast(query, key, value, keep)
    window = None
    if is_causal and query.shape[-2] != key.shape[-2]:
        # PyTorch aligns the top left corners: row i sees j <= i. Keys past the last row are unseen.
        rows, keys = query.shape[-2], key.shape[-2]
        key, value = key[..., :rows, :], value[..., :rows, :]
        is_causal, window = False, (-1, rows - min(rows, keys))
    options = {"causal": is_causal, "window": window, "scale": scale, "dropout_p": dropout_p}
    out = flash_attention(query, key, value, bias=attn_mask, **options)
    return out.reshape(out.shape[out.dim() - rank :]) if rank < 4 else out


def _broadcast(query, key, value, keep):
    """Leading dimensions (and heads, without GQA) broadcast in PyTorch; as views here."""
    lead = torch.broadcast_shapes(*(t.shape[:-keep] for t in (query, key, value)))
    return tuple(t.expand(*lead, *t.shape[-keep:]) for t in (query, key, value))


class _Handle:
    """Our kernels in the dispatcher, until removed."""

    def __init__(self) -> None:
        self.library = torch.library.Library("aten", "IMPL")
        for key in KEYS:
            self.library.impl("scaled_dot_product_attention", _attend, key)

    def remove(self) -> None:
        self.library._destroy()


registry.register_flash_attention_impl(NAME, register_fn=_Handle)


def _deactivate(previous: str | None) -> None:
    if hasattr(registry, "restore_flash_attention_impl"):  # torch 2.11 on
        registry.restore_flash_attention_impl()
        if previous is not None:
            registry.activate_flash_attention_impl(previous)
        return
    # torch 2.10 can activate an implementation but not take it back, so that is done here.
    handle = registry._FLASH_ATTENTION_HANDLES.pop(NAME, None)
    if handle is not None:
        handle.remove()
    registry._FLASH_ATTENTION_ACTIVE = previous


@dataclass
class _Before:
    """What was there before the first of the contexts that are open."""

    contexts: int = 0
    implementation: str | None = None
    fast_path: bool = True


_lock = Lock()
_before = _Before()


def _enter() -> None:
    with _lock:
        _before.contexts += 1
        if _before.contexts > 1:
            return
        _before.implementation = registry.current_flash_attention_impl()
        _before.fast_path = mha.get_fastpath_enabled()
        if _before.implementation != NAME:
            registry.activate_flash_attention_impl(NAME)
        mha.set_fastpath_enabled(False)


def _leave() -> None:
    with _lock:
        _before.contexts -= 1
        if _before.contexts:
            return
        mha.set_fastpath_enabled(_before.fast_path)
        if _before.implementation != NAME:
            _deactivate(_before.implementation)


@contextmanager
def enable_sdpa() -> Iterator[None]:
    """Inside this context ``F.scaled_dot_product_attention`` is ours, gradients of masks included.

    Process-wide while it lasts: until the last of several contexts is left, whichever thread opened
    it. What we do not have (third derivatives) is refused rather than handed back to PyTorch in
    silence. So the fast path of ``nn.MultiheadAttention`` and ``nn.TransformerEncoder``, which
    takes another way than SDPA, is off meanwhile. ``torch.func.vmap`` and nested tensors PyTorch
    takes apart before they come to us; call ``flash_attention`` there. What ``torch.compile`` made
    outside of the context stays PyTorch's inside, and the other way round.
    """
    _enter()
    try:
        yield
    finally:
        _leave()
