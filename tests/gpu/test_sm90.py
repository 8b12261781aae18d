"""What is the sm90 family's own: its head dims and tiles, more work than SMs, heads that share a
tile, tiles that are computed once more, and what it refuses.

The other files test it beside the other families.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from families import refusal
from helpers import (
    COPIED,
    IN_PLACE,
    OPTIONS,
    attend,
    check,
    check_case,
    check_containment,
    dense,
    either_way,
    every_mask,
    every_option,
    explained,
    integers,
    judge,
    on_a_gpu,
    put,
    qkv,
    ragged,
    results,
    rows_first,
    same,
    unchanged,
)

import flashmoe_science as fm
from oracle import same_bits

HEAD_DIMS = [64, 96, 128, 192, 256]
LENGTHS = [1, 2, 63, 64, 65, 111, 112, 113, 127, 128, 129, 191, 192, 193, 255, 257, 300, 517, 1025]

pytestmark = [on_a_gpu, pytest.mark.family("sm90")]


@pytest.mark.parametrize("d", [8, 33, 64, 65, 96, 97, 128, 192, 200, 256])
def test_it_is_the_kernel_that_runs(d, dtype):
    text = fm.explain(*qkv(300, d=d, dtype=dtype), causal=True)
    bucket = min(x for x in (32, *HEAD_DIMS) if x >= d)
    assert re.search(rf"kernel +sm90_attention_fwd_\w+_d{bucket}_", text), text


@every_mask
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_lengths(d, causal, dtype):
    for i, n in enumerate(LENGTHS):
        for m in (n, LENGTHS[(7 * i + 3) % len(LENGTHS)]):
            check(*qkv(n, m, lead=(2,), hq=2, hk=1, d=d, dtype=dtype), causal=causal)


@every_mask
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_more_work_than_sms(d, causal, dtype):
    """Blocks that follow each other on an SM, and heads that do not divide what goes together."""
    check(*qkv(700, 900, lead=(5,), hq=12, hk=4, d=d, dtype=dtype), causal=causal)


# Many tasks for each CTA: the last values of one are multiplied with the first scores of the next,
# and O leaves from where its Q was. The same calls with few heads have a task for each CTA.
BATCH_IN_A_ROW = 9
tasks_in_a_row = pytest.mark.parametrize(
    "d, forward_tile",
    [(64, "192x128"), (64, "128x128"), (96, "192x96"), (96, "128x128"), (128, "128x128")],
)


def attend_each_alone(q, k, v, key_lengths=None, **options):
    """out and lse of all, which have the bits of each alone."""

    def lengths(rows):
        return {} if key_lengths is None else {"key_lengths": key_lengths[rows]}

    found = attend(q, k, v, **lengths(slice(None)), **options)
    for i in range(BATCH_IN_A_ROW):
        rows = slice(i, i + 1)
        alone = attend(q[rows], k[rows], v[rows], **lengths(rows), **options)
        assert same([x[rows] for x in found], alone), i
    return found


@every_mask
@pytest.mark.parametrize("hq, hk", [(16, 16), (20, 4)])
@pytest.mark.parametrize(
    "n, m", [(1024, 1024), (1100, 1164), (1300, 1236), (2500, 2500), (700, 60), (300, 513)]
)
@tasks_in_a_row
def test_tasks_in_a_row(d, forward_tile, n, m, hq, hk, causal, dtype, monkeypatch):
    monkeypatch.setenv("FLASHMOE_TILE", forward_tile)
    q, k, v = qkv(n, m, lead=(BATCH_IN_A_ROW,), hq=hq, hk=hk, d=d, dtype=dtype)
    out, lse = attend_each_alone(q, k, v, causal=causal)
    group, one = (slice(1), slice(hq // hk)), (slice(1), slice(1))
    judge(out[group], lse[group], q[group], k[one], v[one], causal=causal)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (200, 70)}, {"window": (300, -1)}], ids=str
)
@tasks_in_a_row
def test_tasks_of_other_lengths_in_a_row(d, forward_tile, options, dtype, monkeypatch):
    monkeypatch.setenv("FLASHMOE_TILE", forward_tile)
    q, k, v = qkv(1100, 1300, lead=(BATCH_IN_A_ROW,), hq=16, hk=16, d=d, dtype=dtype)
    lengths = integers(0, 1300, 1, 64, 65, 1236, 700, 128, 0)
    out, lse = attend_each_alone(q, k, v, key_lengths=lengths, **options)
    rows = slice(5, 7), slice(2)
    some = lengths[rows[0]]
    judge(out[rows], lse[rows], q[rows], k[rows], v[rows], key_lengths=some, **options)


@tasks_in_a_row
def test_not_a_number_in_tasks_in_a_row(d, forward_tile, dtype, monkeypatch):
    monkeypatch.setenv("FLASHMOE_TILE", forward_tile)
    q, k, v = qkv(1100, lead=(BATCH_IN_A_ROW,), hq=16, hk=16, d=d, dtype=dtype)
    out, lse = attend(q, k, v, causal=True)
    dirty = put(v, (slice(None, None, 2), slice(None), 700, 3), nan)
    got, got_lse = attend(q, k, dirty, causal=True)
    assert same((got[1::2], got_lse[1::2]), (out[1::2], lse[1::2]))
    assert not got[::2, :, 700:, 3].isfinite().any()
    others = [c for c in range(d) if c != 3]
    assert unchanged(got[:, :, :700], out[:, :, :700])
    assert unchanged(got[..., others], out[..., others])
    assert unchanged(got_lse, lse)


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_what_a_mask_hides_stays_hidden(d, value, dtype):
    q, k, v = qkv(300, lead=(2,), hq=2, hk=1, d=d, dtype=dtype)
    out, lse = attend(q, k, v, causal=True)
    bad = put(v, (0, 0, 170, 3), value)
    got, got_lse = attend(q, k, bad, causal=True)
    assert same((got[1], got_lse[1]), (out[1], lse[1]))
    assert not got[0, :, 170:, 3].isfinite().any()
    # What is computed once more is rounded otherwise.
    others = [c for c in range(d) if c != 3]
    assert unchanged(got[0, :, :170], out[0, :, :170])
    assert unchanged(got[0, :, 170:, others], out[0, :, 170:, others])
    assert unchanged(got_lse, lse)
    lengths = integers(170, 300)
    clean = attend(q, k, v, key_lengths=lengths)
    hidden = attend(q, put(k, (0, 0, 171, 5), value), bad, key_lengths=lengths)
    for x, y in zip(hidden, clean, strict=True):
        assert unchanged(x, y)


@every_option
@pytest.mark.parametrize("d", [96, 192, 256])  # test_forward.py has 64 and 128
def test_options(option, d, dtype):
    for n, m in ((300, 300), (130, 700)):
        check(*qkv(n, m, lead=(2,), hq=2, hk=1, d=d, dtype=dtype), **OPTIONS[option])


@every_mask
@pytest.mark.parametrize("d", [64, 128, 256])
def test_maxima_that_jump(d, causal, dtype):
    """Scores that grow from block to block, in all rows, in some, and past what fp16 holds."""
    for std, growth in ((1, 0.2), (8, 1), (30, 4)):
        q, k, v = qkv(700, lead=(1,), hq=2, hk=2, d=d, dtype=torch.float32)
        ramp = 1 + growth * torch.arange(700, device=q.device).flip(0)[:, None] / 64
        check(*((std * q).to(dtype), (k * ramp).to(dtype), v.to(dtype)), causal=causal)
        some = torch.where(torch.arange(700, device=q.device)[:, None] % 97 == 0, 40.0, 1.0)
        check(*((q * some).to(dtype), (k * ramp).to(dtype), v.to(dtype)), causal=causal)


@every_mask
@pytest.mark.parametrize("hq, hk", [(8, 1), (12, 1), (16, 2), (64, 1), (6, 2), (5, 5), (96, 1)])
def test_heads_that_share_a_tile(hq, hk, causal, dtype):
    for n, m in ((1, 300), (3, 100), (16, 16), (17, 400), (65, 129), (130, 131)):
        for d in (64, 128):
            check(*qkv(n, m, lead=(2,), hq=hq, hk=hk, d=d, dtype=dtype), causal=causal)


def test_heads_that_share_a_tile_with_options(dtype):
    q, k, v = qkv(20, 300, lead=(3,), hq=16, hk=2, d=128, dtype=dtype)
    lengths = integers(0, 7, 300)
    for options in ({"window": (9, 3)}, {"softcap": 3.0}, {"causal": True, "window": (40, -1)}):
        check(q, k, v, key_lengths=lengths, **options)
    for layout in IN_PLACE:
        want = attend(q, k, v, causal=True)
        assert same(attend(*(layout(x) for x in (q, k, v)), causal=True), want)
    out, _ = attend(q, k, put(v, (2, 1, 299, 3), nan), causal=True)
    assert out[:, :, :19].isfinite().all() and not out[2, 8:, 19, 3].isfinite().any()


RAGGED = {
    "empty ends": ((0, 0), (5, 5), (0, 0)),
    "edges": tuple((n, n) for n in (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257)),
    "cross": ((128, 64), (64, 128), (65, 127), (1, 300), (300, 1), (17, 0), (0, 9)),
    "long": ((3, 3), (1025, 1025), (2, 2), (700, 900)),
}


# The backward pass.

MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (70, 13)},
         "left": {"window": (100, -1)}, "right": {"window": (-1, 5)}}  # fmt: skip


@either_way
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_gradients(d, mask, deterministic, dtype):
    shape = {"d": d, "dtype": dtype, "deterministic": deterministic, "options": MASKS[mask]}
    for n, m in ((1, 1), (64, 64), (65, 127), (128, 129), (300, 300), (517, 200), (200, 517)):
        check_case(dense(n, m, lead=(2,), hq=2, hk=2, **shape))


@either_way
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d", [32, 64])
def test_gradients_of_few_tokens_by_tiles_of_keys(d, mask, deterministic, dtype, monkeypatch):
    """Which have a kernel of their own (test_whole.py) where heads share no keys and are few."""
    monkeypatch.setenv("FLASHMOE_TILE", f"128x{64 if d == 32 else 128},128x128")
    shape = {"d": d, "dtype": dtype, "deterministic": deterministic, "options": MASKS[mask]}
    for n, m in ((1, 1), (64, 64), (65, 127), (128, 129), (255, 1), (256, 256)):
        case = dense(n, m, lead=(2,), hq=2, hk=2, **shape)
        tensors, options = explained(case)
        text = fm.explain(*tensors, **options, backward=True)
        assert re.search(rf"kernel +sm90_attention_bwd_\w+16_d{d}_128x128$", text, re.M), text
        check_case(case)


@either_way
@every_mask
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_gradients_of_more_work_than_sms(d, causal, deterministic, dtype):
    shape = {"d": d, "dtype": dtype, "deterministic": deterministic, "options": {"causal": causal}}
    check_case(dense(900, 700, lead=(5,), hq=12, hk=4, **shape))


@either_way
@pytest.mark.parametrize("hq, hk", [(8, 1), (12, 4), (5, 5)])
def test_gradients_of_grouped_queries(hq, hk, deterministic, dtype):
    for d in (64, 128, 256):
        shape = {"d": d, "dtype": dtype, "deterministic": deterministic}
        check_case(dense(150, 333, hq=hq, hk=hk, options={"causal": True}, **shape))


@either_way
@every_mask
def test_gradients_with_key_lengths(causal, deterministic, dtype):
    for d in (64, 128, 256):
        shape = {"d": d, "dtype": dtype, "deterministic": deterministic}
        lengths = integers(0, 1, 129, 256, 400)
        options = {"causal": causal}
        check_case(dense(200, 400, lead=(5,), key_lengths=lengths, options=options, **shape))


def test_gradients_of_wrong_key_lengths_are_nan(dtype):
    for d in (64, 128, 256):
        lengths = integers(100, 101, 37)
        got = results(dense(90, 100, lead=(3,), d=d, dtype=dtype, key_lengths=lengths))
        assert all(got[x][1].isnan().all() for x in ("dq", "dk", "dv"))
        assert all(got[x][[0, 2]].isfinite().all() for x in ("dq", "dk", "dv"))


@pytest.mark.parametrize("hq", [16, 6])
@pytest.mark.parametrize("d", [40, 72, 136])
def test_gradients_of_many_heads(d, hq, dtype):
    """So many that a CTA of the kernel before has several blocks of rows, the last not a whole one.
    Some see no key, and one length is wrong."""
    lead = 280 // hq
    shape = {"d": d, "dtype": dtype, "deterministic": True, "options": {"causal": True}}
    case = dense(330, 190, lead=(lead,), hq=hq, hk=hq, **shape)
    want = check_case(case)
    beside = {x: rows_first(getattr(case, x)) for x in ("q", "k", "v", "grad_out")}
    got = results(replace(case, **beside))
    wrong = results(replace(case, key_lengths=integers(*[190] * (lead - 1), 191)))
    for x in ("dq", "dk", "dv"):
        assert same((got[x], wrong[x][:-1]), (want[x], want[x][:-1]))
        assert wrong[x][-1].isnan().all()


@pytest.mark.parametrize("needs", ["q", "k", "v", "qk", "kv", "qv"])
def test_only_the_gradients_that_are_wanted(needs, dtype):
    for d in (64, 128, 256):
        check_case(dense(200, 260, d=d, dtype=dtype, needs=needs, options={"causal": True}))


def test_gradients_without_one_of_lse(dtype):
    for d in (64, 128, 256):
        check_case(dense(200, 260, d=d, dtype=dtype, grad_lse=False))


@pytest.mark.parametrize("hq, hk", [(1, 1), (2, 1), (6, 3), (8, 8), (12, 4), (16, 2)])
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_gradients_of_heads_side_by_side(d, hq, hk, dtype):
    for n, m in ((150, 260), (300, 130)):  # in the second some rows see no key
        case = dense(n, m, hq=hq, hk=hk, d=d, dtype=dtype, options={"causal": True})
        beside = {x: rows_first(getattr(case, x)) for x in ("q", "k", "v", "grad_out")}
        want = check_case(case)
        got = check_case(replace(case, **beside))
        assert all(same((got[x],), (want[x],)) for x in want)


@pytest.mark.parametrize("row", [170, 230])  # the two halves of a block of 128 keys
@pytest.mark.parametrize("which", ["q", "k", "v", "grad_out"])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_gradients_contain_what_a_mask_hides(d, which, row, dtype):
    clean = dense(300, d=d, dtype=dtype, hq=2, hk=1, options={"causal": True})
    dirty = replace(clean, **{which: put(getattr(clean, which), (0, 0, row, d - 5), nan)})
    assert check_containment(clean, dirty)


@every_option
@pytest.mark.parametrize("d", [96, 192, 256])  # test_backward.py has 64 and 128
def test_gradients_with_options(option, d, dtype):
    shape = {"d": d, "dtype": dtype, "options": OPTIONS[option]}
    for n, m in ((300, 300), (130, 700)):
        check_case(dense(n, m, lead=(2,), hq=4, hk=2, **shape))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_gradients_with_a_softcap_contain_what_a_mask_hides(d, dtype):
    options = {"causal": True, "softcap": 2.0}
    clean = dense(300, d=d, dtype=dtype, hq=2, hk=1, options=options)
    dirty = replace(clean, v=put(clean.v, (0, 0, 170, 3), nan))
    assert check_containment(clean, dirty)


@either_way
@every_mask
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("lengths", RAGGED)
def test_gradients_of_ragged_batches(lengths, d, causal, deterministic, dtype):
    shape = {"d": d, "dtype": dtype, "hq": 4, "hk": 2, "deterministic": deterministic}
    check_case(ragged(RAGGED[lengths], options={"causal": causal}, **shape))
    check_case(ragged(RAGGED[lengths], rest=(70, 9), options={"causal": causal}, **shape))


@every_option
def test_gradients_of_ragged_batches_with_options(option, dtype):
    options = OPTIONS[option]
    check_case(ragged(RAGGED["cross"], options=options, d=128, dtype=dtype))
    check_case(ragged(RAGGED["edges"], options=options, d=40, dv=23, dtype=dtype))
    check_case(ragged(RAGGED["edges"], options=options, d=200, dtype=dtype, hq=2, hk=1))


@either_way
def test_gradients_of_more_ragged_work_than_sms(deterministic, dtype):
    lengths = tuple((100 + 37 * i % 900, 100 + 37 * i % 900) for i in range(30))
    shape = {"dtype": dtype, "hq": 8, "hk": 4, "deterministic": deterministic}
    for d in (64, 128, 256):
        check_case(ragged(lengths, d=d, options={"causal": True}, **shape))


@pytest.mark.parametrize("value", [nan, inf])
@pytest.mark.parametrize("which", ["q", "k", "v", "grad_out"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_gradients_of_other_sequences_stay_clean(d, which, value, dtype):
    """What one sequence holds does not reach those before and after it, in the same tiles."""
    shape = {"d": d, "dtype": dtype, "hq": 2, "hk": 1, "grad_lse": False}
    clean = ragged(((70, 70), (50, 50), (90, 90)), options={}, **shape)
    bad = put(getattr(clean, which), (slice(70, 120),), value)
    want, got = results(clean), results(replace(clean, **{which: bad}))
    for name in ("dq", "dk", "dv"):
        for part in (slice(0, 70), slice(120, 210)):
            assert unchanged(got[name][part], want[name][part])
    assert not got["dq"][70:120].isfinite().all()


# Above head dim 64 there are two tiles up to 128, of which the planner takes what fits.
@pytest.fixture(params=["64x128", "80x128"])
def tile(request, monkeypatch):
    monkeypatch.setenv("FLASHMOE_TILE", f"128x128,{request.param}")


@either_way
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d", [72, 96, 97, 128])
def test_gradients_by_either_tile(d, mask, deterministic, tile, dtype):
    shape = {"d": d, "dtype": dtype, "deterministic": deterministic, "options": MASKS[mask]}
    for n, m in ((1, 1), (79, 80), (81, 127), (160, 129), (300, 300), (517, 200), (200, 517)):
        check_case(dense(n, m, lead=(2,), hq=4, hk=2, **shape))
    lengths = integers(0, 1, 129, 256, 400)
    check_case(dense(200, 400, lead=(5,), key_lengths=lengths, **shape))


@either_way
@every_mask
@pytest.mark.parametrize("lengths", RAGGED)
@pytest.mark.parametrize("d", [96, 128])
def test_gradients_of_ragged_batches_by_either_tile(d, lengths, causal, deterministic, tile, dtype):
    shape = {"d": d, "dtype": dtype, "deterministic": deterministic}
    check_case(ragged(RAGGED[lengths], rest=(70, 9), options={"causal": causal}, **shape))


@pytest.mark.parametrize("row", [159, 170, 230])
@pytest.mark.parametrize("which", ["q", "k", "v", "grad_out"])
@pytest.mark.parametrize("d", [96, 128])
def test_either_tile_contains_what_a_mask_hides(d, which, row, tile, dtype):
    clean = dense(300, d=d, dtype=dtype, hq=2, hk=1, options={"causal": True})
    dirty = replace(clean, **{which: put(getattr(clean, which), (0, 0, row, d - 5), nan)})
    assert check_containment(clean, dirty)


def check_tasks_in_a_row(d, causal, dtype):
    """Many short tasks for each CTA: what one leaves in shared memory is not the next one's."""
    shape = {"lead": (32,), "hq": 16, "hk": 16, "d": d, "dtype": dtype, "grad_lse": False}
    case = dense(512, options={"causal": causal}, **shape)
    # As many as leave no SM without work: else the queries of a tile of keys are shared out.
    few = {name: getattr(case, name)[:4] for name in ("q", "k", "v", "grad_out")}
    alone = check_case(replace(case, **few))
    ordered = results(case)
    for _ in range(3):
        got = results(replace(case, deterministic=False))
        for name in ("dk", "dv"):
            assert same_bits(got[name], ordered[name]), name
            assert same_bits(got[name][:4], alone[name]), name
        assert rounded_alike(got["dq"], ordered["dq"])


