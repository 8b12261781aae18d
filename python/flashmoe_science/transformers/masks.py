"""What a query of a model of transformers may see, in our terms.

transformers describes a mask by a function of indices, put together from a few functions of its
own, and by a padding mask. Those we know become a band around the diagonal and a note of which keys
count: nothing of size Sq x Sk is made. Any other becomes transformers' own mask of (B, 1, Sq, Sk).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map
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
    """Queries (B * Sq) and keys (B * Sk) one after the other: which of them see each other."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest: tuple[int, int]  # queries and keys of a sequence
    shape: tuple[int, int, int]  # (B, Sq, Sk) of the batch that was packed


@dataclass(eq=False)
class Mask:
    """Row i sees the keys from i - left to i + right, as far as they count.

    A model that works on its mask itself (adds a bias, repeats it for its heads) finds a tensor
    here: eager attention's, which is made when it is asked for.
    """

    left: int = NO_LIMIT
    right: int = NO_LIMIT
    bias: Tensor | None = None  # (B, 1, 1, Sk): 0 where a key counts, -inf where it is padding
    key_lengths: Tensor | None = None  # (1): of a static cache, the keys up to the last query
    ragged: Ragged | None = None  # the same batch without the keys that are padding
    arguments: dict | None = field(default=None, repr=False)  # of what makes the tensor

    @property
    def is_packed(self) -> bool:
        return self.ragged is not None and self.bias is None

    @property
    def hides_nothing(self) -> bool:
        limits = (self.bias, self.key_lengths, self.ragged)
        return self.left == self.right == NO_LIMIT and all(x is None for x in limits)

    # generate() asks these of the masks that it makes ahead, for static caches; accelerate moves
    # what has to() between devices, and _attend() moves what is in here.
    ndim = 4

    def contiguous(self) -> Mask:
        return self

    def to(self, *args, **kwargs) -> Mask:
        return self

    @property
    def shape(self) -> torch.Size:
        """Of the tensor, without making it."""
        sizes = (self.arguments[name] for name in ("batch_size", "q_length", "kv_length"))
        batch, q_length, kv_length = sizes
        return torch.Size((batch, 1, q_length, kv_length))

    @cached_property
    def tensor(self) -> Tensor:
        """(B, 1, Sq, Sk), to be added to the scores: what every model takes that runs eagerly."""
        if not is_compiling():
            # Without the sizes, which Python would take for a new warning at each length.
            warnings.warn(
                "the model works on its attention mask itself, so that a tensor of (batch, 1, "
                "queries, keys) is made of it. A model that computes its attention itself, too, as "
                "BLOOM does, computes none of it by flashmoe_science",
                stacklevel=1,
            )
        return theirs.eager_mask(**self.arguments)

    def __getattr__(self, name: str):
        """The tensor's, for what a Mask has not. Names of Python's own protocols stay unknown."""
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """torch's functions, and operators with a Mask on their right, get the tensor."""
        arguments = (args, kwargs or {})
        args, kwargs = tree_map(lambda x: x.tensor if isinstance(x, cls) else x, arguments)
        return function(*args, **kwargs)


def _operator(name: str) -> Callable:
    return lambda self, *operands: getattr(self.tensor, name)(*operands)


# Python looks these up in the class, past __getattr__().
_BINARY = ("add", "sub", "mul", "truediv", "and", "or", "eq", "ne", "lt", "le", "gt", "ge")
for _name in (*_BINARY, "radd", "rsub", "rmul", "neg", "invert", "getitem"):
    setattr(Mask, f"__{_name}__", _operator(f"__{_name}__"))
# A class that gets __eq__ keeps its hash by name alone.
Mask.__hash__ = object.__hash__


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


