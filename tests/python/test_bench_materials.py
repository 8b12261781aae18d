"""The benchmark for molecules, proteins and crystals: cases, peers, memory, plot."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import statistics

import pytest
import torch
from rich.console import Console

from bench_rows import ATTENTION
from clocks import CPU, ONE_TURN, FakeCudaClock
from flashmoe_science.bench import (
    accuracy,
    attention,
    memory,
    peers,
    plot,
    ragged,
    report,
    runner,
    timing,
)
from flashmoe_science.bench.case import Implementation, Shape
from flashmoe_science.bench.results import compare
from flashmoe_science.bench.workloads import WORKLOADS

CUDA = torch.device("cuda")
MATERIALS = ("pair_bias", "diffusion", "triangle", "crystals", "crystals_bias")


def make(name: str, shape: str, dtype: torch.dtype = torch.float32):
    return WORKLOADS[name].make(Shape.parse(shape), dtype, CPU)


def test_gpu_shapes_are_those_the_field_was_measured_at():
    """The rows of pair_bias and triangle in the table of peers on an H200, and odd lengths."""
    names = (*MATERIALS, "small", "fp32_bias")
    shapes = {name: WORKLOADS[name].shapes["cuda"] for name in names}
    assert shapes["pair_bias"][:5] == (
        "8,8,256,64", "4,16,384,64", "4,16,768,64", "2,16,1024,64", "1,16,2048,64"
    )  # fmt: skip
    odd = [Shape.parse(text) for text in shapes["pair_bias"][5:]]
    assert {shape.length for shape in odd} == {255, 511, 1023, 2047}
    assert {shape.dim for shape in odd} == {32, 48}
    assert shapes["diffusion"] == ("48,16,384,48", "48,16,768,48")
    lengths = (256, 257, 381, 384, 512, 768)
    assert shapes["triangle"] == tuple(f"{n},4,{n},32" for n in lengths)
    assert shapes["crystals"] == shapes["crystals_bias"] == ("4096,8,443,64", "4096,48,443,16")
    small = [Shape.parse(text) for text in shapes["small"]]
    assert {s.dim for s in small if 64 <= s.length <= 1024} == {16, 32, 48, 64}
    assert [s.length for s in small if s.dim == 64] == [200, 300, 400]
    assert all(16_000 <= s.batch * s.length <= 16_384 for s in small)
    assert set(shapes["fp32_bias"]) <= set(shapes["pair_bias"])
    for name in names:
        assert WORKLOADS[name].passes_for(None, "cuda") == ["fwd", "fwd+bwd"]
        assert WORKLOADS[name].in_graph, "the host would show"


@pytest.mark.parametrize("name", ATTENTION)
def test_every_peer_of_the_table_is_in_the_case(name):
    case = make(name, "2,4,9,8")
    for device in ("cpu", "cuda"):
        assert set(WORKLOADS[name].peers(device)) <= set(case.peers)


def test_what_can_never_run_is_no_peer():
    with_mask = [*MATERIALS, "ragged", "ragged_bias"]
    assert not [n for n in with_mask if "flash" in WORKLOADS[n].peers("cuda")], "takes no mask"
    varlen = [n for n in WORKLOADS if "varlen" in WORKLOADS[n].peers("cuda")]
    paged = [n for n in WORKLOADS if n.startswith("paged_")]
    assert varlen == ["mixed_lengths", "ragged", "crystals", *paged], "takes no bias"
    flex = [n for n in WORKLOADS if "flex" in WORKLOADS[n].peers("cuda")]
    assert flex == ["pair_bias", "diffusion", "triangle"]
    assert not [n for n in WORKLOADS if {"varlen", "flex"} & {*WORKLOADS[n].peers("cpu")}]


def test_triangle_is_rows_that_share_a_bias(monkeypatch):
    case = make("triangle", "5,4,7,8")
    assert case.leaves["q"].shape == (5, 4, 7, 8) and case.leaves["bias"].shape == (1, 4, 7, 7)
    assert case.scores == 5 * 4 * 7 * 7
    seen, right = {}, attention.flash_attention

    def watched(q, k, v, bias):
        seen.update(q=q.shape, v=v.shape, bias=bias.shape)
        return right(q, k, v, bias=bias)

    monkeypatch.setattr(attention, "flash_attention", watched)
    verdict = accuracy.check(case, backward=True)
    assert verdict.ok and "grad_bias rms" in verdict.deviations
    assert seen == {"q": (1, 5, 4, 7, 8), "v": (1, 5, 4, 7, 8), "bias": (1, 1, 4, 7, 7)}


def test_diffusion_is_samples_that_share_a_bias():
    case = make("diffusion", "6,4,7,8")
    assert case.leaves["q"].shape == (6, 4, 7, 8) and case.leaves["bias"].shape == (1, 4, 7, 7)
    verdict = accuracy.check(case, backward=True)
    assert verdict.ok and "grad_bias rms" in verdict.deviations


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_in_fp32_is_next_to_a_rounded_one(dtype):
    case = make("fp32_bias", "2,4,9,8", dtype)
    assert case.leaves["bias"].dtype == torch.float32 and case.leaves["q"].dtype == dtype
    assert accuracy.check(case, backward=True).ok
    peer = case.peers[case.baseline]
    leaves, grad = peer.prepare(case.leaves, case.grad)
    assert leaves["bias"].dtype == dtype and grad is case.grad and leaves["q"] is case.leaves["q"]
    found = accuracy.compute(peer, case, backward=True)
    assert found["grad_bias"].dtype == dtype and peer.another
    truth = accuracy.compute(case.ours, case, backward=True)
    assert truth["grad_bias"].dtype == torch.float32
    torch.testing.assert_close(found["out"], truth["out"], rtol=0.05, atol=0.05)


def test_crystals_with_a_bias_are_next_to_our_own_without(monkeypatch):
    case = on_gpu(monkeypatch, with_bias=True)
    assert case.baseline == attention.WITHOUT_BIAS and case.peers[case.baseline].another
    found = accuracy.compute(case.peers[case.baseline], case, backward=True)
    assert list(found) == ["out", "grad_q", "grad_k", "grad_v"]
    without = dataclasses.replace(
        case, leaves={n: case.leaves[n] for n in "qkv"}, peers={}, baseline=None
    )
    assert accuracy.Oracle(without, True).verdict(without.ours).ok
    same = accuracy.compute(without.ours, without, backward=True)
    assert all(torch.equal(found[name], values) for name, values in same.items())


def off_by(factor: float, right: Implementation) -> Implementation:
    return dataclasses.replace(right, run=lambda leaves: right.run(leaves) * factor)


def test_peers_of_a_gpu_are_checked_before_they_are_timed(monkeypatch):
    """One that is off is said to be and timed; ours that compute another thing are not asked."""
    case = on_gpu(monkeypatch, with_bias=True)
    peers = {**case.peers, "efficient": case.peers["math"]}
    case = dataclasses.replace(case, peers=peers)
    made = dataclasses.replace(WORKLOADS["crystals_bias"], make=lambda *_: case)
    monkeypatch.setitem(WORKLOADS, "crystals_bias", made)
    monkeypatch.setattr(memory, "measure", lambda case, backward: None)
    spec = runner.RowSpec("crystals_bias", Shape.parse("6,4,50,8"), "bf16", "fwd+bwd")
    setting = runner.Setting(CUDA, ["efficient"], [], FakeCudaClock(), ONE_TURN)
    (row,) = runner.run_row(spec, setting)
    assert list(row["implementations"]) == ["ours", "without_bias", "efficient"]
    assert row["best_peer"] == "without_bias"
    assert "check" not in row["implementations"]["without_bias"]
    padded = row["implementations"]["efficient"]
    assert padded["check"] == {"status": "ok", "heads_compared": 4}, "packed again to be compared"
    assert padded["method"].startswith("CUDA graph") and padded["ms"] == 1.0
    case.peers["efficient"] = off_by(1.1, case.peers["math"])
    (row,) = runner.run_row(spec, setting)
    padded = row["implementations"]["efficient"]
    assert padded["check"]["status"] == "failed" and padded["ms"] == 1.0
    assert not report.is_wrong(padded) and report.is_off(padded)


def test_what_is_off_or_not_in_a_graph_is_said(capsys):
    check = {"status": "failed", "reason": "grad_bias rms is off by 2; at most 1 is allowed"}
    method = "events; no CUDA graph: operation not permitted"
    implementations = {"ours": {"ms": 1.0}, "flex": {"ms": 2.0, "check": check, "method": method}}
    row = {"workload": "triangle", "label": "1,1,1,1", "dtype": "bf16", "pass": "fwd"}
    row |= {"check": {"status": "ok"}, "implementations": implementations}
    about = {"cores_busy_with_other_work": 0}
    report.print_problems(report.make_console(), {"about": about, "rows": [row]})
    lines = capsys.readouterr().out.splitlines()
    assert "flex is timed, and less exact than allowed: grad_bias rms (1 rows" in lines[0]
    assert f"flex is timed by {method} (1 rows" in lines[1]


@pytest.fixture
def compiled(monkeypatch):
    """torch.compile without code generation, which needs a GPU here; counts the compilations."""
    calls: list[dict] = []
    right = torch.compile

    def fake(function, **options):
        calls.append(options)
        return right(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", fake)
    yield calls
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("name", "shape"),
    [("pair_bias", "2,4,9,16,kv2"), ("triangle", "3,2,9,16"), ("diffusion", "3,2,16,16")],
)
@pytest.mark.filterwarnings("ignore")
def test_flex_computes_the_same_thing(compiled, name, shape):
    case = make(name, shape)
    for _ in range(2):
        found = accuracy.compute(case.peers["flex"], case, backward=True)
    truth = accuracy.compute(case.reference, accuracy.in_double(case), backward=True)
    for result, values in found.items():
        torch.testing.assert_close(values.double(), truth[result], rtol=1e-4, atol=1e-5)
    assert compiled == [{"dynamic": False, "fullgraph": True}], "once, and never in part"


def test_flex_that_does_not_compile_says_so(monkeypatch):
    def broken(function, **options):
        raise RuntimeError("no compiler here. And a page of details")

    monkeypatch.setattr(torch, "compile", broken)
    case = make("triangle", "2,2,8,8")
    timings = timing.measure(case, ["math", "flex"], "fwd", timing.CpuClock(), ONE_TURN)[
        "sustained"
    ]
    assert timings["flex"].reason == "RuntimeError: no compiler here" and timings["math"].ms


def test_a_peer_without_a_gradient_is_none():
    case = make("pair_bias", "1,2,8,8")

    def forgets_bias(leaves):
        return case.reference.run(leaves | {"bias": leaves["bias"].detach()})

    case = dataclasses.replace(case, peers={"careless": Implementation(forgets_bias)})
    timings = timing.measure(case, ["careless"], "fwd+bwd", timing.CpuClock(), ONE_TURN)
    timings = timings["sustained"]
    assert timings["careless"].reason == "RuntimeError: gives no gradient of bias"
    timings = timing.measure(case, ["careless"], "fwd", timing.CpuClock(), ONE_TURN)["sustained"]
    assert timings["careless"].ms, "the forward pass alone is another matter"


def varlen_2_10(calls, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    calls.append({"is_causal": is_causal})
    return query


def varlen_2_11(
    calls, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)
):
    calls.append({"window_size": window_size})
    return query


def varlen_2_12(
    calls, query, key, value, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False
):
    calls.append({"window_size": window_size, "enable_gqa": enable_gqa})
    return query


@pytest.mark.parametrize(
    ("varlen", "shape", "expected"),
    [
        (varlen_2_10, "3,4,9,8", {"is_causal": False}),
        (varlen_2_10, "3,4,9,8,causal", {"is_causal": True}),
        (varlen_2_11, "3,4,9,8", {"window_size": (-1, -1)}),
        (varlen_2_11, "3,4,9,8,causal,kv2", {"window_size": (-1, 0)}),
        (varlen_2_12, "3,4,9,8,kv2", {"window_size": (-1, -1), "enable_gqa": True}),
    ],
)
def test_varlen_attn_is_called_as_its_version_wants(monkeypatch, varlen, shape, expected):
    from torch.nn.attention import varlen as module

    calls: list[dict] = []
    monkeypatch.setattr(module, "varlen_attn", functools.partial(varlen, calls))
    case = make("ragged", shape)
    case.peers["varlen"].run(case.leaves)
    assert calls == [expected]


def test_varlen_attn_of_the_installed_torch_takes_our_call():
    from torch.nn.attention.varlen import varlen_attn

    options = peers.varlen_options(varlen_attn, causal=True, gqa=True)
    inspect.signature(varlen_attn).bind(*range(7), **options)
    assert options.get("is_causal") is True or options["window_size"] == (-1, 0)


def test_crystals_are_those_of_the_materials_project():
    table = ragged.structures_by_atoms()
    assert sum(table.values()) == 1_580_312 and max(table) == ragged.MOST_ATOMS
    mean = sum(atoms * n for atoms, n in table.items()) / sum(table.values())
    assert 31 <= mean < 32
    about = (ragged.CRYSTALS.parent / "README.md").read_text()
    assert "janosh/matbench-discovery" in about and "MIT" in about
    lengths = ragged.crystal_lengths(4096, ragged.MOST_ATOMS)
    # Every version of Python draws these, or the rows of two machines are not about the same thing.
    assert (sum(lengths), max(lengths), lengths[:4]) == (130_176, 336, [56, 40, 19, 12])
    assert statistics.median(lengths) == 23
    small = ragged.crystal_lengths(500, 20)
    assert len(small) == 500 and max(small) == 20 and min(small) >= 1


def test_padding_and_the_reference_agree_with_a_loop():
    """Both are written without loops over thousands of crystals."""
    case = make("crystals_bias", "40,2,12,4")
    assert len(set(case.lengths)) < 40, "some of one length"
    out = case.reference.run(case.leaves)
    batch = case.peers["math"].run.__self__
    padded, grad = batch.pad(case.leaves, case.grad)
    start = pair = 0
    for i, n in enumerate(case.lengths):
        mine = case.leaves["q"][start : start + n]
        assert torch.equal(padded["q"][i, :, :n], mine.transpose(0, 1))
        assert (padded["q"][i, :, n:] == 0).all()
        assert torch.equal(grad[i, :, :n], case.grad[start : start + n].transpose(0, 1))
        square = case.leaves["bias"][pair : pair + n * n].T.reshape(2, n, n)
        assert torch.equal(padded["bias"][i, :, :n, :n], square)
        assert (padded["bias"][i, :, :, n:] == -torch.inf).all()
        q, k, v = (case.leaves[x][start : start + n].transpose(0, 1) for x in "qkv")
        alone = torch.softmax(q @ k.mT / 2 + square, -1) @ v
        torch.testing.assert_close(out[start : start + n], alone.transpose(0, 1))
        start, pair = start + n, pair + n * n
    assert padded["bias"].is_contiguous() and padded["q"].is_contiguous()


def on_gpu(monkeypatch, with_bias: bool):
    """The Case of a GPU, its tensors on the CPU."""
    right = attention.make_ragged
    monkeypatch.setattr(
        attention,
        "make_ragged",
        lambda shape, dtype, device, *rest: right(shape, dtype, CPU, *rest),
    )
    shape = Shape.parse("6,4,50,8")
    return attention.make_crystals(shape, torch.bfloat16, CUDA, with_bias)


def test_crystals_on_a_gpu_are_about_varlen_and_bytes(monkeypatch):
    case = on_gpu(monkeypatch, with_bias=False)
    tokens, pairs = sum(case.lengths), sum(n * n for n in case.lengths)
    assert case.baseline == "varlen" and case.bytes == 4 * tokens * 4 * 8 * 2
    assert case.scores == pairs * 4 and case.flops == 4 * case.scores * 8
    case = on_gpu(monkeypatch, with_bias=True)
    assert case.baseline == "without_bias" and case.bytes == (4 * tokens * 8 + pairs) * 4 * 2
    on_cpu = make("crystals", "6,4,50,8")
    assert on_cpu.baseline is None and on_cpu.bytes == 0


def test_a_row_of_a_gpu(monkeypatch):
    """Memory, bytes, lengths and the peer the row is about, with a GPU that is none."""
    case = on_gpu(monkeypatch, with_bias=False)
    case.peers["varlen"] = Implementation(case.ours.run)
    made = dataclasses.replace(WORKLOADS["crystals"], make=lambda *_: case)
    monkeypatch.setitem(WORKLOADS, "crystals", made)
    monkeypatch.setattr(memory, "measure", lambda case, backward: {"backward": backward})
    spec = runner.RowSpec("crystals", Shape.parse("6,4,50,8"), "bf16", "fwd+bwd")
    (row,) = runner.run_row(spec, runner.Setting(CUDA, [], [], FakeCudaClock(), ONE_TURN))
    assert row["check"]["status"] == "ok" and row["memory"] == {"backward": True}
    assert list(row["implementations"]) == ["ours", "varlen"] and row["best_peer"] == "varlen"
    assert row["implementations"]["ours"]["gb_per_s"] == pytest.approx(3 * case.bytes / 1e6)
    lengths = row["lengths"]
    assert lengths["sequences"] == 6 == sum(lengths["bins"])
    assert lengths["tokens"] == sum(case.lengths) and lengths["longest"] == max(case.lengths)


def test_lengths_are_counted_in_tens():
    found = runner.spread((1, 10, 11, 25, 25))
    assert found["bins"] == [2, 1, 2] and found["median"] == 11 and found["bin"] == 10


class FakeMeter:
    """torch.cuda's counters, for a call that holds so many bytes at its worst moment."""

    def __init__(self, bytes_held: int) -> None:
        self.bytes_held, self.resets = bytes_held, 0

    def synchronize(self) -> None: ...

    def reset_peak_memory_stats(self) -> None:
        self.resets += 1

    def memory_allocated(self) -> int:
        return 1000

    def max_memory_allocated(self) -> int:
        assert self.resets == 1
        return 1000 + self.bytes_held