@every_mask
@pytest.mark.parametrize("d", [32, 64, 192, 256])
def test_gradients_of_tasks_in_a_row(d, causal, dtype):
    check_tasks_in_a_row(d, causal, dtype)


@every_mask
@pytest.mark.parametrize("d", [96, 128])
def test_gradients_of_tasks_in_a_row_by_either_tile(d, causal, tile, dtype):
    check_tasks_in_a_row(d, causal, dtype)


@either_way
@pytest.mark.parametrize("d", [32, 64, 128])
def test_not_a_number_in_a_task_stays_there(d, deterministic, dtype):
    """A CTA has tasks with something not finite in K or V, behind a mask, and tasks without."""
    shape = {"lead": (24,), "hq": 16, "hk": 16, "d": d, "dtype": dtype, "grad_lse": False}
    case = dense(400, options={"causal": True}, **shape)
    spoilt = [("k", (slice(0, 24, 5), slice(0, 16, 3), 390, 1)),
              ("v", (slice(1, 24, 7), slice(0, 16, 2), 130, 7))]  # fmt: skip
    dirty, clean = case, torch.ones(24, 16, dtype=torch.bool)
    for name, index in spoilt:
        dirty = replace(dirty, **{name: put(getattr(dirty, name), index, nan)})
        clean[index[:2]] = False
    want = results(replace(case, deterministic=True))
    got = results(replace(dirty, deterministic=deterministic))
    for name in ("dk", "dv"):
        assert same_bits(got[name][clean], want[name][clean]), name
    assert rounded_alike(got["dq"][clean], want["dq"][clean])
    # Of the others, the rows before the first that sees a NaN.
    spoilt_k = got["dq"][0, 0, :390]
    assert rounded_alike(spoilt_k, want["dq"][0, 0, :390]) and got["dq"][0, 0, 390:].isnan().any()


