"""What a query of a model of transformers may see, in our terms.

transformers describes a mask by a function of indices, put together from a few functions of its
own, and by a padding mask. Those we know become a band around the diagonal and a note of which keys
count: nothing of size Sq x Sk is made. Any other becomes transformers' own mask of (B, 1, Sq, Sk).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from transformers import masking_utils as theirs
from transformers.utils.import_utils import is_tracing

NO_LIMIT = -1

# What transformers puts its mask functions together with; each makes functions of one code object.
_AND = theirs.and_masks(theirs.causal_mask_function).__code__
_SLIDING = theirs.sliding_window_overlay(1).__code__
_SLIDING_BOTH = theirs.sliding_window_bidirectional_overlay(1).__code__
_PACKED = theirs.packed_sequence_mask_function(None).__code__
# From 5.23 on packed sequences come with their tokens' positions instead of their indices.
_REMAP = getattr(theirs, "remap_positions_for_packed_sequence", None)
_REMAPPED = _REMAP(None, None).__code__ if _REMAP else object()


@dataclass(eq=False)
class Ragged:
    """Tokens of the batch one after the other, (B * S): which of them see each other."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest: int


@dataclass(eq=False)
class Mask:
    """Row i sees the keys from i - left to i + right, as far as they count."""

    left: int = NO_LIMIT
    right: int = NO_LIMIT
    bias: Tensor | None = None  # (B, 1, 1, Sk): 0 where a key counts, -inf where it is padding
    key_lengths: Tensor | None = None  # (1): of a static cache, the keys up to the last query
    ragged: Ragged | None = None  # the same batch without its padding

    @property
    def is_packed(self) -> bool:
        return self.ragged is not None and self.bias is None

    # generate() asks these of the masks that it makes ahead, for static caches.
    ndim = 4

    def contiguous(self) -> Mask:
        return self


def _parts(function: Callable) -> Iterator[Callable]:
    """The functions that one is the conjunction of. torch.compile cannot look into them."""
    code = None if is_compiling() else getattr(function, "__code__", None)
    if code is _AND:
        for part in _bound(function, "mask_functions"):
            yield from _parts(part)
    else:
        yield function
        if code is _REMAPPED:
            yield from _parts(_bound(function, "mask_function"))


def _bound(function: Callable, name: str):
    """What a function made by another one remembers under this name."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def band_of(function: Callable) -> tuple[int, int, Tensor | None] | None:
    """left, right and the packed sequences' ids; None for a mask that is no such band."""
    left = right = None
    ids = None
    remapped = False
    for part in _parts(function):
        code = None if is_compiling() else getattr(part, "__code__", None)
        if part is theirs.causal_mask_function:
            right = 0
        elif code is _SLIDING:
            left = _bound(part, "sliding_window") - 1
        elif code is _SLIDING_BOTH:
            left = right = _bound(part, "sliding_window")
        elif code is _PACKED and ids is None:
            ids = _bound(part, "packed_sequence_mask")
        elif code is _REMAPPED:
            remapped = True
        elif part is not theirs.bidirectional_mask_function:
            return None
    # Positions of one sequence count up by one, as indices do: a band of them is the same band.
    # That holds within a sequence alone.
    if remapped and ids is None:
        return None
    if (left is not None and left < 0) or (right is not None and right < 0):
        return None
    return (NO_LIMIT if left is None else left), (NO_LIMIT if right is None else right), ids


def _pack(runs: Tensor, counts: Tensor | None) -> Ragged | None:
    """The ragged batch of runs, neighbouring tokens of equal value in (B, S).

    Padding has neither keys nor results: its queries are a sequence without keys, its keys one
    without queries. None where the tokens of a row that count lie in several runs, which do see
    each other.
    """
    starts = torch.ones_like(runs, dtype=torch.bool)
    starts[:, 1:] = runs[:, 1:] != runs[:, :-1]
    if counts is not None and ((starts & counts).sum(-1) > 1).any():
        return None
    first = starts.flatten().nonzero().flatten()
    lengths = torch.diff(first, append=first.new_tensor([runs.numel()]))
    queries = keys = lengths
    if counts is not None:
        counted = lengths * counts.flatten()[first]
        queries = torch.stack((lengths, torch.zeros_like(lengths)), -1).flatten()
        keys = torch.stack((counted, lengths - counted), -1).flatten()
    cu_seqlens = (F.pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for x in (queries, keys))
    return Ragged(*cu_seqlens, longest=int(lengths.max()))


def prepare(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = theirs.causal_mask_function,
    attention_mask: Tensor | Mask | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **more,
) -> Mask | Tensor:
    """The mask of a forward pass, once for all layers of a kind, as AttentionMaskInterface asks."""
    if isinstance(attention_mask, Mask):
        return attention_mask
    mask = _describe(q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, dtype)
    # A model that works on its masks forbids to skip them. So does transformers, for packed
    # sequences and static caches, whose masks nobody else looks at.
    skip = allow_is_causal_skip or allow_is_bidirectional_skip or isinstance(q_offset, Tensor)
    if mask is not None and (skip or mask.is_packed):
        return mask
    return theirs.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )


def _describe(q_length, kv_length, q_offset, kv_offset, mask_function, padding, dtype):
    """A Mask, or None where only the whole matrix would say it."""
    band = band_of(mask_function)
    if band is None:
        return None
    left, right, ids = band
    mask = Mask(left, right)
    # How many keys there are up to the position of the last query, which is where our kernels put
    # it. A static cache has more, which a causal mask hides.
    end = q_offset + q_length - kv_offset
    if (left, right) != (NO_LIMIT, NO_LIMIT) and (isinstance(end, Tensor) or end != kv_length):
        if right != 0 or (not isinstance(end, Tensor) and end > kv_length):
            return None
        mask.key_lengths = torch.as_tensor(end).reshape(1)
    if ids is not None:
        if padding is not None or is_tracing(ids) or mask.key_lengths is not None:
            return None
        mask.ragged = _pack(ids, None)
    if padding is None:
        return mask

    counts = theirs.prepare_padding_mask(padding, kv_length, kv_offset)
    counts = counts[:, kv_offset : kv_offset + kv_length].bool()
    if not is_tracing(counts):
        seen = counts
        if mask.key_lengths is not None:
            seen = counts | (torch.arange(kv_length, device=counts.device) >= end)
        if seen.all():
            return mask
        if q_length == kv_length and mask.key_lengths is None:
            mask.ragged = _pack(counts, counts)
    zero = torch.zeros((), dtype=dtype, device=counts.device)
    mask.bias = torch.where(counts, zero, float("-inf"))[:, None, None, :]
    return mask
