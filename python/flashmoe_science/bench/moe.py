"""Mixtures of experts: shapes, cases, and what ours is compared with.

Peers are what people run: a loop over the experts, torch's grouped_mm between a sort and a sum, and
transformers' own experts, where that is installed.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from flashmoe_science import explain_moe, moe
from flashmoe_science.bench.case import (
    Case,
    Implementation,
    Prepare,
    Tensors,
    Workload,
    no_change,
)

ELEMENTS = Path(__file__).parent / "data" / "mptrj_element_counts.csv"


@dataclass(frozen=True)
class MoeShape:
    """T, d, n, E, k: tokens, width, inner width, experts, and how many of them a token has."""

    tokens: int
    width: int
    inner: int
    experts: int
    top_k: int

    options = frozenset()  # it has no more than its numbers

    @classmethod
    def parse(cls, text: str) -> MoeShape:
        """Reads "256,128,256,16,2"."""
        try:
            sizes = [int(word) for word in text.split(",")]
        except ValueError:
            sizes = []
        if len(sizes) != len(fields(cls)) or min(sizes) < 1:
            raise ValueError(
                f"shape {text!r}: expected tokens,width,inner width,experts,experts of a token, "
                "each at least 1, for example 256,128,256,16,2"
            )
        shape = cls(*sizes)
        if shape.top_k > shape.experts:
            raise ValueError(f"shape {text!r}: {shape.top_k} of {shape.experts} experts")
        return shape

    def __str__(self) -> str:
        return f"{self.tokens},{self.width},{self.inner},{self.experts},{self.top_k}"


@dataclass(frozen=True)
class MoeCase(Case):
    """Leaves x, gate_up, down and weights, where tokens have any; scores are tokens times k.

    Tokens meet in the gradients of the experts, so a part of a case is not a smaller case.
    """

    kept: int = 0  # bytes of pre-activations and routing

    @property
    def heads(self) -> int:
        return 1

    group = heads

    def kept_bytes(self, backward: bool) -> int:
        return self.kept if backward else 0


@functools.cache
def atoms_by_element() -> dict[str, int]:
    """How many atoms of MPtrj are of which element; data/README.md says where this is from."""
    with ELEMENTS.open(newline="") as file:
        return {row["element"]: int(row["atoms"]) for row in csv.DictReader(file)}


def element_ids(tokens: int, experts: int) -> list[int]:
    """Which element each atom is of, drawn from MPtrj; always the same ones.

    With fewer experts than elements the rarest share the last one.
    """
    shares = sorted(atoms_by_element().values(), reverse=True)
    shares = [*shares[: experts - 1], sum(shares[experts - 1 :])]
    return random.Random(0).choices(range(len(shares)), shares, k=tokens)


# One way to compute the experts: (x, gate_up, down, ids, weights or None).
Experts = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor
]


def loop(x, gate_up, down, ids, weights, fewest_rows=0):
    """One expert after the other, as transformers' eager experts and many models do."""
    out = torch.zeros_like(x)
    for e in ids.unique().tolist():
        token, choice = torch.where(ids == e)
        rows = x[token]
        if len(token) < fewest_rows:
            rows = F.pad(rows, (0, 0, 0, fewest_rows - len(token)))
        gate, up = F.linear(rows, gate_up[e]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down[e])[: len(token)]
        if weights is not None:
            y = y * weights[token, choice, None]
        out = out.index_add(0, token, y.to(out.dtype))
    return out


def grouped_mm(x, gate_up, down, ids, weights):
    """Sort, gather, two grouped products, scatter: no loop, and no wait for the device."""
    experts = torch.arange(gate_up.shape[0], device=x.device)
    order = ids.flatten().argsort(stable=True)
    token = order // ids.shape[1]
    ends = torch.searchsorted(ids.flatten()[order], experts, right=True).int()
    gate, up = F.grouped_mm(x[token], gate_up.mT, offs=ends).chunk(2, -1)
    y = F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends)
    if weights is not None:
        y = (y * weights.flatten()[order, None]).to(x.dtype)
    return torch.zeros_like(x).index_add(0, token, y)


def of_transformers(name: str) -> Experts:
    """A function of transformers' ExpertsInterface."""

    def run(x, gate_up, down, ids, weights):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

        module = SimpleNamespace(
            gate_up_proj=gate_up, down_proj=down, num_experts=gate_up.shape[0], act_fn=F.silu,
            has_gate=True, has_bias=False, is_transposed=False, is_concatenated=True,
            has_post_expert_norm=False, _is_expert_parallel=False,
        )  # fmt: skip
        module._apply_gate = functools.partial(_default_apply_gate, module)
        if weights is None:
            weights = x.new_ones(ids.shape)
        return ALL_EXPERTS_FUNCTIONS[name](module, x, ids, weights.to(x.dtype))

    return run


def ours(x, gate_up, down, ids, weights):
    return moe(x, gate_up, down, ids, weights)


PEERS = {
    "loop": loop,
    "grouped_mm": grouped_mm,
    "transformers": of_transformers("grouped_mm"),
    "transformers_batched": of_transformers("batched_mm"),
}


