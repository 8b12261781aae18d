"""Attention over the pages of a cache: against the oracle, and as an op of torch."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import flashmoe_science as fm
import oracle
import pages
from oracle import same_bits
from pages import FLOAT8, Problem
from test_random import on_target

ERRORS = (RuntimeError, TypeError, ValueError)
PAGED = torch.ops.flashmoe.attention_paged.default
PAGED_OUT = torch.ops.flashmoe.attention_paged_out.default

CHUNK = 40  # random problems in one test


def accept(problem: Problem) -> None:
    found = pages.complaints(pages.build(problem))
    assert not found, "\n  ".join([str(problem), *found])


@pytest.mark.parametrize("first", range(0, 200, CHUNK))
def test_random_problems(first, threads):
    """Against the oracle, sequences alone, and with one thread and two."""
    failures = []
    for seed in range(first, first + CHUNK):
        made = pages.build(pages.seeded(seed))
        threads(1)
        alone = pages.ours(made)
        threads(2)
        found = pages.complaints(made)
        together = pages.ours(made)
        if not all(same_bits(alone[name], together[name]) for name in alone):
            found.append("1 and 2 threads give different bits")
        if found:
            failures.append("\n  ".join([f"seed {seed}: {pages.seeded(seed)}", *found]))
    assert not failures, "\n".join([f"{len(failures)} of {CHUNK} failed", *failures[:5]])


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(problem=pages.problems())
def test_problems_by_hypothesis(problem):
    accept(problem)


# Every instruction set this machine can run, not only the best one. It is chosen once in a process.

ON_TARGET = """
import json, sys
import torch
import flashmoe_science
import pages

running = json.loads(torch.ops.flashmoe.build_info())["cpu_target"]
assert running == sys.argv[1], f"{running} runs"
for seed in range(60):
    found = pages.complaints(pages.build(pages.seeded(seed)))
    if found:
        print(seed, *found)
"""


def test_every_instruction_set():
    info = json.loads(torch.ops.flashmoe.build_info())
    for target in info["cpu_targets"]:
        if target != info["cpu_target"]:
            run = on_target(target, ON_TARGET)
            assert run.returncode == 0, run.stderr[-3000:]
            assert run.stdout.strip() == "", f"{target}:\n{run.stdout[-5000:]}"


# What must be there, whatever the random problems are.

PLAIN = Problem(
    seed=1,
    dtype="float32",
    float8=False,
    heads_q=4,
    heads_k=2,
    head_dim=16,
    head_dim_v=16,
    page=16,
    lengths=((1, 40), (7, 33), (0, 12), (1, 1), (5, 16), (3, 0), (20, 20)),
)
DECODES = replace(PLAIN, decode=True, lengths=((1, 40), (1, 0), (1, 1), (1, 16), (1, 97)))


@pytest.mark.parametrize("layout", pages.CACHE_LAYOUTS)
@pytest.mark.parametrize("page", [1, 3, 16, 64])
def test_layouts_are_strides(layout, page):
    for problem in (PLAIN, DECODES):
        accept(replace(problem, page=page, layouts=("contiguous", layout, "contiguous")))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("group", [1, 5, 7, 16])
def test_groups_of_any_size(group, dtype):
    for problem in (PLAIN, DECODES):
        accept(replace(problem, dtype=dtype, heads_q=2 * group))


@pytest.mark.parametrize("dim", [1, 20, 64, 128, 192, 256, 257, 512])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_dims_to_512(dim, dtype):
    lengths = ((1, 33), (5, 17))
    accept(replace(PLAIN, dtype=dtype, head_dim=dim, head_dim_v=dim, lengths=lengths))


@pytest.mark.parametrize(
    "options",
    [
        {"window": (5, 0)},
        {"window": (0, 0)},
        {"causal": False},
        {"causal": False, "window": (3, 4)},
        {"softcap": 2.0},
        {"scale": -0.4},
        {"sinks": "float32"},
        {"sinks": "bfloat16", "dtype": "bfloat16"},
        {"sinks": "float32", "window": (4, -1), "softcap": 5.0},
        {"rest": 9},
        {"shared": True},
        {"slack": None},
        {"slack": 1000},
        {"lengths": ()},
    ],
    ids=str,
)
def test_options(options):
    accept(replace(PLAIN, **options))
    if "rest" not in options:
        lengths = options.get("lengths", DECODES.lengths)
        accept(replace(DECODES, **{**options, "lengths": lengths}))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scales", [None, "()", "(1,)", "(Hk,)", "number"])
def test_fp8_caches_and_their_scales(scales, dtype):
    for problem in (PLAIN, DECODES):
        accept(replace(problem, dtype=dtype, float8=True, scales=scales))


def test_every_fp8_number_is_exact():
    """One key: the result is the value itself, times its scale, rounded once."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 0x7F) != 0x7F].view(FLOAT8)  # without the two NaN
    v_cache = numbers.view(-1, 1, 1, 1)
    k_cache = torch.ones_like(v_cache, dtype=torch.float32).to(FLOAT8)
    table = torch.arange(len(numbers))[:, None]
    lens = torch.ones(len(numbers), dtype=torch.int32)
    for dtype, scale in ((torch.bfloat16, 1.0), (torch.float16, 0.25), (torch.bfloat16, 0.7)):
        q = torch.randn(len(numbers), 1, 1).to(dtype)
        out = fm.flash_attention_paged(q, k_cache, v_cache, table, lens, v_scale=scale)
        want = (numbers.double() * torch.tensor(scale).double()).to(dtype)
        torch.testing.assert_close(out.flatten(), want, rtol=0, atol=0)


