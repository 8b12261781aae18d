"""Kernels that are launched while what is ahead of them in the stream still runs: they wait for it,
be it a kernel, a copy, a memset or another stream; eager and in graphs."""

from __future__ import annotations

import pytest
import torch
from helpers import on_a_gpu, qkv

import flashmoe_science as fm
from oracle import same_bits

pytestmark = on_a_gpu

SHAPES = {
    "one launch backward": {"n": 200, "hq": 4, "hk": 4, "d": 64},
    "one round": {"n": 300, "hq": 4, "hk": 4, "d": 64},
    "a counter": {"n": 2048, "lead": (8,), "hq": 16, "hk": 16, "d": 64},
    "split": {"n": 1500, "lead": (1,), "hq": 8, "hk": 1, "d": 128},
    "two CTAs": {"n": 500, "hq": 2, "hk": 1, "d": 256},
    "short": {"n": 40, "hq": 8, "hk": 8, "d": 128},
}


def slowly() -> None:
    """Half a millisecond of nothing on the device."""
    torch.cuda._sleep(1_000_000)


def by_copy(to, source):
    to.copy_(source)


def by_kernel(to, source):
    torch.mul(source, 1, out=to)


def by_memset_and_kernel(to, source):
    to.zero_()
    to.add_(source)


def on_another_stream(to, source):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        slowly()
        to.copy_(source)
    torch.cuda.current_stream().wait_stream(side)


WAYS = (by_copy, by_kernel, by_memset_and_kernel, on_another_stream)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_written_just_before(shape, way, dtype):
    source = qkv(**SHAPES[shape], dtype=dtype)
    leaves = [torch.zeros_like(x).requires_grad_() for x in source]
    grad_source = torch.randn_like(source[0])
    grad = torch.zeros_like(grad_source)

    def both_passes():
        slowly()
        with torch.no_grad():
            for leaf, x in zip(leaves, source, strict=True):
                way(leaf, x)
        out = fm.flash_attention(*leaves, causal=True, deterministic=True)
        slowly()
        way(grad, grad_source)
        return out, *torch.autograd.grad(out, leaves, grad)

    leaves_now = [x.clone().requires_grad_() for x in source]
    out = fm.flash_attention(*leaves_now, causal=True, deterministic=True)
    want = (out, *torch.autograd.grad(out, leaves_now, grad_source))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        eager = both_passes()
        with torch.cuda.graph(graph, stream=stream):
            captured = both_passes()
    for results in (eager, captured):
        if results is captured:
            with torch.no_grad():
                for x in (*leaves, grad):
                    x.fill_(7)
            torch.cuda.synchronize()
            graph.replay()
        torch.cuda.synchronize()
        for got, right in zip(results, want, strict=True):
            assert same_bits(got, right)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_others_still_read(shape, dtype):
    """Results go where a kernel that still runs reads: it sees what was there."""
    tensors = qkv(**SHAPES[shape], dtype=dtype)
    leaves = [x.requires_grad_() for x in tensors]
    want = fm.flash_attention(*leaves, causal=True)
    gradients = torch.autograd.grad(want, leaves, torch.ones_like(want))
    torch.cuda.synchronize()
    reused = 0
    for _ in range(10):
        old = torch.full_like(want, 3)
        slowly()
        copy = old * 1
        address = old.data_ptr()
        del old  # the next result of this size takes its place
        out = fm.flash_attention(*leaves, causal=True)
        again = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert (copy == 3).all()
        reused += out.data_ptr() == address
        assert same_bits(out, want)
        assert same_bits(again[2], gradients[2])
    assert reused
