"""The instructions of compiled kernels: those of their family and dtype, and no others. No GPU."""

from __future__ import annotations

import re
from collections import Counter

from catalogue import (
    BACKWARD,
    BIAS_SUM,
    CATALOGUE,
    FAMILIES,
    FINISH,
    FORWARD,
    FP32_PRODUCTS,
    INFO,
    MOE_PRODUCTS,
    PAIRS,
    chip_of,
    dtype_of,
    needs_images,
    report,
)
from listed_kernels import (
    MOE_FEW,
    MOE_ROWS,
    SECOND_ROWS,
    SECOND_TILES,
    WITH_PRODUCTS,
    every_image,
    family_of,
    is_short,
    needs_cuobjdump,
    read_images,  # noqa: F401  an autouse fixture
)

pytestmark = needs_images
# What each fp32 kernel with products has, and what none of them has.
FP32_CODE = {
    "sm75": (("FFMA", "SHFL"), r"HMMA|LDGSTS"),
    "sm80": (("HMMA.1688.F32.TF32", "LDGSTS.E.BYPASS.128"), r"HMMA\.16816|HGMMA|UTMA|LDSM"),
}
# Tiles of tokens have warps that go their own ways.
PACKED = ("HMMA.16816", "LDSM", "UTMALDG")
# A bias that TMA cannot load.
BY_ROWS = re.compile("_(?:bias_rows|bias_float|mask)_")
# Products of experts that gather rows by token.
GATHERED = ("moe_up", "moe_bwd_act", "moe_bwd_weights")
SINGLE_NUMBERS = ("attention_combine", "attention_bwd_sinks", BIAS_SUM)  # what they write
# What several blocks do to the same memory in any order: only where grad_query is added up.
SHARED_SUMS = r"(?:RED|ATOM)[GS]?\."
COUNTING = ("moe_count", "moe_sort", "attention_paged_decode")
# What the other dtype looks like: in the name of a symbol, in PTX, in machine code. A product of
# fp16 numbers has no word for its type in machine code; one of bf16 numbers has. HFMA2.MMA without
# a type only loads constants.
FOREIGN = {
    "fp16": (r"bf16|BF16|bfloat", r"\.bf16", r"BF16"),
    "bf16": (
        r"fp16|FP16|float16(?<!bfloat16)",
        r"\.f16(?:x2)?\b",
        r"\.F16|\bH(?:ADD|MUL|SETP?|MNMX)2?\b(?!.*BF16)",
    ),
}


@needs_cuobjdump
@every_image
def test_no_dtype_in_the_image_of_another(image):
    """bf16 in an sm_75 image is the case that matters most: that chip has none."""
    dtype = dtype_of(image)
    if not dtype:  # copies bytes
        return
    if dtype in ("fp32", "tf32"):
        assert dtype in FP32_PRODUCTS[family_of(image)]
        for opcodes in report.opcodes(image).values():
            products = {opcode for opcode in opcodes if opcode.startswith("HMMA")}
            assert all(opcode.endswith("TF32") for opcode in products)
        return
    assert dtype in FAMILIES[family_of(image)].dtypes
    in_names, in_ptx, in_code = FOREIGN[dtype]
    if "_fp8_" in image.name and dtype == "bf16":  # an fp8 cache becomes fp16 first
        return
    names = report.symbols(image)
    assert not [name for name in names if re.search(in_names, name)]
    for (kernel, chip), opcodes in report.opcodes(image).items():
        strangers = {opcode for opcode in opcodes if re.search(in_code, opcode)}
        assert not strangers, f"{kernel} for {chip}"
        # What comes from either half is multiplied in TF32 where it is differentiated twice.
        products = {
            opcode
            for opcode in opcodes
            if opcode.startswith(("HMMA", "HGMMA")) and "TF32" not in opcode
        }
        assert all(("BF16" in opcode) == (dtype == "bf16") for opcode in products)
    if chip_of(image) in FAMILIES[family_of(image)].ptx:
        assert ".entry" in report.ptx(image)
        assert not re.search(in_ptx, report.ptx(image))


