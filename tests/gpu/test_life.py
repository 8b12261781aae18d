"""How attention lives with torch's CUDA: streams, graphs, threads, devices, processes, compile."""

from __future__ import annotations

import gc
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import nan

import pytest
import torch
from families import DTYPES, KERNELS
from helpers import (
    HEAD_DIMS,
    check,
    check_case,
    dense,
    either_way,
    heads_in_the_middle,
    integers,
    judge,
    odd_rows,
    on_a_gpu,
    qkv,
    ragged,
    rows_first,
    same,
)
from torch.utils.checkpoint import checkpoint

import flashmoe_science as fm
import oracle
from oracle import same_bits

pytestmark = on_a_gpu

LONG_SLEEP = 600_000_000  # cycles: a third of a second

every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


# Streams.


def test_the_current_stream_is_used_and_nothing_waits():
    q, k, v = qkv(333, d=128)
    want = fm.flash_attention(q, k, v, return_lse=True)
    late = torch.zeros_like(q)
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the stream's own memory and kernels are there from here on
        fm.flash_attention(late, k, v, return_lse=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG_SLEEP)
        late.copy_(q)  # what any other stream would read too early
        got = fm.flash_attention(late, k, v, return_lse=True)
        done.record()
        waited = done.query()
    side.synchronize()
    assert not waited, "the call came back only when the work before it was done"
    assert same(got, want)


@either_way
def test_the_backward_pass_runs_on_the_stream_of_the_forward_pass(deterministic):
    case = dense(333, 200, d=128, grad_lse=False, deterministic=deterministic)
    want = oracle.ours(case)
    late = torch.zeros_like(case.grad_out)
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        oracle.ours(replace(case, grad_out=late))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
        out = fm.flash_attention(*leaves, deterministic=deterministic)
        torch.cuda._sleep(LONG_SLEEP)
        late.copy_(case.grad_out)
        got = torch.autograd.grad(out, leaves, late)
        done.record()
        waited = done.query()
    side.synchronize()
    assert not waited, "the call came back only when the work before it was done"
    if deterministic:
        assert same(got, [want[name] for name in ("dq", "dk", "dv")])
    oracle.accept(case, dict(zip(("dq", "dk", "dv"), got, strict=True)))