def test_memory_is_held_against_inputs_and_results():
    case = make("triangle", "5,4,7,8", torch.bfloat16)
    tensor, bias, lse = 5 * 4 * 7 * 8 * 2, 4 * 7 * 7 * 2, 5 * 4 * 7 * 4
    assert memory.needed_bytes(case, backward=False) == 4 * tensor + bias + lse
    assert memory.needed_bytes(case, backward=True) == 8 * tensor + 2 * bias + lse
    # A forward call that holds its output and lse and nothing else is the best there is.
    found = memory.measure(case, False, FakeMeter(tensor + lse))
    assert found["peak_bytes"] == found["needed_bytes"]
    found = memory.measure(case, True, FakeMeter(tensor + lse + 3 * tensor + bias + 99))
    assert found["peak_bytes"] == found["needed_bytes"] + 99
    broken = dataclasses.replace(case, ours=Implementation(lambda leaves: 1 / 0))
    assert memory.measure(broken, False, FakeMeter(0)) is None


def made_up_row(spec: runner.RowSpec, ours: float = 2.0, ratio: float = 5.0, held: float = 1.05):
    """A row in which we take a time for a giga-score, and the best peer that times a ratio."""
    shape = spec.shape
    scores = shape.batch * shape.heads * shape.length**2
    ms = ours * scores / 1e9
    implementations = {"ours": {"ms": ms}, "efficient": {"ms": ms * ratio}}
    return {
        "workload": spec.workload, "label": str(shape), "dtype": spec.dtype,
        "shape": dataclasses.asdict(shape), "pass": spec.direction, "regime": "sustained",
        "flops": 4.0 * scores,
        "check": {"status": "ok"}, "implementations": implementations,
        "memory": {"peak_bytes": int(held * 1e9), "needed_bytes": 10**9},
        **compare(implementations),
    }  # fmt: skip


