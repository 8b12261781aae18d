"""The benchmark's workloads of serving: attention over pages, and writing to a cache."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from clocks import CPU, ONE_TURN, FakeCudaClock
from flashmoe_science.__main__ import main
from flashmoe_science.bench import accuracy, append, paged, report, runner, timing
from flashmoe_science.bench.append import AppendShape
from flashmoe_science.bench.case import Shape
from flashmoe_science.bench.peer_file import PeerFile
from flashmoe_science.bench.results import compare
from flashmoe_science.bench.workloads import WORKLOADS

PAGED = ("paged_decode", "paged_uneven", "paged_mixed", "paged_prefill")
DTYPES = (torch.float32, torch.bfloat16)


def make(name: str, options: str = "", dtype=torch.float32, base="3,4,40,16,kv2"):
    chunk = ",q7" if name in ("paged_mixed", "paged_prefill") else ""
    return WORKLOADS[name].make(Shape.parse(f"{base}{chunk}{options}"), dtype, CPU)


def test_they_are_among_the_workloads():
    assert [n for n in WORKLOADS if WORKLOADS[n].operator == "attention over pages"] == [*PAGED]
    for name in PAGED:
        for shapes in WORKLOADS[name].shapes.values():
            assert all(str(Shape.parse(shape)) == shape for shape in shapes)
            assert len(set(shapes)) == len(shapes)
    for shapes in WORKLOADS["append"].shapes.values():
        assert all(str(AppendShape.parse(shape)) == shape for shape in shapes)


def test_the_rows_are_those_that_were_asked_for():
    decode = [Shape.parse(shape) for shape in WORKLOADS["paged_decode"].shapes["cuda"]]
    assert {shape.page for shape in decode} == {1, 16, 64}
    assert all((s.heads, s.kv_heads, s.dim) == (32, 8, 128) for s in decode)
    for e4m3 in (False, True):
        sizes = {(s.batch, s.length) for s in decode if s.page == 16 and s.e4m3 == e4m3}
        assert {(1, 512), (1, 8192), (16, 512), (16, 2048), (16, 8192)} < sizes
        assert sum(batch * keys >= 2**18 for batch, keys in sizes) == 3
    mixed = [Shape.parse(shape) for shape in WORKLOADS["paged_mixed"].shapes["cuda"]]
    sizes = {(s.batch, s.length, s.queries) for s in mixed if not s.e4m3}
    assert sizes == {(16, 8192, 512), (64, 8192, 512), (255, 8192, 2048)}
    # As many keys altogether as the published rows: 19,073 and 654,061.
    totals = [sum(paged.ragged_lengths(b, m, spread=1.0)) for b, m in ((16, 1262), (256, 2571))]
    assert totals == [pytest.approx(19_073, rel=0.002), pytest.approx(654_061, rel=0.002)]


@pytest.mark.parametrize("options", ["", ",p1", ",p5,e4m3", ",p64"])
@pytest.mark.parametrize("name", PAGED)
def test_everyone_computes_the_same_thing(name, options):
    for dtype in DTYPES:
        case = make(name, options, dtype)
        oracle = accuracy.Oracle(case, backward=False)
        verdict = oracle.verdict(case.ours, reproducible=True)
        assert verdict.ok and verdict.deviations["out twice"].ours == 0
        asked = [n for n in WORKLOADS[name].peers("cpu") if n in case.peers]
        assert ("sixteen_bits" in asked) == ("e4m3" in options) and "contiguous" in asked
        for peer in asked:
            if not case.peers[peer].another:
                verdict = oracle.verdict(case.peers[peer])
                assert verdict.ok, (peer, verdict.worst)


@pytest.mark.parametrize("name", ["paged_mixed", "paged_prefill"])
def test_corners_are_masks(name):
    """What a GPU's flash and efficient are told is what the others' masks say."""
    case = make(name, dtype=torch.float64)
    attention = case.attention
    plain, _ = attention.batches(case.leaves, case.grad)
    masked, _ = attention.masked(case.leaves, case.grad)
    assert set(masked) - set(plain) == {"mask1" if name == "paged_mixed" else "mask0"}
    for ours, theirs in zip(attention.sdpa(plain), attention.sdpa(masked), strict=True):
        torch.testing.assert_close(ours, theirs)
    there = dataclasses.replace(
        attention, pages=dataclasses.replace(attention.pages, device=torch.device("cuda"))
    )
    assert there.sdpa_peers()["flash"].prepare == there.batches
    assert there.sdpa_peers()["cudnn"].prepare == there.masked
    assert attention.sdpa_peers()["flash"].prepare == attention.masked


@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize("part", ["block_table", "seq_lens", "cu_seqlens_q"])
def test_a_wrong_page_or_length_would_be_found(name, part):
    case = make(name)
    told = dict(case.keywords)
    if part == "block_table":
        told[part] = told[part].flip(0)
    elif part == "seq_lens":
        told[part] = told[part] - 1
    elif name == "paged_mixed":
        told[part] = told[part] + torch.tensor([0, 1, 1, 0, 0], dtype=torch.int32)
    else:
        return
    wrong = dataclasses.replace(case.ours, run=lambda x: paged.flash_attention_paged(**x, **told))
    assert not accuracy.check(dataclasses.replace(case, ours=wrong), backward=False).ok


@pytest.mark.parametrize("name", PAGED)
def test_some_heads_are_a_smaller_case(name):
    case = make(name, ",e4m3", base="2,6,33,8,kv3")
    assert case.group == 2 and case.heads == 6
    part = case.take_heads(4)
    assert part.leaves["v_cache"].shape[2] == 2 and part.flops == pytest.approx(case.flops * 4 / 6)
    assert part.bytes == case.bytes * 4 // 6
    whole, some = (accuracy.compute(case.ours, c, False)["out"] for c in (case, part))
    assert torch.equal(some, whole[:, :4])


def test_work_is_counted():
    case = make("paged_decode", ",e4m3", torch.bfloat16)
    assert case.scores == 3 * 4 * 40 and case.bytes == 3 * 40 * 2 * 2 * 16
    case = make("paged_mixed", "", torch.bfloat16)
    chunk = sum(40 - 7 + 1 + i for i in range(7))
    assert case.scores == 4 * (3 * 40 + chunk) and case.bytes == 4 * 40 * 2 * 2 * 16 * 2
    assert case.flops == 4 * case.scores * 16
    assert make("paged_prefill").bytes == 0, "products are the work"
    lengths = make("paged_uneven").lengths
    assert len(lengths) == 3 and len(set(lengths)) == 3


def test_decodes_and_chunk_alone_are_told_apart():
    """Together they are the mixed call, bit by bit; neither can be its best peer."""
    case = make("paged_mixed", dtype=torch.bfloat16)
    out = accuracy.compute(case.ours, case, False)["out"]
    alone = [accuracy.compute(case.peers[n], case, False)["out"] for n in ("decodes", "chunk")]
    assert [len(x) for x in alone] == [3, 7]
    torch.testing.assert_close(torch.cat(alone), out)
    times = {"ours": 2.0, "decodes": 1.0, "chunk": 1.5, "apart": 2.4, "flash": 3.0}
    found = compare({n: {"ms": ms} for n, ms in times.items()}, None, ["decodes", "chunk"])
    assert found["best_peer"] == "apart" and found["ratio"] == pytest.approx(1.2)
    assert found["ratios"]["decodes"] == 0.5, "and still shown"


@pytest.mark.parametrize("name", [*PAGED, "append"])
def test_every_row_knows_its_kernels(name):
    case = make(name) if name != "append" else made_append("64,2,8,16")
    kernels = runner.kernels_of(case, "fwd")
    assert runner.family_of(kernels) == "cpu"
    assert kernels["fwd"].endswith("cache_append" if name == "append" else "attention_fwd_paged")


def made_append(shape: str, dtype=torch.float32):
    return WORKLOADS["append"].make(AppendShape.parse(shape), dtype, CPU)


@pytest.mark.parametrize("shape", ["5,2,8,4", "64,2,8,16,e4m3", "700,2,8,16", "515,3,5,16,e4m3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_appends_write_the_same_rows(shape, dtype):
    case = made_append(shape, dtype)
    oracle = accuracy.Oracle(case, backward=False)
    for implementation in (case.ours, case.peers["index_copy"]):
        verdict = oracle.verdict(implementation, reproducible=True)
        assert verdict.ok and verdict.deviations["out max"].ours == 0
    slots = case.keywords["slot_mapping"]
    assert slots.unique().numel() == slots.numel() == AppendShape.parse(shape).tokens
    moved = case.leaves["new"].nbytes + slots.numel() * case.leaves["cache"][:, 0, 0].nbytes
    assert case.bytes == moved
    shifted = dataclasses.replace(case.ours, run=lambda x: append_to(x, case, slots.roll(1)))
    assert not oracle.verdict(shifted).ok
    left_out = dataclasses.replace(case.ours, run=lambda x: append_to(x, case, slots - 10**6))
    assert not oracle.verdict(left_out).ok


def append_to(leaves, case, slots):
    append.kv_cache_append(
        *leaves["new"], *leaves["cache"], **{**case.keywords, "slot_mapping": slots}
    )
    return leaves["cache"]


@pytest.mark.parametrize("text", ["64,8,128", "64,8,128,16,fp8", "0,8,128,16", "64,8,128,16,1"])
def test_bad_appends_are_named(capsys, text):
    assert main(["bench", "--workload", "append", "--shape", text]) == 2
    assert "expected tokens,heads,dim" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--workload paged_decode --shape 1,2,8,8,causal", "does not take causal"),
        ("--workload paged_decode --shape 1,2,8,8,q4", "does not take queries"),
        ("--workload paged_prefill --shape 1,2,8,8,q9", "9 queries are among 8 keys"),
        ("--workload dense --shape 1,2,8,8,p16", "does not take page"),
        ("--workload paged_decode --shape 1,2,8,8,p0", "at least 1"),
        ("--workload paged_decode --pass bwd", "paged_decode has only fwd"),
    ],
)
def test_bad_options_are_named(capsys, options, complaint):
    assert main(["bench", *options.split()]) == 2
    assert complaint in capsys.readouterr().err


PEER = """
import torch
import torch.nn.functional as F

