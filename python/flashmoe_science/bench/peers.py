"""What ours is compared with: PyTorch's SDPA backends, its FlexAttention and its varlen_attn."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from flashmoe_science.bench.case import (
    BACKENDS,
    Implementation,
    Prepare,
    Tensors,
    no_change,
)


def of_heads(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """The part of a mask (B, H, S, S) that is about the heads of q, the first ones; a view."""
    return mask if mask is None or mask.dim() < 4 else mask[:, : q.shape[1]]


def sdpa_dense(
    leaves: Tensors,
    causal: bool,
    gqa: bool,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """SDPA expands a bias shared by the whole batch itself.

    It does so by a view, after padding a bias of odd length. Expanded by us beforehand, the bias
    would be padded once for every row that shares it. A window's mask has causal in it.
    """
    return F.scaled_dot_product_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        attn_mask=leaves.get("bias", of_heads(mask, leaves["q"])),
        dropout_p=dropout_p,
        is_causal=causal and mask is None,
        enable_gqa=gqa,
    )


def window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Which keys each query sees, (S, S): PyTorch has no windows of its own."""
    position = torch.arange(length, device=device)
    behind = position[:, None] - position
    return (behind >= 0) & (behind < window)


def sdpa_peers(
    run: Callable[[Tensors], torch.Tensor],
    prepare: Prepare = no_change,
    restore: Callable[[Tensors], Tensors] = dict,
) -> dict[str, Implementation]:
    """run under each PyTorch backend."""
    return {name: Implementation(run, prepare, name, restore=restore) for name in BACKENDS}


def flex_with_bias(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, gqa: bool
) -> torch.Tensor:
    """FlexAttention whose score_mod reads a bias (B, H, S, S), or (1, H, S, S) for all."""
    from torch.nn.attention.flex_attention import flex_attention

    shared = bias.shape[0] == 1

    def add_bias(
        score: torch.Tensor,
        batch: torch.Tensor,
        head: torch.Tensor,
        row: torch.Tensor,
        column: torch.Tensor,
    ) -> torch.Tensor:
        # Of anything but an input as it is (bias[0], say) FlexAttention loses the gradient.
        return score + bias[batch * 0 if shared else batch, head, row, column]

    return flex_attention(q, k, v, score_mod=add_bias, enable_gqa=gqa)


@dataclasses.dataclass
class CompiledFlex:
    """flex_with_bias, compiled for the one Case it belongs to when it is first called.

    That takes seconds; timing.first_call keeps them off the clock.
    """

    gqa: bool
    compiled: Callable[..., torch.Tensor] | None = None

    def __call__(self, leaves: Tensors) -> torch.Tensor:
        if self.compiled is None:
            import torch._functorch.config

            # A function may be compiled for eight sets of sizes; after those it would be an error.
            torch.compiler.reset()
            # "bwd" runs the backward pass many times, which must then leave its inputs alone.
            torch._functorch.config.donated_buffer = False
            self.compiled = torch.compile(flex_with_bias, dynamic=False, fullgraph=True)
        return self.compiled(leaves["q"], leaves["k"], leaves["v"], leaves["bias"], self.gqa)


@functools.cache
def varlen_options(function: Callable, causal: bool, gqa: bool) -> dict[str, Any]:
    """How varlen_attn is told: torch 2.10 has is_causal, 2.11 a window, later ones enable_gqa."""
    known = inspect.signature(function).parameters
    options: dict[str, Any] = {}
    if causal:
        options |= {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if gqa and "enable_gqa" in known:
        options["enable_gqa"] = True
    return options


def torch_varlen(
    leaves: Tensors,
    cu_seqlens: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    causal: bool,
) -> torch.Tensor:
    """PyTorch's own ragged attention, which has neither bias nor a CPU kernel.

    cu_seqlens and longest are those of queries and of keys.
    """
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    options = varlen_options(varlen_attn, causal, q.shape[1] != k.shape[1])
    return varlen_attn(q, k, v, *cu_seqlens, *longest, **options)