def test_a_foreign_dtype_would_be_found():
    for dtype, (names, ptx, code) in {
        "fp16": ("a_bf16_d64", "cvt.rn.bf16x2.f32", "HMMA.16816.F32.BF16"),
        "bf16": ("a_fp16_d64", "cvt.rn.f16x2.f32", "F2FP.F16.F32.PACK_AB"),
    }.items():
        for pattern, text in zip(FOREIGN[dtype], (names, ptx, code), strict=True):
            assert re.search(pattern, text)
    assert re.search(FOREIGN["bf16"][2], "HADD2.F32"), "how fp16 becomes fp32"
    own = ("a_bf16_d64", "mma.f32.bf16.bf16.f32", "HMMA.16816.F32.BF16")
    for pattern, text in zip(FOREIGN["bf16"], own, strict=True):
        assert not re.search(pattern, text)
    own = ("a_fp16_d64", "mma.f32.f16.f16.f32", "F2FP.F16.F32.PACK_AB")
    for pattern, text in zip(FOREIGN["fp16"], own, strict=True):
        assert not re.search(pattern, text)


def strange_fp32_code(kernel: str, opcodes: Counter[str]) -> list[str]:
    wanted, foreign = FP32_CODE[CATALOGUE[kernel]["family"]]
    found = [f"has {x}" for x in opcodes if re.match(rf"(?:{foreign}|{SHARED_SUMS})", x)]
    products = CATALOGUE[kernel]["block_q"] > 0
    # A sum of pairs' derivatives adds up in place: its lanes have nothing to tell each other.
    if CATALOGUE[kernel]["role"] == "attention_second_bias_sum":
        wanted = [x for x in wanted if x != "SHFL"]
    lacks = [x for x in wanted if products and not any(code.startswith(x) for code in opcodes)]
    return found + [f"has no {x}" for x in lacks]


