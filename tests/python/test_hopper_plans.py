"""Where the planner takes the sm90 family, and how it cuts a problem. Asks it only: no GPU.

test_plans.py has the other families, on the chips that have no other.
"""

from __future__ import annotations

import math
import re

import pytest
import torch

import flashmoe_science as fm
from catalogue import CATALOGUE, TORCH_DTYPES, bias_sum, needs_all_families
from plans import SHAPE, problem, spec, told
from test_plans import HEAD_DIMS, ragged

pytestmark = needs_all_families
H200 = {"device": "sm_90"}
LONG = {"batch": 2, "heads_q": 16, "heads_k": 16, "n": 4096, "m": 4096}


def kernel_of(*tensors, **options) -> dict:
    return CATALOGUE[told(fm.explain(*tensors, **options, **H200))["kernel"]]


def packed(batch: int, length: int) -> tuple[list, dict]:
    """Sequences of this length on average, and the gradients."""
    offsets = {f"cu_seqlens_{x}": spec(batch + 1, dtype=torch.int32) for x in "qk"}
    longest = {f"max_seqlen_{x}": 2 * length for x in "qk"}
    return [spec(batch * length, 16, 64)] * 3, offsets | longest | {"backward": True}


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_long_sequences_take_it(dtype):
    for d in (64, 96, 128, 192, 256):
        for causal in (False, True):
            kernel = kernel_of(*problem(dtype, d, **LONG), causal=causal)
            assert (kernel["family"], kernel["head_dim"]) == ("sm90", d)
        capped = kernel_of(*problem(dtype, d, **LONG), softcap=30.0)
        assert capped["family"] == "sm90" and "_fwd_general_" in capped["name"]
        assert kernel_of(*problem(dtype, d, **LONG), scale=-1.0) == capped


def test_tasks_of_long_causal_passes_are_counted():
    """Not where all are as long, nor where a list is as even: above all where they are few."""

    def before(d=128, n=4096, batch=32, bias=None, **options) -> list[str]:
        tensors = problem("bf16", d, **LONG | {"n": n, "m": n, "batch": batch})
        return told(fm.explain(*tensors, bias=bias, **options, **H200))["before"]

    counter = ["sm90_attention_task_counter_bf16"]
    for d in (64, 96, 128):
        assert before(d, causal=True) == before(d, n=1024, causal=True) == counter
        assert before(d, window=(512, 0)) == counter
    assert before(causal=True, softcap=30.0) == counter
    assert before(64, n=512, batch=64, causal=True) == counter
    assert (
        not before()
        and not before(n=1023, causal=True)
        and not before(64, n=511, batch=64, causal=True)
    )
    assert before(causal=True, batch=4) == counter  # 15.5 tasks a CTA
    assert not before(causal=True, batch=3)  # 11.6
    assert not before(32, causal=True) and not before(192, causal=True)
    bias = spec(16, 4096, 4096, dtype=torch.bfloat16)
    assert counter[0] not in before(causal=True, bias=bias)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_so_do_their_gradients(dtype):
    for d in (64, 96, 128, 192, 256):
        for deterministic in (False, True):
            tensors = problem(dtype, d, **LONG)
            text = fm.explain(*tensors, backward=True, deterministic=deterministic, **H200)
            plan = told(text)
            kernel = CATALOGUE[plan["kernel"]]
            assert (kernel["family"], kernel["head_dim"]) == ("sm90", d)
            assert plan["before"] == [f"sm90_attention_bwd_preprocess_{dtype}"]
            # Above 128 the kernel has registers left to round dQ itself.
            assert plan["after"] == ([f"sm90_attention_bwd_dq_{dtype}"] if d <= 128 else [])
            assert plan["grid"] == (132, 1, 1)
            assert ("not bitwise reproducible" in text) != deterministic
        capped = kernel_of(*problem(dtype, d, **LONG), backward=True, softcap=30.0)
        assert capped["family"] == "sm90" and "_bwd_general_" in capped["name"]
        assert capped["head_dim"] == {64: 96, 128: 192}.get(d, d)