def test_an_estimate_counts_compiling():
    specs = runner.rows_of(["pair_bias"], None, ["bf16"], None, "cuda")
    setting = runner.Setting(CUDA, ["math"], [], FakeCudaClock(), ONE_TURN)
    with_flex = dataclasses.replace(setting, peers=["math", "flex"])
    without = runner.estimated_seconds(specs, setting)
    assert runner.estimated_seconds(specs, with_flex) > without + 11 * (2 + 4)


ABOUT = {
    "device": "cuda", "gpu": {"name": "GPU z"}, "commit": None, "dirty": None,
    "date": "2026-11-15", "cpu_target": "neon",
    "versions": {"flashmoe_science": "0.1.0", "torch": "2.10"},
}  # fmt: skip


def made_up_results() -> dict:
    """Two rows of crystals: in one a peer is far slower, in the other it cannot run."""
    rows = []
    for workload, peer_ms in (("crystals", 9.0), ("crystals_bias", None)):
        spec = runner.RowSpec(workload, Shape.parse("50,8,443,64"), "bf16", "fwd+bwd")
        row = made_up_row(spec, ours=1.0)
        data = {"few_samples": True, "gflops": 1.0, "gb_per_s": 1.0}
        times = {"ours": 0.25, "varlen": 1.0, "efficient": peer_ms}
        row["implementations"] = {
            n: ({"ms": ms} | data if ms else {"ms": None, "reason": "too large"})
            for n, ms in times.items()
        }
        row |= compare(row["implementations"], "varlen")
        row["lengths"] = runner.spread(tuple(ragged.crystal_lengths(50, 443)))
        rows.append(row)
    return {"about": ABOUT, "rows": rows}