def strange_code(kernel: str, chip: str, opcodes: Counter[str]) -> list[str]:
    """What a kernel's instructions lack, or have and should not."""
    if CATALOGUE[kernel]["dtype"] == "float32":
        return strange_fp32_code(kernel, opcodes)
    role, family = CATALOGUE[kernel]["role"], FAMILIES[CATALOGUE[kernel]["family"]]

    def some(pattern: str) -> list[str]:
        return [opcode for opcode in opcodes if re.match(pattern, opcode)]

    if role in SECOND_ROWS + SECOND_TILES:  # the same bits in every run
        wanted = ["FFMA"]
        if CATALOGUE[kernel]["family"] == "sm80":
            # Scores are products of 16 bits. What is computed from them has TF32's 11; a sum of it
            # for a bias has no other product.
            bf16 = CATALOGUE[kernel]["dtype"] == "bfloat16"
            wanted = [r"HMMA\.16816\.F32" + (r"\.BF16$" if bf16 else "$")]
            wanted += [r"HMMA\.1688\.F32\.TF32"] * (role != "attention_second_bias_sum")
        found = [f"has {opcode}" for opcode in some(SHARED_SUMS)]
        products = [x for x in some("HMMA|HGMMA") if not re.match("|".join(wanted), x)]
        found += [f"has {opcode}" for opcode in products]
        return found + [f"has no {x}" for x in wanted if role in SECOND_TILES and not some(x)]
    short = is_short(*(CATALOGUE[kernel][x] for x in ("head_dim", "block_q", "block_k")))
    # Of short sequences dQ is computed after the others, and nobody adds it up.
    products = role in WITH_PRODUCTS or (short and role in FINISH)
    foreign = some(rf".*(?:{family.foreign})")
    # Over pages Hopper reads small tiles as Ampere does: its work is reading the cache.
    as_ampere = role in PAIRS and CATALOGUE[kernel]["family"] == "sm90"
    copies = role == "attention_paged_chunk"  # pages that the copy engine cannot load
    if BY_ROWS.search(kernel) or role in GATHERED or as_ampere or copies:
        foreign = [opcode for opcode in foreign if "LDGSTS" not in opcode]
    found = [f"has {opcode}" for opcode in foreign]
    packed = "_packed_" in kernel
    instructions = PACKED if packed else family.instructions
    if as_ampere:
        instructions = FAMILIES["sm80"].instructions
    wanted = [re.escape(prefix) for prefix in instructions if products]
    if BY_ROWS.search(kernel):  # in chunks, in the background
        wanted.append(r"LDGSTS\.E.*\.ZFILL")
    wanted += [r"LDGSTS\.E\.BYPASS\.128"] if copies else []
    hopper = CATALOGUE[kernel]["family"] == "sm90"
    if role in MOE_FEW:  # from global memory to the MMAs
        wanted += [r"HMMA\.16816", r"LDG\.E.*\.128"]
    elif hopper and role[:4] == "moe_":  # rows end anywhere: no copy engine stores
        wanted += [r"STG\.E\.128"] if role not in MOE_ROWS or role == "moe_combine" else []
        wanted += [r"LDGSTS\.E\.BYPASS\.128"] if role in GATHERED else []
    elif hopper and products:  # the copy engine stores, but for sums, which are single numbers
        wanted += [r"UTMASTG"] if role != BIAS_SUM and not as_ampere else []
    elif hopper:
        wanted += [r"STG\.E\.128"] if role == "attention_bias_align" else []
    elif "paged" in role:  # rows leave in pairs of columns
        wanted += []
    elif role not in (*SINGLE_NUMBERS, *MOE_ROWS) or role == "moe_combine":
        wanted.append(r"STG\.E\.128")
    if hopper and products:  # tickets are integers; only a backward pass adds numbers
        adds = role in BACKWARD and not packed and "_bwd_whole_" not in kernel
        found += [f"has {x}" for x in some(SHARED_SUMS + r".*F32") if not adds]
        # Where the compiler loses sight of warps being together, the main loop loses a tenth.
        divergent = sum(opcodes[x] for x in some(r"BRA\.DIV"))
        found += [f"has {divergent} BRA.DIV"] if role in FORWARD and divergent > 2 else []
        # Where a cluster begins and ends, for a ticket, for turns and for zeros; not in the main
        # loop, which took a fifth longer with one for each block that was done with.
        fences = sum(opcodes[x] for x in some(r"MEMBAR.*GPU"))
        found += [f"has {fences} MEMBAR.GPU"] if fences > 8 else []
    elif role in BACKWARD and not short:  # four numbers at once from Hopper on
        wanted.append(r"REDG?\.E\.ADD\.F32" + (r"x4\b" if chip == "sm_90" else r"\."))
    elif role in BACKWARD or role in COUNTING:  # tickets and counts are integers
        found += [f"has {opcode}" for opcode in some(SHARED_SUMS + r".*F32")]
    else:  # everything else has the same bits in every run
        found += [f"has {opcode}" for opcode in some(SHARED_SUMS)]
        if not products and role not in MOE_FEW:
            found += [f"has {opcode}" for opcode in some(r"HMMA|HGMMA")]
    return found + [f"has no {pattern}" for pattern in wanted if not some(pattern)]


@needs_cuobjdump
@every_image
def test_kernels_use_the_instructions_of_their_family(image):
    for (kernel, chip), opcodes in report.opcodes(image).items():
        assert not strange_code(kernel, chip, opcodes), f"{kernel} for {chip}"


