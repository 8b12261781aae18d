"""The C functions on device memory: what another language would call."""

import ctypes
from pathlib import Path

import pytest
import torch

import flashmoe_science

LIBRARY = Path(flashmoe_science.__file__).parent / "lib" / "libflashmoe.so"


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 4)]


class Args(ctypes.Structure):
    """flash_attention_args of include/flashmoe/c_api.h."""

    _fields_ = [
        ("struct_size", ctypes.c_uint64),
        *((n, ctypes.c_int64) for n in ("batch", "heads_q", "heads_k", "len_q", "len_k")),
        *((n, ctypes.c_int64) for n in ("head_dim", "head_dim_v")),
        *((n, Tensor) for n in ("query", "key", "value", "bias")),
        ("bias_shape", ctypes.c_int64 * 4),
        ("bias_dtype", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("has_scale", ctypes.c_int32),
        ("deterministic", ctypes.c_int32),
        ("key_lengths", ctypes.c_void_p),
        *((n, Tensor) for n in ("out", "lse", "grad_out", "grad_lse")),
        *((n, Tensor) for n in ("grad_query", "grad_key", "grad_value", "grad_bias")),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_uint64),
        ("device", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
    ]


@pytest.fixture(scope="module")
def library():
    found = ctypes.CDLL(str(LIBRARY))
    found.flash_attention_last_error.restype = ctypes.c_char_p
    return found


def arguments(library, q, k, v, out, lse, stream) -> Args:
    args = Args()
    assert (
        library.flash_attention_args_init(ctypes.byref(args), ctypes.c_size_t(ctypes.sizeof(args)))
        == 0
    )
    args.batch, args.heads_q, args.len_q, args.head_dim = q.shape
    args.heads_k, args.len_k, args.head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    named = {"query": q, "key": k, "value": v, "out": out}
    for name, tensor in named.items():
        setattr(args, name, Tensor(tensor.data_ptr(), (ctypes.c_int64 * 4)(*tensor.stride())))
    args.lse = Tensor(lse.data_ptr(), (ctypes.c_int64 * 4)(*lse.stride(), 0))
    args.device, args.stream = q.device.index, stream.cuda_stream
    return args


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_forward_on_device_memory(library, dtype):
    torch_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    device = torch.device("cuda", torch.cuda.current_device())
    q = torch.randn(2, 130, 4, 64, dtype=torch_dtype, device=device).transpose(1, 2)
    k, v = (torch.randn(2, 2, 77, 64, dtype=torch_dtype, device=device) for _ in range(2))
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:-1], float("nan"), device=device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    args = arguments(library, q, k, v, out, lse, stream)
    args.causal = 1
    forward = getattr(library, f"flash_attention_forward_{dtype}")
    assert forward(ctypes.byref(args)) == 0, library.flash_attention_last_error()
    torch.cuda.current_stream().wait_stream(stream)
    want, want_lse = flashmoe_science.flash_attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_refusals_name_the_argument(library):
    q = torch.randn(1, 1, 8, 64, dtype=torch.float16, device="cuda:0")
    lse = torch.empty(q.shape[:-1], device=q.device)
    args = arguments(library, q, q, q, torch.empty_like(q), lse, torch.cuda.current_stream())
    args.softcap = 5.0
    assert library.flash_attention_forward_fp16(ctypes.byref(args)) != 0
    assert b"softcap" in library.flash_attention_last_error()
    args.softcap, args.device = 0.0, 1000
    assert library.flash_attention_forward_fp16(ctypes.byref(args)) != 0
    assert b"device is 1000" in library.flash_attention_last_error()
    args.device = 0
    args.query.data += 2
    assert library.flash_attention_forward_fp16(ctypes.byref(args)) != 0
    assert b"query" in library.flash_attention_last_error()