def test_the_table_of_a_gpu_says_how_much_memory():
    results, out = made_up_results(), io.StringIO()
    del results["rows"][1]["memory"]
    report.print_tables(Console(width=190, color_system=None, file=out), results)
    text = out.getvalue()
    lines = {line.split()[0]: line.split() for line in text.splitlines() if "bf16" in line}
    assert "peak memory" in text
    assert lines["crystals"][-3:] == ["1.05", "varlen", "4.00x"]
    assert lines["crystals_bias"][-3:] == ["-", "varlen", "4.00x"]


def texts_of(figure) -> str:
    return "\n".join(t.get_text() for axes in figure.axes for t in axes.texts)


def test_a_chemist_can_read_the_plot(tmp_path, monkeypatch):
    from matplotlib import image

    plt = plot.pyplot()
    closed = []
    monkeypatch.setattr(plt, "close", closed.append)
    written = plot.write_plots(made_up_results(), tmp_path)
    assert [path.name for path in written] == ["results.png", "crystals.png"]
    figure = closed[-1]
    histogram, times = figure.axes
    assert "50 crystals" in texts_of(figure) and histogram.get_xlabel() == "atoms in a crystal"
    assert sum(bar.get_height() for bar in histogram.patches) == 50
    assert "0.2500 ms   4.0x" in texts_of(figure) and "cannot run" in texts_of(figure)
    assert "9.000 ms  \u203a" in texts_of(figure), "cut off, and says so"
    labels = [label.get_text() for label in times.get_yticklabels()]
    assert labels[0] == "8 heads of 64\nforward + backward" and "pair bias" in labels[1]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [
        "flashmoe_science", "PyTorch varlen_attn", "PyTorch efficient, padded to the longest"
    ]  # fmt: skip
    monkeypatch.undo()
    for figure in closed:
        plt.close(figure)
    pixels = image.imread(written[1])
    assert min(pixels.shape[:2]) > 500 and pixels[..., :3].std() > 0.05


def test_without_crystals_there_is_no_plot_of_them(tmp_path):
    results = made_up_results()
    for row in results["rows"]:
        row["workload"] = "ragged"
    assert plot.write_plots(results, tmp_path) == [tmp_path / "results.png"]
    assert not (tmp_path / "crystals.png").exists()
