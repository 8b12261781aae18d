"""Plans for every chip name kernels that are there, and say why. Asks the planner only: no GPU.

test_forced_plans.py has those that the environment asks for; tests/cpp/test_plan_cuda.cc and
test_plan_bias.cc ask for many more problems.
"""

from __future__ import annotations

import math
import re

import pytest
import torch

import flashmoe_science as fm
from catalogue import (
    CATALOGUE,
    FAMILIES,
    INFO,
    TORCH_DTYPES,
    Family,
    beside,
    bias_sum,
    needs_all_families,
    report,
)
from plans import SHAPE, problem, spec, told

CHIPS = report.CHIPS

pytestmark = needs_all_families
PLANNED = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_100", "sm_120")
HEAD_DIMS = (1, 8, 16, 24, 32, 33, 48, 64, 80, 96, 128, 160, 192, 250, 256)


def capability(chip: str) -> int:
    return int(re.sub(r"\D", "", chip))


def can_run(family: Family, chip: str) -> bool:
    """Machine code runs on its own generation from its own chip on, with an "a" on that chip only;
    PTX on everything newer."""
    here = capability(chip)
    for code in family.machine_code:
        there = capability(code)
        if code.endswith("a"):
            if here == there:
                return True
        elif here // 10 == there // 10 and here >= there:
            return True
    return any(here >= capability(code) for code in family.ptx)


either_pass = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


def runs(chip: str, dtype: str) -> bool:
    """Whether a family of this build has kernels of the dtype for the chip."""
    families = [FAMILIES[name] for name in INFO["families"]]
    return any(dtype in family.dtypes and can_run(family, chip) for family in families)


def check_tile(plan: dict, chip: str, dtype: str, d: int, role: str) -> dict:
    """The plan's kernel: there, of that role and the smallest head dim, and no larger than fits."""
    kernel = CATALOGUE[plan["kernel"]]
    assert can_run(FAMILIES[kernel["family"]], chip)
    assert kernel["role"] == role
    assert kernel["dtype"] == str(TORCH_DTYPES[dtype]).removeprefix("torch.")
    buckets = {k["head_dim"] for k in CATALOGUE.values()}
    assert kernel["head_dim"] == min(bucket for bucket in buckets if bucket >= d)
    for name in ("threads", "shared_bytes", "block_q", "block_k"):
        assert plan[name] == kernel[name], name
    for name in (plan["kernel"], *plan["before"], *plan["after"]):
        assert CATALOGUE[name]["shared_bytes"] <= CHIPS[chip].block_shared_bytes
        assert CATALOGUE[name]["family"] == kernel["family"]
        assert CATALOGUE[name]["dtype"] == kernel["dtype"]
    return kernel


@either_pass
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("chip", PLANNED)
def test_plans_name_kernels_that_exist_and_fit(chip, dtype, backward):
    if not runs(chip, dtype):
        with pytest.raises(RuntimeError, match=rf"(?is){chip}.*cpu"):
            fm.explain(*problem(dtype), device=chip)
        return
    for d in HEAD_DIMS:
        plan = told(fm.explain(*problem(dtype, d), backward=backward, device=chip))
        role = "attention_bwd" if backward else "attention_fwd"
        kernel = check_tile(plan, chip, dtype, d, role)
        family = kernel["family"]
        if backward:
            assert plan["before"] == [f"{family}_attention_bwd_preprocess_{dtype}"]
            assert plan["after"] == [beside(plan["kernel"], "dq")]
            blocks, heads = math.ceil(SHAPE["m"] / kernel["block_k"]), SHAPE["heads_k"]
        else:
            combine = [f"{family}_attention_combine_{dtype}"]
            assert plan["before"] == []
            assert plan["after"] == (combine if plan["splits"] > 1 else [])
            blocks = math.ceil(SHAPE["n"] / kernel["block_q"]) * plan["splits"]
            heads = SHAPE["heads_q"]
        assert plan["grid"] == (blocks, heads, SHAPE["batch"])
        assert plan["slices"] == (1, None) and plan["bias_splits"] == 1