NAME = "theirs"

def attention_paged(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q,
                    max_seqlen_k, k_scale=1.0, v_scale=1.0):
    outs, page = [], k_cache.shape[1]
    for i, m in enumerate(seq_lens.tolist()):
        rows = q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]].transpose(0, 1)[None]
        blocks = block_table[i, : -(-m // page)].long().tolist()
        k, v = (torch.cat([x[b] for b in blocks])[:m].to(q.dtype) * scale
                for x, scale in ((k_cache, k_scale), (v_cache, v_scale)))
        k, v = (x.to(q.dtype).transpose(0, 1)[None] for x in (k, v))
        mask = torch.ones(rows.shape[2], m, dtype=bool).tril(m - rows.shape[2])
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)

def cache_append(k, v, k_cache, v_cache, slot_mapping):
    page = k_cache.shape[1]
    k_cache[slot_mapping // page, slot_mapping % page] = k
    v_cache[slot_mapping // page, slot_mapping % page] = v
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "peer.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("options", ["", ",p5,e4m3"])
@pytest.mark.parametrize("name", PAGED)
def test_a_peer_from_a_file(tmp_path, name, options):
    peer, case = PeerFile.load(write(tmp_path, PEER)), make(name, options)
    spec = runner.RowSpec(name, None, "fp32", "fwd")
    oracle = accuracy.Oracle(case, backward=False)
    assert oracle.verdict(peer.implementation(spec, case)).ok
    peer = PeerFile.load(write(tmp_path, PEER.replace("m - rows.shape[2]", "0")))
    assert not oracle.verdict(peer.implementation(spec, case)).ok


def test_a_run_as_a_user_makes_it(tmp_path, capsys, threads):
    options = f"--workload {','.join(PAGED)} --shape 3,4,33,8,kv2 3,4,33,8,kv2,p5,e4m3"
    options += " --dtype fp32,bf16 --device cpu --budget 0.001 --threads 1"
    command = ["bench", *options.split(), "--peer", str(write(tmp_path, PEER))]
    assert main([*command, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "attention over pages on" in text and "theirs" in text and "[16/16]" in text
    found = json.loads((tmp_path / "results.json").read_text())
    assert len(found["rows"]) == 4 * 2 * 2
    for row in found["rows"]:
        assert row["check"]["status"] == "ok" and row["family"] == "cpu"
        assert row["implementations"]["theirs"]["ms"] > 0
        ours = row["implementations"]["ours"]
        assert ("gb_per_s" in ours) == (row["workload"] != "paged_prefill")
        assert row["best_peer"] not in ("decodes", "chunk")
        if row["workload"] == "paged_mixed":
            assert {"apart", "decodes", "chunk"} <= row["ratios"].keys()
    assert (tmp_path / "results.png").stat().st_size > 10_000
    options = "--workload append --dtype fp32 --device cpu --budget 0.001 --threads 1 --no-plot"
    command = ["bench", *options.split(), "--peer", str(tmp_path / "peer.py")]
    assert main([*command, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["best_peer"] for row in rows} == {"copy"}
    states = {row["label"]: row["implementations"]["theirs"] for row in rows}
    assert states["64,2,64,16"]["ms"] > 0
    assert "has no parameter k_scale" in states["64,2,64,16,e4m3"]["reason"]


def test_calls_of_a_graph_find_no_key_in_the_cache():
    """Copies in turn, as many as the L2 cannot hold; a cache that is larger is one by itself."""
    case = make("paged_decode")
    size = sum(leaf.nbytes for leaf in case.leaves.values())
    clock = FakeCudaClock(0.125, 0.125)
    clock.flush = torch.empty(3 * size, dtype=torch.int8)
    bound = timing.Runner(case.ours, case, "fwd", in_graph=True)
    bound.make_graph(clock, 0.125)
    caches = {inputs["k_cache"].data_ptr() for inputs in bound.inputs}
    assert len(caches) == 4 and bound.graph_calls == 16
    clock.flush = torch.empty(size // 2, dtype=torch.int8)
    bound.make_graph(clock, 0.125)
    assert len(bound.inputs) == 1


def test_a_row_that_is_refused_says_why(monkeypatch, tmp_path, capsys):
    def refuse(*args, **options):
        raise RuntimeError("no CUDA kernel of this build can run this call on sm_75 (sm75: fp8)")

    monkeypatch.setattr(paged, "flash_attention_paged", refuse)
    monkeypatch.setattr(paged, "explain_paged", refuse)
    options = "--workload paged_mixed --shape 2,2,16,8,q4 --dtype fp32 --device cpu --no-plot"
    assert main(["bench", *options.split(), "--budget", "0.001", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "ours refused: RuntimeError: no CUDA kernel" in text and "(sm75: fp8)" in text
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert row["implementations"]["ours"]["ms"] is None and row["implementations"]["math"]["ms"] > 0
    assert row["implementations"]["apart"]["ms"] is None and row["ratio"] is None


def test_names_in_tables_and_pictures():
    own = [p for n in PAGED for p in WORKLOADS[n].peers("cuda") if p in report.OUR_LABELS]
    assert set(own) == {"contiguous", "sixteen_bits", "apart", "decodes", "chunk"}
    assert report.label_of("index_copy") == "PyTorch index_copy"


def test_a_gpu_row_of_pages_is_there_in_both_regimes(monkeypatch):
    monkeypatch.setattr(runner.memory, "measure", lambda case, backward: None)
    workload = WORKLOADS["paged_mixed"]
    on_cpu = dataclasses.replace(workload, make=lambda s, dtype, _: workload.make(s, dtype, CPU))
    monkeypatch.setitem(WORKLOADS, "paged_mixed", on_cpu)
    schedule = dataclasses.replace(ONE_TURN, regimes=("sustained", "rested"))
    peers = workload.peers("cuda")
    setting = runner.Setting(torch.device("cuda"), peers, [], FakeCudaClock(), schedule)
    spec = runner.RowSpec("paged_mixed", Shape.parse("3,4,40,16,kv2,q7"), "fp32", "fwd")
    for row in runner.run_row(spec, setting):
        assert row["implementations"]["ours"]["method"].startswith("CUDA graph")
        assert row["implementations"]["varlen"]["ms"] is None, "and says why"
        assert row["implementations"]["varlen"]["reason"]
        assert row["implementations"]["apart"]["check"]["status"] == "ok"
        assert "check" not in row["implementations"]["decodes"], "which is another call"
