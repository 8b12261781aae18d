"""Plans of attention over pages and of writing to a cache, for every chip. No GPU."""

from __future__ import annotations

import re

import pytest
import torch

import flashmoe_science as fm
import pages
from catalogue import CATALOGUE, FAMILIES, TORCH_DTYPES, needs_all_families, report
from plans import told
from test_plans import PLANNED, can_run, runs

pytestmark = needs_all_families
CHIPS = report.CHIPS


def problem(batch=4, tokens=None, hq=32, hk=8, d=128, page=16, keys=8192, dtype="bf16", fp8=False):
    """Meta tensors and options of a call."""
    query = TORCH_DTYPES[dtype]
    cache = torch.float8_e4m3fn if fp8 else query
    meta = {"device": "meta"}
    caches = [torch.empty(1000, page, hk, d, dtype=cache, **meta) for _ in "kv"]
    table = torch.empty(batch, -(-keys // page), dtype=torch.int32, **meta)
    lens = torch.empty(batch, dtype=torch.int32, **meta)
    q = torch.empty(tokens or batch, hq, d, dtype=query, **meta)
    options = {"max_seqlen_k": keys}
    if tokens:
        cu = torch.empty(batch + 1, dtype=torch.int32, **meta)
        options |= {"cu_seqlens_q": cu, "max_seqlen_q": tokens}
    return [q, *caches, table, lens], options


def plan(chip, **sizes) -> tuple[dict, str]:
    tensors, options = problem(**sizes)
    text = fm.explain_paged(*tensors, **options, device=chip)
    found = re.search(r"^ +splits +the keys, in up to (\d+)$", text, re.M)
    return told(text) | {"splits": int(found[1]) if found else 1}, text


def workspace(text: str) -> str:
    return re.search(r"^ +workspace +(.*)$", text, re.M)[1]


@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "fp8"])
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("chip", PLANNED)
def test_every_head_dim_has_a_kernel_that_fits(chip, dtype, fp8):
    if not runs(chip, dtype):
        with pytest.raises(RuntimeError, match=rf"(?is){chip}.*cpu"):
            plan(chip, dtype=dtype, fp8=fp8)
        return
    for d in (16, 64, 72, 128, 192, 256, 512):
        told_plan, _ = plan(chip, dtype=dtype, fp8=fp8, d=d)
        kernel = CATALOGUE[told_plan["kernel"]]
        assert kernel["role"] == "attention_paged_decode" and ("_fp8_" in kernel["name"]) == fp8
        assert kernel["head_dim"] == min(x for x in (64, 128, 256, 512) if x >= d)
        assert can_run(FAMILIES[kernel["family"]], chip)
        for name in (told_plan["kernel"], *told_plan["before"], *told_plan["after"]):
            assert CATALOGUE[name]["shared_bytes"] <= CHIPS[chip].block_shared_bytes
            assert CATALOGUE[name]["family"] == kernel["family"]


@pytest.mark.parametrize("chip", PLANNED)
def test_splits_do_not_depend_on_the_batch(chip):
    """Nor does anything else that decides which numbers are added up when."""
    alone, _ = plan(chip, batch=1, dtype="fp16")
    for batch in (2, 16, 256):
        crowd, _ = plan(chip, batch=batch, dtype="fp16")
        assert crowd["splits"] == alone["splits"] and crowd["kernel"] == alone["kernel"]
    assert alone["splits"] > 1


def test_short_sequences_are_not_combined():
    told_plan, _ = plan("sm_90", keys=256)
    assert told_plan["splits"] == 1 and told_plan["after"] == []
    told_plan, _ = plan("sm_90", keys=257)
    assert told_plan["splits"] == 2
    assert told_plan["after"] == ["sm90_attention_paged_combine_bf16_d128_64x64"]