def simple(**changes):
    """A good call, changed."""
    call = {
        "q": torch.randn(3, 4, 8),
        "k_cache": torch.randn(6, 4, 2, 8),
        "v_cache": torch.randn(6, 4, 2, 8),
        "block_table": torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 8, 1], dtype=torch.int32),
    }
    return {**call, **changes}


def half(name, **changes):
    call = simple(**changes)
    return call | {x: call[x].bfloat16() for x in ("q", "k_cache", "v_cache")} | {name: call[name]}


def float8(**changes):
    call = simple(**changes)
    caches = {name: call[name].to(FLOAT8) for name in ("k_cache", "v_cache")}
    return call | {"q": call["q"].bfloat16()} | caches | changes


def test_the_same_as_dense_attention():
    """One sequence in pages of its own, beside flash_attention over the same keys."""
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 32, 8), torch.randn(1, 2, 32, 8)
    want = fm.flash_attention(q, k, v, causal=True)[0].transpose(0, 1)
    caches = [x[0].transpose(0, 1).reshape(4, 8, 2, 8) for x in (k, v)]
    got = fm.flash_attention_paged(
        q[0].transpose(0, 1),
        *caches,
        torch.arange(4)[None],
        torch.tensor([32]),
        cu_seqlens_q=torch.tensor([0, 9]),
    )
    torch.testing.assert_close(got, want)


def test_the_signature_is_the_documented_one():
    parameters = inspect.signature(fm.flash_attention_paged).parameters
    names = "q k_cache v_cache block_table seq_lens cu_seqlens_q max_seqlen_q max_seqlen_k causal "
    names += "window scale softcap sinks k_scale v_scale out return_lse"
    assert list(parameters) == names.split()
    keyword_only = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert keyword_only == names.split()[5:]
    defaults = {n: parameters[n].default for n in keyword_only}
    assert defaults == dict.fromkeys(keyword_only) | {"causal": True, "return_lse": False}


# out=


def test_out_is_written_and_returned():
    call = simple()
    want, want_lse = fm.flash_attention_paged(**call, return_lse=True)
    out, lse = torch.full_like(call["q"], math.nan), torch.full((3, 4), math.nan)
    assert fm.flash_attention_paged(**call, out=out) is out
    assert same_bits(out, want)
    got = fm.flash_attention_paged(**call, out=out.fill_(math.nan), return_lse=True)
    assert got[0] is out and same_bits(out, want) and same_bits(got[1], want_lse)
    got = fm.flash_attention_paged(**call, out=(out.fill_(math.nan), lse), return_lse=True)
    assert got[0] is out and got[1] is lse
    assert same_bits(out, want) and same_bits(lse, want_lse)


