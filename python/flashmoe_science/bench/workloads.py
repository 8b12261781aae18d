"""What the benchmark can run: one entry of WORKLOADS each, and nothing about them elsewhere.

A workload makes a Case from a shape: the tensors, our call, the same thing said with PyTorch's math
backend (the correctness reference, in any dtype), and the peers. To add a workload, write a
function that makes its Case and add an entry at the end of this file.

Dimension 1 of every tensor of a Case counts heads, whatever the layout. Heads are independent of
each other, so a few heads of a Case are a smaller Case with the same answer (Case.take_heads).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import random
import statistics
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashmoe_science import flash_attention, flash_attention_varlen

Tensors = dict[str, torch.Tensor]

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
BACKENDS_OF = {"cpu": ("flash", "math"), "cuda": ("flash", "cudnn", "efficient", "math")}
NONDETERMINISTIC = "nondeterministic"  # our own backward pass, free to add in any order

PASSES = ("fwd", "bwd", "fwd+bwd")
USUAL_PASSES = ("fwd", "fwd+bwd")


@dataclass(frozen=True)
class Shape:
    """batch, heads, length, dim as a user types them, with the options that follow the numbers."""

    batch: int
    heads: int
    length: int
    dim: int
    kv_heads: int = 0
    causal: bool = False

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads "4,8,256,64", "1,8,1024,64,causal" or "1,8,1024,64,kv2"."""
        words = text.split(",")
        try:
            batch, heads, length, dim = (int(word) for word in words[:4])
            kv_heads, causal = heads, False
            for word in words[4:]:
                if word == "causal":
                    causal = True
                elif word.startswith("kv"):
                    kv_heads = int(word.removeprefix("kv"))
                else:
                    raise ValueError(word)
        except ValueError:
            raise ValueError(
                f"shape {text!r}: expected batch,heads,length,dim and then causal or kvN, "
                "for example 4,8,256,64 or 1,8,1024,64,causal,kv2"
            ) from None
        if min(batch, heads, length, dim, kv_heads) < 1:
            raise ValueError(f"shape {text!r}: every size must be at least 1")
        if heads % kv_heads:
            raise ValueError(f"shape {text!r}: {heads} heads are not a multiple of {kv_heads}")
        return cls(batch, heads, length, dim, kv_heads, causal)

    def __post_init__(self) -> None:
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)

    def __str__(self) -> str:
        text = f"{self.batch},{self.heads},{self.length},{self.dim}"
        if self.kv_heads != self.heads:
            text += f",kv{self.kv_heads}"
        return text + (",causal" if self.causal else "")


Prepare = Callable[[Tensors, torch.Tensor], tuple[Tensors, torch.Tensor]]


