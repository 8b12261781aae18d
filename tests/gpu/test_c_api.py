"""The C functions on device memory: what another language would call."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from math import nan
from pathlib import Path

import pytest
import torch
from helpers import DEVICE, on_a_gpu

import flashmoe_science
from oracle import same_bits

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
        ("sinks", Tensor),
        ("dropout_p", ctypes.c_double),
        ("seed", ctypes.c_void_p),
        *((n, Tensor) for n in ("out", "lse", "grad_out", "grad_lse")),
        *((n, Tensor) for n in ("grad_query", "grad_key", "grad_value", "grad_bias")),
        ("grad_sinks", Tensor),
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


class Host:
    """What stands for a stream in a rehearsal."""

    cuda_stream = None

    def synchronize(self) -> None: ...


@pytest.fixture
def stream():
    return Host() if DEVICE == "cpu" else torch.cuda.Stream()


def arguments(library, stream, **tensors) -> Args:
    """Tensors by their names in the struct; query, key and value must be among them."""
    args = Args()
    size = ctypes.c_size_t(ctypes.sizeof(args))
    assert library.flash_attention_args_init(ctypes.byref(args), size) == 0
    q, k, v = (tensors[name] for name in ("query", "key", "value"))
    args.batch, args.heads_q, args.len_q, args.head_dim = q.shape
    args.heads_k, args.len_k, args.head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    for name, tensor in tensors.items():
        strides = (*tensor.stride(), 0)[:4]  # lse has three dimensions
        setattr(args, name, Tensor(tensor.data_ptr(), (ctypes.c_int64 * 4)(*strides)))
    if "bias" in tensors:
        bias = tensors["bias"]
        args.bias_shape[:] = bias.shape
        args.bias_dtype = {torch.float32: 1, torch.bool: 2}.get(bias.dtype, 0)
    args.device, args.stream = -1 if q.device.index is None else q.device.index, stream.cuda_stream
    return args


def workspace(library, args: Args, dtype: str, backward: bool) -> torch.Tensor:
    """As much as the call asks for, full of NaN; to be kept until the call is done."""
    needed = ctypes.c_uint64()
    asked = library.flash_attention_workspace_bytes(
        ctypes.byref(args), ["fp16", "bf16"].index(dtype), int(backward), ctypes.byref(needed)
    )
    assert asked == 0, library.flash_attention_last_error()
    scratch = torch.full((needed.value + 64,), 255, dtype=torch.uint8, device=DEVICE)
    args.workspace_bytes = needed.value
    if needed.value:
        args.workspace = scratch.data_ptr()
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    return scratch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if DEVICE == "cpu" else f"cuda:{torch.cuda.current_device()}")


def in_a_thread(function, *args):
    """By a thread that has no CUDA context: it has called nothing else."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def here(function, *args):
    return function(*args)


@pytest.mark.parametrize("call", [here, in_a_thread])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("n, m", [(130, 77), (2, 5000)])
def test_forward_and_backward_on_device_memory(library, n, m, dtype, call, device, stream):
    kind = {"dtype": {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype], "device": device}
    q = torch.randn(2, n, 4, 64, **kind).transpose(1, 2)
    k, v = (torch.randn(2, 2, m, 64, **kind) for _ in range(2))
    out, grad_q, grad_k, grad_v = (torch.full_like(x, float("nan")) for x in (q, q, k, v))
    grad_out = torch.randn_like(q)
    lse = torch.full(q.shape[:-1], float("nan"), device=device)
    args = arguments(library, stream, query=q, key=k, value=v, out=out, lse=lse)
    args.causal = args.deterministic = 1
    scratch = workspace(library, args, dtype, backward=False)
    forward = getattr(library, f"flash_attention_forward_{dtype}")
    assert call(forward, ctypes.byref(args)) == 0, library.flash_attention_last_error()
    stream.synchronize()

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    options = {"causal": True, "return_lse": True, "deterministic": True}
    want, want_lse = flashmoe_science.flash_attention(*leaves, **options)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)

    args = arguments(
        library,
        stream,
        **{"query": q, "key": k, "value": v, "out": out, "lse": lse, "grad_out": grad_out},
        **{"grad_query": grad_q, "grad_key": grad_k, "grad_value": grad_v},
    )
    args.causal = args.deterministic = 1
    scratch = workspace(library, args, dtype, backward=True)
    backward = getattr(library, f"flash_attention_backward_{dtype}")
    assert call(backward, ctypes.byref(args)) == 0, library.flash_attention_last_error()
    stream.synchronize()
    del scratch
    for got, grad in zip(
        (grad_q, grad_k, grad_v), torch.autograd.grad(want, leaves, grad_out), strict=True
    ):
        assert torch.equal(got, grad)