def test_out_of_any_strides():
    call = simple()
    want = fm.flash_attention_paged(**call)
    wide = torch.full((3, 6, 10), math.nan)
    out = wide[:, 1:5, 1:9]
    fm.flash_attention_paged(**call, out=out)
    assert same_bits(out, want)
    assert wide.isnan().sum() == wide.numel() - out.numel()


def test_results_lie_as_the_queries_do():
    swapped = torch.randn(4, 3, 8).transpose(0, 1)
    assert fm.flash_attention_paged(**simple(q=swapped)).stride() == swapped.stride()
    narrow = fm.flash_attention_paged(**simple(q=swapped, v_cache=torch.randn(6, 4, 2, 5)))
    assert narrow.shape == (3, 4, 5) and narrow.is_contiguous()


OUTS = {
    "shape": (torch.empty(3, 4, 9), "out"),
    "rows": (torch.empty(4, 4, 8), "out"),
    "dtype": (torch.empty(3, 4, 8, dtype=torch.float64), "out"),
    "device": (torch.empty(3, 4, 8, device="meta"), "out"),
    "overlapping": (torch.empty(1, 4, 8).expand(3, 4, 8), "out"),
    "a list": ([1.0], "out"),
    "a pair without return_lse": ((torch.empty(3, 4, 8), torch.empty(3, 4)), "out"),
}


@pytest.mark.parametrize("name", OUTS)
def test_bad_memory_for_the_result(name):
    out, pattern = OUTS[name]
    with pytest.raises(ERRORS, match=pattern):
        fm.flash_attention_paged(**simple(), out=out)


@pytest.mark.parametrize(
    "lse",
    [
        torch.empty(4, 3),
        torch.empty(3, 4, dtype=torch.float64),
        torch.empty(3, 4, device="meta"),
        1,
    ],
    ids=["shape", "dtype", "device", "number"],
)
def test_bad_memory_for_lse(lse):
    out = torch.full((3, 4, 8), 7.0)
    with pytest.raises(ERRORS, match=r"lse|out\[1\]"):
        fm.flash_attention_paged(**simple(), out=(out, lse), return_lse=True)
    assert out.eq(7).all()  # nothing was computed


