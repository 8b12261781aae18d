"""Jagged nested tensors as the ragged batches they are."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

_MAKE = "torch.nested.nested_tensor(..., layout=torch.jagged)"


def any_nested(*tensors: Tensor) -> bool:
    return any(x.is_nested for x in tensors)


def refuse(function: str, *tensors: Tensor) -> None:
    """For functions that have another form of ragged batch."""
    if any_nested(*tensors):
        raise TypeError(
            f"{function} takes packed tensors (tokens, heads, head_dim); pass nested tensors to "
            "flash_attention, or their values() and offsets()"
        )


def as_ragged(q, k, v, **others) -> tuple:
    """Their values as (T, H, D) views; offsets and longest lengths of q and of k.

    In the order of flash_attention_varlen's arguments. ``others`` are what it has no room for.
    """
    _check_jagged(q=q, k=k, v=v)
    for name, given in others.items():
        if given is not None:
            raise ValueError(
                f"{name} is given, and q, k and v are nested; flash_attention_varlen over their "
                "values() and offsets() takes a packed bias"
            )
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(
            f"q, k and v have {q.shape[0]}, {k.shape[0]} and {v.shape[0]} sequences; it must be "
            "the same number"
        )
    if not _same_lengths(k, v):
        raise ValueError(
            f"k has shape {_shape(k)} and v {_shape(v)}, whose lengths differ: v must have those "
            "of k. torch.nested.nested_tensor_from_jagged(values, offsets=k.offsets()) gives them"
        )
    tokens = (x.values().transpose(0, 1) for x in (q, k, v))
    return *tokens, q.offsets(), k.offsets(), q._get_max_seqlen(), k._get_max_seqlen()


def like(q: Tensor, rows: Tensor) -> Tensor:
    """(T, H, ...) nested as q: (B, H, j, ...)."""
    return torch.nested.nested_tensor_from_jagged(
        rows.transpose(0, 1),
        offsets=q.offsets(),
        jagged_dim=2,
        min_seqlen=q._maybe_min_seqlen,
        max_seqlen=q._maybe_max_seqlen,
    )


def _shape(x: Tensor) -> str:
    return f"({', '.join(map(str, x.shape))})"


def _check_jagged(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if not x.is_nested:
            given = ", ".join(n for n, other in tensors.items() if other.is_nested)
            raise TypeError(
                f"{name} is no nested tensor and {given} is; make all three with {_MAKE}"
            )
        if x.layout != torch.jagged:
            raise ValueError(
                f"{name} is a nested tensor of layout {x.layout}; make it with {_MAKE}"
            )
        # PyTorch's SDPA takes (B, j, S, D) for j heads of length S: not to be guessed at.
        if x.dim() != 4 or x._ragged_idx != 2:
            raise ValueError(
                f"{name} has shape {_shape(x)}; nested tensors are (batch, heads, length, "
                "head_dim) with ragged lengths. Those of (batch, length, heads, head_dim) want "
                ".transpose(1, 2)"
            )
        if x.lengths() is not None:
            raise ValueError(f"{name} has holes between its sequences; call .contiguous() on it")


def _same_lengths(k: Tensor, v: Tensor) -> bool:
    if k.shape[2] == v.shape[2]:
        return True
    # Made one by one, they have the same lengths under different names.
    return not is_compiling() and torch.equal(k.offsets(), v.offsets())


def _refuse_strided(*args):
    raise ValueError(f"a nested tensor of layout torch.strided is given; make it with {_MAKE}")


# To Python such a tensor is a Tensor like any other. The dispatcher tells, at no cost to the rest.
_fragment = torch.library.Library("flashmoe", "FRAGMENT")
for _op in ("attention", "attention_forward"):
    for _key in ("NestedTensorCPU", "NestedTensorCUDA"):
        _fragment.impl(_op, _refuse_strided, _key)
