"""What a workload is made of: its shape, the tensors and calls of a Case, and the Workload itself.

Dimension 1 of every tensor of a Case of attention counts heads, whatever the layout. Heads are
independent of each other, so a few heads of a Case are a smaller Case with the same answer
(Case.take_heads). paged.py has the cases of attention over pages, append.py and moe.py the shapes
and cases of writing to a cache and of a mixture of experts, which have no such parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

Tensors = dict[str, torch.Tensor]
# The output of an implementation, or the gradient of one: most have one, second derivatives many.
Outputs = torch.Tensor | tuple[torch.Tensor, ...]

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
BACKENDS_OF = {"cpu": ("flash", "math"), "cuda": ("flash", "cudnn", "efficient", "math")}

PASSES = ("fwd", "bwd", "fwd+bwd")
USUAL_PASSES = ("fwd", "fwd+bwd")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
USUAL_DTYPES = {"cpu": tuple(DTYPES), "cuda": ("bf16",)}


def each(function: Callable[[torch.Tensor], torch.Tensor], outputs: Outputs) -> Outputs:
    """function of one output, or of every one."""
    if isinstance(outputs, tuple):
        return tuple(map(function, outputs))
    return function(outputs)


def named(outputs: Outputs) -> Tensors:
    """ "out", or "out_0", "out_1", ..."""
    if isinstance(outputs, tuple):
        return {f"out_{i}": out for i, out in enumerate(outputs)}
    return {"out": outputs}


@dataclass(frozen=True)
class Shape:
    """batch, heads, length, dim as a user types them, with the options that follow the numbers."""

    batch: int
    heads: int
    length: int
    dim: int
    kv_heads: int = 0
    causal: bool = False
    window: int = 0  # keys that a query sees, its own the last of them; 0: all
    even: bool = False  # where lengths are drawn: every sequence has length tokens instead
    queries: int = 0  # of a chunk over length keys
    page: int = 0  # tokens of a page of a cache
    e4m3: bool = False  # a cache in fp8
    bias: bool = False
    shared: bool = False  # one mask for all heads
    tf32: bool = False  # is allowed

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads "4,8,256,64", "1,8,1024,64,causal", "1,8,1024,64,kv2,causal,w128"."""
        words = text.split(",")
        try:
            batch, heads, length, dim = (int(word) for word in words[:4])
            sizes, flags = {"kv_heads": heads}, {}
            for word in words[4:]:
                letters = word.rstrip("0123456789")
                if word in OPTIONS and word not in SIZES:
                    flags[word] = True
                elif letters in SIZES:
                    sizes[SIZES[letters]] = int(word.removeprefix(letters))
                else:
                    raise ValueError(word)
        except ValueError:
            known = ", ".join(f"{word}N" if word in SIZES else word for word in OPTIONS)
            raise ValueError(
                f"shape {text!r}: expected batch,heads,length,dim and then any of {known}; "
                "for example 4,8,256,64 or 1,8,1024,64,causal,kv2"
            ) from None
        if min(batch, heads, length, dim, *sizes.values()) < 1:
            raise ValueError(f"shape {text!r}: every size must be at least 1")
        if heads % sizes["kv_heads"]:
            raise ValueError(
                f"shape {text!r}: {heads} heads are not a multiple of {sizes['kv_heads']}"
            )
        if "window" in sizes and "causal" not in flags:
            raise ValueError(f"shape {text!r}: a window ends at the query's own key: add causal")
        if sizes.get("queries", 0) > length:
            raise ValueError(f"shape {text!r}: {sizes['queries']} queries are among {length} keys")
        return cls(batch, heads, length, dim, **sizes, **flags)

    def __post_init__(self) -> None:
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)

    def __str__(self) -> str:
        numbers = f"{self.batch},{self.heads},{self.length},{self.dim}"
        return ",".join([numbers, *self.words])

    @property
    def words(self) -> list[str]:
        """What it has besides its four numbers."""
        words = {word: getattr(self, SIZES.get(word, word)) for word in OPTIONS}
        words["kv"] = self.kv_heads if self.kv_heads != self.heads else 0
        return [f"{w}{value}" if w in SIZES else w for w, value in words.items() if value]

    @property
    def options(self) -> set[str]:
        """The names of these: "kv", "window", "causal"."""
        names = {SIZES.get(word.rstrip("0123456789"), word) for word in self.words}
        return {"kv" if name == "kv_heads" else name for name in names}

    @property
    def pairs(self) -> int:
        """Scores of one sequence and head. Half are causal, as published rates count them."""
        if self.window:
            seen = min(self.window, self.length)
            return seen * (seen + 1) // 2 + (self.length - seen) * seen
        return self.length * self.length // (2 if self.causal else 1)


