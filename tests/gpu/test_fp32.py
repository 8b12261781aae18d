"""Attention in fp32: what other files ask of the 16-bit types, and what only fp32 has."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from math import nan
from types import FunctionType

import pytest
import test_backward
import test_bad_lengths
import test_bias
import test_byte_masks
import test_deterministic
import test_dropout_kernels
import test_forward
import test_nan
import test_ragged
import test_ragged_bias
import test_sink_kernels
import test_strides
import torch
from families import COMPLETE, dtypes_of
from helpers import (
    DEVICE,
    check_case,
    check_containment,
    dense,
    explained,
    normal,
    on_a_gpu,
    put,
    ragged,
    results,
)

import flashmoe_science as fm
from dropped import with_dropout
from oracle import same_bits

DTYPE_NAMES = ("fp32",)

# Tests of these files that say nothing of tiles or of 16 bits run once more, in fp32.
AGAIN = {
    test_forward: """lengths grouped_queries leading_dimensions head_dims value_head_dims options
        key_lengths key_lengths_are_broadcast a_peaked_softmax scores_far_from_zero
        without_lse_the_output_is_the_same empty_results no_keys
        rows_that_see_no_key""",
    test_backward: """head_dims value_head_dims grouped_queries options windows key_lengths
        a_peaked_softmax scores_far_from_zero small_and_large_upstream_gradients
        only_the_gradients_that_are_wanted a_loss_of_either_result
        a_loss_of_lse_alone_may_want_only_v backward_twice_over_one_graph empty_shapes
        rows_that_see_no_key keys_that_no_row_sees equal_keys_share_their_gradient""",
    test_bias: """broadcasts head_dims lengths options strides key_lengths triangle_attention
        few_tiles_shared_by_many triangle_with_padding expanded_bias minus_infinity_is_a_mask
        nan_behind_a_mask_stays_there infinity_behind_a_mask_stays_there
        keys_that_nobody_sees_may_hold_anything rows_that_see_nothing_may_hold_anything
        a_bias_behind_another_mask_may_hold_anything nan_in_the_bias_reaches_its_row
        few_queries_over_many_keys only_what_is_wanted
        the_gradient_of_a_bias_has_the_same_bits_always""",
    test_ragged: """lengths options head_dims value_head_dims grouped_queries tokens_of_no_sequence
        tokens_without_any_sequence stated_maxima_may_be_larger lengths_of_either_integer
        many_heads only_the_gradients_that_are_wanted a_loss_of_one_result""",
    test_ragged_bias: """lengths head_dims options grouped_queries strides
        a_bias_that_its_owner_expanded tokens_of_no_sequence_have_no_bias
        minus_infinity_is_a_mask rows_that_see_nothing_may_hold_anything
        keys_that_nobody_sees_may_hold_anything nan_stays_in_its_sequence
        nan_in_the_bias_reaches_its_row only_what_is_wanted""",
    test_sink_kernels: """options head_dims lengths heads key_lengths sinks_far_from_the_scores
        sums_in_parts ragged ragged_with_a_bias minus_infinity_is_no_sink nan_stays_in_its_head
        rows_that_see_the_sink_alone_may_hold_anything
        rows_that_a_bias_hides_may_hold_anything""",
    test_byte_masks: """options head_dims lengths broadcast layouts any_byte_but_zero_is_true packed
        many_short_sequences key_lengths_and_few_queries what_it_hides_may_hold_anything
        it_takes_no_memory""",
    test_dropout_kernels: """the_pairs_are_those_of_philox masks_do_not_move_the_pairs
        a_cpu_run_repeats_a_gpu_run options head_dims lengths a_bias_that_nobody_shares
        the_sum_of_a_shared_bias the_sum_in_parts a_mask ragged leading_dimensions_and_lengths
        few_queries_over_many_keys sinks wrong_lengths a_dropped_value_may_hold_anything
        a_gradient_reaches_the_values_that_were_kept seeds a_replay_of_a_graph_draws_anew
        a_graph_reads_its_seed_from_the_device""",
    test_strides: """strides strides_of_gradients gradients_over_several_leading_dimensions
        the_gradient_of_one_packed_tensor expanded_inputs gradients_of_expanded_tensors
        strides_of_ragged_tensors""",
    test_nan: """nan_in_a_query_stays_in_its_row nan_behind_the_mask_is_not_seen
        nan_reaches_what_depends_on_it nan_in_other_head_dims
        infinity_in_a_value_reaches_what_depends_on_it nan_upstream_reaches_what_depends_on_it
        keys_behind_the_length_are_never_looked_at few_queries_over_many_keys
        one_query_does_not_see_past_its_window nan_stays_in_its_sequence
        tokens_of_no_sequence_are_never_looked_at""",
    test_deterministic: """the_forward_pass_always the_batch_beside_a_sequence_changes_nothing""",
    test_bad_lengths: """key_lengths key_lengths_with_a_bias a_sequence_longer_than_stated
        lengths_that_fall lengths_of_garbage a_biased_sequence_longer_than_stated
        biased_lengths_of_garbage a_bias_with_too_few_pairs a_bias_with_too_many_pairs""",
}


def again(module, name: str) -> FunctionType:
    """A test of another file with the marks of that file, which a test does not have itself."""
    test = getattr(module, f"test_{name}")
    copy = FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__)
    marks = getattr(module, "pytestmark", [])
    marks = marks if isinstance(marks, list) else [marks]
    copy.pytestmark = [*getattr(test, "pytestmark", []), *(mark.mark for mark in marks)]
    return copy


for _module, _names in AGAIN.items():
    for _name in _names.split():
        globals()[f"{_module.__name__}_{_name}"] = again(_module, _name)


@contextmanager
def tf32_allowed():
    """As torch.set_float32_matmul_precision("high") leaves it: torch's own products follow too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def make(kind: str, **more):
    if kind == "ragged":
        return ragged(((65, 129), (1, 7), (200, 33)), dtype=torch.float32, **more)
    case = dense(150, 170, dtype=torch.float32, **more)
    if kind == "bias":
        bias = normal(4, 150, 170, dtype=torch.float32)
        case = replace(case, bias=bias, needs=case.needs + "b")
    if kind == "mask":
        case = replace(case, bias=torch.rand(4, 150, 170, device=DEVICE) < 0.6)
    return with_dropout(case) if kind == "dropout" else case