def test_a_write_is_noticed_by_autograd():
    """As for any other write in place: what a backward pass has saved must not change."""
    weight = torch.randn(3, 4, 8, requires_grad=True)
    out = torch.randn(3, 4, 8)
    loss = (weight * out).sum()
    with torch.no_grad():
        fm.flash_attention_paged(**simple(), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Errors.

integer, double = torch.int32, torch.float64
BAD = {
    "q is a list": (simple(q=[1.0]), r"\bq\b"),
    "cache is None": (simple(k_cache=None), "k_cache"),
    "table is a list": (simple(block_table=[[0]]), "block_table"),
    "lengths are a list": (simple(seq_lens=[1]), "seq_lens"),
    "offsets are a list": (simple(cu_seqlens_q=[0, 3]), "cu_seqlens_q"),
    "sinks are a number": (simple(sinks=1.0), "sinks"),
    "causal is a tensor": (simple(causal=torch.tensor(True)), "causal"),
    "scale is a tensor": (simple(scale=torch.tensor(1.0)), "scale"),
    "q of rank 4": (simple(q=torch.randn(3, 1, 4, 8)), "query"),
    "cache of rank 3": (simple(k_cache=torch.randn(24, 2, 8)), "k_cache"),
    "integers as a cache": (simple(k_cache=torch.ones(6, 4, 2, 8, dtype=integer)), "k_cache"),
    "another dtype": (simple(k_cache=torch.randn(6, 4, 2, 8).double()), "cache"),
    "fp8 keys, other values": (half("k_cache", k_cache=float8()["k_cache"]), "v_cache"),
    "fp8 queries": (simple(q=torch.randn(3, 4, 8).to(FLOAT8)), "query"),
    "heads": (simple(q=torch.randn(3, 5, 8)), "heads"),
    "head dim": (simple(q=torch.randn(3, 4, 9)), "head dim"),
    "head dim 513": (
        simple(q=torch.randn(3, 4, 513), k_cache=torch.randn(6, 4, 2, 513)),
        "head dim 513",
    ),
    "pages": (simple(v_cache=torch.randn(6, 5, 2, 8)), "v_cache"),
    "blocks": (simple(v_cache=torch.randn(7, 4, 2, 8)), "v_cache"),
    "table of rank 1": (simple(block_table=torch.zeros(3, dtype=integer)), "block_table"),
    "table of floats": (simple(block_table=torch.zeros(3, 2)), "block_table"),
    "more queries than sequences": (simple(q=torch.randn(4, 4, 8)), "query has 4 tokens"),
    "lengths of another batch": (simple(seq_lens=torch.ones(2, dtype=integer)), "seq_lens"),
    "offsets of another batch": (simple(cu_seqlens_q=torch.tensor([0, 3])), "cu_seqlens_q"),
    "a length past the table": (simple(seq_lens=torch.tensor([5, 9, 1])), r"seq_lens\[1\] is 9"),
    "a negative length": (simple(seq_lens=torch.tensor([5, -2, 1])), r"seq_lens\[1\] is -2"),
    "a length past the bound": (simple(max_seqlen_k=7), r"seq_lens\[1\] is 8"),
    "queries past the bound": (
        simple(cu_seqlens_q=torch.tensor([0, 0, 2, 3]), max_seqlen_q=1),
        "max_seqlen_q is 1",
    ),
    "a negative bound": (simple(max_seqlen_k=-1), "max_seqlen_k"),
    "no such block": (simple(block_table=torch.tensor([[0, 1], [2, 6], [4, 5]])), "block.* 6"),
    "falling offsets": (simple(cu_seqlens_q=torch.tensor([0, 2, 1, 3])), "cu_seqlens_q"),
    "window": (simple(window=(-2, 0)), "window"),
    "softcap": (simple(softcap=-1.0), "softcap"),
    "sinks of another head": (simple(sinks=torch.randn(2)), "sinks"),
    "sinks in float64": (simple(sinks=torch.randn(4).double()), "sinks"),
    "bytes": (half("k_cache", k_cache=torch.zeros(6, 4, 2, 8, dtype=torch.uint8)),
              r"k_cache.*\.view\(torch\.float8_e4m3fn\)"),
    "e5m2": (half("k_cache", k_cache=torch.zeros(6, 4, 2, 8).to(torch.float8_e5m2)), "k_cache"),
    "a scale for no fp8": (simple(k_scale=torch.tensor(0.5)), "k_scale"),
    "a scale in float64": (float8(k_scale=torch.tensor(0.5).double()), "k_scale"),
    "scales of other heads": (float8(v_scale=torch.ones(3)), "v_scale"),
    "a scale of 0": (float8(k_scale=0.0), "k_scale is 0"),
    "a scale that float32 does not have": (float8(k_scale=1e-46), "k_scale is 1e-46"),
    "a scale past float32": (float8(v_scale=1e300), r"v_scale is 1e\+300"),
    "a scale of nan": (float8(v_scale=math.nan), "v_scale is nan"),
    "a scale as text": (float8(v_scale="large"), "v_scale"),
    "lengths elsewhere": (simple(seq_lens=torch.ones(3, dtype=integer, device="meta")), "seq_lens"),
    "a cache elsewhere": (simple(v_cache=torch.empty(6, 4, 2, 8, device="meta")), "v_cache"),
    "a scale elsewhere": (float8(k_scale=torch.empty((), device="meta")), "k_scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_argument(name):
    call, pattern = BAD[name]
    with pytest.raises(ERRORS, match=pattern):
        fm.flash_attention_paged(**call)


def test_the_unchanged_calls_are_good():
    assert fm.flash_attention_paged(**simple()).shape == (3, 4, 8)
    assert fm.flash_attention_paged(**float8()).dtype == torch.bfloat16
    assert fm.flash_attention_paged(**half("q", q=simple()["q"].bfloat16())).shape == (3, 4, 8)


# Derivatives: none, and never in silence.


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "sinks", "out"])
def test_a_gradient_is_refused(name):
    call = simple(sinks=torch.randn(4), out=torch.zeros(3, 4, 8))
    call[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=rf"no gradient, and {name} would need one"):
        fm.flash_attention_paged(**call)
    with torch.no_grad():
        assert not fm.flash_attention_paged(**call).isnan().any()
    with torch.inference_mode():
        fm.flash_attention_paged(**simple(q=call["q"]))


def test_scales_with_a_gradient_are_refused():
    with pytest.raises(NotImplementedError, match="k_scale would need one"):
        fm.flash_attention_paged(**float8(k_scale=torch.tensor(0.5, requires_grad=True)))


def test_torch_func_is_refused():
    call = simple()
    rest = {name: x for name, x in call.items() if name != "q"}
    attend = lambda q: fm.flash_attention_paged(q, **rest)  # noqa: E731
    with pytest.raises(NotImplementedError, match="no gradient"):
        torch.func.grad(lambda q: attend(q).sum())(call["q"])
    with pytest.raises(NotImplementedError, match="no vmap"):
        torch.func.vmap(attend)(call["q"][None])
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(attend, (call["q"],), (call["q"],))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="mode"):
        attend(torch.autograd.forward_ad.make_dual(call["q"], call["q"]))