def surrounded(x: torch.Tensor, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory full of `value`, and x's shape of it: room before, after and between its rows."""
    wide = x.new_full((*x.shape[:-2], x.shape[-2] + 3, (x.shape[-1] + 23) // 8 * 8), value)
    return wide, wide[..., 1 : 1 + x.shape[-2], 8 : 8 + x.shape[-1]]


def transposed(x: torch.Tensor, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide, view = surrounded(x.mT, value)
    return wide, view.mT


def heads_last(x: torch.Tensor, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide, view = surrounded(x.movedim(1, -1), value)
    return wide, view.movedim(-1, 1)


# Which of (batch, heads, queries, keys) the bias has for itself.
OWN = [(1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)]
OWN += [(0, 0, 0, 0)]


@pytest.mark.parametrize("layout", [surrounded, transposed, heads_last])
@pytest.mark.parametrize("wide", [False, True], ids=["like the input", "fp32"])
@pytest.mark.parametrize("own", OWN, ids=str)
def test_a_bias_and_its_gradient(library, own, wide, layout, device, stream):
    """A gradient with strides of its own, in memory of which nothing else is written; around the
    bias and in the workspace lies NaN."""
    n, m, lead = 70, 77, (2, 4)
    kind = {"dtype": torch.float16, "device": device}
    q, k, v = (torch.randn(2, h, rows, 32, **kind) for h, rows in ((4, n), (2, m), (2, m)))
    out, grad_q, grad_k, grad_v = (torch.full_like(x, nan) for x in (q, q, k, v))
    lse, grad_out = torch.full(q.shape[:-1], nan, device=device), torch.randn_like(q)
    shape = [size if kept else 1 for size, kept in zip((*lead, n, m), own, strict=True)]
    values = torch.randn(shape, device=device).to(torch.float32 if wide else torch.float16)
    _, bias = layout(values, nan)
    bias.copy_(values)
    around, grad_bias = layout(values, 7.0)
    grad_bias.fill_(nan)
    results = {"out": out, "lse": lse}
    args = arguments(library, stream, query=q, key=k, value=v, bias=bias, **results)
    args.causal = 1
    scratch = workspace(library, args, "fp16", backward=False)
    done = library.flash_attention_forward_fp16(ctypes.byref(args))
    assert done == 0, library.flash_attention_last_error()
    stream.synchronize()
    grads = {"grad_query": grad_q, "grad_key": grad_k, "grad_value": grad_v, "grad_bias": grad_bias}
    args = arguments(
        library,
        stream,
        **{"query": q, "key": k, "value": v, "bias": bias, "grad_out": grad_out},
        **results,
        **grads,
    )
    args.causal = args.deterministic = 1
    scratch = workspace(library, args, "fp16", backward=True)
    done = library.flash_attention_backward_fp16(ctypes.byref(args))
    assert done == 0, library.flash_attention_last_error()
    stream.synchronize()
    del scratch

    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
    options = {"causal": True, "return_lse": True, "deterministic": True}
    want, want_lse = flashmoe_science.flash_attention(*leaves[:3], bias=leaves[3], **options)
    assert same_bits(out, want) and same_bits(lse, want_lse)
    wanted = torch.autograd.grad(want, leaves, grad_out)
    for (name, got), grad in zip(grads.items(), wanted, strict=True):
        assert same_bits(got, grad), name
    grad_bias.fill_(7.0)
    assert around.eq(7).all(), "something beside the gradient was written"


def test_options_and_lengths(library, device, stream):
    q, k, v = (torch.randn(3, 2, 70, 48, dtype=torch.float16, device=device) for _ in range(3))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], device=device)
    lengths = torch.tensor([0, 33, 70], dtype=torch.int32, device=device)
    args = arguments(library, stream, query=q, key=k, value=v, out=out, lse=lse)
    args.softcap, args.window_left, args.has_scale, args.scale = 5.0, 20, 1, -0.3
    args.key_lengths = lengths.data_ptr()
    scratch = workspace(library, args, "fp16", backward=False)
    assert library.flash_attention_forward_fp16(ctypes.byref(args)) == 0
    stream.synchronize()
    del scratch
    options = {"softcap": 5.0, "window": (20, -1), "scale": -0.3, "key_lengths": lengths}
    want, want_lse = flashmoe_science.flash_attention(q, k, v, return_lse=True, **options)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("option", ["sinks", "mask", "dropout"])
def test_sinks_masks_and_dropout(library, option, device, stream):
    """As Python's function does it, or refuses it: there may be no kernel yet."""
    kind = {"dtype": torch.float16, "device": device}
    q, k, v = (torch.randn(2, h, rows, 64, **kind) for h, rows in ((4, 70), (2, 77), (2, 77)))
    named, options = {"query": q, "key": k, "value": v}, {}
    if option == "sinks":
        named["sinks"] = options["sinks"] = torch.randn(4, device=device)
    elif option == "mask":
        named["bias"] = options["bias"] = torch.rand(2, 1, 70, 77, device=device) < 0.7
    else:
        options = {"dropout_p": 0.3, "seed": torch.tensor(2**40 + 3, device=device)}
    out, grad_q, grad_k, grad_v = (torch.full_like(x, nan) for x in (q, q, k, v))
    lse, grad_out = torch.full(q.shape[:-1], nan, device=device), torch.randn_like(q)
    grads = {"grad_query": grad_q, "grad_key": grad_k, "grad_value": grad_v}
    leaves = {name: x.detach().requires_grad_() for name, x in zip("qkv", (q, k, v), strict=True)}
    if option == "sinks":
        grads["grad_sinks"] = torch.full_like(named["sinks"], nan)
        leaves["sinks"] = options["sinks"].detach().requires_grad_()
    given = {**options, **leaves, "return_lse": True, "deterministic": True}

    def call(direction: str, **tensors: torch.Tensor) -> int:
        args = arguments(library, stream, **named, out=out, lse=lse, **tensors)
        args.deterministic = 1
        if option == "dropout":
            args.dropout_p, args.seed = 0.3, options["seed"].data_ptr()
        scratch = workspace(library, args, "fp16", backward=direction == "backward")
        code = getattr(library, f"flash_attention_{direction}_fp16")(ctypes.byref(args))
        stream.synchronize()
        del scratch
        return code

    try:
        want, want_lse = flashmoe_science.flash_attention(**given)
    except RuntimeError as error:
        assert "no CUDA kernel of this build" in str(error)
        args = arguments(library, stream, **named, out=out, lse=lse)
        if option == "dropout":
            args.dropout_p, args.seed = 0.3, options["seed"].data_ptr()
        assert library.flash_attention_forward_fp16(ctypes.byref(args)) == 2
        return
    assert call("forward") == 0, library.flash_attention_last_error()
    assert same_bits(out, want) and same_bits(lse, want_lse)
    assert call("backward", grad_out=grad_out, **grads) == 0, library.flash_attention_last_error()
    wanted = torch.autograd.grad(want, list(leaves.values()), grad_out)
    for (name, got), grad in zip(grads.items(), wanted, strict=True):
        assert same_bits(got, grad), name


@on_a_gpu
def test_refusals_name_the_argument(library):
    q = torch.randn(1, 1, 8, 64, dtype=torch.float16, device="cuda:0")
    lse = torch.empty(q.shape[:-1], device=q.device)
    bias = torch.zeros(1, 1, 8, 5, dtype=torch.float16, device=q.device)  # there are 8 keys
    named = {"query": q, "key": q, "value": q, "out": torch.empty_like(q), "lse": lse}
    args = arguments(library, torch.cuda.current_stream(), **named, bias=bias)
    assert library.flash_attention_forward_fp16(ctypes.byref(args)) != 0
    assert b"bias" in library.flash_attention_last_error()
    args.bias_shape[3], args.bias_dtype = 8, 3
    assert library.flash_attention_forward_fp16(ctypes.byref(args)) != 0
    assert b"bias_dtype is 3" in library.flash_attention_last_error()
    args.bias_shape[:], args.bias_dtype = [0] * 4, 0
    args.bias.data, args.device = None, 1000
    assert library.flash_attention_forward_fp16(ctypes.byref(args)) != 0
    assert b"device is 1000" in library.flash_attention_last_error()
    args.device = 0
    args.query.data += 2
    assert library.flash_attention_forward_fp16(ctypes.byref(args)) != 0
    assert b"query" in library.flash_attention_last_error()


@on_a_gpu
def test_a_workspace_that_is_missing_or_too_small_is_refused(library, device):
    q, k, v = (torch.randn(1, 2, 300, 64, dtype=torch.float16, device=device) for _ in range(3))
    names = {"query": q, "key": k, "value": v, "out": q, "grad_out": q}
    grads = {"grad_query": torch.empty_like(q)}
    lse = torch.zeros(q.shape[:-1], device=device)
    args = arguments(library, torch.cuda.current_stream(), **names, **grads, lse=lse)
    scratch = workspace(library, args, "fp16", backward=True)
    assert args.workspace_bytes > 0
    args.workspace_bytes -= 1
    assert library.flash_attention_backward_fp16(ctypes.byref(args)) != 0
    assert b"workspace_bytes" in library.flash_attention_last_error()
    args.workspace, args.workspace_bytes = None, 0
    assert library.flash_attention_backward_fp16(ctypes.byref(args)) != 0
    assert b"workspace" in library.flash_attention_last_error()
    del scratch
