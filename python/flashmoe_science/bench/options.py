"""What a call of attention can be asked for besides: second derivatives, fp32's accuracy on a GPU,
dropout, masks of bytes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from flashmoe_science.bench import dropout
from flashmoe_science.bench.attention import dense_options, make_dense, make_ragged, our_dense
from flashmoe_science.bench.case import Case, Implementation, Shape, Tensors, Workload
from flashmoe_science.bench.peers import sdpa_dense, sdpa_peers
from flashmoe_science.bench.ragged import MOST_ATOMS, crystal_lengths
from flashmoe_science.bench.second import FIRST, SECOND, twice

# Our own calls as peers.
MASK_AS_BIAS = "mask_as_bias"  # 0 and -inf in the dtype of q, k and v
WITHOUT_DROPOUT = "without_dropout"

DROPPED = 0.1
SEED = 2**40 + 3


def explain_derivative(explain_pass: Callable[..., str], leaves: Tensors, backward: bool) -> str:
    """Of a case of second derivatives: what their first and their second part would run."""
    return (
        explain_pass(leaves, False, derivative="second") if backward else explain_pass(leaves, True)
    )


def make_second(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """Second derivatives of dense attention, with a bias for every pair of a sequence if asked."""
    case = make_dense(shape, dtype, device, bias_batch=shape.batch if shape.bias else 0)
    return twice(case, functools.partial(explain_derivative, case.ours.explain))


def make_second_crystals(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """The same for a ragged batch; math gets all sequences of one length at a time, unpadded."""
    case = make_ragged(shape, dtype, device, draw=crystal_lengths)
    return twice(case, functools.partial(explain_derivative, case.ours.explain))


def make_fp32(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """Dense attention, or pair_bias; with everyone's products in TF32 where that is allowed."""
    case = make_dense(shape, dtype, device, bias_batch=shape.batch if shape.bias else 0)
    allow = functools.partial(dataclasses.replace, tf32=shape.tf32)
    return dataclasses.replace(
        case,
        ours=allow(case.ours),
        reference=allow(case.reference),
        peers={name: allow(peer) for name, peer in case.peers.items()},
    )


def make_dropout(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """Dense attention that drops pairs. Peers drop as many, and others: theirs are not compared."""
    case, options = make_dense(shape, dtype, device), dense_options(shape)
    # On the device, as torch's generator keeps its own.
    dropped = {"dropout_p": DROPPED, "seed": torch.tensor(SEED, device=device)}
    gqa = shape.kv_heads != shape.heads
    sdpa = functools.partial(sdpa_dense, causal=shape.causal, gqa=gqa, dropout_p=DROPPED)
    theirs = {n: dataclasses.replace(p, another=True) for n, p in sdpa_peers(sdpa).items()}
    exact = functools.partial(dropout.attention, causal=shape.causal, p=DROPPED, seed=SEED)
    without = dataclasses.replace(our_dense(**options), another=True)
    return dataclasses.replace(
        case,
        ours=our_dense(**options, **dropped),
        reference=Implementation(exact),
        peers={**theirs, WITHOUT_DROPOUT: without},
        baseline="flash" if device.type == "cuda" else "math",
        keywords={**options, **dropped},
    )


def make_mask(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """A mask of bytes, (B, H, S, S) or shared by all heads, that hides half of all pairs.

    No query sees no key at all: PyTorch has no answer for that.
    """
    case = make_dense(shape, dtype, device)
    size = (shape.batch, 1 if shape.shared else shape.heads, shape.length, shape.length)
    mask = torch.rand(size, device=device) < 0.5
    mask.diagonal(dim1=-2, dim2=-1).fill_(True)
    bias = torch.zeros(size, dtype=dtype, device=device).masked_fill_(~mask, -torch.inf)
    sdpa = functools.partial(sdpa_dense, causal=False, gqa=shape.kv_heads != shape.heads, mask=mask)
    return dataclasses.replace(
        case,
        ours=our_dense(mask=mask),
        reference=Implementation(sdpa, backend="math"),
        peers={**sdpa_peers(sdpa), MASK_AS_BIAS: our_dense(mask=bias)},
        keywords={**dense_options(shape), "mask": mask},
    )


SECOND_DERIVATIVES = {
    "operator": "second derivatives of attention",
    "backward_flops": SECOND / FIRST,
    "peers_on": {"cpu": ("math",), "cuda": ("math",)},
    "passes": ("bwd", "fwd+bwd"),
    "own_passes": {device: ("bwd", "fwd+bwd") for device in ("cpu", "cuda")},
    "own_dtypes": {"cuda": ("fp32", "bf16")},
    "in_graph": True,
}

OPTION_WORKLOADS = {
    "second": Workload(
        "second derivatives: the backward pass of a backward pass, with a pair bias too",
        {
            "cpu": ("2,4,64,32", "1,4,96,32,bias"),
            "cuda": ("8,8,256,64", "1,10,400,64,bias"),
        },
        make_second,
        options=frozenset({"kv", "bias"}),
        **SECOND_DERIVATIVES,
    ),
    "second_crystals": Workload(
        "second derivatives of crystals; PyTorch's math gets those of one length at a time",
        {"cpu": ("32,4,64,16",), "cuda": (f"4096,8,{MOST_ATOMS},64",)},
        make_second_crystals,
        options=frozenset({"kv"}),
        **SECOND_DERIVATIVES,
    ),
    "fp32": Workload(
        "dense, and with a pair bias (bias), in fp32; with TF32 for everyone where allowed (tf32)",
        {
            "cpu": ("1,4,256,64", "1,4,128,64,bias"),
            "cuda": tuple(
                s + t for t in ("", ",tf32") for s in ("4,16,1024,64", "4,16,384,64,bias")
            ),
        },
        make_fp32,
        options=frozenset({"kv", "bias", "tf32"}),
        dtypes=("fp32",),
        own_dtypes={"cuda": ("fp32",)},
    ),
    "dropout": Workload(
        f"dense that drops {DROPPED} of all pairs, beside the same in PyTorch",
        {"cpu": ("1,4,256,64",), "cuda": ("4,32,4096,64", "4,32,4096,64,causal")},
        make_dropout,
        peers_on={
            "cpu": ("math", WITHOUT_DROPOUT),
            "cuda": ("flash", "cudnn", "efficient", WITHOUT_DROPOUT),
        },
        own_passes={"cuda": ("fwd", "bwd")},
    ),
    "mask": Workload(
        "dense with a mask of bytes, one for each head or for all (shared), beside it as a bias",
        {
            "cpu": ("2,4,128,64", "2,4,128,64,shared"),
            "cuda": ("8,8,1024,64", "8,8,1024,64,shared"),
        },
        make_mask,
        options=frozenset({"kv", "shared"}),
        peers_on={
            "cpu": ("flash", "math", MASK_AS_BIAS),
            "cuda": ("cudnn", "efficient", "math", MASK_AS_BIAS),
        },
    ),
}