def test_so_do_those_of_a_bias():
    batch, heads, n = 2, 16, 4096
    for dtype in TORCH_DTYPES:
        for d, bucket in ((16, 32), (32, 32), (64, 64), (80, 96), (128, 128)):
            bias = spec(batch, heads, n, n, dtype=TORCH_DTYPES[dtype])
            tensors = problem(dtype, d, **LONG)
            plan = told(fm.explain(*tensors, bias=bias, backward=True, **H200))
            keys = 256 if bucket == 32 else 128
            assert plan["kernel"] == f"sm90_attention_bwd_bias_{dtype}_d{bucket}_64x{keys}"
            assert plan["before"] == [f"sm90_attention_bwd_preprocess_{dtype}"]
            assert plan["after"] == [f"sm90_attention_bwd_dq_{dtype}"]


def odd_bias(*lead, length, dtype):
    """Rows that begin anywhere."""
    return spec(*lead, length, length + 1, dtype=dtype)[..., :length]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_a_bias_in_odd_rows_is_read_where_it_lies(dtype):
    """But for one that many share, which is copied to whole chunks."""
    batch, heads, wide = 2, 16, TORCH_DTYPES[dtype]
    align = f"sm90_attention_bias_align_{dtype}"
    for d, bucket in ((16, 32), (64, 64), (80, 96), (128, 128)):
        for length, lead, copied in (
            (1024, (batch, heads), False),
            (4096, (batch, heads), False),
            (4096, (heads,), False),
            (4096, (batch, 1), True),
        ):
            tensors = problem(dtype, d, **LONG | {"n": length, "m": length})
            bias = odd_bias(*lead, length=length, dtype=wide)
            kind = "bias" if copied else "bias_rows"
            text = fm.explain(*tensors, bias=bias, backward=True, **H200)
            plan = told(text)
            keys = 256 if copied and bucket == 32 else 128
            assert plan["kernel"] == f"sm90_attention_bwd_{kind}_{dtype}_d{bucket}_64x{keys}"
            preprocess = f"sm90_attention_bwd_preprocess_{dtype}"
            assert plan["before"] == ([align] if copied else []) + [preprocess]
            dq = f"sm90_attention_bwd_dq_{dtype}"
            summed = [bias_sum(plan["kernel"])] if lead != (batch, heads) else []
            assert plan["after"] == [dq, *summed]
            plan = told(fm.explain(*tensors, bias=bias, **H200))
            assert plan["kernel"].startswith(f"sm90_attention_fwd_{kind}_{dtype}_d{bucket}_")
            assert plan["before"] == ([align] if copied else []) and plan["after"] == []
        # Keys that are no neighbours are copied, up to 256 MB.
        for length, family in ((1024, "sm90"), (4096, "sm80")):
            tensors = problem(dtype, d, **LONG | {"n": length, "m": length})
            apart = spec(batch, length, length, heads, dtype=wide).movedim(-1, 1)
            text = fm.explain(*tensors, bias=apart, **H200)
            assert ("would copy a large bias to aligned rows" in text) == (family == "sm80")
            assert "bias_rows" not in told(text)["kernel"]
            assert family == "sm80" or told(text)["before"] == [align]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_a_bias_in_fp32_has_kernels_of_its_own(dtype):
    """Up to head dim 64, where its gradient is no sum."""
    batch, heads, n = 2, 16, 1024
    for length in (n, n - 1):
        for d, bucket in ((16, 32), (32, 32), (48, 64), (64, 64)):
            tensors = problem(dtype, d, **LONG | {"n": length, "m": length})
            own = spec(batch, heads, length, length, dtype=torch.float32)
            plan = told(fm.explain(*tensors, bias=own, **H200))
            assert plan["kernel"] == f"sm90_attention_fwd_bias_float_{dtype}_d{bucket}_128x64"
            assert plan["before"] == plan["after"] == []
            plan = told(fm.explain(*tensors, bias=own, backward=True, **H200))
            assert plan["kernel"] == f"sm90_attention_bwd_bias_float_{dtype}_d{bucket}_64x128"
            assert plan["before"] == [f"sm90_attention_bwd_preprocess_{dtype}"]
            assert plan["after"] == [f"sm90_attention_bwd_dq_{dtype}"]
            shared = spec(heads, length, length, dtype=torch.float32)
            plan = told(fm.explain(*tensors, bias=shared, **H200))
            assert plan["kernel"] == f"sm90_attention_fwd_bias_float_{dtype}_d{bucket}_128x64"
            text = fm.explain(*tensors, bias=shared, backward=True, **H200)
            assert "does not sum the gradient of a shared fp32 bias" in text
            apart = spec(batch, length, length, heads, dtype=torch.float32).movedim(-1, 1)
            text = fm.explain(*tensors, bias=apart, **H200)
            assert "takes an fp32 bias of neighbouring keys alone" in text
        tensors = problem(dtype, 72, **LONG | {"n": length, "m": length})
        text = fm.explain(*tensors, bias=own, **H200)
        assert "takes an fp32 bias up to head dim 64" in text