def test_the_grid_is_what_the_chip_holds():
    """However long sequences may be: CTAs find their work themselves, the last of it by tickets."""
    for batch, keys in ((256, 131_072), (64, 1 << 20)):
        for fp8 in (False, True):
            # On Hopper all but 4: a multiple of the 8 key heads, which are read side by side.
            for chip, ctas in (("sm_90", 3 * 132 - 4), ("sm_80", 2 * 108)):
                told_plan, _ = plan(chip, batch=batch, keys=keys, fp8=fp8)
                assert told_plan["grid"] == (ctas, 1, 1)
                family = CATALOGUE[told_plan["kernel"]]["family"]
                assert told_plan["before"] == [f"{family}_attention_paged_tickets_bf16_d128_64x64"]


def test_few_items_have_a_cta_each():
    """A head, a split, a sequence: nobody goes over all lengths first, and nothing is counted."""
    for batch, keys in ((1, 200), (1, 512), (16, 8192)):
        told_plan, _ = plan("sm_90", batch=batch, keys=keys)
        assert told_plan["grid"] == (8, min(-(-keys // 256), 16), batch)
        assert told_plan["before"] == []
    most = 8 * 3 * 132  # CTAs, in sequences of 8 heads and 16 splits
    assert plan("sm_90", batch=most // 128)[0]["grid"] == (8, 16, most // 128)
    assert plan("sm_90", batch=most // 128 + 1)[0]["grid"] == (3 * 132 - 4, 1, 1)


MANY = "sm90_attention_paged_bf16_d128_64x64"


def test_more_rows_than_a_decode_has_have_a_kernel_of_their_own():
    assert plan("sm_90", batch=2, tokens=4)[0]["before"] == []  # 4 heads of each: 16 rows
    assert plan("sm_90", batch=2, tokens=5)[0]["before"] == [MANY]
    fp8 = MANY.replace("paged_", "paged_fp8_")
    assert plan("sm_90", batch=2, tokens=5, fp8=True)[0]["before"] == [fp8]
    assert plan("sm_80", batch=2, tokens=5)[0]["before"] == [MANY.replace("sm90", "sm80")]


@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "fp8"])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("chip", ["sm_75", "sm_80", "sm_90"])
def test_up_to_8_rows_have_a_tile_of_their_own(chip, d, fp8, monkeypatch):
    """By the bound, with the same keys in the same order: a request has the same bits in both."""

    def tile(hq, tokens=None):
        sizes = {"batch": 1, "hq": hq, "hk": 1, "d": d, "dtype": "fp16", "fp8": fp8}
        kernel = CATALOGUE[plan(chip, tokens=tokens, **sizes)[0]["kernel"]]
        assert kernel["role"] == "attention_paged_decode" and kernel["head_dim"] == d
        return kernel["block_q"], kernel["block_k"]

    few = [tile(1), tile(8), tile(1, 8), tile(4, 2), tile(2, 3)]
    more = [tile(9), tile(16), tile(17), tile(1, 9), tile(4, 3), tile(4, 100)]
    assert {rows for rows, _ in few} == {8} and {rows for rows, _ in more} == {16}
    assert len({keys for _, keys in few + more}) == 1
    keys = few[0][1]
    monkeypatch.setenv("FLASHMOE_TILE", f"16x{keys}")
    assert tile(1) == tile(9) == (16, keys)
    monkeypatch.setenv("FLASHMOE_TILE", f"8x{keys}")
    assert tile(8) == (8, keys)
    with pytest.raises(RuntimeError, match=rf"asks for 8x{keys}; .* 9 rows, there are 16x{keys}"):
        tile(9)


def test_chunks_have_a_kernel_of_their_own_on_hopper():
    chunk = "sm90_attention_paged_chunk_rows_bf16_d128_128x128"
    assert plan("sm_90", tokens=512)[0]["before"] == [chunk, MANY]
    assert plan("sm_90", tokens=63)[0]["before"] == [MANY]
    for page in (1, 24, 64):  # threads copy the rows of pages that are too small for TMA
        assert plan("sm_90", tokens=512, page=page)[0]["before"] == [chunk, MANY]
    assert plan("sm_80", tokens=512)[0]["before"] == [MANY.replace("sm90", "sm80")]


def chunk_of(k_cache, v_cache) -> str:
    meta = {"device": "meta"}
    q = torch.empty(512, 16, k_cache.shape[-1], dtype=k_cache.dtype, **meta)
    table, lens, cu = (torch.empty(n, dtype=torch.int32, **meta) for n in ((4, 64), 4, 5))
    text = fm.explain_paged(
        *(q, k_cache, v_cache, table, lens),
        **{"cu_seqlens_q": cu, "max_seqlen_q": 512, "device": "sm_90"},
    )
    return told(text)["before"][0]


def test_rows_of_a_chunk_come_whole_where_they_can():
    """Whole blocks of 64 columns, and heads evenly far apart from block to block."""
    whole, parts = "_paged_chunk_rows_", "_paged_chunk_bf16_"
    dims = {128: whole, 192: whole, 256: whole, 64: parts, 96: parts, 136: parts, 248: parts}
    for heads in (1, 2, 8):
        for d, kernel in dims.items():
            caches = pages.empty_caches("separate", 9, 16, heads, (d, d), torch.bfloat16, "meta")
            assert kernel in chunk_of(*caches), (heads, d)
    even = {layout: whole for layout in pages.CACHE_LAYOUTS}
    even |= {"heads first": parts, "uneven": parts}
    for layout, kernel in even.items():
        if layout == "sliced":  # rows of single numbers have no such kernel
            continue
        caches = pages.empty_caches(layout, 9, 16, 8, (128, 128), torch.bfloat16, "meta")
        assert kernel in chunk_of(*caches), layout
        one_head = pages.empty_caches(layout, 9, 16, 1, (128, 128), torch.bfloat16, "meta")
        one_block = pages.empty_caches(layout, 1, 16, 8, (128, 128), torch.bfloat16, "meta")
        assert whole in chunk_of(*one_head) and whole in chunk_of(*one_block), layout
    keys = pages.empty_caches("separate", 9, 16, 8, (128, 96), torch.bfloat16, "meta")
    assert parts in chunk_of(*keys)  # values have their own head dim


def test_chunks_over_fp8_have_one_too():
    many = MANY.replace("paged_", "paged_fp8_")
    for dtype in ("bf16", "fp16"):
        for d, tile in ((16, 64), (64, 64), (80, 128), (128, 128)):
            before = plan("sm_90", tokens=512, fp8=True, d=d, dtype=dtype)[0]["before"]
            kernel = CATALOGUE[before[0]]
            assert "_paged_chunk_fp8_" in before[0] and kernel["head_dim"] == tile
            assert kernel["dtype"] == str(TORCH_DTYPES[dtype])[6:] and len(before) == 2
    for page in (1, 24, 64):
        before = plan("sm_90", tokens=512, page=page, fp8=True)[0]["before"]
        assert before == ["sm90_attention_paged_chunk_fp8_bf16_d128_128x128", many]
    assert plan("sm_90", tokens=63, fp8=True)[0]["before"] == [many]
    # Rows that are no chunks of 16 bytes, and head dims that leave no memory for bytes.
    for d in (72, 192, 256, 512):
        before = plan("sm_90", tokens=512, fp8=True, d=d)[0]["before"]
        assert len(before) == 1 and "_paged_fp8_" in before[0]
    assert plan("sm_80", tokens=512, fp8=True)[0]["before"] == [many.replace("sm90", "sm80")]


def test_the_workspace_stays_small():
    """Of 256 decodes over 128k keys 34 GB a layer, of which this is nothing."""
    _, text = plan("sm_90", batch=256, keys=131_072)
    assert workspace(text).endswith("MiB") and float(workspace(text).split()[0]) < 80


def test_explain_says_that_splits_are_a_bound():
    _, text = plan("sm_90")
    assert "the keys split in up to 16 to fill the chip" in text


def test_what_cuda_kernels_lack_is_named():
    tensors, options = problem()
    tensors[0] = tensors[0].double()
    tensors[1], tensors[2] = tensors[1].double(), tensors[2].double()
    with pytest.raises(RuntimeError, match="query is float64; CUDA kernels over pages take"):
        fm.explain_paged(*tensors, **options, device="sm_90")