# What it refuses, and nothing else: tests of the other files are skipped where it does.


def expanded(x):
    return x[:1].expand(x.shape)


def split_batch(x):
    """Leading dimensions that no single stride steps through."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


REFUSED = {
    "fp32 bias of keys apart": (
        lambda q, k, v: (q, k, v, torch.zeros(k.shape[-2], q.shape[-2]).to(q.device).mT),
        "takes an fp32 bias of neighbouring keys",
    ),
    "bias of keys": (
        lambda q, k, v: (q, k, v, q.new_zeros(k.shape[-2])),
        "of all queries and keys",
    ),
    "no queries": (lambda q, k, v: (q[..., :0, :], k, v), "nothing to attend to"),
    "no keys": (lambda q, k, v: (q, k[..., :0, :], v[..., :0, :]), "nothing to attend to"),
    "no batch": (lambda q, k, v: (q[:0], k[:0], v[:0]), "nothing to attend to"),
    "broadcast": (lambda q, k, v: (q, expanded(k), v), "key is broadcast"),
    "leading": (lambda q, k, v: (q, k, split_batch(v)), "value is broadcast, or its leading"),
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_it_refuses(what, backward, dtype):
    change, words = REFUSED[what]
    tensors = change(*qkv(100, 130, lead=(2, 3), dtype=dtype))
    assert re.search(rf"sm90: .*{words}", refusal(*tensors, backward=backward))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@every_option
def test_what_it_takes(option, backward, dtype):
    def takes(tensors, **options):
        assert not refusal(*tensors, **options, **OPTIONS[option], backward=backward)

    for d in (1, 8, 33, 64, 100, 128, 200, 256):
        for n, m in ((1, 1), (1, 3000), (77, 4), (300, 517)):
            tensors = qkv(n, m, d=d, dtype=dtype)
            takes(tensors)
            takes(tensors, key_lengths=integers(1, m))
            takes(tensors, deterministic=True)
            for layout in (*IN_PLACE, *COPIED):
                takes([layout(x) for x in tensors])
            lengths = {"cu_seqlens_q": integers(0, n, 2 * n), "cu_seqlens_k": integers(0, m, 2 * m)}
            packed = [x.transpose(1, 2).flatten(0, 1) for x in tensors]
            takes(packed, **lengths, max_seqlen_q=n, max_seqlen_k=m)


def rounded_alike(got, want):
    """Whether sums of the same numbers in another order are what these are."""
    eps = torch.finfo(want.dtype).eps
    return torch.allclose(got, want, atol=(eps * want.abs().max()).item(), rtol=2 * eps)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (3000, 500)}], ids=str)
@pytest.mark.parametrize(
    "lead, hq, hk, d", [((1,), 24, 24, 128), ((3,), 8, 2, 96), ((7,), 3, 3, 80)]
)
def test_sums_that_begin_with_zeros(lead, hq, hk, d, options, tile, dtype):
    """dQ of several waves of heads: each writes the zeros of the next. And of sums in order, which
    begin with none."""
    case = dense(4500, lead=lead, hq=hq, hk=hk, d=d, dtype=dtype, options=options, grad_lse=False)
    ordered = results(replace(case, deterministic=True))
    for _ in range(3):
        got = results(replace(case, deterministic=False))
        for name in ("dk", "dv"):
            assert same_bits(got[name], ordered[name])
        assert rounded_alike(got["dq"], ordered["dq"])


# What order_heads() does with so many heads and keys on 132 SMs.
PAIRED = {
    "a wave of four pairs": dict(n=4096, lead=(2,), hq=20, hk=4, d=128),
    "a wave of four pairs, and 12 heads in the order of others": dict(
        n=4001, lead=(5,), hq=24, hk=4, d=96
    ),
    "a pair with two passes": dict(n=32700, lead=(2,), hq=5, hk=1, d=128),
    "half of the keys before the first query": dict(n=2932, m=5632, lead=(2,), hq=14, hk=2, d=128),
    "three waves of shorter sequences": dict(n=2048, lead=(12,), hq=20, hk=4, d=128),
}


def check_pairs(dtype, **shape):
    """Tiles of keys that go from their first queries to their last, beside others that go from the
    last to the first; twice the same bits of dK and dV, and numbers as of sums in order."""
    case = dense(**shape, dtype=dtype, options={"causal": True}, grad_lse=False)
    ordered = results(replace(case, deterministic=True))
    got, again = (results(replace(case, deterministic=False)) for _ in range(2))
    for name in ("dk", "dv"):
        assert same_bits(got[name], again[name])
        if torch.cuda.get_device_properties(0).multi_processor_count == 132:
            # Half of the paired heads add the other way round: else this tested no pairs.
            assert not same_bits(got[name], ordered[name])
    for name in ("dq", "dk", "dv"):
        assert rounded_alike(got[name], ordered[name]), name


def test_two_pairs_of_heads_of_64_tiles_of_keys_each(dtype):
    check_pairs(dtype, n=8191, lead=(1,), hq=28, hk=4, d=64)


@pytest.mark.parametrize("which", PAIRED)
def test_pairs_of_heads_by_either_tile(which, tile, dtype):
    check_pairs(dtype, **PAIRED[which])


@pytest.mark.parametrize("batch", [0, 1], ids=["downwards", "upwards"])
@pytest.mark.parametrize("what, row", [("q", 100), ("grad_out", 4000), ("k", 2000), ("v", 3900)])
def test_not_a_number_in_pairs_of_heads(what, row, batch, tile, dtype):
    case = dense(
        **PAIRED["a wave of four pairs"], dtype=dtype, options={"causal": True}, grad_lse=False
    )
    dirty = replace(case, **{what: put(getattr(case, what), (batch, 2, row, 5), nan)})
    ordered = results(replace(dirty, deterministic=True))
    got = results(replace(dirty, deterministic=False))
    assert ordered["dq"].isnan().any()
    for name in ("dq", "dk", "dv"):
        assert torch.equal(got[name].isnan(), ordered[name].isnan()), name
        assert rounded_alike(got[name].nan_to_num(), ordered[name].nan_to_num()), name
