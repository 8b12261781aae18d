"""Plans of a mixture of experts for every chip. Asks the planner only: no GPU."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

import flashmoe_science as fm
from catalogue import CATALOGUE, MOE_PRODUCTS, needs_all_families
from test_plan_code import check_code

pytestmark = needs_all_families
CHIPS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# T, d, n, E, k: training, small layers, elements, few tokens, decoding, odd, nothing.
SHAPES = (
    (32768, 2048, 1024, 64, 8),
    (16384, 512, 256, 64, 4),
    (65536, 256, 512, 89, 1),
    (8192, 256, 128, 16, 2),
    (512, 2048, 768, 128, 8),
    (128, 2048, 768, 128, 8),
    (32, 2048, 768, 128, 8),
    (1, 2048, 768, 4096, 8),
    (300, 67, 133, 5, 2),
    (0, 64, 64, 4, 2),
    (64, 64, 64, 4, 0),
)


def arguments(shape, dtype=torch.float16, transposed=False, biases=True) -> dict:
    T, d, n, E, k = shape

    def empty(*sizes, dtype=dtype):
        return torch.empty(sizes, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

    def weights(rows, columns):
        return empty(E, columns, rows).mT if transposed else empty(E, rows, columns)

    named = {"x": empty(T, d), "gate_up": weights(2 * n, d), "down": weights(d, n)}
    named |= {"ids": empty(T, k, dtype=torch.int32), "weights": empty(T, k, dtype=torch.float32)}
    if biases:
        named |= {"up_bias": empty(E, 2 * n), "down_bias": empty(E, d)}
    return named


def launched(text: str) -> list[str]:
    return re.findall(r"^    (\S+): grid ", text, re.M)


def kernel_of(text: str) -> dict:
    return CATALOGUE[re.search(r"^  kernel +(\S+)$", text, re.M)[1]]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_has_code_for_its_plans(chip, backward):
    shared = {"sm_75": 64, "sm_86": 99, "sm_89": 99, "sm_120": 99, "sm_80": 163}.get(chip, 227)
    for shape, transposed in itertools.product(SHAPES, (False, True)):
        given = arguments(shape, transposed=transposed)
        text = fm.explain_moe(**given, device=chip, backward=backward)
        for name in check_code(text, chip):
            assert CATALOGUE[name]["shared_bytes"] <= shared * 1024, name
        T, d, n, E, k = shape
        whole = d % 8 == n % 8 == 0 and T * k > 0  # what TMA takes
        few = not backward and E <= T * k < 16 * E  # sm80 is faster
        hopper = "sm90" if whole and not few else "sm80"
        family = {"sm_75": "sm75", "sm_90": hopper}.get(chip, "sm80")
        assert kernel_of(text)["family"] == family


def test_launches_in_their_order():
    def roles(shape, **options) -> list[str]:
        text = fm.explain_moe(**arguments(shape), device="sm_90", **options)
        return [CATALOGUE[name]["role"] for name in launched(text)]

    sort, products = ["moe_count", "moe_scan", "moe_place"], ["moe_up", "moe_down", "moe_combine"]
    assert roles((30000, 64, 48, 5, 2)) == [*sort, *products]
    assert roles((300, 64, 48, 5, 2)) == ["moe_sort", *products]
    assert roles((8, 64, 48, 5, 2)) == ["moe_sort", *products]
    assert roles((2, 64, 48, 5, 2)) == ["moe_sort", "moe_few_up", "moe_few_down"]
    assert roles((8, 64, 48, 500, 2)) == [*sort, "moe_few_up", "moe_few_down"]
    backward = roles((300, 64, 48, 5, 2), backward=True)
    first = ["moe_bwd_prepare", "moe_bwd_act", "moe_down", "moe_combine"]
    assert backward == [
        *first,
        "moe_bwd_weights",
        "moe_bwd_bias",
        "moe_bwd_bias_sum",
        "moe_bwd_scale",
    ]


def test_weights_are_read_as_they_lie():
    """Up goes along (2n, d), dA across (d, n), dX across (2n, d); transposed, the other way."""
    for transposed in (False, True):
        given = arguments((300, 64, 48, 5, 2), transposed=transposed)
        up, down = launched(fm.explain_moe(**given, device="sm_90"))[1:3]
        assert ("_up_t_" in up) == ("_down_t_" in down) == transposed
        act, dx = launched(fm.explain_moe(**given, device="sm_90", backward=True))[1:3]
        assert ("_act_t_" in act) == ("_down_t_" in dx) == (not transposed)


@pytest.mark.parametrize(
    "shape, rows",
    [
        ((32768, 2048, 1024, 64, 8), 128),
        ((65536, 256, 512, 89, 1), 128),
        ((512, 2048, 768, 128, 8), 64),
        ((32, 2048, 768, 128, 8), 16),
        ((1, 2048, 768, 128, 8), 16),
        ((200, 64, 64, 1, 1), 16),
    ],
    ids=str,
)
def test_tiles_follow_the_rows_of_an_expert(shape, rows, monkeypatch):
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm80")
    assert kernel_of(fm.explain_moe(**arguments(shape), device="sm_90"))["block_q"] == rows


@pytest.mark.parametrize(
    "shape, tile",
    [
        ((32768, 2048, 1024, 64, 8), (128, 256)),
        ((16384, 512, 256, 64, 4), (128, 128)),
        ((512, 2048, 768, 128, 8), (128, 256)),
        ((512, 2048, 64, 128, 8), (128, 128)),
        ((128, 2048, 768, 128, 8), (16, 16)),
        ((129, 2048, 768, 128, 8), (128, 256)),
        ((64, 2048, 768, 128, 8), (8, 16)),
        ((1, 2048, 768, 128, 8), (8, 16)),
        ((200, 64, 64, 1, 1), (128, 128)),
    ],
    ids=str,
)
def test_tiles_of_hopper(shape, tile, monkeypatch):
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm90")
    kernel = kernel_of(fm.explain_moe(**arguments(shape), device="sm_90"))
    assert (kernel["family"], kernel["block_q"], kernel["block_k"]) == ("sm90", *tile)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pairs, rows", [(127, 0), (128, 1), (300, 2), (2047, 15), (2048, 16)])
def test_few_rows_an_expert_are_for_sm80(pairs, rows, dtype, transposed, monkeypatch):
    """From 1 to 15 of 128 experts, forward, unless a family or a tile is forced."""

    def plan(**options) -> tuple[str, str]:
        text = fm.explain_moe(**given, device="sm_90", **options)
        return kernel_of(text)["family"], text

    given = arguments((pairs, 2048, 768, 128, 1), dtype, transposed)
    family, text = plan()
    assert family == ("sm80" if 1 <= rows < 16 else "sm90")
    number = "1 row" if rows == 1 else f"{rows} rows"
    said = f"sm80's tiles of few rows stream the weights faster for {number} an expert"
    assert (f"sm90: passed over: {said}" in text) == (family == "sm80")
    assert plan(backward=True)[0] == "sm90"
    with monkeypatch.context() as patch:
        patch.setenv("FLASHMOE_TILE", "128x128")
        assert plan()[0] == "sm90"
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm90")
    assert plan()[0] == "sm90"


def test_few_rows_need_weights_in_rows():
    given = arguments((1, 2048, 768, 128, 8), transposed=True)
    assert kernel_of(fm.explain_moe(**given, device="sm_90"))["role"] == "moe_up"


def test_what_hopper_does_not_take():
    text = fm.explain_moe(**arguments((300, 64, 36, 5, 2)), device="sm_90")
    assert "sm90: passed over: takes widths that are multiples of 8, these are 64 and 36" in text
    text = fm.explain_moe(**arguments((0, 64, 48, 5, 2)), device="sm_90")
    assert "sm90: passed over: has nothing to do for a call without tokens" in text
    shared = arguments((300, 64, 48, 5, 2), biases=False)
    one = torch.empty(1, 96, 64, dtype=torch.float16, device="meta")
    text = fm.explain_moe(**{**shared, "gate_up": one.expand(5, 96, 64)}, device="sm_90")
    assert "sm90: passed over: TMA cannot read gate_up, whose stride 0 is 0" in text


def test_a_tile_can_be_forced(monkeypatch):
    for name, kernel in CATALOGUE.items():
        if kernel["role"] not in ("moe_up", "moe_few_up"):
            continue
        monkeypatch.setenv("FLASHMOE_TILE", f"{kernel['block_q']}x{kernel['block_k']}")
        monkeypatch.setenv("FLASHMOE_FAMILY", kernel["family"])
        dtype = getattr(torch, kernel["dtype"])
        given = arguments((300, 64, 48, 5, 2), dtype, transposed="_up_t_" in name)
        assert kernel_of(fm.explain_moe(**given, device="sm_90"))["name"] == name
    monkeypatch.setenv("FLASHMOE_TILE", "1x1")
    with pytest.raises(RuntimeError, match=r"FLASHMOE_TILE asks for 1x1; there are 128x64, 64x64"):
        fm.explain_moe(**arguments((300, 64, 48, 5, 2)), device="sm_90")


def test_what_is_refused(monkeypatch):
    given = arguments((300, 64, 48, 5, 2), torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"sm80: needs sm_80.*sm75: has no bfloat16.*\.cpu\(\)"):
        fm.explain_moe(**given, device="sm_75")
    with pytest.raises(
        RuntimeError, match=r"there are 9000 experts; CUDA kernels take at most 8192"
    ):
        fm.explain_moe(**arguments((4, 8, 8, 9000, 1)), device="sm_90")
    with pytest.raises(RuntimeError, match=r"x is float32; CUDA kernels take float16 and bfloat16"):
        fm.explain_moe(**arguments((4, 8, 8, 3, 1), torch.float32), device="sm_90")
    monkeypatch.setenv("FLASHMOE_FAMILY", "sm90")
    with pytest.raises(RuntimeError, match=r"sm90: takes widths that are multiples of 8"):
        fm.explain_moe(**arguments((300, 67, 133, 5, 2)), device="sm_90")
    with pytest.raises(RuntimeError, match=r"sm90: is for sm_90 alone, the device is sm_100"):
        fm.explain_moe(**given, device="sm_100")


def workspace(text: str) -> float:
    return float(re.search(r"^  workspace +(\S+) MiB$", text, re.M)[1])


def test_workspace_is_linear():
    """Forward: activations and y; backward: dh, weighted activations, dX, and at most 69 MB of
    sums on an H200, however many rows an expert has."""
    shape = 32768, 2048, 1024, 64, 8
    d, n, rows = 2048, 1024, 32768 * 8 * 2 / 2**20
    forward = workspace(fm.explain_moe(**arguments(shape), device="sm_90"))
    assert forward < 1.02 * rows * (n + d)
    backward = workspace(fm.explain_moe(**arguments(shape), device="sm_90", backward=True))
    assert backward < 1.05 * rows * (3 * n + d) + 70


def test_every_product_is_planned():
    """Nothing in the catalogue that no plan launches, aside from a tile that is to be forced and
    one for builds without sm80."""
    seen = set()
    for chip, shape, transposed, dtype in itertools.product(
        CHIPS, SHAPES, (False, True), (torch.float16, torch.bfloat16)
    ):
        if chip == "sm_75" and dtype == torch.bfloat16:
            continue
        given = arguments(shape, dtype, transposed)
        for backward in (False, True):
            seen |= set(launched(fm.explain_moe(**given, device=chip, backward=backward)))
    roles = {*sum(MOE_PRODUCTS.values(), ()), "moe_few_up", "moe_few_down"}
    products = {name for name, k in CATALOGUE.items() if k["role"] in roles}
    aside = "sm80.*_128x256|sm90_moe_few.*_16x16"
    assert not {name for name in products - seen if not re.match(aside, name)}
