"""What is not there is refused, by name and with what would work."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE, check, check_case, dense, integers, on_a_gpu, qkv

import flashmoe_science as fm

pytestmark = on_a_gpu


REFUSALS = {
    "float64": (
        lambda q, k, v: fm.flash_attention(q.double(), k.double(), v.double()),
        r"(?:float64|fp64).*(?:float16|fp16)",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(what):
    call, words = REFUSALS[what]
    with pytest.raises(RuntimeError, match=rf"(?is){words}") as refusal:
        call(*qkv(33))
    assert "cpu" in str(refusal.value).lower(), "says what would work"
    torch.cuda.synchronize()  # and leaves the device as it was
    check(*qkv(33))
    check_case(dense(33))


def test_tensors_on_different_devices_are_refused():
    q, k, v = qkv(33)
    for name, tensors in {
        "key": (q, k.cpu(), v),
        "value": (q, k, v.cpu()),
        "key|query": (q.cpu(), k, v),
    }.items():
        with pytest.raises(RuntimeError, match=rf"(?is)(?:{name}).*device"):
            fm.flash_attention(*tensors)
    with pytest.raises(RuntimeError, match=r"(?is)bias.*device"):
        fm.flash_attention(q, k, v, bias=torch.zeros(33, 33, dtype=q.dtype))
    with pytest.raises(RuntimeError, match=r"(?is)key_lengths.*device"):
        fm.flash_attention(q, k, v, key_lengths=torch.tensor([5, 9]))
    with pytest.raises(RuntimeError, match=r"(?is)cu_seqlens_k.*device"):
        cu = integers(0, 33)
        flat = [x[0].transpose(0, 1) for x in (q, k, v)]
        fm.flash_attention_varlen(*flat, cu, cu.cpu(), 33, 33)


def test_mixed_dtypes_are_refused():
    q, k, v = qkv(33)
    with pytest.raises(RuntimeError, match="key"):
        fm.flash_attention(q, k.bfloat16(), v)
    for dtype in (torch.bfloat16, torch.float64, torch.bool):
        with pytest.raises(RuntimeError, match="bias"):
            fm.flash_attention(q, k, v, bias=torch.zeros(33, 33, device=DEVICE).to(dtype))


def test_cpu_tensors_work_next_to_a_gpu():
    q, k, v = (x.cpu() for x in qkv(33))
    out, lse = fm.flash_attention(q, k, v, bias=torch.randn(33, 33), return_lse=True)
    assert out.device.type == lse.device.type == "cpu"
    assert out.isfinite().all()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_family_that_has_no_such_dtype(backward, monkeypatch):
    tensors = [x.requires_grad_(backward) for x in qkv(33, dtype=torch.bfloat16)]
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm75")
    with pytest.raises(RuntimeError, match=r"sm75.*(?:bfloat16|bf16)"):
        fm.flash_attention(*tensors)
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm80")
    assert fm.flash_attention(*tensors).isfinite().all()


def test_a_family_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm1")
    with pytest.raises(RuntimeError, match=r"FLASHMOE_FAMILY is sm1.*sm80"):
        fm.flash_attention(*qkv(33))


@pytest.mark.parametrize("tile", ["1x1", "64", "64x64x64", "axb", "-64x64"])
def test_a_tile_that_does_not_exist(tile, monkeypatch):
    monkeypatch.setenv("FLASHMOE_TILE", tile)
    with pytest.raises(RuntimeError, match=rf"FLASHMOE_TILE.*{tile}.*\d+x\d+"):
        fm.flash_attention(*qkv(33))


def test_lengths_are_checked_as_far_as_the_host_knows_them():
    q, k, v = qkv(33)
    with pytest.raises(RuntimeError, match="key_lengths"):
        fm.flash_attention(q, k, v, key_lengths=integers(5, 6, 7))
    with pytest.raises(RuntimeError, match="key_lengths"):
        fm.flash_attention(q, k, v, key_lengths=torch.tensor([5.0, 6.0], device=DEVICE))