def test_small_dims_have_tiles_that_leave_little_empty():
    for n, keys in ((128, 192), (256, 256), (257, 192), (384, 192), (512, 256), (768, 256)):
        bias = spec(4, n, n, dtype=TORCH_DTYPES["bf16"])
        shape = {"batch": 16, "heads_q": 4, "heads_k": 4, "n": n, "m": n}  # 16: odd rows are copied
        tensors = problem("bf16", 32, **shape)
        plan = told(fm.explain(*tensors, bias=bias, backward=True, **H200))
        assert plan["kernel"] == f"sm90_attention_bwd_bias_bf16_d32_64x{keys}"


def test_two_ctas_share_a_block_of_keys_above_128():
    few = {"batch": 1, "heads_q": 2, "heads_k": 2, "n": 256, "m": 256}  # 2 x 2 blocks of 128 keys
    for d in (128, 192, 256):
        plan = told(fm.explain(*problem("bf16", d, **few), backward=True, **H200))
        assert CATALOGUE[plan["kernel"]]["block_k"] == 128
        assert plan["grid"] == (4 if d <= 128 else 8, 1, 1)


def test_each_bucket_has_the_next_larger_dims(monkeypatch):
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm90")
    for dtype in TORCH_DTYPES:
        for d in (*HEAD_DIMS, 8, 70):
            plan = told(fm.explain(*problem(dtype, d), causal=True, **H200))
            kernel = CATALOGUE[plan["kernel"]]
            assert kernel["head_dim"] == min(x for x in (32, 64, 96, 128, 192, 256) if x >= d)
            works = math.ceil(SHAPE["n"] / kernel["block_q"]) * SHAPE["heads_q"] * SHAPE["batch"]
            held = 132 * (2 if kernel["head_dim"] == 32 else 1)  # CTAs
            assert plan["grid"][0] <= min(works, held) and plan["grid"][1:] == (1, 1)
            assert plan["before"] == plan["after"] == []


def test_heads_share_a_tile_that_one_would_not_fill(monkeypatch):
    """Four queries of 32 heads that share their keys fill a tile of 128."""
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm90")
    for heads_q, heads_k, n, grid in (
        (32, 1, 4, 3),
        (32, 1, 128, 3 * 32),
        (32, 1, 64, 3 * 16),
        (24, 1, 16, 3 * 3),  # eight of the 24
        (5, 1, 16, 3 * 5),  # an odd number of them: none
        (32, 32, 4, 3 * 32),
    ):
        shape = {"batch": 3, "heads_q": heads_q, "heads_k": heads_k, "n": n, "m": 900}
        plan = told(fm.explain(*problem(d=128, **shape), **H200))
        assert plan["grid"] == (grid, 1, 1), shape


def test_three_warpgroups_where_their_rows_fill(monkeypatch):
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm90")
    for n, rows in ((4096, 192), (512, 192), (192, 192), (128, 128), (64, 128), (256, 128)):
        shape = {"batch": 64, "heads_q": 16, "heads_k": 16, "n": n, "m": n}
        assert kernel_of(*problem(**shape))["block_q"] == rows, n
    # Up to 1,024 tokens two are faster at D = 96.
    for n, d, causal, rows in (
        (1024, 64, False, 192), (512, 64, True, 192), (256, 64, True, 128),
        (1024, 96, False, 128), (2048, 96, False, 192), (2048, 96, True, 192),
    ):  # fmt: skip
        shape = {"batch": 16, "heads_q": 16, "heads_k": 16, "n": n, "m": n}
        assert kernel_of(*problem(d=d, **shape), causal=causal)["block_q"] == rows, (n, d, causal)

    # 48 heads of 512 are 144 tiles of 192 rows: two rounds of 132 SMs, as 192 of 128 are.
    few = problem(batch=4, heads_q=12, heads_k=12, n=512, m=512)
    assert kernel_of(*few)["block_q"] == kernel_of(*few, causal=True)["block_q"] == 128