KINDS = ("dense", "bias", "ragged", "mask", "dropout")


@pytest.mark.parametrize("d", [16, 32, 64, 100, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_the_same_bits_unasked(kind, d, dtype):
    """Nothing is added up in memory."""
    case = make(kind, d=d, deterministic=False)
    got, again = results(case), results(case)
    for name, x in got.items():
        assert same_bits(x, again[name]), name


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_ends_of_tiles(d, length, dtype):
    check_case(dense(length, lead=(1,), d=d, dtype=dtype, options={"causal": True}))
    check_case(dense(length, 77, lead=(1,), d=d, dtype=dtype))
    check_case(dense(77, length, lead=(1,), d=d, dtype=dtype))


@pytest.mark.parametrize("dropout", [0, 0.5], ids=["whole", "dropped"])
def test_thousands_of_keys(dropout, dtype):
    """Accumulators of tensor cores cut off what does not fit: over many keys that would show."""
    for n, m in ((64, 8192), (8192, 64)):
        case = dense(n, m, lead=(1,), hq=2, hk=1, d=64, dtype=dtype)
        check_case(with_dropout(case, dropout) if dropout else case)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65])
@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_dropout_at_the_ends_of_blocks_of_philox(d, length, dtype):
    check_case(with_dropout(dense(length, 77, lead=(1,), d=d, dtype=dtype), 0.5))
    bias = normal(4, 77, length, dtype=dtype)
    case = dense(77, length, d=d, dtype=dtype)
    check_case(with_dropout(replace(case, bias=bias, needs=case.needs + "b"), 0.5))


