"""The public functions that have gradients, each with the same in plain torch math.

test_autograd.py asks them for all that autograd and torch.func offer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F

import flashmoe_science as fm
from flashmoe_science.compat import flash_attn

# Where the sequences of the ragged batch begin and end.
STARTS_Q, STARTS_K = (0, 2, 2, 5), (0, 3, 4, 6)
RAGGED = (torch.tensor(STARTS_Q), torch.tensor(STARTS_K), 3, 3)
KEY_LENGTHS = torch.tensor([4, 2])


def math(q, k, v, bias=None, key_lengths=None, sinks=None):
    """(..., H, S, D) tensors; a head of keys serves several of queries."""
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    if key_lengths is not None:
        behind = torch.arange(k.shape[-2]) >= key_lengths[:, None, None, None]
        scores = scores.masked_fill(behind, float("-inf"))
    if sinks is not None:  # a key whose value is 0
        scores = torch.cat([scores, sinks[:, None, None].expand_as(scores[..., :1])], -1)
        v = F.pad(v, (0, 0, 0, 1))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def heads_last(q, k, v):
    out, lse = math(*(x.transpose(-3, -2) for x in (q, k, v)))
    return out.transpose(-3, -2), lse


def ragged(q, k, v, bias=None, sinks=None, starts_k=STARTS_K):
    """(T, H, D) tensors, the bias packed sequence after sequence."""
    outs, lses, first = [], [], 0
    for (q0, q1), (k0, k1) in zip(pairwise(STARTS_Q), pairwise(starts_k), strict=True):
        here, n, m = None, q1 - q0, k1 - k0
        if bias is not None:
            here = bias[first : first + n * m].unflatten(0, (n, m)).movedim(-1, 0)
            first += n * m
        dense = (x.transpose(0, 1) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        out, lse = math(*dense, here, sinks=sinks)
        outs.append(out.transpose(0, 1))
        lses.append(lse.transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


def heads_first_lse(q, k, v, starts_k=STARTS_K):
    out, lse = ragged(q, k, v, starts_k=starts_k)
    return out, lse.transpose(0, 1)


def weights(x):
    """Of the elements of a result, of which no two count alike."""
    return torch.linspace(-1, 2, x.numel(), dtype=x.dtype).reshape(x.shape)


IDS = torch.tensor([[0, 2], [2, 2], [-1, 1], [4, 0], [1, 0]])


def experts(x, gate_up, down, weights):
    """Every token through every expert, and then those that it has."""
    gate, up = torch.einsum("ehd,...d->...eh", gate_up, x).chunk(2, -1)
    each = torch.einsum("edn,...en->...ed", down, F.silu(gate) * up)
    chosen = (IDS[..., None] == torch.arange(3)).to(x.dtype)  # (T, k, E)
    return (torch.einsum("tke,tk,ted->td", chosen, weights, each),)


def router(logits):
    weights = logits.softmax(-1).topk(2).values
    return (weights / weights.sum(-1, keepdim=True),)


@dataclass(frozen=True)
class Subject:
    ours: Callable
    math: Callable
    shapes: tuple[tuple[int, ...], ...]
    vmap: bool = True
    twice: bool = True  # has second derivatives and forward mode
    context: Callable = nullcontext
    instead: str = "SDPBackend.MATH"  # what a refusal says to use

    def inputs(self):
        generator = torch.Generator().manual_seed(7)
        return tuple(
            torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes
        )


DENSE = ((2, 4, 3, 2), (2, 2, 4, 2), (2, 2, 4, 2))
PACKED = ((5, 4, 2), (6, 2, 2), (6, 2, 2))
SUBJECTS = {
    "flash_attention": Subject(
        lambda *x: fm.flash_attention(*x, return_lse=True), math, (*DENSE, (4, 3, 4))
    ),
    "flash_attention, key_lengths": Subject(
        lambda *x: fm.flash_attention(*x, key_lengths=KEY_LENGTHS, return_lse=True),
        partial(math, key_lengths=KEY_LENGTHS),
        (*DENSE, (1, 4)),
    ),
    "flash_attention, one result": Subject(
        lambda *x: (fm.flash_attention(*x),), lambda *x: math(*x)[:1], DENSE
    ),
    "flash_attention, a bias and one result": Subject(
        lambda *x: (fm.flash_attention(*x),), lambda *x: math(*x)[:1], (*DENSE, (4, 3, 4))
    ),
    "flash_attention, sinks": Subject(
        lambda q, k, v, sinks: fm.flash_attention(q, k, v, sinks=sinks, return_lse=True),
        lambda q, k, v, sinks: math(q, k, v, sinks=sinks),
        (*DENSE, (4,)),
    ),
    "flash_attention_varlen, sinks": Subject(
        lambda q, k, v, sinks: fm.flash_attention_varlen(
            q, k, v, *RAGGED, sinks=sinks, return_lse=True
        ),
        lambda q, k, v, sinks: ragged(q, k, v, sinks=sinks),
        (*PACKED, (4,)),
        vmap=False,
    ),
    "flash_attention_varlen": Subject(
        lambda q, k, v, bias: fm.flash_attention_varlen(
            q, k, v, *RAGGED, bias=bias, return_lse=True
        ),
        ragged,
        (*PACKED, (12, 4)),
        vmap=False,
    ),
    "enable_sdpa": Subject(
        lambda *x: (F.scaled_dot_product_attention(*x),),
        lambda *x: math(*x)[:1],
        ((2, 4, 3, 2), (2, 4, 4, 2), (2, 4, 4, 2), (4, 3, 4)),
        context=fm.enable_sdpa,
    ),
    "flash_attn_func": Subject(
        lambda *x: flash_attn.flash_attn_func(*x, return_attn_probs=True),
        heads_last,
        ((2, 3, 4, 2), (2, 4, 2, 2), (2, 4, 2, 2)),
    ),
    "flash_attn_varlen_func": Subject(
        lambda *x: flash_attn.flash_attn_varlen_func(*x, *RAGGED, return_attn_probs=True),
        heads_first_lse,
        PACKED,
        vmap=False,
    ),
    "flash_attn_qkvpacked_func": Subject(
        lambda x: flash_attn.flash_attn_qkvpacked_func(x, return_attn_probs=True),
        lambda x: heads_last(*x.unbind(-3)),
        ((2, 3, 3, 4, 2),),
    ),
    "flash_attn_kvpacked_func": Subject(
        lambda *x: flash_attn.flash_attn_kvpacked_func(*x, return_attn_probs=True),
        lambda q, kv: heads_last(q, *kv.unbind(-3)),
        ((2, 3, 4, 2), (2, 4, 2, 2, 2)),
    ),
    "flash_attn_varlen_qkvpacked_func": Subject(
        lambda x: flash_attn.flash_attn_varlen_qkvpacked_func(
            x, RAGGED[0], 3, return_attn_probs=True
        ),
        lambda x: heads_first_lse(*x.unbind(1), STARTS_Q),
        ((5, 3, 4, 2),),
        vmap=False,
    ),
    "flash_attn_varlen_kvpacked_func": Subject(
        lambda *x: flash_attn.flash_attn_varlen_kvpacked_func(*x, *RAGGED, return_attn_probs=True),
        lambda q, kv: heads_first_lse(q, *kv.unbind(1)),
        (PACKED[0], (PACKED[1][0], 2, *PACKED[1][1:])),
        vmap=False,
    ),
    "moe": Subject(
        lambda x, gate_up, down, weights: (fm.moe(x, gate_up, down, IDS, weights),),
        experts,
        ((5, 3), (3, 4, 3), (3, 3, 2), (5, 2)),
        vmap=False,
        twice=False,
        instead="F.linear",
    ),
    "route": Subject(
        lambda logits: (fm.route(logits, 2)[1],),
        router,
        ((5, 4),),
        vmap=False,
        twice=False,
        instead="topk",
    ),
}