# The op registry, torch.compile and torch.export.


def op_arguments(problem: Problem) -> tuple:
    """The inputs of the ops, and memory for their results."""
    made = pages.build(problem)
    get = made.options.get
    names = ("cu_seqlens_q", "sinks", "k_scale", "v_scale", "max_seqlen_q", "max_seqlen_k")
    inputs = (*made.tensors.values(), *map(get, names), True, 30, -1, None, 0.0)
    # Without NaN: opcheck compares.
    return inputs, tuple(torch.zeros_like(x) for x in made.results.values())


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{"sinks": "float32"}, {"slack": None, "float8": True, "dtype": "bfloat16", "scales": "()"}],
    ids=str,
)
def test_opcheck(changes, lse):
    checks = {"test_utils": pages.CHECKS_OF_FLOAT8} if "float8" in changes else {}
    inputs, (out, lse_memory) = op_arguments(replace(PLAIN, **changes))
    torch.library.opcheck(PAGED, (*inputs, lse), **checks)
    torch.library.opcheck(PAGED_OUT, (*inputs, out, lse_memory if lse else None), **checks)


def test_the_ops_themselves_refuse_gradients():
    """An exported graph calls them, with no Python of ours around them."""
    inputs, (out, lse) = op_arguments(PLAIN)
    version = out._version
    PAGED_OUT(*inputs, out, lse)
    assert out._version > version  # autograd has heard of the write
    assert same_bits(out, PAGED(*inputs, False)[0])
    wanting = (inputs[0].clone().requires_grad_(), *inputs[1:])
    for call in (lambda: PAGED(*wanting, False), lambda: PAGED_OUT(*wanting, out, None)):
        with pytest.raises(NotImplementedError, match="no gradient"):
            call()


def step(q, k, v, cache, block_table, seq_lens, slot_mapping, out=None):
    """What a layer of a model does for new tokens; keys and values are halves of one row."""
    k_cache, v_cache = cache.chunk(2, -1)
    fm.kv_cache_append(k + 1, v, k_cache, v_cache, slot_mapping)
    attended, lse = fm.flash_attention_paged(
        q * 2, k_cache, v_cache, block_table, seq_lens, window=(6, -1), out=out, return_lse=True
    )
    return attended.relu(), lse