# What may follow the four numbers of a shape, in this order: "kv2,causal"; and whose are numbers.
OPTIONS = ("kv", "causal", "w", "even", "q", "p", "e4m3", "bias", "shared", "tf32")
SIZES = {"kv": "kv_heads", "w": "window", "q": "queries", "p": "page"}

Prepare = Callable[[Tensors, torch.Tensor], tuple[Tensors, torch.Tensor]]


def no_change(leaves: Tensors, grad: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The inputs as they are, for an implementation that reads the Case's own layout."""
    return leaves, grad


def tokens_first(leaves: Tensors, grad: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """q, k, v as they leave a model's projections, (B, S, H, D) in memory.

    Every dense case of a GPU is stored so, for everyone: PyTorch's flash backward pass would first
    copy its output and gradient into this layout, and its own work is what we compare with.
    """

    def relaid(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    return {n: t if n == "bias" else relaid(t) for n, t in leaves.items()}, relaid(grad)


@dataclass(frozen=True)
class Implementation:
    """One way to compute a Case: run(leaves) gives the output.

    prepare changes the layout of (leaves, grad of the output) before any clock starts. backend is
    the PyTorch backend to force while it runs. explain(leaves, backward) says which kernel of ours
    would run. in_full: timed in every turn, however slow it is. restore gives output and gradients
    ("out", "grad_q", ...) the Case's own layout, to be compared. another: it computes something
    else than the Case, to say what that would cost; its answer is not compared, and it is never
    the best peer. tf32: fp32 products may be those of TF32, as for torch's own. around: a context
    for many calls.
    """

    run: Callable[[Tensors], Outputs]
    prepare: Prepare = no_change
    backend: str | None = None
    explain: Callable[[Tensors, bool], str] | None = None
    in_full: bool = False
    restore: Callable[[Tensors], Tensors] = dict
    another: bool = False
    tf32: bool = False
    around: Callable[[], AbstractContextManager[None]] = nullcontext


def as_it_is(run: Callable[[Tensors], Outputs]) -> Callable[[Tensors], Outputs]:
    return run


@dataclass(frozen=True)
class Case:
    """A workload at one shape, dtype and device, ready to run."""

    leaves: Tensors  # the tensors gradients are taken of, by name
    grad: Outputs  # gradient of the output
    scores: int  # query-key pairs, all heads, not counting padding nor what causal or window remove
    flops: float  # of the forward pass: 4 * scores * dim
    ours: Implementation
    reference: Implementation
    peers: dict[str, Implementation]
    baseline: str | None = None  # the peer the ratio is about, always run; None: the best one
    bytes: int = 0  # that the forward pass must move, where moving them is the work
    reproducible: bool = False  # ours must give the same bits twice
    lengths: tuple[int, ...] = ()  # of the sequences of a ragged batch
    reference_scores: int = 0  # that the reference computes, where it masks nearly all of them
    keywords: dict[str, Any] = field(default_factory=dict)  # what a peer's file is told: PeerFile
    wrap: Callable = as_it_is  # from a peer's attention to what the case is about

    @property
    def heads(self) -> int:
        return self.leaves["q"].shape[1]

    @property
    def group(self) -> int:
        """Query heads per key head: the fewest heads that can be taken."""
        return self.heads // self.leaves["k"].shape[1]

    @property
    def judges_largest_of_gradients(self) -> bool:
        """Whether the largest error of a gradient is judged beside the root mean square."""
        return True

    def kept_bytes(self, backward: bool) -> int | None:
        """What a call must hold besides inputs, output and gradients; None: not known. Here lse."""
        q = self.leaves["q"]
        return q.shape[:-1].numel() * (8 if q.dtype == torch.float64 else 4)

    def take_heads(self, heads: int) -> Case:
        """The first heads query heads as a smaller Case; heads is a multiple of group."""
        part = heads / self.heads
        leaves = {name: t[:, : int(t.shape[1] * part)] for name, t in self.leaves.items()}
        return dataclasses.replace(
            self,
            leaves={name: t.contiguous() for name, t in leaves.items()},
            grad=each(lambda g: g[:, : int(g.shape[1] * part)].contiguous(), self.grad),
            scores=int(self.scores * part),
            flops=self.flops * part,
            bytes=int(self.bytes * part),
        )


@dataclass(frozen=True)
class Workload:
    """An entry of WORKLOADS."""

    summary: str
    shapes: dict[str, tuple[str, ...]]  # default shapes by device type
    make: Callable[[Any, torch.dtype, torch.device], Case]  # from a shape of shape_type
    operator: str = "attention"
    shape_type: type = Shape  # with parse(), str() and options
    sizes: str = "B,H,S,D"  # what the numbers of a shape are
    # FLOPs of the backward pass over those of the forward pass: attention has five matrix products
    # there where the forward pass has two.
    backward_flops: float = 2.5
    # What may follow a shape's four numbers, by the names that Shape.options has.
    options: frozenset[str] = frozenset({"causal", "kv"})
    # By device type, in the order of the table: the ones of the Case's peers that can ever run.
    peers_on: dict[str, tuple[str, ...]] = field(default_factory=lambda: dict(BACKENDS_OF))
    passes: tuple[str, ...] = PASSES  # the ones that mean something
    own_passes: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by device; else usual
    dtypes: tuple[str, ...] = tuple(DTYPES)  # the ones that mean something
    own_dtypes: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by device; else usual
    in_graph: bool = False  # on a GPU timed as CUDA graphs: calls so short that the host shows
    waits_for_host: bool = False  # on a GPU timed with the host, as calls follow each other

    def peers(self, device_type: str) -> list[str]:
        """Names of the peers, in the order of the table."""
        return list(self.peers_on[device_type])

    def passes_for(self, asked: Iterable[str] | None, device_type: str) -> list[str]:
        """Those asked for that this workload has; unasked, its own."""
        if asked is None:
            usual = [p for p in USUAL_PASSES if p in self.passes]
            asked = self.own_passes.get(device_type, usual)
        return [p for p in asked if p in self.passes]

    def dtypes_for(self, asked: Iterable[str] | None, device_type: str) -> list[str]:
        """The same for dtypes."""
        if asked is None:
            asked = self.own_dtypes.get(device_type, USUAL_DTYPES[device_type])
        return [dtype for dtype in asked if dtype in self.dtypes]

    def flops_of_pass(self, direction: str) -> float:
        """Over those of the forward pass."""
        return {"fwd": 1.0, "bwd": self.backward_flops}.get(direction, 1 + self.backward_flops)

    def refuses(self, shape: Any) -> str | None:
        """Why this workload cannot have that shape, or None."""
        extra = shape.options - self.options
        return f"does not take {' or '.join(sorted(extra))}" if extra else None


@contextmanager
def forced_backend(implementation: Implementation) -> Iterator[None]:
    """PyTorch's SDPA has only the implementation's backend to choose from, and its precision.

    And what else is to be around its calls.
    """
    backend, before = implementation.backend, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if implementation.tf32 else "highest")
    try:
        choice = BACKENDS[backend] if backend else list(BACKENDS.values())
        with sdpa_kernel(choice), implementation.around():
            yield
    finally:
        torch.set_float32_matmul_precision(before)