# With a bias, by its shape; whether a gradient of that shape is a sum; whether enough share it to
# copy its odd rows, in 16 bits.
BIASES = {
    "full": ((3, 8, 300, 517), False, False),
    "heads": ((8, 300, 517), True, False),
    "batches": ((3, 1, 300, 517), True, True),
    "pairs": ((300, 517), True, True),
    "keys": ((3, 8, 1, 517), True, False),
    "queries": ((3, 8, 300, 1), True, False),
    "one": ((1,), True, False),
}


@pytest.mark.parametrize("wide", [False, True], ids=["like the input", "fp32"])
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("chip", PLANNED)
def test_plans_with_a_bias(chip, dtype, wide):
    """tests/cpp/test_plan_bias.cc has those that want no gradient of it."""
    bias_dtype = torch.float32 if wide else TORCH_DTYPES[dtype]
    if not runs(chip, dtype):
        with pytest.raises(RuntimeError, match=rf"(?is){chip}.*cpu"):
            fm.explain(*problem(dtype), bias=spec(300, 517, dtype=bias_dtype), device=chip)
        return
    for d in HEAD_DIMS:
        for shape, summed, odd in BIASES.values():
            call = {"bias": spec(*shape, dtype=bias_dtype), "device": chip}
            plan = told(fm.explain(*problem(dtype, d), **call))
            kernel = check_tile(plan, chip, dtype, d, "attention_fwd_bias")
            family = kernel["family"]
            rows = [f"{family}_attention_bias_align_{dtype}"] if odd and not wide else []
            combine = [f"{family}_attention_combine_{dtype}"]
            assert plan["before"] == rows
            assert plan["after"] == (combine if plan["splits"] > 1 else [])
            blocks = math.ceil(SHAPE["n"] / kernel["block_q"]) * plan["splits"]
            assert plan["grid"] == (blocks, SHAPE["heads_q"], SHAPE["batch"])
            assert plan["slices"] == (1, None) and plan["bias_splits"] == 1

            plan = told(fm.explain(*problem(dtype, d), **call, backward=True))
            kernel = check_tile(plan, chip, dtype, d, "attention_bwd_bias")
            assert plan["before"] == [*rows, f"{family}_attention_bwd_preprocess_{dtype}"]
            total = [bias_sum(plan["kernel"])] if summed else []
            assert plan["after"] == [beside(plan["kernel"], "dq"), *total]
            assert plan["bias_splits"] == 1 or summed
            blocks = math.ceil(SHAPE["m"] / kernel["block_k"])
            slices, part = plan["slices"]
            assert part in (None, "batch")
            assert plan["grid"] == (blocks, SHAPE["heads_k"], math.ceil(SHAPE["batch"] / slices))


def test_a_bias_with_all_its_dimensions_of_size_one_is_no_sum():
    """Broadcast over nothing: (1, 1, 300, 517) is full where there is one head of one batch."""
    alone = problem(batch=1, heads_q=1, heads_k=1)
    for shape in ((300, 517), (1, 1, 300, 517)):
        plan = told(fm.explain(*alone, bias=spec(*shape), backward=True, device="sm_100"))
        assert plan["after"] == [beside(plan["kernel"], "dq")]
    plan = told(fm.explain(*alone, bias=spec(1, 517), backward=True, device="sm_100"))
    assert plan["after"][1:] == [bias_sum(plan["kernel"])]


@pytest.mark.parametrize("heads", [4, 1], ids=["a bias for each head", "one for all"])
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("chip", PLANNED)
def test_plans_with_a_packed_bias(chip, dtype, heads):
    if not runs(chip, dtype):
        return
    for d in HEAD_DIMS:
        for bias_dtype in (TORCH_DTYPES[dtype], torch.float32):
            tensors, options = ragged(d, dtype)
            options |= {"bias": spec(800, heads, dtype=bias_dtype), "device": chip}
            plan = told(fm.explain(*tensors, **options))
            family = check_tile(plan, chip, dtype, d, "attention_fwd_bias")["family"]
            before = [f"{family}_attention_ragged_blocks_{dtype}"]
            # Heads that lie side by side are copied apart, and the gradient back.
            copies = heads > 1 and bias_dtype != torch.float32
            copy = [f"{family}_attention_bias_transpose_{dtype}"] if copies else []
            assert plan["before"] == before + copy
            assert plan["after"] == [] and plan["splits"] == 1
            plan = told(fm.explain(*tensors, **options, backward=True))
            check_tile(plan, chip, dtype, d, "attention_bwd_bias")
            assert plan["before"] == [*before, *copy, f"{family}_attention_bwd_preprocess_{dtype}"]
            assert plan["bias_splits"] == 1
            total = [bias_sum(plan["kernel"])] if heads == 1 else copy
            assert plan["after"] == [beside(plan["kernel"], "dq"), *total]