def test_two_streams_at_once():
    problems = [qkv(300, 500, lead=(4,), d=128), qkv(511, lead=(3,), dtype=torch.bfloat16)]
    want = [fm.flash_attention(*x, causal=True, return_lse=True) for x in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    got = []
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                result = fm.flash_attention(*problems[i], causal=True, return_lse=True)
                got.append((i, result))
    torch.cuda.synchronize()
    assert all(same(result, want[i]) for i, result in got)


def test_two_streams_at_once_in_the_backward_pass():
    """Workspaces of calls that overlap in time must not overlap in memory."""
    cases = [dense(300, 500, lead=(4,), d=128), dense(511, lead=(3,), hq=8, dtype=torch.bfloat16)]
    want = [oracle.ours(case) for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    got = []
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got.append((i, oracle.ours(cases[i])))
    torch.cuda.synchronize()
    for i, result in got:
        assert all(same_bits(result[name], want[i][name]) for name in result)


def test_several_threads():
    """Each with its stream; they meet in whatever is kept from call to call."""
    problems = [
        qkv(50 + 37 * i, 200 + i, d=HEAD_DIMS[i % 2], dtype=list(DTYPES.values())[i // 2 % 2])
        for i in range(8)
    ]
    want = [fm.flash_attention(*x, causal=True, return_lse=True) for x in problems]
    torch.cuda.synchronize()

    def work(i: int) -> bool:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            got = [
                fm.flash_attention(*problems[i], causal=True, return_lse=True) for _ in range(10)
            ]
        stream.synchronize()
        return all(same(result, want[i]) for result in got)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_several_threads_with_gradients():
    cases = [
        dense(50 + 37 * i, 200 + i, d=(16, 48, 64, 128)[i % 4], options={"causal": bool(i % 2)})
        for i in range(8)
    ]
    want = [oracle.ours(case) for case in cases]
    torch.cuda.synchronize()

    def work(i: int) -> bool:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            got = [oracle.ours(cases[i]) for _ in range(5)]
        stream.synchronize()
        return all(same_bits(one[name], want[i][name]) for one in got for name in one)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


# Graphs.


def warmed_up(work) -> None:
    """On a side stream first, as torch asks of whatever is to be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("layout", [torch.clone, rows_first, odd_rows], ids=lambda f: f.__name__)
def test_graph_capture_and_replay(layout, dtype):
    q, k, v = (layout(x) for x in qkv(130, 200, d=128, dtype=dtype))
    warmed_up(lambda: fm.flash_attention(q, k, v, causal=True, return_lse=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fm.flash_attention(q, k, v, causal=True, return_lse=True)
    for _ in range(3):
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        for x in captured:
            x.fill_(nan)
        graph.replay()
        got = [x.clone() for x in captured]
        assert same(got, fm.flash_attention(q, k, v, causal=True, return_lse=True))
        judge(*got, q, k, v, causal=True)


GRAPHED = {
    "dense": lambda **kw: dense(130, 200, options={"causal": True}, **kw),
    "odd": lambda **kw: dense(130, 200, d=20, dv=100, **kw),
    "few queries": lambda **kw: dense(2, 5000, lead=(1,), **kw),
    "own keys": lambda **kw: dense(130, 200, hq=3, hk=3, options={"causal": True}, **kw),
    "key lengths": lambda **kw: dense(130, 200, key_lengths=integers(70, 200), **kw),
    "ragged": lambda **kw: ragged(((70, 91), (3, 300), (0, 5), (130, 0)), rest=(3, 5), **kw),
}


@either_way
@pytest.mark.parametrize("kind", GRAPHED)
def test_graph_capture_of_the_backward_pass(kind, deterministic, dtype):
    """Sums in the workspace must start from 0 at every replay, not only at the first."""
    case = GRAPHED[kind](dtype=dtype, deterministic=deterministic)
    warmed_up(lambda: oracle.ours(case))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = oracle.ours(case)
    for _ in range(3):
        for x in (case.q, case.k, case.v, case.grad_out, case.grad_lse):
            x.copy_(torch.randn_like(x))
        for x in captured.values():
            x.fill_(nan)
        graph.replay()
        got = {name: x.clone() for name, x in captured.items()}
        if deterministic:
            again = oracle.ours(case)
            assert all(same_bits(got[name], again[name]) for name in got)
        oracle.accept(case, got)


def test_lengths_may_change_between_replays():
    """They are the device's; a graph reads them anew."""
    case = dense(130, 200, lead=(3,), key_lengths=integers(1, 2, 3), options={"causal": True})
    warmed_up(lambda: oracle.ours(case))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = oracle.ours(case)
    for lengths in ((200, 0, 64), (5, 199, 130)):
        case.key_lengths.copy_(integers(*lengths))
        graph.replay()
        oracle.accept(case, {name: x.clone() for name, x in captured.items()})


FIRST_CALL_IN_A_CAPTURE = """
import torch
import flashmoe_science as fm

q, k, v = (torch.randn(1, 2, 100, 64, dtype=torch.float16, device="cuda") for _ in range(3))
torch.cuda.synchronize()
graph, refusal = torch.cuda.CUDAGraph(), None
try:
    with torch.cuda.graph(graph):
        try:
            out = fm.flash_attention(q, k, v)
        except RuntimeError as error:
            refusal = error
except RuntimeError as error:
    refusal = refusal or error
if refusal is None:
    graph.replay()
    refusal = "same" if torch.equal(out, fm.flash_attention(q, k, v)) else "different"
print(refusal)
"""


def test_the_first_call_may_be_inside_a_capture(script):
    """Its kernel is not loaded yet: either that works, or the error says what to do."""
    said = script(FIRST_CALL_IN_A_CAPTURE)
    assert said == "same" or "before capturing" in said


# torch.compile and what it believes about the ops.


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend):
    if backend == "inductor" and importlib.util.find_spec("triton") is None:
        pytest.skip("inductor needs triton on a GPU")
    torch._dynamo.reset()

    def layer(q, k, v):
        out, lse = fm.flash_attention(q * 2, k, v, causal=True, return_lse=True)
        return out + 1, lse * 2

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for n, m in ((130, 200), (77, 77), (257, 64)):  # the later ones with symbolic sizes
        tensors = qkv(n, m)
        with torch.no_grad():
            assert same(compiled(*tensors), layer(*tensors))
    strided = [rows_first(x) for x in qkv(130, 200)]
    with torch.no_grad():
        assert same(compiled(*strided), layer(*strided))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_with_gradients(backend):
    if backend == "inductor" and importlib.util.find_spec("triton") is None:
        pytest.skip("inductor needs triton on a GPU")
    torch._dynamo.reset()

    def layer(q, k, v):
        out, lse = fm.flash_attention(
            q * 2, k, v, window=(40, -1), softcap=9.0, return_lse=True, deterministic=True
        )
        return out.float().sum() + lse.sum()

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for n, m in ((130, 200), (77, 77), (257, 64)):
        leaves = [x.requires_grad_() for x in qkv(n, m)]
        got = torch.autograd.grad(compiled(*leaves), leaves)
        want = torch.autograd.grad(layer(*leaves), leaves)
        assert same(got[1:], want[1:])
        torch.testing.assert_close(got[0], want[0])  # times 2 in fp16, perhaps fused


@every_dtype
def test_opcheck(dtype):
    """What traced graphs believe about the op: schema, and shapes and strides of its results."""
    options = (*(None,) * 5, 0, 0, True, -1, -1, None, 0.0, False, False, 0.0, None)
    op = torch.ops.flashmoe.attention_forward.default
    for layout in (torch.clone, rows_first, heads_in_the_middle, odd_rows):
        tensors = [layout(x) for x in qkv(40, 50, dtype=dtype)]
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(op, (*tensors, *options), test_utils=tests)


OPTION_VALUES = (0, 0, True, 40, -1, None, 9.0, True, False, 0.0, None)  # as the ops take them


@every_dtype
def test_opcheck_with_gradients(dtype):
    tensors = [x.requires_grad_() for x in qkv(40, 50, dtype=dtype)]
    nothing = (None,) * 5
    op = torch.ops.flashmoe.attention.default
    torch.library.opcheck(op, (*tensors, *nothing, *OPTION_VALUES))
    for layout in (torch.clone, rows_first, odd_rows):
        tensors = [layout(x) for x in qkv(40, 50, dtype=dtype)]
        out, lse = torch.ops.flashmoe.attention_forward.default(*tensors, *nothing, *OPTION_VALUES)
        for grad_out, needs in (
            (layout(torch.randn_like(out)), (True, True, True, False, False)),
            (None, (False, True, False, False, False)),
        ):
            arguments = (grad_out, torch.randn_like(lse), out, lse, *tensors, *nothing)
            torch.library.opcheck(
                torch.ops.flashmoe.attention_backward.default,
                (*arguments, *OPTION_VALUES, *needs),
                test_utils=("test_schema", "test_faketensor"),
            )


def test_checkpointing():
    case = dense(130, 77, options={"causal": True}, grad_lse=False)
    want = oracle.ours(case)
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    out = checkpoint(
        lambda *x: fm.flash_attention(*x, causal=True, deterministic=True),
        *leaves,
        use_reentrant=False,
    )
    got = torch.autograd.grad(out, leaves, case.grad_out)
    assert same(got, [want[name] for name in ("dq", "dk", "dv")])


def test_changing_a_saved_tensor_is_noticed():
    leaves = [x.requires_grad_() for x in qkv(33)]
    loss = fm.flash_attention(*leaves).float().sum()
    with torch.no_grad():
        leaves[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Memory.


@either_way
@pytest.mark.parametrize("kind", ["dense", "ragged", "key lengths", "few queries"])
def test_memory_is_linear_in_the_length(kind, deterministic):
    """32,768 squared is a gigabyte even of bytes."""

    def peak(length: int) -> int:
        if kind == "ragged":
            case = ragged(((length, length), (3, 5)), hq=1, hk=1)
        elif kind == "few queries":
            case = dense(2, 2 * length, lead=(1,), hq=1, hk=1)
        else:
            lengths = integers(length // 2) if kind == "key lengths" else None
            case = dense(length, lead=(1,), hq=1, hk=1, key_lengths=lengths)
        case = replace(case, deterministic=deterministic)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        oracle.ours(case)
        return torch.cuda.max_memory_allocated() - before

    half, whole = peak(16_384), peak(32_768)
    assert whole < 128 << 20, f"{whole >> 20} MiB for tensors of 4 MiB"
    assert whole < 2.5 * half + (4 << 20), (
        f"{half >> 20} MiB, and {whole >> 20} for twice the length"
    )


def test_nothing_is_kept_between_calls():
    case = dense(500, 600)
    oracle.ours(case)
    gc.collect()  # what the tests before left is not to go in between
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        oracle.ours(case)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


# Devices and processes.


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one():
    last = f"cuda:{torch.cuda.device_count() - 1}"
    home = qkv(150, 200)
    away = [x.to(last) for x in home]
    before = torch.cuda.current_device()
    out, lse = fm.flash_attention(*away, causal=True, return_lse=True)
    assert torch.cuda.current_device() == before
    assert out.device == lse.device == torch.device(last)
    judge(out, lse, *away, causal=True)
    check(*home, causal=True)
    with pytest.raises(RuntimeError, match=r"(?is)key.*device"):
        fm.flash_attention(home[0], away[1], away[2])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gradients_on_another_device_than_the_current_one():
    case = dense(150, 200, options={"causal": True})
    names = ("q", "k", "v", "grad_out", "grad_lse")
    last = f"cuda:{torch.cuda.device_count() - 1}"
    away = replace(case, **{name: getattr(case, name).to(last) for name in names})
    before = torch.cuda.current_device()
    oracle.accept(away, oracle.ours(away))
    assert torch.cuda.current_device() == before
    check_case(case)


FORKED = """
import os
import torch
import flashmoe_science as fm

torch.set_num_threads(1)  # OpenMP's threads do not survive a fork either
q, k, v = (torch.randn(1, 2, 100, 64, dtype=torch.float16, device="cuda") for _ in range(3))
cpu = [x.cpu() for x in (q, k, v)]
fm.flash_attention(q, k, v)
torch.cuda.synchronize()
child = os.fork()
if child == 0:
    try:
        fm.flash_attention(q, k, v)
        print("no error", flush=True)
    except RuntimeError as error:
        print(error, flush=True)
    print("and on the CPU", fm.flash_attention(*cpu).isfinite().all().item(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_forked_process_is_told_so(script):
    said = script(FORKED)
    assert "fork" in said and "spawn" in said, said
    assert "and on the CPU True" in said


SPAWNED = """
import sys
import torch
import flashmoe_science as fm

def attend(seed):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, 2, 100, 64).half().cuda() for _ in range(3))
    return fm.flash_attention(q, k, v, causal=True).cpu().tolist()

if __name__ == "__main__":
    want = [attend(seed) for seed in range(2)]
    with torch.multiprocessing.get_context("spawn").Pool(2) as pool:
        got = pool.map_async(attend, range(2)).get(timeout=120)
    print("same" if got == want else "different")
"""


def test_spawned_processes_work(script):
    assert script(SPAWNED) == "same"


# No kernel of torch runs here, only copies: torch's own images have no PTX for this chip.
COMPILED_BY_THE_DRIVER = """
import torch

torch.manual_seed(0)
host = [torch.randn(2, 2, 150, 64).half() for _ in range(3)]
try:
    tensors = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in host]
    for x, y in zip(tensors, host):
        x.copy_(y)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(tensors, host))
except (RuntimeError, AssertionError) as error:
    print("torch:", error)
    raise SystemExit

import flashmoe_science as fm

out = fm.flash_attention(*tensors, causal=True).cpu().double()
q, k, v = (x.double() for x in host)
hidden = torch.ones(150, 150, dtype=torch.bool).triu(1)
want = torch.softmax((q @ k.mT / 8).masked_fill(hidden, -torch.inf), -1) @ v
error = (out - want).abs().max().item()
print("close" if error < 5e-3 else f"off by {error}")
"""


def test_chips_to_come_are_served_by_ptx(script):
    """The driver compiles our PTX when it is told to ignore the machine code beside it.

    Of the sm80 family: sm90 is for Hopper alone, and has none. PTX lies beside the code for sm_80.
    """
    if not any(k["family"] == "sm80" and "sm_80" in k["chips"] for k in KERNELS):
        pytest.skip("this build has kernels of the sm80 family for this chip alone, without PTX")
    said = script(
        COMPILED_BY_THE_DRIVER,
        CUDA_FORCE_PTX_JIT="1",
        CUDA_MODULE_LOADING="LAZY",
        FLASHMOE_FAMILY="sm80",
    )
    if said.startswith("torch:"):
        pytest.skip(f"torch itself cannot work like that here: {said[:200]}")
    assert said == "close"