def test_few_short_sequences_go_backward_here():
    def family(batch: int, d: int, n=64, heads_k=4, **options) -> str:
        tensors = problem(d=d, batch=batch, heads_q=8, heads_k=heads_k, n=n, m=n)
        return kernel_of(*tensors, backward=True, **options)["family"]

    assert family(2, 32) == family(16, 64) == family(32, 128) == family(4, 256, 20) == "sm90"
    assert family(17, 32) == family(17, 64) == family(2, 16) == "sm80"
    assert family(2, 64, bias=spec(64, 64)) == "sm80"
    # Heads with keys of their own have a kernel for them, and where these are two CTAs' up to eight
    # CTAs for each SM.
    for d in (16, 32):
        assert family(17, d, heads_k=8) == family(67, d, heads_k=8) == "sm90"
    assert family(66, 16, 200, heads_k=8) == "sm90"
    assert family(67, 16, 200, heads_k=8) == "sm80"


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_heads_of_few_tokens_go_backward_in_one_launch(dtype, monkeypatch):
    """Up to 256 queries and keys: each head is a cluster's, of one CTA up to 128 keys, else of two.
    Its sums have one order, asked for or not."""
    few = {"batch": 3, "heads_q": 8, "heads_k": 8, "n": 200, "m": 256}

    def said(d=64, dv=0, sizes=few, **options) -> str:
        more = {name: options.pop(name) for name in list(options) if name in few}
        tensors = problem(dtype, d, dv, **sizes | more)
        return fm.explain(*tensors, **options, backward=True, **H200)

    def is_whole(**call) -> bool:
        return "_bwd_whole_" in told(said(**call))["kernel"]

    for d, dv, bucket in ((1, 0, 32), (8, 32, 32), (33, 8, 64), (8, 64, 64), (64, 0, 64)):
        for n, m in ((1, 1), (256, 128), (1, 129), (256, 256)):
            for options in ({}, {"causal": True}, {"window": (9, -1)}, {"deterministic": True}):
                text = said(d, dv, n=n, m=m, **options)
                plan, ctas = told(text), 1 if m <= 128 else 2
                assert plan["kernel"] == f"sm90_attention_bwd_whole_{dtype}_d{bucket}_128x256"
                assert plan["before"] == plan["after"] == []
                assert plan["grid"] == (24 * ctas, 1, 1)
                assert (", clusters of 2" in text) == (ctas == 2)
                assert "\n  workspace  0 MiB\n" in text and "\n  bitwise reproducible\n" in text
    assert is_whole(key_lengths=spec(3, dtype=torch.int64)) and is_whole(scale=0.8)

    for why, call in (
        ("takes at most 256 queries and 256 keys", {"n": 257}),
        ("takes at most 256 queries and 256 keys", {"m": 257}),
        ("takes no heads that share their keys", {"heads_k": 4}),
        ("gives no gradient of the sinks", {"sinks": spec(8, dtype=torch.float32)}),
        # 1,072 CTAs for 132 SMs.
        (
            "tiles of a part of a head are faster for more than 8 blocks an SM at head dims "
            "up to 32",
            {"d": 32, "batch": 67},
        ),
    ):
        text = said(**call)
        assert re.search(rf"_bwd_whole_\w+: passed over: {why}$", text, re.M), why
        assert "_bwd_whole_" not in told(text)["kernel"]
    assert is_whole(d=32, batch=66) and is_whole(d=32, batch=500, m=128) and is_whole(batch=500)
    for call in (
        {"d": 65},
        {"dv": 72},
        {"softcap": 3.0},
        {"scale": -0.1},
        {"bias": spec(8, 200, 256, dtype=TORCH_DTYPES[dtype])},
        {"dropout_p": 0.1},
    ):
        assert not is_whole(**call)
    # Thousands of heads of a few dozen tokens are packed.
    assert "_bwd_packed_" in said(batch=66, n=64, m=64) and is_whole(batch=65, n=64, m=64)

    # Either can be asked for.
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm90")
    for d, forward in ((32, "128x64"), (64, "128x128")):
        monkeypatch.setenv("FLASHMOE_TILE", f"{forward},128x256")
        assert is_whole(d=d, batch=500) and is_whole(d=d, n=1, m=1)
        with pytest.raises(RuntimeError, match="FLASHMOE_TILE asks for 128x256"):
            said(d, n=257)
        monkeypatch.setenv("FLASHMOE_TILE", f"{forward},128x128")
        assert told(said(d))["kernel"] == f"sm90_attention_bwd_{dtype}_d{d}_128x128"