@pytest.mark.parametrize("chip", PLANNED)
def test_few_queries_over_many_keys_are_split(chip):
    few = {"n": 1, "m": 100_000, "batch": 1}
    for bias in (None, spec(8, 1, 100_000)):
        text = fm.explain(*problem(d=128, **few), bias=bias, device=chip)
        plan = told(text)
        assert plan["splits"] >= 8  # Orin has 16 SMs, and there are two key heads
        assert plan["grid"] == (plan["splits"], SHAPE["heads_k"], 1), "a group's heads are rows"
        assert plan["after"] == [f"{plan['kernel'].split('_')[0]}_attention_combine_fp16"]
        assert CATALOGUE[plan["after"][0]]["role"] == "attention_combine"
        assert f"split in {plan['splits']}" in text and "\n  bitwise reproducible\n" in text
    for sizes in ({**few, "batch": 512}, {**few, "m": 100}, {"n": 4096, "m": 4096}):
        plan = told(fm.explain(*problem(d=128, **sizes), device=chip))
        assert plan["splits"] == 1 and not plan["after"], sizes


def test_a_backward_pass_says_whether_it_is_reproducible():
    for chip in ("sm_75", "sm_80", "sm_100"):
        text = fm.explain(*problem(), backward=True, device=chip)
        assert "\n  not bitwise reproducible" in text and "deterministic" in text
        again = fm.explain(*problem(), backward=True, deterministic=True, device=chip)
        assert "\n  bitwise reproducible\n" in again
        assert told(text) == told(again), "the same kernels, in turns"


def test_a_tile_that_does_not_fit_is_passed_over_by_name():
    """The backward pass of head dim 256 has a tile for chips with more than 164 KB."""
    large = problem(d=256, n=4096)
    on_h100, on_a100 = (
        fm.explain(*large, backward=True, device=chip) for chip in ("sm_100", "sm_80")
    )
    name = told(on_h100)["kernel"]
    assert CATALOGUE[name]["shared_bytes"] > CHIPS["sm_80"].block_shared_bytes
    assert told(on_a100)["kernel"] != name
    reason = f"needs {CATALOGUE[name]['shared_bytes']} bytes of shared memory, sm_80 has"
    assert f"{name}: passed over: {reason}" in on_a100
    short = fm.explain(*problem(d=128, n=40), device="sm_100")
    assert re.search(r"128x64: passed over: 40 rows would leave half of the tile empty", short)


def test_a_tile_that_leaves_an_sm_half_empty_is_passed_over_by_name():
    """Two blocks of the backward pass of head dim 64 fit an SM of Hopper, one an SM of Ampere."""
    on_h100, on_a100 = (
        fm.explain(*problem(d=64, n=4096), backward=True, device=chip)
        for chip in ("sm_100", "sm_80")
    )
    name = told(on_h100)["kernel"]
    assert told(on_a100)["kernel"] != name
    assert f"{name}: passed over: made for 2 blocks on an SM, of which sm_80 holds 1" in on_a100


def test_a_machine_without_a_gpu_plans_for_the_cpu():
    plan = told(fm.explain(*problem(), causal=True, device="cpu"))
    assert plan["kernel"].startswith("cpu_")


def test_a_chip_before_turing_is_refused():
    with pytest.raises(RuntimeError, match=r"(?s)sm75: needs sm_75.*sm_70.*\.cpu\(\)"):
        fm.explain(*problem(), device="sm_70")


@either_pass
def test_a_turing_chip_has_no_bf16(backward):
    words = r"(?s)sm_75.*sm80: needs sm_80.*sm75: has no kernels for bfloat16.*\.cpu\(\)"
    with pytest.raises(RuntimeError, match=words):
        fm.explain(*problem("bf16"), backward=backward, device="sm_75")
    plan = told(fm.explain(*problem("fp16"), backward=backward, device="sm_75"))
    assert plan["kernel"].startswith("sm75_")