def _cumulated(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _starts(runs: Tensor) -> Tensor:
    """True where a run begins, neighbouring tokens of equal value in (B, S)."""
    starts = torch.ones_like(runs, dtype=torch.bool)
    starts[:, 1:] = runs[:, 1:] != runs[:, :-1]
    return starts


def _pack(runs: Tensor, counts: Tensor | None) -> Ragged:
    """The ragged batch of runs of tokens, whose queries and keys are the same tokens.

    Padding has neither keys nor results: its queries are a sequence without keys, its keys one
    without queries.
    """
    first = _starts(runs).flatten().nonzero().flatten()
    lengths = torch.diff(first, append=first.new_tensor([runs.numel()]))
    queries = keys = lengths
    if counts is not None:
        counted = lengths * counts.flatten()[first]
        queries = torch.stack((lengths, torch.zeros_like(lengths)), -1).flatten()
        keys = torch.stack((counted, lengths - counted), -1).flatten()
    longest, (batch, length) = int(lengths.max()), runs.shape
    shape = (batch, length, length)
    return Ragged(_cumulated(queries), _cumulated(keys), (longest, longest), shape)


def _pack_keys(counts: Tensor, q_length: int) -> Ragged:
    """The ragged batch of all queries of a row over the one run of its keys that count.

    Padding before and after the run are sequences of keys without queries. A padded query sees the
    same keys as the others: queries need not be the keys' tokens, and models pool padded ones.
    """
    batch, kv_length = counts.shape
    before, seen = counts.int().argmax(-1), counts.sum(-1)
    keys = torch.stack((before, seen, kv_length - before - seen), -1).flatten()
    queries = torch.tensor([0, q_length, 0], device=counts.device).repeat(batch)
    longest, shape = (q_length, int(keys.max())), (batch, q_length, kv_length)
    return Ragged(_cumulated(queries), _cumulated(keys), longest, shape)


def _for_batch(padding: Tensor, batch_size: int) -> Tensor:
    """A row of padding for each sequence: another number of them says nothing but "no padding"."""
    rows = padding.shape[0]
    if rows == batch_size:
        return padding
    if rows and not is_tracing(padding) and padding.all():
        return padding[:1].expand(batch_size, -1)
    raise ValueError(
        f"attention_mask has shape {tuple(padding.shape)} for a batch of {batch_size}; "
        "padding needs a row for each sequence of the batch"
    )


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
) -> Mask | Tensor | None:
    """The mask of a forward pass, once for all layers of a kind, as AttentionMaskInterface asks."""
    if isinstance(attention_mask, Mask):
        return attention_mask
    if attention_mask is not None:
        attention_mask = _for_batch(attention_mask, batch_size)
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "use_vmap": use_vmap,
        "device": device,
    }
    mask = _describe(q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, dtype)
    # Without a mask a layer asks its module whether it is causal. A decoder that its config makes
    # bidirectional (is_causal=False) may not know, and keeps the mask that says so.
    made_bidirectional = getattr(more.get("config"), "is_causal", None) is False
    may_skip = allow_is_bidirectional_skip and not made_bidirectional
    if mask is not None and mask.hides_nothing and may_skip:
        return None
    # A model that works on its masks forbids to skip them. So does transformers, for packed
    # sequences and static caches, whose masks nobody else looks at.
    skip = allow_is_causal_skip or allow_is_bidirectional_skip or isinstance(q_offset, Tensor)
    if mask is not None and (skip or mask.is_packed):
        mask.arguments = {"dtype": dtype, **arguments}
        return mask
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return theirs.sdpa_mask(**arguments, **skips)


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
        # Causal masks are of self-attention. A window to both sides, which a run's keys would shift
        # for padded queries, stays a window with a bias; so do runs between holes, which see each
        # other.
        everything = (left, right) == (NO_LIMIT, NO_LIMIT)
        same_tokens = right == 0 and q_length == kv_length and mask.key_lengths is None
        if (everything or same_tokens) and not ((_starts(counts) & counts).sum(-1) > 1).any():
            mask.ragged = _pack_keys(counts, q_length) if everything else _pack(counts, counts)
    zero = torch.zeros((), dtype=dtype, device=counts.device)
    mask.bias = torch.where(counts, zero, float("-inf"))[:, None, None, :]
    return mask