def test_80_queries_where_they_leave_little_empty():
    """Backward, head dims 65 to 128."""
    heads = {"batch": 2, "heads_q": 16, "heads_k": 16}
    for n, options, rows in (
        (16384, {}, 80), (1024, {}, 80), (560, {}, 80), (512, {}, 64), (400, {}, 80),
        (16384, {"causal": True}, 80), (8192, {"causal": True}, 80), (4096, {"causal": True}, 64),
        (16384, {"window": (128, 128)}, 64), (16384, {"window": (4096, 0)}, 80),
        # No limits, in whatever words.
        (512, {"window": (2**63 - 1, 0)}, 64), (16384, {"window": (2**63 - 1, 0)}, 80),
        (512, {"window": (-1, 2**63 - 1)}, 64), (400, {"window": (2**63 - 1, 2**63 - 1)}, 80),
    ):  # fmt: skip
        for d in (96, 128):
            tensors = problem(d=d, n=n, m=n, **heads)
            kernel = kernel_of(*tensors, backward=True, **options)
            assert (kernel["block_q"], kernel["block_k"]) == (rows, 128), (n, options, d)
    said = fm.explain(*problem(d=128, n=512, m=512, **heads), backward=True, **H200)
    assert "computes 2240 rows of queries of a head, tiles of 64 compute 2048" in said
    capped = kernel_of(*problem(d=96, n=1024, m=1024, **heads), backward=True, softcap=30.0)
    assert capped["block_q"] == 64


def of_one(heads_q: int, heads_k: int, n: int, d=128, batch=1, dtype="bf16") -> list[torch.Tensor]:
    return problem(dtype, d, batch=batch, heads_q=heads_q, heads_k=heads_k, n=n, m=n)


def splits_of(tensors, **options) -> tuple[int, int]:
    """Tasks that a tile of keys comes in backward, and of how many tiles; (1, 0): nothing is."""
    plan = told(fm.explain(*tensors, **options, backward=True, **H200))
    dtype = CATALOGUE[plan["kernel"]]["dtype"]
    sums = [name for name in plan["after"] if CATALOGUE[name]["role"] == "attention_bwd_key_sum"]
    assert len(sums) == (plan["splits"] > 1) and all(CATALOGUE[x]["dtype"] == dtype for x in sums)
    return plan["splits"], plan["split_tiles"]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("d", [32, 64, 96, 128, 192, 256])
def test_few_tiles_of_keys_share_out_their_queries(d, dtype):
    """For 132 SMs, or 66 pairs of them."""
    for causal in (False, True):
        splits, tiles = splits_of(of_one(16, 1, 5003, d, dtype=dtype), causal=causal)
        assert splits >= 4 and tiles == 40
        assert splits_of(of_one(16, 16, 5003, d, 4, dtype), causal=causal) == (1, 0)
    # A causal mask's first tile is as long as all others could be together.
    if d <= 128:
        assert splits_of(of_one(32, 8, 2048, d, dtype=dtype), causal=True)[0] > 1
    assert splits_of(of_one(4, 4, 128, d, dtype=dtype)) == (1, 0)


def test_the_tiles_that_are_left_when_all_have_had_as_many_are_split_alone():
    for heads, tiles in ((13, 33), (20, 16), (25, 16), (15, 9)):
        tensors = of_one(heads, heads, 128 * tiles - 27)
        splits, split_tiles = splits_of(tensors)
        assert splits > 1 and split_tiles == heads * tiles % 132
        assert splits_of(tensors, causal=True) == (1, 0)
    assert splits_of(of_one(7, 7, 1777, 64, 3)) == (4, 30)  # a tenth faster: little enough to gain
    assert splits_of(of_one(33, 33, 2048)) == (1, 0)  # four for each SM


def test_what_is_not_split():
    tensors = of_one(16, 1, 5003, 64)
    assert splits_of(tensors)[0] > 1
    assert splits_of(tensors, deterministic=True) == splits_of(tensors)
    assert splits_of(tensors, bias=spec(5003, 5003, dtype=torch.bfloat16)) == (1, 0)


