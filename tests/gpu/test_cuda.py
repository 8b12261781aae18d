"""What CUDA tensors meet in a build that has no CUDA kernels yet."""

import pytest
import torch

import flashmoe_science as fm


def qkv(dtype=torch.float16):
    return [torch.randn(2, 4, 33, 16, dtype=dtype, device="cuda") for _ in range(3)]


def test_cuda_tensors_are_refused_with_what_works():
    with pytest.raises(RuntimeError, match=r"(?is)no cuda kernels.*cpu"):
        fm.flash_attention(*qkv())


def test_ragged_cuda_tensors_are_refused_too():
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in qkv())
    cu = torch.tensor([0, 13, 33], dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match=r"(?is)no cuda kernels.*cpu"):
        fm.flash_attention_varlen(q, k, v, cu, cu, 20, 20)


def test_explain_says_so_as_well():
    with pytest.raises(RuntimeError, match=r"(?is)no cuda kernels.*cpu"):
        fm.explain(*qkv())


def test_a_refusal_leaves_the_device_usable():
    q, k, v = qkv(torch.float32)
    with pytest.raises(RuntimeError):
        fm.flash_attention(q, k, v)
    torch.cuda.synchronize()
    assert (q @ k.mT).isfinite().all()


def test_cpu_tensors_still_work_next_to_a_gpu():
    q, k, v = (x.cpu() for x in qkv())
    got = fm.flash_attention(q, k, v)
    want = torch.softmax(q.double() @ k.double().mT / 4, -1) @ v.double()
    assert (got.double() - want).abs().max() <= 2**-10 * want.abs().max()