def test_explain_gives_the_reasons():
    text = fm.explain(*problem(), causal=True, device="sm_100")
    assert re.search(r"^ +copies +none$", text, re.M)
    assert "chosen" in text
    assert re.search(r"sm90: passed over: .+", text)


def test_explain_tells_of_copies():
    q, k, v = problem()
    odd = spec(*k.shape[:-1], 65)[..., :64]
    rows_first = spec(3, 517, 2, 64).transpose(1, 2)
    packed = spec(3, 517, 3, 2, 64)[:, :, 1].transpose(1, 2)
    columns = spec(3, 2, 64, 517).mT

    def copies(*tensors, **options):
        return re.search(r"copies +(.*)", fm.explain(*tensors, **options))[1]

    for chip in ("sm_75", "sm_80", "sm_100"):
        assert copies(q, rows_first, packed, device=chip) == "none"
        assert copies(q, k[:, :, :1].expand(k.shape), v, device=chip) == "none"
        assert copies(q, odd, v, device=chip) == "key once, before the kernel"
        assert copies(q, odd, columns, device=chip) == "key, value once, before the kernel"
        # A head dim that is no multiple of 8: rows of 33 are copied, rows 40 apart are not.
        assert copies(*problem(d=33), device=chip).startswith("query, key, value once, before")
        apart = [x[..., :33] for x in problem(d=40)]
        assert not re.search("query|key|value", copies(*apart, device=chip))
        # The gradient of a key with gaps has none.
        back = copies(q, odd, v, device=chip, backward=True)
        assert back == "key once, before the kernel"
        back = copies(q, columns, v, device=chip, backward=True)
        assert back == "key once, before the kernel; grad_key once, after it"


def ragged(d=64, dtype="fp16") -> tuple[list[torch.Tensor], dict]:
    offsets = {f"cu_seqlens_{x}": spec(3, dtype=torch.int32) for x in "qk"}
    tensors = [spec(40, 4, d, dtype=TORCH_DTYPES[dtype])] * 3
    return tensors, offsets | {"max_seqlen_q": 20, "max_seqlen_k": 20}