def test_parts_take_no_more_memory_than_six_tasks_of_each_sm():
    most = 6 * 132 * 2 * 128 * 128 * 4 / 2**20
    for n in (700, 1100, 2048, 4099, 5003, 16384):
        for heads_q, heads_k in ((16, 1), (5, 5), (32, 8), (13, 13), (7, 1)):
            tensors = of_one(heads_q, heads_k, n)
            for causal in (False, True):
                options = {"causal": causal, "backward": True}
                text = fm.explain(*tensors, **options, **H200)
                bytes_of_sums = heads_q * (n + 256) * 4 * (128 + 2)
                workspace = float(re.search(r"workspace +([\d.]+) MiB", text)[1])
                assert workspace < most + 2 * bytes_of_sums / 2**20 + 1


def test_ragged_batches():
    offsets = {f"cu_seqlens_{x}": spec(9, dtype=torch.int32) for x in "qk"}
    options = offsets | {"max_seqlen_q": 4096, "max_seqlen_k": 4096}
    tensors = [spec(8 * 4096, 16, 128)] * 3
    plan = told(fm.explain(*tensors, **options, **H200))
    assert CATALOGUE[plan["kernel"]]["family"] == "sm90"
    assert plan["before"] == ["sm90_attention_ragged_blocks_fp16"]
    assert plan["grid"] == (132, 1, 1)
    plan = told(fm.explain(*tensors, **options, backward=True, **H200))
    assert CATALOGUE[plan["kernel"]]["family"] == "sm90"
    assert plan["grid"] == (132, 1, 1)


def crystals(batch: int, heads_q: int, heads_k: int, d: int, dv: int = 0) -> tuple[list, dict]:
    """Sequences of 31 tokens on average."""
    offsets = {f"cu_seqlens_{x}": spec(batch + 1, dtype=torch.int32) for x in "qk"}
    longest = {f"max_seqlen_{x}": 444 for x in "qk"}
    shapes = ((heads_q, d), (heads_k, d), (heads_k, dv or d))
    return [spec(31 * batch, *shape) for shape in shapes], offsets | longest


def test_many_short_sequences_are_packed(monkeypatch):
    """Where sm80 has its tiles of 32 x 32; and heads that share a box."""
    for heads, d, bucket, boxes in (
        (48, 16, 16, 12),
        (6, 16, 16, 2),
        (3, 32, 32, 2),
        (8, 64, 64, 8),
    ):
        tensors, options = crystals(4096, heads, heads, d)
        plan = told(fm.explain(*tensors, **options, **H200))
        assert plan["kernel"] == f"sm90_attention_fwd_packed_fp16_d{bucket}_128x32"
        assert plan["before"] == ["sm90_attention_row_bounds_fp16"]
        tiles = math.ceil(4096 * 31 / 128)
        assert plan["grid"] == (min(tiles * boxes, 2 * 132), 1, 1)
        plan = told(fm.explain(*tensors, **options, **H200, backward=True))
        assert plan["kernel"] == f"sm90_attention_bwd_packed_fp16_d{bucket}_192x32"
        assert plan["before"] == ["sm90_attention_bwd_packed_preprocess_fp16"]
        tiles = math.ceil(4096 * 31 / 192)  # of queries, and of keys
        assert plan["grid"] == (min(2 * tiles * boxes, 132), 1, 1)
    for heads_q, heads_k, d, dv in ((8, 2, 64, 0), (8, 8, 48, 0), (8, 8, 64, 8), (8, 8, 8, 64)):
        tensors, options = crystals(4096, heads_q, heads_k, d, dv)
        assert "_fwd_packed_" in kernel_of(*tensors, **options, causal=True)["name"]
        backward = kernel_of(*tensors, **options, causal=True, backward=True)
        assert "_bwd_packed_" in backward["name"]
    # What it does not do is sm80's still.
    for tensors, options, more in (
        (*crystals(4096, 8, 8, 64), {"softcap": 3.0}),
        (*crystals(4096, 8, 8, 64), {"scale": -0.1}),
        (*crystals(4096, 8, 8, 64), {"bias": spec(31 * 31 * 4096, 8), "causal": True}),
        (*crystals(4096, 8, 8, 64), {"bias": spec(31 * 31 * 4096, 1)}),
        (*crystals(4096, 8, 8, 64), {"bias": spec(31 * 31 * 4096, 8, dtype=torch.float32)}),
        (*crystals(4096, 8, 2, 64), {"bias": spec(31 * 31 * 4096, 8)}),
        (*crystals(65, 8, 8, 64), {"bias": spec(31 * 31 * 65, 8)}),
        (*crystals(4096, 8, 4, 16), {}),
        (*crystals(4096, 8, 8, 24), {}),
        (*crystals(4096, 8, 8, 32, 16), {}),
        (*crystals(65, 8, 8, 64), {}),
    ):
        for backward in (False, True):
            kernel = kernel_of(*tensors, **options, **more, backward=backward)
            assert kernel["family"] == "sm80", more
    apart = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in crystals(4096, 8, 8, 16)[0]]
    assert kernel_of(*apart, **crystals(4096, 8, 8, 16)[1])["family"] == "sm80"
    # A tile can be asked for.
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm90")
    monkeypatch.setenv("FLASHMOE_TILE", "128x32,192x32")
    for d in (16, 32, 64):
        for dtype in (torch.float16, torch.bfloat16):
            tensors, options = crystals(3, 8, 8, d)
            for backward, name in ((False, "_fwd_packed_"), (True, "_bwd_packed_")):
                tensors = [x.to(dtype) for x in tensors]
                kernel = kernel_of(*tensors, **options, backward=backward)
                assert name in kernel["name"] and kernel["head_dim"] == d
    with pytest.raises(RuntimeError, match=r"FLASHMOE_TILE asks for 128x32"):
        fm.explain(*problem(), softcap=3.0, **H200)


