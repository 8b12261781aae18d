"""Attention on CUDA tensors: the numbers against the oracle, and how it lives with torch's CUDA."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import inf, nan

import pytest
import torch

import flashmoe_science as fm
import oracle
from oracle import Case, same_bits

DEVICE = "cuda"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
HEAD_DIMS = (64, 128)

# Where fragments (8, 16), tiles (64, 128) and several of them end, and primes.
LENGTHS = (0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 191, 255, 257)
LENGTHS += (97, 331, 523, 997, 1023, 1024, 1025)
# Each with itself and two others, both ways round over the whole list.
PAIRS = [(n, n) for n in LENGTHS]
PAIRS += [(n, LENGTHS[(7 * i + 3) % len(LENGTHS)]) for i, n in enumerate(LENGTHS)]
PAIRS += [(n, LENGTHS[(5 * i + 11) % len(LENGTHS)]) for i, n in enumerate(LENGTHS)]
PAIRS += [(4095, 4095), (4096, 4096), (4097, 4097), (1, 4097), (4097, 1), (129, 4096), (4096, 63)]
PAIRS += [(1025, 4095), (4097, 1024)]
PAIRS = sorted(set(PAIRS))

every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
every_head_dim = pytest.mark.parametrize("d", HEAD_DIMS, ids=lambda d: f"d{d}")
every_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def normal(*shape: int, dtype=torch.float16, std: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) * std).to(dtype)


def qkv(n, m=None, *, lead=(2,), hq=4, hk=2, d=64, dtype=torch.float16) -> list[torch.Tensor]:
    m = n if m is None else m
    shapes = ((*lead, hq, n, d), (*lead, hk, m, d), (*lead, hk, m, d))
    return [normal(*shape, dtype=dtype) for shape in shapes]


@contextmanager
def poisoned(*results: tuple[tuple[int, ...], torch.dtype]):
    """What torch.empty gives inside holds NaN, so that an element nobody writes shows.

    In both ways that there are: blocks of the results' sizes are filled and freed, and reused by
    the allocator; and torch fills new memory itself when asked for determinism.
    """
    blocks = [torch.full(shape, nan, dtype=dtype, device=DEVICE) for shape, dtype in results]
    del blocks
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def attend(q, k, v, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, made in poisoned memory, made twice with the same bits, inputs untouched."""
    before = [x.clone() for x in (q, k, v)]
    shapes = ((*q.shape[:-1], v.shape[-1]), q.dtype), (q.shape[:-1], torch.float32)
    with poisoned(*shapes):
        results = fm.flash_attention(q, k, v, return_lse=True, **options)
    again = fm.flash_attention(q, k, v, return_lse=True, **options)
    for name, a, b in zip(("out", "lse"), results, again, strict=True):
        assert a.device == q.device
        assert same_bits(a, b), f"{name} differs between two runs"
    for name, a, b in zip("qkv", (q, k, v), before, strict=True):
        assert same_bits(a, b), f"{name} was changed"
    return results


def judge(out, lse, q, k, v, **options) -> None:
    """Against the float64 oracle, with the tolerance of every other test."""
    no_grad = q.new_zeros(1).expand(*q.shape[:-1], v.shape[-1])
    oracle.accept(Case(q, k, v, no_grad, options=options, needs=""), {"out": out, "lse": lse})


def check(q, k, v, **options) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = attend(q, k, v, **options)
    judge(out, lse, q, k, v, **options)
    return out, lse


def same(got, want) -> bool:
    return all(same_bits(a, b) for a, b in zip(got, want, strict=True))


# The numbers.


def test_poison_poisons():
    """The other tests lean on it."""
    with poisoned():
        assert torch.empty(1000, device=DEVICE).isnan().all()
        assert torch.empty_like(normal(3, 5)).isnan().all()


@every_dtype
@every_head_dim
@every_mask
@pytest.mark.parametrize("n, m", PAIRS, ids=lambda size: str(size))
def test_lengths(n, m, causal, d, dtype):
    large = n * m > 1025**2
    shape = {"lead": (1,), "hq": 2, "hk": 1} if large else {"lead": (2,), "hq": 4, "hk": 2}
    check(*qkv(n, m, d=d, dtype=dtype, **shape), causal=causal)


@every_dtype
@every_head_dim
@every_mask
@pytest.mark.parametrize("hq, hk", [(1, 1), (3, 3), (4, 2), (8, 2), (16, 2), (6, 2), (8, 1)])
def test_grouped_queries(hq, hk, causal, d, dtype):
    check(*qkv(130, 77, lead=(2,), hq=hq, hk=hk, d=d, dtype=dtype), causal=causal)