@pytest.mark.parametrize("chip", PLANNED)
def test_ragged_batches_are_listed_first(chip):
    """As many blocks as the sequences may have, all heads in one dimension of the grid."""
    tensors, options = ragged()
    for backward in (False, True):
        plan = told(fm.explain(*tensors, **options, backward=backward, device=chip))
        family = CATALOGUE[plan["kernel"]]["family"]
        prepare = [f"{family}_attention_bwd_preprocess_fp16"] if backward else []
        assert plan["before"] == [f"{family}_attention_ragged_blocks_fp16", *prepare]
        block = plan["block_k"] if backward else plan["block_q"]
        assert plan["grid"] == ((40 // block + 2 + 1) * 4, 1, 1)


def workspace(text: str) -> float:
    """In MiB, of three digits."""
    return float(re.search(r"workspace +(\S+) MiB", text)[1])


def test_a_large_ragged_backward_pass_goes_by_parts_of_the_heads():
    offsets = {f"cu_seqlens_{x}": spec(9, dtype=torch.int32) for x in "qk"}
    options = offsets | {"max_seqlen_q": 4096, "max_seqlen_k": 4096}
    large = [spec(8 * 4096, 16, 64)] * 3
    text = fm.explain(*large, **options, backward=True, device="sm_100")
    plan = told(text)
    assert plan["slices"] == (4, "heads")
    assert plan["grid"] == ((8 * 4096 // plan["block_k"] + 8 + 1) * 4, 1, 1)
    assert workspace(text) <= 0.099 * 8 * large[0].numel() * 2 / 2**20
    assert told(fm.explain(*large, **options, device="sm_100"))["slices"] == (1, None)


def test_a_large_backward_pass_with_a_bias_goes_by_parts_of_the_batch():
    large = problem(d=32, batch=512, heads_q=4, heads_k=4, n=512, m=512)
    bias = spec(4, 512, 512)
    text = fm.explain(*large, bias=bias, backward=True, device="sm_100")
    plan = told(text)
    assert plan["slices"] == (3, "batch")
    assert plan["grid"] == (512 // plan["block_k"], 4, 171)
    assert workspace(text) <= 0.099 * 2 * (8 * large[0].numel() + 2 * bias.numel()) / 2**20
    assert told(fm.explain(*large, bias=bias, device="sm_100"))["slices"] == (1, None)
    without = told(fm.explain(*large, backward=True, device="sm_100"))
    assert without["slices"] == (1, None) and without["grid"][2] == 512


@pytest.mark.parametrize("chip", ["sm_75", "sm_80", "sm_100"])
def test_odd_rows_of_a_bias_that_eight_share_are_copied(chip):
    """tests/cpp/test_plan_bias.cc has the other strides."""
    for batch, keys, shape, copied in (
        (8, 93, (70, 93), True),
        (7, 93, (70, 93), False),
        (8, 96, (70, 96), False),
        (8, 93, (1, 93), False),
        (8, 93, (70, 1), False),
    ):
        shared = problem(batch=batch, heads_q=1, heads_k=1, n=70, m=keys)
        text = fm.explain(*shared, bias=spec(*shape), device=chip)
        rows = f"{told(text)['kernel'][:4]}_attention_bias_align_fp16"
        assert told(text)["before"] == ([rows] if copied else [])
        assert told(text)["splits"] == 1
        # Rows of 96 numbers for 93, in multiples of 256 bytes.
        copy = math.ceil(70 * 96 * 2 / 256) * 256 if copied else 0
        assert workspace(text) == float(f"{copy / 2**20:.3g}")


def test_the_sum_of_a_small_gradient_is_split():
    """16 tiles, and 296 blocks of them fit a B200: 17 x 16 are nine tenths of those."""
    shared = problem(batch=64, heads_q=4, heads_k=4, n=256, m=256)
    text = fm.explain(*shared, bias=spec(256, 256), backward=True, device="sm_100")
    assert told(text)["bias_splits"] == 17 and told(text)["splits"] == 1
    large = problem(batch=64, heads_q=4, heads_k=4, n=4096, m=4096)
    text = fm.explain(*large, bias=spec(4096, 4096), backward=True, device="sm_100")
    assert told(text)["bias_splits"] == 1


@either_pass
def test_many_short_sequences_have_a_tile_of_their_own(backward, monkeypatch):
    role = "attention_bwd" if backward else "attention_fwd"
    tensors, options = problem(batch=148, heads_q=4, heads_k=4, n=32, m=32), {"device": "sm_100"}
    text = fm.explain(*tensors, **options, backward=backward)
    assert told(text)["kernel"] == f"sm80_{role}_fp16_d64_32x32"
    longer = [
        name
        for name, kernel in CATALOGUE.items()
        if kernel["image"] == f"sm80_{role}_fp16_d64" and kernel["role"] == role
        if (kernel["block_q"], kernel["block_k"]) != (32, 32)
    ]
    assert re.findall(r"(\w+): passed over: made for longer sequences$", text, re.M) == longer
    assert longer
    for few in ({"batch": 147, "n": 32, "m": 32}, {"batch": 148, "n": 32, "m": 33}):
        other = fm.explain(*problem(**few, heads_q=4, heads_k=4), **options, backward=backward)
        assert told(other)["kernel"] in longer
    if backward:  # the two passes have no long tile in common; test_plan_cuda.cc forces them
        return
    monkeypatch.setenv("FLASHMOE_TILE", re.search(r"_(\d+x\d+)$", longer[0])[1])
    assert told(fm.explain(*tensors, **options))["kernel"] == longer[0]


def test_a_tile_for_short_sequences_is_passed_over_by_name():
    text = fm.explain(*problem(n=20, m=20), device="sm_75")
    why = "made for many sequences of at most a few dozen tokens"
    assert f"sm75_attention_fwd_fp16_d64_32x32: passed over: {why}\n" in text


def test_a_tile_with_a_bias_that_fills_the_last_round_worse_is_passed_over_by_name():
    """297 blocks of 128 rows are one more than a B200 holds at once."""
    why = "297 blocks would leave much of the last round of SMs idle"
    for batch, rows in ((296, 128), (297, 64)):
        tensors = problem(batch=batch, heads_q=1, heads_k=1, n=128, m=128)
        text = fm.explain(*tensors, bias=spec(128, 128), device="sm_100")
        assert told(text)["block_q"] == rows
        assert (f"128x64: passed over: {why}\n" in text) == (rows == 64)
        assert told(fm.explain(*tensors, device="sm_100"))["block_q"] == 128


# Every option, each way.
OPTIONS = {
    "causal": (problem(), {"causal": True}),
    "window": (problem(), {"window": (5, 3)}),
    "softcap": (problem(), {"softcap": 20.0}),
    "scale": (problem(), {"scale": -0.3}),
    "key_lengths": (problem(), {"key_lengths": spec(3, dtype=torch.int32)}),
    "head dims": (problem(d=40, dv=72), {}),
    "bias": (problem(), {"bias": spec(300, 517), "causal": True, "softcap": 20.0}),
    "transposed bias": (problem(), {"bias": spec(517, 300).mT}),
    "bias and lengths": (
        problem(d=40, dv=72),
        {"bias": spec(8, 300, 517), "key_lengths": spec(3, dtype=torch.int32)},
    ),
    "ragged bias": (ragged()[0], ragged()[1] | {"bias": spec(800, 4), "causal": True}),
    "bias of five dimensions": ([x[None, None] for x in problem()], {"bias": spec(3, 1, 300, 517)}),
    "bias of nothing": (problem(m=0), {"bias": spec(300, 1)}),
    "bias of nobody": (problem(batch=0), {"bias": spec(8, 300, 517)}),
    "bias of short sequences": (problem(batch=500, n=20, m=31), {"bias": spec(8, 20, 31)}),
    "short sequences": (problem(batch=500, n=20, m=31), {"causal": True}),
    "ragged": ragged(),
    "ragged, small": ragged(d=24),
    "five dimensions": ([x[None, None] for x in problem()], {}),
    "nothing": (problem(m=0), {}),
    "nobody": (problem(batch=0), {}),
}


@pytest.mark.parametrize("chip", PLANNED)
@pytest.mark.parametrize("what", OPTIONS)
def test_options(what, chip):
    tensors, options = OPTIONS[what]
    for more in ({}, {"backward": True}, {"backward": True, "deterministic": True}):
        plan = told(fm.explain(*tensors, **options, **more, device=chip))
        assert {plan["kernel"], *plan["before"], *plan["after"]} <= set(CATALOGUE)


# What has no kernel yet: an explanation that fails, by name and with what would work.
REFUSED = {
    "dtype": ([x.double() for x in problem()], {}, r"float64.*float32.*float16"),
}


@either_pass
@pytest.mark.parametrize("chip", ["sm_75", "sm_80", "sm_100", "sm_120"])
@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what, chip, backward):
    tensors, options, words = REFUSED[what]
    with pytest.raises(RuntimeError, match=rf"(?is){words}.*\.cpu\(\)"):
        fm.explain(*tensors, **options, backward=backward, device=chip)


@pytest.mark.parametrize("chip", (*PLANNED, "sm_90"))
def test_fp32_follows_what_torch_allows_for_its_products(chip):
    """As matmul does: "high" and "medium" allow TF32, which Turing does not have."""
    family = "sm75" if chip == "sm_75" else "sm80"
    tensors = [spec(2, 4, 300, 64, dtype=torch.float32)] * 3
    bias = spec(4, 300, 300, dtype=torch.float32)
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            allowed = precision != "highest"
            product = "tf32" if allowed and family == "sm80" else "fp32"
            for backward, options in ((False, {}), (True, {}), (True, {"bias": bias})):
                text = fm.explain(*tensors, **options, backward=backward, device=chip)
                assert told(text)["kernel"].startswith(f"{family}_attention_")
                assert f"_{product}_d64_" in told(text)["kernel"]
                assert ("TF32 allowed" in text) == allowed
                assert "\n  bitwise reproducible\n" in text
            half = [x.half() for x in tensors]
            assert "TF32" not in fm.explain(*half, device=chip)
    finally:
        torch.set_float32_matmul_precision("highest")