def test_many_short_sequences_with_a_bias_are_packed():
    for heads, d, bucket, boxes in (
        (48, 16, 16, 12),
        (3, 32, 32, 2),
        (8, 64, 64, 8),
        (8, 40, 64, 8),
    ):
        tensors, options = crystals(4096, heads, heads, d)
        bias = spec(31 * 31 * 4096, heads)
        plan = told(fm.explain(*tensors, **options, bias=bias, **H200))
        assert plan["kernel"] == f"sm90_attention_fwd_packed_bias_fp16_d{bucket}_128x32"
        assert plan["before"] == ["sm90_attention_row_bounds_fp16"]
        assert plan["grid"] == (min(math.ceil(4096 * 31 / 128) * boxes, 2 * 132), 1, 1)
        text = fm.explain(*tensors, **options, bias=bias, **H200, backward=True)
        plan = told(text)
        assert plan["kernel"] == f"sm90_attention_bwd_packed_bias_fp16_d{bucket}_192x32"
        assert plan["before"] == ["sm90_attention_bwd_packed_preprocess_fp16"]
        assert "bitwise reproducible" in text and "bias_transpose" not in text


def short(batch: int, length: int, heads: int, d: int, heads_k: int = 0) -> list[torch.Tensor]:
    """As projections leave them: the heads of a token lie side by side."""
    shapes = ((batch, length, h, d) for h in (heads, heads_k or heads, heads_k or heads))
    return [spec(*shape).transpose(1, 2) for shape in shapes]


def test_dense_batches_of_short_sequences_are_packed():
    for length, heads, d, bucket, boxes in (
        (64, 32, 16, 16, 8),
        (50, 6, 32, 32, 3),
        (33, 8, 48, 64, 8),
    ):
        pitch = math.ceil(length / 32) * 32
        tensors = short(256, length, heads, d)
        plan = told(fm.explain(*tensors, **H200))
        assert plan["kernel"] == f"sm90_attention_fwd_packed_fp16_d{bucket}_128x32"
        assert plan["before"] == ["sm90_attention_row_bounds_fp16"]
        assert plan["grid"] == (min(math.ceil(256 * pitch / 128) * boxes, 2 * 132), 1, 1)
        plan = told(fm.explain(*tensors, **H200, backward=True))
        assert plan["kernel"] == f"sm90_attention_bwd_packed_fp16_d{bucket}_192x32"
        assert plan["grid"] == (132, 1, 1)
    assert "_fwd_packed_" in kernel_of(*short(512, 64, 8, 64, 2), causal=True)["name"]
    assert "_fwd_packed_" in kernel_of(*(x.contiguous() for x in short(256, 64, 8, 64)))["name"]
    # What it does not do, and what is long or few, has the kernels that it had.
    for tensors, options in (
        (short(256, 65, 32, 64), {}),
        (short(256, 97, 32, 32), {}),
        (short(256, 129, 32, 16), {}),
        (short(8, 64, 8, 16), {}),
        (short(256, 64, 32, 24), {}),
        ([x.contiguous() for x in short(256, 64, 32, 16)], {}),
        (short(256, 64, 8, 16, 4), {}),
        (short(256, 64, 32, 16), {"softcap": 3.0}),
        (short(256, 64, 32, 16), {"bias": spec(256, 32, 64, 64)}),
        (short(256, 64, 32, 16), {"key_lengths": spec(256, dtype=torch.int32)}),
    ):
        for backward in (False, True):
            name = kernel_of(*tensors, **options, backward=backward)["name"]
            assert "_packed_" not in name, (tensors[0].shape, options)
    sinks = {"sinks": spec(32, dtype=torch.float32)}
    assert "_fwd_packed_" in kernel_of(*short(256, 64, 32, 16), **sinks)["name"]
    for length, d in ((65, 16), (128, 16), (65, 32), (96, 32)):
        tensors = short(256, length, 32, d)
        assert "_packed_" not in kernel_of(*tensors)["name"]
        assert "_bwd_packed_" in kernel_of(*tensors, backward=True)["name"]