def test_strange_code_would_be_found():
    def codes(text: str) -> Counter[str]:
        return Counter(text.split())

    kernels, short = (
        {
            (k["family"], k["role"]): name
            for name, k in CATALOGUE.items()
            if is_short(k["head_dim"], k["block_q"], k["block_k"]) == which
            and k["dtype"] != "float32"
        }
        for which in (False, True)
    )
    good = "HMMA.16816.F32 LDSM.16.M88.4 LDGSTS.E.BYPASS.128.ZFILL STG.E.128 BAR.RED.OR"
    if "sm80" in INFO["families"]:
        single, four = "RED.E.ADD.F32.FTZ.RN", "REDG.E.ADD.F32x4.FTZ.RN"
        for bias in ("", "_bias"):
            forward, backward = (kernels["sm80", f"attention_{x}{bias}"] for x in ("fwd", "bwd"))
            assert not strange_code(forward, "sm_80", codes(good))
            assert strange_code(forward, "sm_80", codes(good.replace("16816", "1688")))
            assert strange_code(forward, "sm_80", codes(good.replace("LDGSTS", "LDG")))
            assert strange_code(forward, "sm_80", codes(good + " RED.E.ADD.F32.FTZ.RN.STRONG.GPU"))
            atomic = " ATOMG.E.ADD.F32.FTZ.RN.STRONG.GPU"
            assert strange_code(forward, "sm_90", codes(good + atomic))
            assert strange_code(backward, "sm_80", codes(good))
            assert not strange_code(backward, "sm_80", codes(f"{good} {single}"))
            assert strange_code(backward, "sm_90", codes(f"{good} {single}"))
            assert not strange_code(backward, "sm_90", codes(f"{good} {four}"))
        total, finish = (kernels["sm80", role] for role in (BIAS_SUM, "attention_bwd_dq"))
        assert not strange_code(total, "sm_90", codes(good))
        assert not strange_code(total, "sm_90", codes(good.replace("STG.E.128", "STG.E.U16")))
        assert strange_code(total, "sm_90", codes(f"{good} {four}")), "the same bits in every run"
        assert strange_code(total, "sm_90", codes(good.replace("HMMA", "FFMA")))
        assert not strange_code(finish, "sm_90", codes("LDG.E.128 STG.E.128"))
        assert strange_code(finish, "sm_90", codes("HMMA.16816.F32 STG.E.128"))
        for role in ("attention_bwd", "attention_bwd_dq", "attention_bwd_bias_dq"):
            assert not strange_code(short["sm80", role], "sm_90", codes(good))
            assert strange_code(short["sm80", role], "sm_90", codes(f"{good} {four}"))
            assert strange_code(short["sm80", role], "sm_90", codes("LDG.E.128 STG.E.128"))
        for role in sum(MOE_PRODUCTS.values(), ()):
            assert not strange_code(kernels["sm80", role], "sm_90", codes(good))
            assert strange_code(kernels["sm80", role], "sm_90", codes(f"{good} {four}"))
            assert strange_code(kernels["sm80", role], "sm_90", codes(good.replace("HMMA", "FFMA")))
        count = kernels["sm80", "moe_count"]
        assert not strange_code(count, "sm_80", codes("LDG.E STG.E ATOMS.ADD"))
        assert strange_code(count, "sm_80", codes(f"LDG.E STG.E {single}"))
        assert strange_code(kernels["sm80", "moe_combine"], "sm_80", codes("LDG.E STG.E"))
        rows = kernels["sm80", "attention_bias_align"]
        assert not strange_code(rows, "sm_90", codes("LDG.E LDG.E.U16 STG.E.128"))
        assert strange_code(rows, "sm_90", codes("LDG.E.U16 STG.E.U16"))
        assert strange_code(rows, "sm_90", codes("HMMA.16816.F32 STG.E.128"))
        for role in SECOND_TILES:
            name, sum_of_bias = f"sm80_{role}_bf16", role == "attention_second_bias_sum"
            scores, tf32 = "HMMA.16816.F32.BF16 STG.E", "HMMA.1688.F32.TF32"
            both = scores if sum_of_bias else f"{scores} {tf32}"
            assert not strange_code(name, "sm_90", codes(both))
            assert bool(strange_code(name, "sm_90", codes(scores))) != sum_of_bias
            assert strange_code(name, "sm_90", codes(f"{tf32} STG.E"))
            assert strange_code(name, "sm_90", codes(f"{both} {single}"))
            assert strange_code(name, "sm_90", codes(f"{both} HMMA.16816.F32"))
            assert strange_code(name, "sm_90", codes("FFMA STG.E"))
        for product in FP32_PRODUCTS["sm80"]:
            forward = f"sm80_attention_fwd_{product}_d64_128x32"
            good32 = "HMMA.1688.F32.TF32 LDGSTS.E.BYPASS.128.ZFILL STG.E.64 BAR.RED.OR"
            assert not strange_code(forward, "sm_90", codes(good32))
            assert strange_code(forward, "sm_90", codes(good32 + " RED.E.ADD.F32.FTZ.RN"))
            assert strange_code(forward, "sm_90", codes(good32.replace("1688", "16816")))
            assert strange_code(forward, "sm_90", codes("FFMA LDGSTS.E.BYPASS.128"))
    if "sm75" in INFO["families"]:
        forward = kernels["sm75", "attention_fwd"]
        exact = "sm75_attention_fwd_fp32_d64_64x32"
        assert not strange_code(exact, "sm_75", codes("FFMA SHFL.IDX STG.E.64.SYS"))
        assert strange_code(exact, "sm_75", codes("FFMA SHFL.IDX HMMA.1688.F32"))
        assert strange_code(forward, "sm_75", codes(good))
        assert not strange_code(forward, "sm_75", codes("HMMA.1688.F32 LDSM.16 STG.E.128.SYS"))
    if "sm90" in INFO["families"]:
        hopper = " ".join((*FAMILIES["sm90"].instructions, "UTMASTG.4D"))
        names = [name for name in CATALOGUE if name.startswith("sm90_")]
        plain = {
            CATALOGUE[name]["role"]: name
            for name in names
            if not re.search("_packed_|_whole_", name) and not BY_ROWS.search(name)
        }
        for kernel in filter(BY_ROWS.search, names):
            assert strange_code(kernel, "sm_90", codes(hopper))
            copies = " LDGSTS.E.BYPASS.128.ZFILL"
            assert not strange_code(kernel, "sm_90", codes(hopper + copies))
        for role in ("attention_fwd", "attention_fwd_bias", "attention_bwd", "attention_bwd_bias"):
            kernel = plain[role]
            assert not strange_code(kernel, "sm_90", codes(hopper + 8 * " MEMBAR.ALL.GPU"))
            assert strange_code(kernel, "sm_90", codes(hopper + 9 * " MEMBAR.ALL.GPU"))
            assert strange_code(kernel, "sm_90", codes(hopper.replace("UTMASTG.4D", "")))
        tokens = " ".join((*PACKED, "UTMASTG.3D"))
        for which in ("_fwd_packed_", "_bwd_packed_fp16_d16_"):
            packed = next(name for name in names if which in name)
            assert not strange_code(packed, "sm_90", codes(tokens))
            assert strange_code(packed, "sm_90", codes(hopper))
            assert strange_code(packed, "sm_90", codes(tokens + " REDG.E.ADD.F32.FTZ.RN"))
        sums = " REDG.E.ADD.F32.FTZ.RN"  # of dQ, which a cluster with all of a head has complete
        assert not strange_code(plain["attention_bwd"], "sm_90", codes(hopper + sums))
        whole = next(name for name in names if "_bwd_whole_" in name)
        assert not strange_code(whole, "sm_90", codes(hopper))
        assert strange_code(whole, "sm_90", codes(hopper + sums))
        total = plain[BIAS_SUM]
        assert not strange_code(total, "sm_90", codes("HGMMA.64x64x16.F32 UTMALDG.4D STG.E.U16"))
        assert strange_code(total, "sm_90", codes("HMMA.16816.F32 UTMALDG.4D STG.E.U16"))
        assert strange_code(total, "sm_90", codes(hopper + " REDG.E.ADD.F32.FTZ.RN"))
        rows = plain["attention_bias_align"]
        assert not strange_code(rows, "sm_90", codes("LDG.E LDG.E.U16 STG.E.128"))
        assert strange_code(rows, "sm_90", codes("LDG.E.U16 STG.E.U16"))
        for role in sum(MOE_PRODUCTS.values(), ()):
            copies = " LDGSTS.E.BYPASS.128" if role in GATHERED else ""
            good = f"HGMMA.64x256x16.F32 UTMALDG.3D STG.E.128{copies}"
            assert not strange_code(plain[role], "sm_90", codes(good))
            assert strange_code(plain[role], "sm_90", codes(good.replace("HGMMA", "HMMA")))
            assert strange_code(plain[role], "sm_90", codes(good.replace("STG.E.128", "STG.E.U16")))
            assert strange_code(plain[role], "sm_90", codes(good + " REDG.E.ADD.F32.FTZ.RN"))
            other = good.replace(copies, "") if copies else good + " LDGSTS.E.BYPASS.128"
            assert strange_code(plain[role], "sm_90", codes(other))