@every_dtype
@pytest.mark.parametrize(
    "lead", [(1,), (2,), (3,), (4,), (5,), (2, 3), (2, 1, 3), (1, 1, 2, 2)], ids=str
)
def test_leading_dimensions(lead, dtype):
    q, k, v = qkv(67, 130, lead=lead, hq=2, hk=1, dtype=dtype)
    out, lse = check(q, k, v, causal=True)
    flat = [x.flatten(0, -4) for x in (q, k, v)]
    flat_out, flat_lse = fm.flash_attention(*flat, causal=True, return_lse=True)
    assert same((out.flatten(0, -4), lse.flatten(0, -3)), (flat_out, flat_lse))


@every_dtype
@every_mask
@pytest.mark.parametrize("scale", [1.0, 0.3, -0.2, -1.0, 0.0, 1e-6, 4.0, 0])
def test_scale(scale, causal, dtype):
    check(*qkv(150, 201, dtype=dtype), causal=causal, scale=scale)


@every_dtype
@every_head_dim
@every_mask
def test_a_peaked_softmax(causal, d, dtype):
    q, k, v = qkv(200, d=d, dtype=dtype)
    check(q * 8, k, v, causal=causal)


@every_dtype
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_far_from_zero(sign, dtype):
    """Around +-512 exp overflows, or gives 0 throughout, unless the maximum is taken off first."""
    q, k, v = qkv(100, 300, dtype=dtype)
    q, k = q * 0.1 + 8, k * 0.1 + 8 * sign
    _, lse = check(q, k, v, causal=True)
    assert (lse * sign > 400).all()


@every_dtype
def test_equal_values_come_back(dtype):
    """Weights that sum to 1: a property that needs no oracle."""
    q, k, _ = qkv(129, 513, dtype=dtype)
    out, _ = attend(q, k, torch.full_like(k, 0.75), causal=False)
    assert (out.float() - 0.75).abs().max() <= 0.75 * torch.finfo(dtype).eps


@every_dtype
def test_without_lse_the_output_is_the_same(dtype):
    q, k, v = qkv(130, dtype=dtype)
    out, _ = attend(q, k, v)
    alone = fm.flash_attention(q, k, v)
    assert isinstance(alone, torch.Tensor) and same_bits(out, alone)


# Nothing to do.


@every_dtype
@every_head_dim
@every_mask
@pytest.mark.parametrize("lead, n, m", [((0,), 5, 5), ((2, 0), 5, 5), ((2,), 0, 5), ((2,), 0, 0)])
def test_empty_results(lead, n, m, causal, d, dtype):
    q, k, v = qkv(n, m, lead=lead, d=d, dtype=dtype)
    out, lse = fm.flash_attention(q, k, v, causal=causal, return_lse=True)
    assert out.shape == q.shape and out.dtype == dtype and out.device == q.device
    assert lse.shape == q.shape[:-1] and lse.dtype == torch.float32
    torch.cuda.synchronize()


@every_dtype
@every_head_dim
@every_mask
@pytest.mark.parametrize("n", [1, 64, 130])
def test_no_keys(n, causal, d, dtype):
    out, lse = attend(*qkv(n, 0, d=d, dtype=dtype), causal=causal)
    assert (out == 0).all() and (lse == -inf).all()


@every_dtype
@every_head_dim
@pytest.mark.parametrize("n, m", [(200, 3), (300, 129), (257, 128), (129, 1)])
def test_rows_that_see_no_key(n, m, d, dtype):
    out, lse = check(*qkv(n, m, d=d, dtype=dtype), causal=True)
    assert (out[..., : n - m, :] == 0).all() and (lse[..., : n - m] == -inf).all()
    assert (lse[..., n - m :] > -inf).all()


# Strides. Memory that belongs to no element is NaN.


def gaps(*shape: int, dtype) -> torch.Tensor:
    return torch.full(shape, nan, dtype=dtype, device=DEVICE)