def step_inputs(batch: int = 3, blocks: int = 6):
    q, k, v = torch.randn(batch, 4, 8), torch.randn(batch, 2, 8), torch.randn(batch, 2, 8)
    table = torch.arange(2 * batch, dtype=torch.int32).view(batch, 2) % blocks
    lens = torch.arange(batch, dtype=torch.int32) % 8 + 1
    slots = table.gather(1, (lens[:, None] - 1).long() // 4)[:, 0] * 4 + (lens - 1) % 4
    return q, k, v, torch.randn(blocks, 4, 2, 16), table, lens, slots.long()


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield


def test_compile_refuses_gradients(fresh_compiler):
    call = simple(q=torch.randn(3, 4, 8, requires_grad=True))
    with pytest.raises(NotImplementedError, match="no gradient"):
        torch.compile(fm.flash_attention_paged, backend="aot_eager")(**call)


@pytest.mark.parametrize(
    "backend, given", [("aot_eager", False), ("aot_eager", True), ("inductor", False)]
)
def test_compile(backend, given, fresh_compiler):
    inputs, other = step_inputs(), step_inputs()
    for a, b in zip(inputs, other, strict=True):
        b.copy_(a)
    outs = (torch.empty(3, 4, 8), torch.empty(3, 4, 8)) if given else (None, None)
    want = step(*inputs, out=outs[0])
    got = torch.compile(step, fullgraph=True, backend=backend)(*other, out=outs[1])
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    assert same_bits(other[3], inputs[3])  # the cache was written
    if given:
        assert same_bits(outs[0], outs[1])


def test_compile_with_dynamic_shapes_compiles_once(fresh_compiler):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for batch, blocks in ((3, 11), (5, 13), (7, 40)):
        inputs = step_inputs(batch, blocks)
        want = step(*(x.clone() for x in inputs))
        got = compiled(*inputs)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    assert counter.frame_count == 1


class Layer(torch.nn.Module):
    def __init__(self, cache):
        super().__init__()
        self.register_buffer("cache", cache)

    def forward(self, q, k, v, block_table, seq_lens, slot_mapping):
        return step(q, k, v, self.cache, block_table, seq_lens, slot_mapping)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    q, k, v, cache, *rest = step_inputs()
    batch = torch.export.Dim("batch", min=2, max=4096)
    shapes = [{0: batch}] * 6
    program = torch.export.export(
        Layer(cache.clone()), (q, k, v, *rest), dynamic_shapes=tuple(shapes), strict=strict
    )
    assert "flashmoe.attention_paged" in program.graph_module.code
    exported = program.module()
    for inputs in ((q, k, v, *rest), tuple(x for i, x in enumerate(step_inputs(5, 6)) if i != 3)):
        module = Layer(cache.clone())
        exported.cache.copy_(cache)
        want, got = module(*inputs), exported(*inputs)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
        assert same_bits(exported.cache, module.cache)
    with pytest.raises(NotImplementedError, match="no gradient"):
        exported(q.requires_grad_(), k, v, *rest)


def test_meta_and_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    meta = {name: x.to("meta") for name, x in simple().items()}
    out, lse = fm.flash_attention_paged(**meta, return_lse=True)
    assert out.is_meta and out.shape == (3, 4, 8) and lse.shape == (3, 4)
    swapped = simple(q=torch.randn(4, 3, 8).transpose(0, 1))
    real = fm.flash_attention_paged(**swapped, return_lse=True)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) for name, x in swapped.items()}
        fake = fm.flash_attention_paged(**fakes, return_lse=True)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_lazy_negation_is_seen():
    """The negative of a tensor can be a bit in its flags, with the data unchanged."""
    call = simple()
    flagged = torch._neg_view(call["q"])
    got = fm.flash_attention_paged(**{**call, "q": flagged})
    assert same_bits(got, fm.flash_attention_paged(**{**call, "q": -call["q"]}))
    with pytest.raises(ValueError, match="out is a lazily negated view"):
        fm.flash_attention_paged(**call, out=torch._neg_view(torch.zeros(3, 4, 8)))


# explain_paged()


def test_explain_names_what_will_run():
    text = fm.explain_paged(**simple())
    assert "cpu" in text and "causal" in text and "pages of 4" in text
    assert "window" in fm.explain_paged(**simple(), window=(3, 0), return_lse=True)
    meta = {name: x.to("meta") for name, x in simple().items()}
    assert fm.explain_paged(**meta, device="cpu") == text
    with pytest.raises(RuntimeError, match="head dim"):
        fm.explain_paged(**simple(q=torch.randn(3, 4, 9)))


def test_a_bound_is_no_length():
    """The same plan serves every length below it, so nothing but the bound may be in it."""
    call = simple(max_seqlen_k=4096)
    text = fm.explain_paged(**call)
    assert text == fm.explain_paged(**{**call, "seq_lens": torch.ones(3, dtype=torch.int32)})
    assert "4096" in text


def test_a_broken_result_would_be_found():
    """The oracle sees an error of a tenth in one sequence."""
    made = pages.build(PLAIN)
    got = pages.ours(made)
    assert not oracle.compare(made.exact, got, made.rounded)
    got["out"][1:8] *= 0.9
    assert oracle.compare(made.exact, got, made.rounded)