def no_change(leaves: Tensors, grad: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The inputs as they are, for an implementation that reads the Case's own layout."""
    return leaves, grad


def tokens_first(leaves: Tensors, grad: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """q, k, v as they leave a model's projections, (B, S, H, D) in memory.

    PyTorch's flash backward pass first copies its output and gradient into this layout if they have
    another: its own work is what we want to be compared with.
    """

    def relaid(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    return {n: t if n == "bias" else relaid(t) for n, t in leaves.items()}, relaid(grad)


@dataclass(frozen=True)
class Implementation:
    """One way to compute a Case: run(leaves) gives the output.

    prepare changes the layout of (leaves, grad of the output) before any clock starts, and
    prepare_backward once more where a backward pass is timed. backend names the PyTorch backend to
    force while it runs.
    """

    run: Callable[[Tensors], torch.Tensor]
    prepare: Prepare = no_change
    backend: str | None = None
    prepare_backward: Prepare = no_change


@dataclass(frozen=True)
class Case:
    """A workload at one shape, dtype and device, ready to run."""

    leaves: Tensors  # the tensors gradients are taken of, by name
    grad: torch.Tensor  # gradient of the output
    scores: int  # query-key pairs, all heads, not counting padding nor what causal removes
    flops: float  # of the forward pass: 4 * scores * dim
    ours: Implementation
    reference: Implementation
    peers: dict[str, Implementation]
    baseline: str | None = None  # the peer the ratio is about, always run; None: the best one
    bytes: int = 0  # of keys and values, where reading them is the work
    in_graph: bool = False  # so short on a GPU that it is timed as a CUDA graph of many calls
    reproducible: bool = False  # ours must give the same bits twice

    @property
    def heads(self) -> int:
        return self.leaves["q"].shape[1]

    @property
    def group(self) -> int:
        """Query heads per key head: the fewest heads that can be taken."""
        return self.heads // self.leaves["k"].shape[1]

    def take_heads(self, heads: int) -> Case:
        """The first heads query heads as a smaller Case; heads is a multiple of group."""
        part = heads / self.heads
        leaves = {name: t[:, : int(t.shape[1] * part)] for name, t in self.leaves.items()}
        return dataclasses.replace(
            self,
            leaves={name: t.contiguous() for name, t in leaves.items()},
            grad=self.grad[:, :heads].contiguous(),
            scores=int(self.scores * part),
            flops=self.flops * part,
            bytes=int(self.bytes * part),
        )


@dataclass(frozen=True)
class Workload:
    """An entry of WORKLOADS."""

    summary: str
    shapes: dict[str, tuple[str, ...]]  # default shapes by device type
    make: Callable[[Shape, torch.dtype, torch.device], Case]
    options: frozenset[str] = frozenset({"causal", "kv"})  # what may follow a shape's four numbers
    other_peers: tuple[str, ...] = ()  # beyond the device's SDPA backends
    with_sdpa: bool = True  # those backends are peers
    passes: tuple[str, ...] = PASSES  # the ones that mean something
    own_passes: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by device; else usual

    def peers(self, device_type: str) -> list[str]:
        """Names of the peers, in the order of the table."""
        return [*(BACKENDS_OF[device_type] if self.with_sdpa else ()), *self.other_peers]

    def passes_for(self, asked: Iterable[str] | None, device_type: str) -> list[str]:
        """Those asked for that this workload has; unasked, its own."""
        if asked is None:
            usual = [p for p in USUAL_PASSES if p in self.passes]
            asked = self.own_passes.get(device_type, usual)
        return [p for p in asked if p in self.passes]

    def refuses(self, shape: Shape) -> str | None:
        """Why this workload cannot have that shape, or None."""
        asked = {"causal"} if shape.causal else set()
        asked |= {"kv"} if shape.kv_heads != shape.heads else set()
        extra = asked - self.options
        return f"does not take {' or '.join(sorted(extra))}" if extra else None


def sdpa_peers(
    device: torch.device,
    run: Callable[[Tensors], torch.Tensor],
    prepare: Prepare = no_change,
) -> dict[str, Implementation]:
    """run under each PyTorch backend of the device; what prepare lays out stays as it is."""
    peers = {name: Implementation(run, prepare, name) for name in BACKENDS_OF[device.type]}
    if device.type == "cuda" and prepare is no_change:
        for name in ("flash", "cudnn", "efficient"):
            peers[name] = dataclasses.replace(peers[name], prepare_backward=tokens_first)
    return peers


def normal(*size: int, like: torch.Tensor) -> torch.Tensor:
    """Standard normal numbers with the dtype and device of like."""
    return torch.randn(*size, dtype=torch.float32, device=like.device).to(like.dtype)


def ours_dense(leaves: Tensors, causal: bool, deterministic: bool | None = None) -> torch.Tensor:
    return flash_attention(
        leaves["q"], leaves["k"], leaves["v"], bias=leaves.get("bias"), causal=causal,
        deterministic=deterministic,
    )  # fmt: skip


def sdpa_dense(leaves: Tensors, causal: bool, gqa: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        attn_mask=leaves.get("bias"),
        is_causal=causal,
        enable_gqa=gqa,
    )


def make_dense(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    with_bias: bool = False,
    queries: int | None = None,
) -> Case:
    """(B, H, S, D), with a bias of (B, H, S, S) and its gradient when asked."""
    like = torch.empty(0, dtype=dtype, device=device)
    queries = queries or shape.length
    query_size = (shape.batch, shape.heads, queries, shape.dim)
    key_size = (shape.batch, shape.kv_heads, shape.length, shape.dim)
    leaves = {name: normal(*key_size, like=like) for name in ("k", "v")}
    leaves = {"q": normal(*query_size, like=like), **leaves}
    if with_bias:
        leaves["bias"] = normal(shape.batch, shape.heads, queries, shape.length, like=like)
    pairs = queries * shape.length // (2 if shape.causal else 1)
    scores = shape.batch * shape.heads * pairs
    sdpa = functools.partial(sdpa_dense, causal=shape.causal, gqa=shape.kv_heads != shape.heads)
    return Case(
        leaves=leaves,
        grad=normal(*query_size, like=like),
        scores=scores,
        flops=4.0 * scores * shape.dim,
        ours=Implementation(functools.partial(ours_dense, causal=shape.causal)),
        reference=Implementation(sdpa, backend="math"),
        peers=sdpa_peers(device, sdpa),
    )


def make_decode(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """One new query for each head over length keys."""
    case = make_dense(shape, dtype, device, queries=1)
    read = case.leaves["k"].nbytes + case.leaves["v"].nbytes
    return dataclasses.replace(case, bytes=read, in_graph=True)


def make_deterministic(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """Our reproducible backward pass, and our ordinary one as its peer."""
    ours = functools.partial(ours_dense, causal=shape.causal)
    return dataclasses.replace(
        make_dense(shape, dtype, device),
        ours=Implementation(functools.partial(ours, deterministic=True)),
        peers={NONDETERMINISTIC: Implementation(functools.partial(ours, deterministic=False))},
        baseline=NONDETERMINISTIC,
        reproducible=True,
    )


def ragged_lengths(count: int, mean: int) -> list[int]:
    """Lengths spread like the atoms of crystals: log-normal around mean, always the same ones.

    A spread of 0.8 puts the longest of 64 near seven times the median.
    """
    spread = 0.8
    normal = statistics.NormalDist(-spread * spread / 2, spread)
    quantiles = (normal.inv_cdf((i + 0.5) / count) for i in range(count))
    lengths = [max(1, round(mean * 2.718281828**z)) for z in quantiles]
    random.Random(0).shuffle(lengths)
    return lengths


@dataclass(frozen=True)
class Ragged:
    """Sequences packed along the first dimension, and how others want them."""

    lengths: list[int]
    causal: bool
    device: torch.device

    @functools.cached_property
    def offsets(self) -> list[int]:
        return [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]

    @functools.cached_property
    def cu_seqlens(self) -> torch.Tensor:
        return torch.tensor(self.offsets, dtype=torch.int32, device=self.device)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def ours(self, leaves: Tensors) -> torch.Tensor:
        cu, longest = self.cu_seqlens, self.longest
        return flash_attention_varlen(
            leaves["q"], leaves["k"], leaves["v"], cu, cu, longest, longest,
            bias=leaves.get("bias"), causal=self.causal,
        )  # fmt: skip

    def one_by_one(self, leaves: Tensors) -> torch.Tensor:
        """SDPA on each sequence alone: slow, and plainly right."""
        outs, pair = [], 0
        for start, n in zip(self.offsets, self.lengths, strict=False):
            q, k, v = (leaves[x][start : start + n].transpose(0, 1)[None] for x in "qkv")
            mask = None
            if "bias" in leaves:
                mask = leaves["bias"][pair : pair + n * n].T.reshape(1, -1, n, n)
                pair += n * n
            gqa = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=self.causal, enable_gqa=gqa
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    @functools.cached_property
    def padding_mask(self) -> torch.Tensor:
        """Which keys a padded batch may see, (N, 1, 1 or longest, longest).

        Padded rows see some keys too: a row that sees none is NaN in PyTorch.
        """
        position = torch.arange(self.longest, device=self.device)
        lengths = torch.tensor(self.lengths, device=self.device)
        mask = (position < lengths[:, None])[:, None, None, :]
        return mask & (position <= position[:, None]) if self.causal else mask

    def pad(self, leaves: Tensors, grad: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        """The tensors as a padded batch, (N, H, longest, D); a bias takes in the padding mask."""
        padded = {name: self._pad_tokens(leaves[name]) for name in "qkv"}
        if "bias" in leaves:
            padded["bias"] = self._pad_bias(leaves["bias"])
        return padded, self._pad_tokens(grad)

    def _pad_tokens(self, packed: torch.Tensor) -> torch.Tensor:
        padded = packed.new_zeros(len(self.lengths), self.longest, *packed.shape[1:])
        for i, (start, n) in enumerate(zip(self.offsets, self.lengths, strict=False)):
            padded[i, :n] = packed[start : start + n]
        return padded.transpose(1, 2).contiguous()

    def _pad_bias(self, packed: torch.Tensor) -> torch.Tensor:
        size = (len(self.lengths), packed.shape[1], self.longest, self.longest)
        padded, pair = packed.new_zeros(size), 0
        for i, n in enumerate(self.lengths):
            padded[i, :, :n, :n] = packed[pair : pair + n * n].T.reshape(-1, n, n)
            pair += n * n
        return padded.masked_fill(~self.padding_mask, float("-inf"))

    def sdpa(self, leaves: Tensors) -> torch.Tensor:
        q, k, v = leaves["q"], leaves["k"], leaves["v"]
        mask = leaves.get("bias", self.padding_mask)
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)

    def torch_varlen(self, leaves: Tensors) -> torch.Tensor:
        """PyTorch's own ragged attention, which has neither bias nor a CPU kernel."""
        if "bias" in leaves:
            raise NotImplementedError("torch.nn.attention.varlen has no bias")
        varlen = importlib.import_module("torch.nn.attention.varlen")
        cu, longest = self.cu_seqlens, self.longest
        return varlen.varlen_attn(
            leaves["q"], leaves["k"], leaves["v"], cu, cu, longest, longest, is_causal=self.causal
        )


def make_ragged(
    shape: Shape, dtype: torch.dtype, device: torch.device, with_bias: bool = False
) -> Case:
    """(T, H, D): shape.batch sequences of shape.length tokens on average.

    The SDPA peers get them padded to the longest, which is what a model without ragged attention
    does; the padding itself is not timed.
    """
    like = torch.empty(0, dtype=dtype, device=device)
    ragged = Ragged(ragged_lengths(shape.batch, shape.length), shape.causal, device)
    tokens, pairs = sum(ragged.lengths), sum(n * n for n in ragged.lengths)
    query_size = (tokens, shape.heads, shape.dim)
    key_size = (tokens, shape.kv_heads, shape.dim)
    leaves = {name: normal(*key_size, like=like) for name in ("k", "v")}
    leaves = {"q": normal(*query_size, like=like), **leaves}
    if with_bias:
        leaves["bias"] = normal(pairs, shape.heads, like=like)
    scores = pairs * shape.heads // (2 if shape.causal else 1)
    return Case(
        leaves=leaves,
        grad=normal(*query_size, like=like),
        scores=scores,
        flops=4.0 * scores * shape.dim,
        ours=Implementation(ragged.ours),
        reference=Implementation(ragged.one_by_one, backend="math"),
        peers={
            **sdpa_peers(device, ragged.sdpa, ragged.pad),
            "varlen": Implementation(ragged.torch_varlen),
        },
    )


def gpu_dense_shapes(dims: Iterable[int], lengths: Iterable[int]) -> tuple[str, ...]:
    """batch * length = 16,384 and heads * dim = 2,048, the sizes published comparisons use."""
    return tuple(
        f"{16384 // length},{2048 // dim},{length},{dim}{causal}"
        for dim in dims
        for causal in ("", ",causal")
        for length in lengths
    )


WORKLOADS = {
    "dense": Workload(
        "attention without a bias, (B, H, S, D)",
        {
            "cpu": ("4,8,256,64", "1,8,1024,64", "1,16,2048,128", "64,8,30,16"),
            "cuda": gpu_dense_shapes((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)),
        },
        make_dense,
        own_passes={"cuda": ("fwd", "bwd")},  # the forward pass would blur the backward's ratio
    ),
    "small_dims": Workload(
        "dense with the small head dims of science models",
        {
            "cpu": ("4,8,256,16", "4,8,256,32", "4,8,256,48"),
            "cuda": ("16,32,1024,16", "16,32,1024,32", "16,32,1024,48"),
        },
        make_dense,
    ),
    "decode": Workload(
        "one query over S keys; on a GPU timed as a CUDA graph of many calls",
        {
            "cpu": ("1,32,8192,128,kv8",),
            "cuda": tuple(f"1,32,{length << 10},128,kv8" for length in (8, 16, 32, 64, 128)),
        },
        make_decode,
        options=frozenset({"kv"}),  # causal removes nothing, and means another thing in PyTorch
        passes=("fwd",),
    ),
    "deterministic": Workload(
        "dense with deterministic=True, next to our own without it",
        {
            "cpu": ("1,8,1024,64",),
            "cuda": gpu_dense_shapes((64, 128), (1024, 4096, 16384)),
        },
        make_deterministic,
        other_peers=(NONDETERMINISTIC,),
        with_sdpa=False,
        passes=("bwd", "fwd+bwd"),
        own_passes={"cpu": ("bwd",), "cuda": ("bwd",)},
    ),
    "pair_bias": Workload(
        "a learned bias of (B, H, S, S) and its gradient",
        {
            "cpu": ("16,8,64,32", "4,8,256,32", "1,16,512,64"),
            "cuda": ("64,16,256,32", "16,16,512,32", "4,16,1024,64", "1,16,2048,64"),
        },
        functools.partial(make_dense, with_bias=True),
        options=frozenset({"kv"}),
    ),
    "ragged": Workload(
        "B sequences of S tokens on average, packed; PyTorch gets them padded",
        {
            "cpu": ("64,8,31,16", "16,8,128,64"),
            "cuda": ("256,8,31,16", "256,16,31,32", "64,16,512,64"),
        },
        make_ragged,
        other_peers=("varlen",),
    ),
    "ragged_bias": Workload(
        "ragged with a packed pair bias and its gradient",
        {"cpu": ("64,8,31,16", "16,8,128,32"), "cuda": ("256,8,31,16", "64,16,256,32")},
        functools.partial(make_ragged, with_bias=True),
        options=frozenset({"kv"}),
        other_peers=("varlen",),
    ),
}


def forced_backend(implementation: Implementation) -> AbstractContextManager[None]:
    """A context in which PyTorch's SDPA has only the implementation's backend to choose from."""
    backend = implementation.backend
    return sdpa_kernel(BACKENDS[backend] if backend else list(BACKENDS.values()))