def filled(view: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    assert view.shape == values.shape
    return view.copy_(values)


def rows_first(x):
    """(B, S, H, D) in memory, as projections leave it."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def heads_in_the_middle(x):
    """A slice of (B, S, 3, H, D): one of a packed q, k, v."""
    wide = gaps(*x.shape[:-3], x.shape[-2], 3, x.shape[-3], x.shape[-1], dtype=x.dtype)
    return filled(wide[..., 1, :, :].transpose(-3, -2), x)


def rows_apart(x):
    """Room before, after and between the rows, aligned."""
    wide = gaps(*x.shape[:-2], x.shape[-2] + 9, x.shape[-1] + 24, dtype=x.dtype)
    return filled(wide[..., 4 : 4 + x.shape[-2], 8 : 8 + x.shape[-1]], x)


def every_third_row(x):
    wide = gaps(*x.shape[:-2], 3 * x.shape[-2] + 2, x.shape[-1], dtype=x.dtype)
    return filled(wide[..., 2::3, :][..., : x.shape[-2], :], x)


def batch_last(x):
    """The slowest dimension varies fastest but for the rows' elements."""
    return x.movedim(0, -2).contiguous().movedim(-2, 0)


def odd_rows(x):
    """Rows a whole number of elements apart, but not of 16 bytes."""
    wide = gaps(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype)
    return filled(wide[..., : x.shape[-1]], x)


def half_aligned_rows(x):
    wide = gaps(*x.shape[:-1], x.shape[-1] + 4, dtype=x.dtype)
    return filled(wide[..., : x.shape[-1]], x)


def odd_start(x):
    """Dense, but not where 16 bytes begin."""
    return filled(gaps(x.numel() + 8, dtype=x.dtype)[3 : 3 + x.numel()].view(x.shape), x)


def odd_heads(x):
    """Aligned rows, heads that start anywhere."""
    size = x.shape[-2] * x.shape[-1]
    wide = gaps(*x.shape[:-2], size + 5, dtype=x.dtype)
    return filled(wide[..., :size].unflatten(-1, x.shape[-2:]), x)


def columns_first(x):
    """(B, H, D, S) in memory: the last dimension is not the unit one."""
    return x.mT.contiguous().mT


def every_second_column(x):
    wide = gaps(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    return filled(wide[..., ::2], x)


IN_PLACE = [rows_first, heads_in_the_middle, rows_apart, every_third_row, batch_last]
COPIED = [odd_rows, half_aligned_rows, odd_start, odd_heads, columns_first, every_second_column]


@every_dtype
@every_head_dim
@pytest.mark.parametrize("layout", IN_PLACE + COPIED, ids=lambda f: f.__name__)
def test_strides(layout, d, dtype):
    """The same numbers wherever they lie: bits like those of contiguous tensors."""
    tensors = qkv(131, 77, lead=(3,), d=d, dtype=dtype)
    want = check(*tensors, causal=True)
    for which in ((0,), (1,), (2,), (0, 1, 2)):
        q, k, v = (layout(x) if i in which else x for i, x in enumerate(tensors))
        out, lse = attend(q, k, v, causal=True)
        assert same((out, lse), want), f"with {['qkv'[i] for i in which]} in that layout"
        if layout in IN_PLACE:
            assert out.stride() == torch.empty_like(q).stride(), "the output follows the query"


@every_dtype
@pytest.mark.parametrize("layout", [rows_first, rows_apart, batch_last, odd_rows])
def test_strides_of_several_leading_dimensions(layout, dtype):
    """Leading dimensions that cannot be seen as one: no single stride steps through them."""
    tensors = qkv(70, 33, lead=(3, 2), hq=2, hk=1, dtype=dtype)
    want = check(*tensors)
    swapped = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    assert same(attend(*swapped), want)
    assert same(attend(*(layout(x) for x in tensors)), want)
    wide = [torch.stack([x, torch.full_like(x, nan)], 1)[:, 0] for x in tensors]
    assert same(attend(*wide), want)


@every_dtype
@every_head_dim
def test_slices_of_one_packed_tensor(d, dtype):
    n, hq, hk = 150, 6, 2
    packed = normal(2, n, hq + 2 * hk, d, dtype=dtype)
    q, k, v = (x.transpose(1, 2) for x in packed.split((hq, hk, hk), dim=2))
    out, _ = check(q, k, v, causal=True)
    assert out.transpose(1, 2).is_contiguous()


@every_dtype
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_expanded_inputs(dim, dtype):
    """Stride 0: one key head for all batches, one row for all rows, one number for a whole row."""
    tensors = qkv(66, 130, lead=(3,), hq=2, hk=2, dtype=dtype)
    for which in ((0,), (1,), (2,), (0, 1, 2)):
        q, k, v = (
            x.narrow(dim, 0, 1).contiguous().expand(x.shape) if i in which else x
            for i, x in enumerate(tensors)
        )
        got = check(q, k, v, causal=True)
        assert same(got, attend(*(x.contiguous() for x in (q, k, v)), causal=True))


def test_strides_of_dimensions_of_size_one_do_not_matter():
    q, k, v = qkv(65, lead=(1,), hq=1, hk=1)
    strange = [x.as_strided(x.shape, (7, 3, 64, 1)) for x in (q, k, v)]
    assert same(attend(*strange), attend(q, k, v))


def test_views_with_flags_are_seen():
    """The negative of a tensor can be a bit in its flags, with the data unchanged."""
    q, k, v = qkv(40)
    got = fm.flash_attention(torch._neg_view(q), k, v)
    assert same_bits(got, fm.flash_attention(-q, k, v))


# NaN goes where it has to, and nowhere else.


@every_dtype
@every_head_dim
@every_mask
def test_nan_in_a_query_stays_in_its_row(causal, d, dtype):
    q, k, v = qkv(150, 200, d=d, dtype=dtype)
    want = attend(q, k, v, causal=causal)
    bad = q.clone()
    bad[1, 2, 77, 5] = nan
    hit = torch.zeros(q.shape[:-1], dtype=torch.bool, device=DEVICE)
    hit[1, 2, 77] = True
    for got, clean in zip(attend(bad, k, v, causal=causal), want, strict=True):
        assert got[hit].isnan().all()
        assert same_bits(got[~hit], clean[~hit])


@every_dtype
@every_head_dim
@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("poison", [nan, inf], ids=str)
def test_nan_behind_the_mask_is_not_seen(poison, name, d, dtype):
    """Key 133 belongs to the rows from 83 on, of the two query heads that share it."""
    q, k, v = qkv(150, 200, d=d, dtype=dtype)
    out, lse = attend(q, k, v, causal=True)
    bad = (k if name == "key" else v).clone()
    bad[1, 1, 133, 7] = poison
    inputs = (q, bad, v) if name == "key" else (q, k, bad)
    got_out, got_lse = attend(*inputs, causal=True)
    sees = torch.zeros(out.shape[:-1], dtype=torch.bool, device=DEVICE)
    sees[1, 2:, 133 - 50 :] = True
    assert same_bits(got_out[~sees], out[~sees])
    assert same_bits(got_lse[~sees], lse[~sees])
    if name == "value":
        assert same_bits(got_lse, lse)
        assert not got_out[sees][:, 7].isfinite().any()
        assert same_bits(got_out[..., :7], out[..., :7])
        assert same_bits(got_out[..., 8:], out[..., 8:])
    elif poison != poison:
        assert got_out[sees].isnan().all() and got_lse[sees].isnan().all()


# Sizes.


@every_dtype
@pytest.mark.parametrize("lead", [(65_535,), (65_536,), (131_071,), (3, 30_000)], ids=str)
def test_more_sequences_than_a_grid_has_room_for(lead, dtype):
    """A grid's third dimension ends at 65,535."""
    check(*qkv(3, 5, lead=lead, hq=2, hk=1, dtype=dtype), causal=True)


def test_more_heads_than_a_grid_has_room_for():
    """They are refused or computed, never dropped."""
    q, k, v = qkv(3, 5, lead=(1,), hq=65_541, hk=65_541)
    try:
        check(q, k, v)
    except RuntimeError as refusal:
        assert "65541 heads" in str(refusal)


@pytest.mark.parametrize("which", ["rows", "heads", "keys"])
def test_past_two_to_the_31_elements(which, roomy):
    """Offsets of 32 bits would wrap and read or write something else."""
    roomy(30 << 30)
    d, dtype = 128, torch.bfloat16
    lead, heads, n, m = {
        "rows": ((1,), 1, 2**24 + 129, 70),
        "heads": ((2,), 4, 2**21 + 65, 33),
        "keys": ((32,), 64, 1, 2**13 + 1),
    }[which]

    def large(*shape: int) -> torch.Tensor:
        x = torch.empty(shape, dtype=dtype, device=DEVICE)
        for part in x.view(-1).split(1 << 28):
            part.normal_()
        return x

    q, k, v = large(*lead, heads, n, d), large(*lead, heads, m, d), large(*lead, heads, m, d)
    assert max(q.numel(), k.numel()) > 2**31
    with poisoned():
        out, lse = fm.flash_attention(q, k, v, return_lse=True)
    first, last = slice(0, 1), slice(-1, None)
    rows = min(n, 200)
    for end, part in ((first, slice(0, rows)), (last, slice(n - rows, n))):
        one = [x[(end,) * (len(lead) + 1)] for x in (q, k, v, out, lse)]
        one_q, one_out, one_lse = one[0][..., part, :], one[3][..., part, :], one[4][..., part]
        judge(one_out, one_lse, one_q, one[1], one[2])
    assert all(x.isfinite().all() for x in out.view(-1).split(1 << 28)) and lse.isfinite().all()


# What is not there yet is refused, by name and with what would work.


def ragged_call(q, k, v):
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    cu = torch.tensor([0, 13, q.shape[0]], dtype=torch.int32, device=q.device)
    return fm.flash_attention_varlen(q, k, v, cu, cu, 40, 40)


def backward_call(q, k, v):
    fm.flash_attention(q.requires_grad_(), k, v).float().sum().backward()


REFUSALS = {
    "bias": (lambda q, k, v: fm.flash_attention(q, k, v, bias=normal(33, 33)), r"bias"),
    "window": (lambda q, k, v: fm.flash_attention(q, k, v, window=(5, 3)), r"window"),
    "softcap": (lambda q, k, v: fm.flash_attention(q, k, v, softcap=20.0), r"softcap"),
    "key_lengths": (
        lambda q, k, v: fm.flash_attention(q, k, v, key_lengths=torch.tensor([5, 9]).to(DEVICE)),
        r"key_lengths",
    ),
    "ragged": (ragged_call, r"ragged|cu_seqlens|varlen"),
    "backward": (backward_call, r"backward"),
    "head dim": (
        lambda q, k, v: fm.flash_attention(q[..., :40], k[..., :40], v[..., :40]),
        r"head dim.*64.*128",
    ),
    "value head dim": (
        lambda q, k, v: fm.flash_attention(q, k, torch.cat([v, v], -1)),
        r"head dim|value",
    ),
    "float32": (
        lambda q, k, v: fm.flash_attention(q.float(), k.float(), v.float()),
        r"(?:float32|fp32).*(?:float16|fp16)",
    ),
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


def test_tensors_on_different_devices_are_refused():
    q, k, v = qkv(33)
    for name, tensors in {
        "key": (q, k.cpu(), v),
        "value": (q, k, v.cpu()),
        "key|query": (q.cpu(), k, v),
    }.items():
        with pytest.raises(RuntimeError, match=rf"(?is)(?:{name}).*device"):
            fm.flash_attention(*tensors)


def test_mixed_dtypes_are_refused():
    q, k, v = qkv(33)
    with pytest.raises(RuntimeError, match="key"):
        fm.flash_attention(q, k.bfloat16(), v)


def test_cpu_tensors_work_next_to_a_gpu():
    q, k, v = (x.cpu() for x in qkv(33))
    out, lse = fm.flash_attention(q, k, v, bias=torch.randn(33, 33), return_lse=True)
    assert out.device.type == lse.device.type == "cpu"
    assert out.isfinite().all()


def test_explain_names_the_kernel():
    for name, dtype in DTYPES.items():
        for d in HEAD_DIMS:
            text = fm.explain(*qkv(200, d=d, dtype=dtype), causal=True)
            assert f"attention_fwd_{name}_d{d}_causal" in text
            assert f"attention_fwd_{name}_d{d}_full" in fm.explain(*qkv(200, d=d, dtype=dtype))


# torch's CUDA: streams, graphs, threads, devices, processes.

LONG_SLEEP = 600_000_000  # cycles: a third of a second


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


@every_dtype
@pytest.mark.parametrize("layout", [torch.clone, rows_first, odd_rows], ids=lambda f: f.__name__)
def test_graph_capture_and_replay(layout, dtype):
    q, k, v = (layout(x) for x in qkv(130, 200, d=128, dtype=dtype))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fm.flash_attention(q, k, v, causal=True, return_lse=True)
    torch.cuda.current_stream().wait_stream(side)
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


@every_dtype
def test_opcheck(dtype):
    """What traced graphs believe about the op: schema, and shapes and strides of its results."""
    options = (None, None, None, None, 0, 0, True, -1, -1, None, 0.0)
    op = torch.ops.flashmoe.attention_forward.default
    for layout in (torch.clone, rows_first, heads_in_the_middle, odd_rows):
        tensors = [layout(x) for x in qkv(40, 50, dtype=dtype)]
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(op, (*tensors, *options), test_utils=tests)


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
    """The driver compiles our PTX when it is told to ignore the machine code beside it."""
    said = script(COMPILED_BY_THE_DRIVER, CUDA_FORCE_PTX_JIT="1", CUDA_MODULE_LOADING="LAZY")
    if said.startswith("torch:"):
        pytest.skip(f"torch itself cannot work like that here: {said[:200]}")
    assert said == "close"