def import_transformers(leaves: Tensors, grad: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Takes seconds: before any clock starts, and only where it is needed."""
    importlib.import_module("transformers.integrations.moe")
    return leaves, grad


def on_leaves(experts: Experts, ids: torch.Tensor, prepare: Prepare = no_change) -> Implementation:
    def run(leaves: Tensors) -> torch.Tensor:
        weights = leaves.get("weights")
        return experts(leaves["x"], leaves["gate_up"], leaves["down"], ids, weights)

    return Implementation(run, prepare)


def peers_of(ids: torch.Tensor) -> dict[str, Implementation]:
    return {
        name: on_leaves(
            experts, ids, import_transformers if name.startswith("transformers") else no_change
        )
        for name, experts in PEERS.items()
    }


def make_case(shape: MoeShape, dtype, device, ids: torch.Tensor, weights=None) -> MoeCase:
    """SwiGLU experts with ids (T, k) and weights (T, k) or none."""

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*size, device=device)).to(dtype)

    T, d, n, E, k = (getattr(shape, field.name) for field in fields(shape))
    leaves = {
        "x": normal(T, d),
        "gate_up": normal(E, 2 * n, d, scale=d**-0.5),
        "down": normal(E, d, n, scale=n**-0.5),
    }
    if weights is not None:
        leaves["weights"] = weights

    def explain(leaves: Tensors, backward: bool) -> str:
        return explain_moe(**leaves, ids=ids, backward=backward)

    return MoeCase(
        leaves=leaves,
        grad=normal(T, d),
        scores=T * k,
        flops=6.0 * T * k * d * n,
        ours=Implementation(on_leaves(ours, ids).run, explain=explain),
        # Fewer rows PyTorch multiplies as vectors, with sums side by side that round less than
        # those of a product, which everyone's sums are compared with.
        reference=on_leaves(functools.partial(loop, fewest_rows=8), ids),
        peers=peers_of(ids),
        reproducible=True,
        kept=T * k * 2 * n * leaves["x"].element_size() + 4 * (E + 1 + T * k),
        keywords={"ids": ids},
    )


def make_routed(shape: MoeShape, dtype: torch.dtype, device: torch.device) -> MoeCase:
    """The top k of a softmax, as a balanced router chooses; weights that add up to 1."""
    scores = torch.randn(shape.tokens, shape.experts, device=device).softmax(-1)
    weights, ids = scores.topk(shape.top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    return make_case(
        shape, dtype, device, ids, weights.to(torch.promote_types(dtype, torch.float32))
    )


def make_elements(shape: MoeShape, dtype: torch.dtype, device: torch.device) -> MoeCase:
    """An expert for each element, and atoms as they come: one has a third of them all."""
    ids = torch.tensor(element_ids(shape.tokens, shape.experts), device=device)[:, None]
    if shape.top_k != 1:
        raise ValueError(f"shape {str(shape)!r}: an atom is of one element, so k is 1")
    return make_case(shape, dtype, device, ids)


def make_decode(shape: MoeShape, dtype: torch.dtype, device: torch.device) -> MoeCase:
    """Few tokens: reading the experts that they have is the work."""
    case = make_routed(shape, dtype, device)
    touched = case.keywords["ids"].unique().numel()
    read = touched * 3 * shape.width * shape.inner * dtype.itemsize
    return dataclasses.replace(case, bytes=read)


BATCHED = {device: (*PEERS,) for device in ("cpu", "cuda")}
# batched_mm copies the experts of every token: gigabytes, where tokens are many.
MANY = {device: tuple(p for p in PEERS if p != "transformers_batched") for device in BATCHED}
COMMON = {
    "operator": "mixture of experts",
    "shape_type": MoeShape,
    "sizes": "T,d,n,E,k",
    "backward_flops": 2.0,
    "options": frozenset(),
}
TRAINING = ("24576,1536,256,128,8", "32768,2048,1024,64,8")
SMALL = "16384,512,256,64,4"
CPU_SMALL, CPU_LARGE = "256,128,256,16,2", "1024,256,512,8,2"

MOE_WORKLOADS = {
    "moe": Workload(
        "T tokens of width d, each to k of E SwiGLU experts of inner width n, by a router",
        {"cpu": (CPU_SMALL, CPU_LARGE), "cuda": (*TRAINING, SMALL)},
        make_routed,
        peers_on=MANY,
        **COMMON,
    ),
    "moe_elements": Workload(
        "T atoms, an expert for each of E elements, in the shares that the Materials Project has",
        {"cpu": ("2048,128,256,89,1",), "cuda": ("65536,256,512,89,1",)},
        make_elements,
        peers_on=MANY,
        **COMMON,
    ),
    "moe_decode": Workload(
        "a few new tokens, each to k of E experts: reading these is the work",
        {
            "cpu": ("1,256,512,16,2",),
            "cuda": tuple(f"{tokens},2048,768,128,8" for tokens in (1, 32)),
        },
        make_decode,
        peers_on=BATCHED,
        passes=("fwd",),
        in_graph=True,
        **COMMON,
    ),
}