@pytest.mark.parametrize(
    "why, tensors, options",
    [
        ("takes a bias of all queries and keys alone", problem(), {"bias": spec(517)}),
        ("takes an fp32 bias up to head dim 64", problem(d=72),
         {"bias": spec(300, 517, dtype=torch.float32)}),
        ("takes an fp32 bias of neighbouring keys alone", problem(),
         {"bias": spec(517, 300, dtype=torch.float32).mT}),
        ("does not sum the gradient of a shared fp32 bias", problem(),
         {"bias": spec(300, 517, dtype=torch.float32), "backward": True}),
        ("adds a bias before softcap and scale", problem(),
         {"bias": spec(300, 517), "softcap": 5.0}),
        ("takes a bias up to head dim 128", problem(d=192), {"bias": spec(300, 517)}),
        ("there is nothing to attend to", problem(m=0), {}),
        ("there is nothing to attend to", problem(batch=0), {}),
        ("more than 1073741824 blocks cannot be counted",
         problem(batch=1 << 20, heads_q=1024, heads_k=1, n=65, m=65), {}),
        ("more than 1073741824 blocks cannot be counted",  # of 16 rows, there
         problem(batch=1 << 18, heads_q=1024, heads_k=1, n=65, m=65), {"backward": True}),
        ("is for sm_90 alone, the device is sm_100", problem(), {"device": "sm_100"}),
        ("needs sm_90 or newer", problem(), {"device": "sm_80"}),
        ("key is broadcast", [problem()[0], problem()[1][:, :1].expand(3, 2, 517, 64),
                              problem()[2]], {}),
        ("value is broadcast", [*problem()[:2], problem()[2][:1].expand(3, 2, 517, 64)], {}),
        ("query is broadcast, or its leading dimensions do not lie densely",
         [spec(2, 4, 3, *x.shape[1:])[:, ::2] for x in problem()], {}),
    ],
    ids=lambda x: x[:30] if isinstance(x, str) else "",
)  # fmt: skip
def test_what_it_cannot_do_is_said_and_runs_elsewhere(why, tensors, options, monkeypatch):
    options = H200 | options
    text = fm.explain(*tensors, **options)
    assert f"sm90: passed over: {why}" in text or f"sm90: {why}" in text
    assert CATALOGUE[told(text)["kernel"]]["family"] == "sm80"
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm90")
    with pytest.raises(RuntimeError, match=rf"(?s)sm90: {why}"):
        fm.explain(*tensors, **options)


@pytest.mark.parametrize(
    "why, tensors, options",
    [
        ("at most 64 tokens have smaller tiles in sm80", problem(batch=60, n=64, m=64), {}),
        ("at most 64 tokens have smaller tiles in sm80", *ragged()),
        ("head dims up to 16 have tiles of their own", problem(d=16, **LONG), {"backward": True}),
        ("head dims up to 16 have tiles of their own", problem(d=16, **LONG), {}),
        ("one query: sm80 splits its keys", problem(batch=64, n=1, m=4096), {}),
        ("of at most 200 tokens fill sm80's tiles better", *packed(8, 150)),
        ("blocks would leave most of 132 SMs idle", problem(batch=1, n=300, m=8192), {}),
    ],
    ids=lambda x: x[:30] if isinstance(x, str) else "",
)  # fmt: skip
def test_where_it_would_be_slower_it_is_passed_over(why, tensors, options, monkeypatch):
    text = fm.explain(*tensors, **options, **H200)
    assert why in text and CATALOGUE[told(text)["kernel"]]["family"] == "sm80"
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm90")  # who asks for it gets it
    assert kernel_of(*tensors, **options)["family"] == "sm90"