@pytest.mark.parametrize("name", ["v", "grad_out"])
@pytest.mark.parametrize("d", [200, 256])
def test_a_dropped_pair_may_hold_anything_where_two_blocks_share_keys(d, name, dtype):
    clean = with_dropout(dense(70, 75, d=d, dtype=dtype), 0.5)
    dirty = put(getattr(clean, name), (..., 50, 3), nan)
    assert check_containment(clean, replace(clean, **{name: dirty})) > 0


@on_a_gpu
@pytest.mark.family("sm80")
@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_one_product_where_torch_allows_it(kind, d, family):
    """Within twice the error of torch's own TF32 products, and not within that of fp32."""
    case = make(kind, d=d)
    exact = results(case)
    with tf32_allowed():
        got = check_case(case)
    assert all(x.isfinite().all() for x in got.values())
    assert not torch.equal(got["out"], exact["out"])
    error = (got["out"] - exact["out"]).abs().max()
    assert error > 1e-5, "as accurate as fp32: it was not one product"
    check_case(case)  # and three again


@on_a_gpu
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_explain_says_which_product(kind, backward, family):
    tensors, options = explained(make(kind))
    text = fm.explain(*tensors, **options, backward=backward)
    assert "_fp32_" in text and "TF32" not in text and "bitwise reproducible" in text
    with tf32_allowed():
        text = fm.explain(*tensors, **options, backward=backward)
    assert "TF32 allowed" in text
    assert ("_tf32_" in text) == (family == "sm80")


@on_a_gpu
@pytest.mark.family("sm80")
def test_a_compiled_call_follows_too(family):
    case = make("dense")
    compiled = torch.compile(lambda q, k, v: fm.flash_attention(q, k, v), fullgraph=True)
    for _ in range(2):
        want = fm.flash_attention(case.q, case.k, case.v)
        assert same_bits(compiled(case.q, case.k, case.v), want)
        with tf32_allowed():
            one = fm.flash_attention(case.q, case.k, case.v)
            assert same_bits(compiled(case.q, case.k, case.v), one)
        assert not same_bits(one, want)


@on_a_gpu
@pytest.mark.family("sm80")
def test_gradients_are_made_as_their_forward_pass_was(family):
    """What torch allows when backward() runs does not matter: the call has decided."""
    q, k, v = (x.requires_grad_() for x in (make("dense").q for _ in range(3)))
    grads = []
    for allowed_later in (False, True):
        out = fm.flash_attention(q, k, v)
        if allowed_later:
            with tf32_allowed():
                grads.append(torch.autograd.grad(out.sum(), q)[0])
        else:
            grads.append(torch.autograd.grad(out.sum(), q)[0])
    assert same_bits(*grads)


@on_a_gpu
def test_other_dtypes_do_not_change(family):
    q, k, v = (normal(1, 2, 50, 64) for _ in range(3))
    want = fm.flash_attention(q, k, v)
    with tf32_allowed():
        assert same_bits(fm.flash_attention(q, k, v), want)
        assert "TF32" not in fm.explain(q, k, v)


@on_a_gpu
def test_families_that_have_it():
    q = torch.empty(1, 1, 64, 64, device=DEVICE)
    for family in (f for f in COMPLETE if dtypes_of(f)):  # of those that were built
        chip = {"sm80": "sm_80", "sm75": "sm_75"}[family]
        assert f"{family}_attention_fwd_fp32" in fm.explain(q, q, q, device=chip)
    assert "sm80_attention_fwd_fp32" in fm.explain(q, q, q, device="sm_90")
    with pytest.raises(RuntimeError, match=r"(?s)float64.*float32"):
        fm.flash_attention(*(q.double() for _ in range(3)))
