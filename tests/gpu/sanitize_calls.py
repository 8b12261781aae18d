"""Which calls tests/gpu/sanitize.py makes: small ones that together reach every kernel."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from math import inf

import torch

import moe_oracle
import oracle
import pages
from dropped import with_dropout

DEVICE = os.environ.get("FLASHMOE_TEST_DEVICE", "cuda")  # "cpu" tries out the script itself


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x.to(DEVICE)


def rows_first(x: torch.Tensor) -> torch.Tensor:
    """(B, S, H, D) in memory."""
    return x.transpose(-3, -2).contiguous().to(DEVICE).transpose(-3, -2)


def rows_apart(x: torch.Tensor) -> torch.Tensor:
    """Aligned rows with room between them that nobody has written: initcheck sees who reads it."""
    pitch = (x.shape[-1] + 15) // 8 * 8
    wide = torch.empty(*x.shape[:-1], pitch, dtype=x.dtype, device=DEVICE)
    return wide[..., : x.shape[-1]].copy_(x)


def with_room(x: torch.Tensor) -> torch.Tensor:
    """Rows that begin anywhere, which sm90's kernels read by cp.async: it is told how many bytes of
    a row's last 16 to read. Room for all of them: see docs/kernels/sanitizers.md."""
    room = torch.empty(x.numel() + 16, dtype=x.dtype, device=DEVICE)
    return room[: x.numel()].view(x.shape).copy_(x)


def odd_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows that are not 16-byte aligned, and are copied."""
    wide = with_room(x.new_zeros(*x.shape[:-1], x.shape[-1] + 1))
    return wide[..., : x.shape[-1]].copy_(x)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().to(DEVICE).mT


@dataclass
class Bias:
    own: str = "bhqk"  # what it has for itself of batch, heads, queries, keys; ragged: heads or not
    wide: bool = False  # fp32
    layout: object = as_it_is
    masked: bool = False  # a third of it -inf, with a row that sees nothing
    mask: bool = False  # where it is not -inf, in bytes

    def values(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        bias = torch.randn(shape).to(torch.float32 if self.wide else dtype)
        if self.masked:
            hidden = torch.rand(shape) < 0.3
            if shape[-2] > 1:
                hidden[..., shape[-2] // 2, :] = True
            bias = bias.masked_fill(hidden, -inf)
        return bias != -inf if self.mask else bias

    def __str__(self) -> str:
        flags = ("fp32 " if self.wide else "") + ("masked " if self.masked else "")
        flags += "mask " if self.mask else ""
        return f"bias {self.own} {flags}{self.layout.__name__}"


@dataclass
class Call:
    d: int
    heads: tuple[int, int] = (2, 1)
    lengths: tuple[int, int] = (0, 0)
    dv: int = 0  # 0: as d
    lead: tuple[int, ...] = (1,)
    key_lengths: tuple[int, ...] = ()
    ragged: tuple[tuple[int, int], ...] = ()
    layout: object = as_it_is
    needs: str = "qkvbs"
    bias: Bias | None = None
    sinks: torch.dtype | None = None
    options: dict = field(default_factory=dict)
    dropout: float = 0.0
    in_order: bool | None = None  # of its sums; None: as its turn is

    def case(self, dtype: torch.dtype, deterministic: bool) -> oracle.Case:
        """On the CPU."""
        (hq, hk), (n, m), dv = self.heads, self.lengths, self.dv or self.d
        if self.ragged:
            # A token behind the last sequence on either side.
            n, m = (1 + sum(pair[side] for pair in self.ragged) for side in (0, 1))
            shapes = ((n, hq, self.d), (m, hk, self.d), (m, hk, dv), (n, hq, dv))
        else:
            lead = self.lead
            shapes = ((hq, n, self.d), (hk, m, self.d), (hk, m, dv), (hq, n, dv))
            shapes = tuple((*lead, *shape) for shape in shapes)
        tensors = [torch.randn(shape).to(dtype) for shape in shapes]
        case = oracle.Case(*tensors, grad_lse=torch.randn(shapes[0][:-1]), needs=self.needs)
        case.options = dict(self.options)
        case.deterministic = deterministic if self.in_order is None else self.in_order
        if self.key_lengths:
            case.key_lengths = torch.tensor(self.key_lengths, dtype=torch.int32)
        if self.ragged:
            case.cu_q, case.cu_k = (
                torch.tensor([0, *(pair[side] for pair in self.ragged)]).cumsum(0).int()
                for side in (0, 1)
            )
            case.max_q, case.max_k = (max(pair[side] for pair in self.ragged) for side in (0, 1))
        if self.bias and self.ragged:
            pairs = sum(rows * keys for rows, keys in self.ragged)
            case.bias = self.bias.values((pairs, hq if "h" in self.bias.own else 1), dtype)
        elif self.bias:
            full = {"b": self.lead, "h": (hq,), "q": (n,), "k": (m,)}
            sizes = (
                size if dim in self.bias.own else (1,) * len(size) for dim, size in full.items()
            )
            case.bias = self.bias.values(sum(sizes, ()), dtype)
        if self.sinks:
            case.sinks = torch.randn(hq).to(self.sinks)
        return with_dropout(case, self.dropout) if self.dropout else case

    def __str__(self) -> str:
        what = f"ragged {self.ragged}" if self.ragged else f"{self.lengths[0]} x {self.lengths[1]}"
        dims = f"d{self.d}" + (f"/{self.dv}" if self.dv else "")
        more = f"{self.bias or ''} {'sinks' if self.sinks else ''}"
        more += f" dropout {self.dropout}" if self.dropout else ""
        return f"{dims} {what} {self.options or ''} {self.layout.__name__} {more}"


CAUSAL = {"causal": True}
SHORT = tuple((1 + i % 37, 1 + i % 37) for i in range(60))
MIXED = ((17, 17), (0, 5), (70, 33), (1, 1), (3, 0))

# Each runs in every family and dtype; every other one deterministically.
CALLS = [
    # The large forward tile needs more than 64 rows and blocks for all SMs: many heads.
    Call(64, (150, 75), (129, 65), lead=(2,), options=CAUSAL, needs=""),
    Call(128, (160, 160), (66, 31), needs="q"),
    Call(32, (160, 80), (70, 65), options={"window": (9, 3)}, needs="k"),
    Call(96, (160, 160), (66, 31), options=CAUSAL, needs=""),
    Call(256, (160, 160), (66, 31), needs=""),
    # The small one, edge lengths, every bucket of head dims.
    Call(8, (2, 2), (1, 1)),
    Call(16, (4, 2), (65, 129), lead=(2,), options=CAUSAL),
    Call(24, (2, 1), (63, 64), layout=rows_apart),
    Call(32, (2, 1), (64, 63), options=CAUSAL),
    Call(48, (4, 1), (97, 130), layout=rows_first, options=CAUSAL),
    Call(64, (2, 2), (130, 64), layout=rows_apart, options={"scale": 0.0}),
    Call(96, (2, 1), (33, 100), options=CAUSAL),
    Call(128, (2, 1), (127, 129), layout=rows_first, options={"scale": -0.2}),
    Call(160, (2, 1), (40, 65), options=CAUSAL),
    Call(256, (2, 1), (70, 65)),
    # Dims that are copied, and value dims of their own.
    Call(20, (2, 1), (31, 70), options=CAUSAL),
    Call(1, (1, 1), (17, 33), dv=3),
    Call(64, (2, 1), (65, 40), dv=24, layout=odd_rows),
    Call(40, (2, 1), (65, 40), dv=128),
    # Masks, lengths, softcap.
    Call(64, (2, 1), (130, 140), options={"window": (20, 5)}),
    Call(32, (4, 2), (70, 200), lead=(4,), key_lengths=(0, 1, 65, 200), options=CAUSAL),
    Call(48, (2, 1), (66, 66), options={"softcap": 3.0, "causal": True}),
    Call(64, (2, 1), (90, 3), options=CAUSAL),
    Call(64, (2, 1), (65, 0)),
    Call(64, (2, 1), (0, 65)),
    Call(32, (2, 1), (30, 40), lead=(2, 3), options=CAUSAL),
    # Few queries over many keys: split, with empty splits among them.
    Call(64, (4, 2), (1, 2000)),
    Call(128, (8, 2), (1, 1025), options=CAUSAL),
    Call(64, (2, 1), (3, 1500), lead=(3,), key_lengths=(0, 70, 1500), needs="q"),
    Call(32, (2, 1), (4, 1500), options={"window": (100, 0)}, needs="v"),
    # Ragged.
    Call(32, (2, 1), ragged=MIXED),
    Call(64, (4, 2), ragged=MIXED, options=CAUSAL),
    Call(128, (2, 1), ragged=((65, 129), (2, 2)), options={"window": (30, 0)}),
    Call(20, (2, 2), ragged=MIXED, options={"softcap": 5.0}),
    Call(256, (2, 1), ragged=((5, 40), (33, 7)), options=CAUSAL),
    # A bias, in every bucket: one for each score, whose gradient the pass itself writes, and one
    # that is shared, whose gradient is summed. Keys in whole chunks of 16 bytes, in parts, or odd.
    Call(16, (2, 1), (65, 72), bias=Bias(masked=True), options=CAUSAL),
    Call(8, (2, 2), (33, 67), lead=(3,), bias=Bias("hqk")),
    Call(32, (4, 2), (70, 129), bias=Bias(wide=True), options={"softcap": 5.0}),
    Call(24, (2, 1), (66, 80), lead=(2, 2), bias=Bias("bqk", layout=rows_apart, masked=True)),
    Call(48, (2, 1), (17, 131), lead=(2,), bias=Bias(layout=rows_apart), options=CAUSAL),
    Call(40, (4, 2), (70, 65), bias=Bias("qk", wide=True, layout=transposed), options=CAUSAL),
    Call(64, (2, 2), (130, 96), bias=Bias(layout=transposed, masked=True)),
    Call(64, (2, 1), (65, 136), lead=(3,), bias=Bias("hqk"), key_lengths=(0, 70, 136)),
    Call(96, (2, 1), (33, 100), bias=Bias(layout=odd_rows), options={"window": (20, 5)}),
    Call(80, (2, 1), (70, 64), lead=(2,), bias=Bias("hk", masked=True), options={"softcap": 3.0}),
    Call(128, (2, 1), (40, 65), lead=(2,), bias=Bias(wide=True, layout=rows_apart, masked=True)),
    Call(128, (4, 2), (66, 72), bias=Bias("bq"), options=CAUSAL),
    Call(192, (2, 1), (33, 40), bias=Bias(layout=rows_apart), options={"softcap": 4.0}),
    Call(160, (2, 1), (35, 67), lead=(2,), bias=Bias("hqk", layout=odd_rows), options=CAUSAL),
    Call(256, (2, 1), (34, 33), bias=Bias(masked=True)),
    Call(200, (2, 2), (33, 48), lead=(2,), bias=Bias("", wide=True)),
    # Few tiles of a gradient that many share: several blocks for each, and a sum of theirs.
    Call(32, (4, 2), (40, 72), lead=(24,), bias=Bias("qk", masked=True)),
    Call(128, (2, 1), (70, 300), lead=(4,), bias=Bias("", wide=True), needs="b"),
    # Without its gradient, or with nothing else; a value dim of its own; nothing to do.
    Call(64, (2, 1), (66, 88), bias=Bias(layout=rows_apart), needs="qkv"),
    Call(64, (2, 1), (66, 67), lead=(2,), bias=Bias("hqk"), needs="kv"),
    Call(32, (2, 1), (66, 88), lead=(2,), bias=Bias("hqk"), needs="b"),
    Call(20, (2, 1), (40, 24), dv=64, bias=Bias(), needs="b"),
    Call(64, (2, 1), (65, 0), bias=Bias("hq")),
    Call(64, (2, 1), (0, 65), bias=Bias("hk")),
    # Few queries, split.
    Call(64, (4, 2), (1, 2000), bias=Bias(), needs=""),
    Call(128, (2, 1), (3, 1501), bias=Bias("hk", wide=True), options=CAUSAL, needs=""),
    # Packed.
    Call(32, (4, 2), ragged=MIXED, bias=Bias("h", masked=True), options=CAUSAL),
    Call(64, (2, 1), ragged=MIXED, bias=Bias("")),
    Call(128, (2, 2), ragged=((65, 72), (2, 3), (8, 8)), bias=Bias("h", wide=True)),
    Call(20, (2, 1), ragged=MIXED, bias=Bias("", layout=rows_apart), options={"softcap": 5.0}),
    Call(256, (2, 1), ragged=((5, 40), (33, 7)), bias=Bias("h", layout=transposed), needs="qkv"),
    # Sinks: rows without keys, one query's heads as rows, split keys, sums in parts.
    Call(64, (4, 2), (90, 30), options=CAUSAL, sinks=torch.float32),
    Call(128, (8, 2), (1, 1025), sinks=torch.float32),
    Call(32, (2, 1), (3, 1500), lead=(3,), key_lengths=(0, 70, 1500), sinks=torch.float32),
    Call(16, (3, 3), (70, 33), lead=(20,), bias=Bias(masked=True), sinks=torch.float32),
    Call(48, (4, 2), ragged=MIXED, sinks=torch.float32, needs="s"),
    # Masks in bytes: by words, byte by byte, along a row and across, broadcast, packed.
    Call(64, (4, 2), (130, 136), bias=Bias(mask=True, masked=True), options=CAUSAL),
    Call(32, (2, 1), (65, 131), lead=(2,), bias=Bias("bqk", mask=True, masked=True)),
    Call(128, (2, 1), (70, 67), bias=Bias(mask=True, masked=True, layout=odd_rows)),
    Call(16, (2, 2), (66, 80), bias=Bias(mask=True, masked=True, layout=transposed)),
    Call(96, (2, 1), (33, 100), bias=Bias("k", mask=True, masked=True), options={"softcap": 3.0}),
    Call(256, (2, 1), (34, 33), bias=Bias("q", mask=True, masked=True)),
    Call(64, (2, 1), ragged=MIXED, bias=Bias("", mask=True, masked=True)),
    Call(32, (2, 2), ragged=SHORT, bias=Bias("h", mask=True, masked=True)),
    # Dropout: every head dim it has, with and without a bias and its sum, few queries.
    Call(64, (4, 2), (200, 257), options=CAUSAL, dropout=0.1),
    Call(64, (2, 1), (130, 136), lead=(2,), bias=Bias("hqk", masked=True), dropout=0.5),
    Call(64, (2, 1), (66, 67), bias=Bias(mask=True, masked=True), dropout=0.5),
    Call(20, (2, 1), (65, 40), bias=Bias(layout=odd_rows), dropout=0.3),
    Call(32, (2, 2), (70, 129), bias=Bias("", wide=True), options={"window": (20, 5)}, dropout=0.5),
    Call(128, (2, 1), (130, 131), dropout=0.5),
    Call(96, (2, 1), (70, 200), lead=(3,), key_lengths=(0, 129, 200), dropout=0.9),
    Call(256, (2, 1), (70, 65), bias=Bias(), options={"softcap": 3.0, "causal": True}, dropout=0.2),
    Call(160, (2, 1), (35, 67), lead=(2,), bias=Bias("hqk"), dropout=1.0),
    Call(64, (4, 2), (1, 2000), dropout=0.4),
    Call(64, (2, 1), ragged=MIXED, bias=Bias("h"), options=CAUSAL, dropout=0.4),
    Call(128, (2, 1), ragged=((65, 129), (2, 2)), bias=Bias(""), dropout=0.4),
    Call(32, (2, 2), ragged=SHORT, sinks=torch.float32, dropout=0.4),
    # Many short sequences, which have tiles of their own.
    Call(64, (2, 2), (31, 17), lead=(270,), options=CAUSAL),
    Call(32, (2, 2), (20, 31), lead=(270,), bias=Bias(masked=True)),
    Call(20, (2, 2), (32, 32), lead=(270,), bias=Bias(wide=True), options={"softcap": 5.0}),
    Call(16, (2, 2), ragged=SHORT),
    Call(64, (2, 2), ragged=SHORT, bias=Bias("h", masked=True)),
    Call(48, (4, 2), ragged=SHORT, bias=Bias("h"), options=CAUSAL),
]

# In fp32, of sm80 with three TF32 products and with one: every head dim of its own, with a bias and
# without, a gradient that is summed in parts, sinks, lists of a ragged batch.
FP32_CALLS = [
    Call(32, (4, 2), (130, 70), lead=(2,), options=CAUSAL),
    Call(20, (2, 1), (33, 97), layout=rows_apart, options={"window": (20, 5)}),
    Call(64, (2, 1), (129, 65), dv=40, sinks=torch.float32),
    Call(128, (2, 2), (66, 67), layout=rows_first, options={"softcap": 3.0}),
    Call(256, (2, 1), (70, 33), options=CAUSAL),
    Call(64, (8, 2), (1, 300), needs=""),
    Call(64, (2, 1), (65, 0)),
    Call(64, (2, 1), (70, 200), lead=(4,), key_lengths=(0, 1, 65, 200), options=CAUSAL),
    Call(64, (2, 1), (66, 131), bias=Bias(masked=True)),
    Call(32, (2, 1), (70, 65), lead=(3,), bias=Bias("hqk", layout=transposed)),
    Call(100, (2, 1), (65, 40), bias=Bias("bq", masked=True), options={"softcap": 4.0}),
    Call(256, (2, 2), (33, 34), lead=(2,), bias=Bias("hk"), options={"scale": -0.2}),
    Call(32, (4, 2), (40, 72), lead=(24,), bias=Bias("qk")),
    Call(64, (4, 2), ragged=MIXED, options=CAUSAL, sinks=torch.float32),
    Call(128, (2, 1), ragged=MIXED, bias=Bias("h", masked=True)),
    Call(32, (2, 1), ragged=MIXED, bias=Bias("")),
    Call(64, (4, 2), (130, 136), bias=Bias(mask=True, masked=True), options=CAUSAL),
    Call(32, (2, 1), (65, 131), lead=(2,), bias=Bias("bk", mask=True, masked=True)),
    Call(128, (2, 1), (66, 67), bias=Bias(mask=True, masked=True, layout=odd_rows)),
    Call(256, (2, 1), (34, 33), bias=Bias(mask=True, layout=transposed), options={"softcap": 3.0}),
    Call(64, (2, 1), ragged=MIXED, bias=Bias("h", mask=True, masked=True)),
    Call(64, (4, 2), (200, 257), options=CAUSAL, dropout=0.1),
    Call(32, (2, 1), (70, 65), lead=(3,), bias=Bias("hqk"), dropout=0.5),
    Call(128, (2, 1), (66, 131), bias=Bias(masked=True), options={"window": (50, 7)}, dropout=0.5),
    Call(256, (2, 1), (70, 33), bias=Bias("qk", mask=True, masked=True), dropout=0.9),
    Call(20, (4, 2), ragged=MIXED, bias=Bias(""), sinks=torch.float32, dropout=0.4),
]

# The sm90 family: a call to each kernel in each order of sums.
SEQUENCES = ((65, 65), (0, 3), (200, 130), (1, 1))
SM90_CALLS = [
    Call(64, (4, 2), (200, 300), lead=(2,), options=CAUSAL),
    Call(64, (2, 1), (257, 130), lead=(2,), options={"window": (50, 7)}),
    Call(96, (2, 1), (129, 257), layout=rows_first),
    Call(96, (3, 3), (200, 200), lead=(2,), options=CAUSAL),
    Call(128, (3, 3), (300, 300), lead=(9,), options={"window": (50, 7)}),
    Call(128, (2, 1), (70, 200), lead=(3,), key_lengths=(0, 129, 200)),
    Call(192, (2, 2), (65, 113), layout=rows_apart, options=CAUSAL),
    Call(192, (2, 1), (150, 200), options={"window": (-1, 30)}),
    Call(256, (2, 1), (130, 70), dv=200),
    Call(256, (4, 2), (200, 200), options=CAUSAL),
    Call(128, (16, 2), (5, 300), options=CAUSAL, needs=""),  # heads in a tile
    Call(64, (2, 1), (100, 200), options={"softcap": 3.0}),
    Call(200, (2, 1), (100, 200), options={"softcap": 3.0, "causal": True}),
    Call(64, (2, 1), ragged=SEQUENCES, options=CAUSAL),
    Call(128, (2, 2), ragged=SEQUENCES),
    Call(256, (2, 2), ragged=SEQUENCES, dv=100),
    Call(32, (2, 1), (200, 130), options=CAUSAL),
    Call(32, (2, 2), ragged=SEQUENCES),
    # Tiles of keys whose queries are shared out.
    Call(64, (8, 1), (700, 200), options=CAUSAL),
    Call(96, (8, 1), ragged=((500, 500), (9, 3), (70, 200))),
    Call(128, (8, 2), (600, 300), lead=(2,), key_lengths=(300, 70)),
    Call(256, (8, 1), (500, 200), options={"window": (-1, 30)}),
    # A bias: its gradient by TMA and number by number, tiles that a mask hides, more heads than
    # keys' heads, keys' lengths, and none of its gradient.
    Call(32, (4, 2), (130, 264), lead=(2,), bias=Bias(masked=True), options=CAUSAL),
    Call(32, (2, 2), (65, 131), bias=Bias(layout=with_room)),
    Call(64, (2, 1), (200, 200), lead=(2,), bias=Bias(masked=True)),
    Call(64, (2, 1), (130, 257), bias=Bias(layout=odd_rows), options={"window": (50, 7)}),
    Call(64, (2, 2), (129, 136), bias=Bias(layout=transposed), options=CAUSAL),
    Call(96, (2, 1), (70, 200), lead=(3,), bias=Bias(), key_lengths=(0, 129, 200)),
    Call(128, (2, 2), (200, 264), bias=Bias(layout=rows_apart), options=CAUSAL),
    Call(128, (4, 2), (65, 300), lead=(2,), bias=Bias(masked=True)),
    Call(64, (2, 1), (130, 200), bias=Bias(), needs="qkv"),
    Call(64, (2, 1), (130, 200), bias=Bias(), needs="b"),
    # Masks in bytes, whose rows begin anywhere.
    Call(32, (4, 2), (130, 264), lead=(2,), bias=Bias(mask=True, masked=True), options=CAUSAL),
    Call(64, (2, 1), (200, 257), bias=Bias(mask=True, masked=True, layout=with_room)),
    Call(64, (2, 2), (129, 131), lead=(2,), bias=Bias("qk", False, with_room, True, True)),
    Call(64, (2, 1), (130, 261), lead=(2,), bias=Bias("bk", False, with_room, True, True)),
    Call(96, (2, 1), (70, 200), lead=(3,), bias=Bias(mask=True), key_lengths=(0, 129, 200)),
    Call(128, (4, 2), (65, 300), bias=Bias(mask=True, masked=True, layout=odd_rows)),
    # Sinks, also where heads share a tile, and after the last sequence.
    Call(128, (16, 2), (5, 300), options=CAUSAL, sinks=torch.float32),
    Call(64, (2, 1), ragged=SEQUENCES, sinks=torch.float32),
    Call(16, (6, 6), ragged=SHORT, sinks=torch.float32),
    # Many short sequences, packed.
    Call(16, (6, 6), ragged=SHORT),
    Call(32, (2, 2), ragged=SHORT, options={"window": (9, 3)}),
    Call(48, (4, 2), ragged=SHORT, options=CAUSAL),
    # With a bias, whose heads are read together and one by one.
    Call(16, (8, 8), ragged=SHORT, bias=Bias("h", masked=True)),
    Call(16, (6, 6), ragged=SHORT, bias=Bias("h", masked=True)),
    Call(32, (2, 2), ragged=SHORT, bias=Bias("h")),
    Call(64, (2, 2), ragged=SHORT, bias=Bias("h")),
    # More tasks than SMs, by tiles of 80 queries.
    Call(128, (24, 24), (80, 256), lead=(3,)),
    Call(96, (24, 24), (160, 256), lead=(3,), options=CAUSAL),
    # More tasks than SMs forward, some of which skip keys, and a warp that looks at keys backward.
    Call(64, (140, 140), (200, 264), options=CAUSAL),
    # Two CTAs, and many tasks for each.
    Call(256, (24, 24), (130, 1536), options=CAUSAL),
    # dQ that begins with zeros, which the heads before have written: of 24 heads 12 are in a wave.
    Call(128, (24, 24), (160, 3072), options=CAUSAL, in_order=False),
    # Pairs of key heads, one down the queries and one up.
    Call(128, (180, 36), (160, 1536), options=CAUSAL, in_order=False),
    # All of a head in one CTA, and in two, of which one has no keys or sees no queries.
    Call(64, (3, 3), (200, 128), lead=(2,)),
    Call(32, (2, 2), (65, 100), options=CAUSAL, layout=rows_first),
    Call(24, (2, 2), (256, 256), options=CAUSAL),
    Call(64, (2, 2), (256, 200), options=CAUSAL),
    Call(40, (3, 3), (130, 256), dv=64, layout=rows_first, options={"window": (50, 7)}),
    Call(64, (2, 2), (200, 130), options={"window": (-1, 5)}, needs="q"),
    Call(32, (2, 2), (200, 256), lead=(4,), key_lengths=(0, 70, 129, 256)),
    Call(64, (2, 2), (100, 256), lead=(3,), key_lengths=(0, 64, 200), options=CAUSAL),
]

# Differentiated twice, in families that have kernels for it: every kernel, one chunk of columns and
# several, tiles that end early on either side, biases of their own and shared, sums in parts.
SECOND_CALLS = [
    Call(64, (4, 2), (70, 45), lead=(2,), bias=Bias(masked=True), options=CAUSAL),
    Call(20, (2, 1), (33, 65), bias=Bias("hqk", wide=True), options={"softcap": 3.0}),
    Call(32, (2, 2), (40, 33), lead=(24,), bias=Bias("qk"), sinks=torch.float32),
    Call(200, (2, 1), (34, 31), dv=72, layout=rows_apart),
    Call(24, (2, 1), (31, 70), lead=(3,), key_lengths=(0, 33, 70), bias=Bias("hk"), needs="qb"),
    Call(72, (2, 1), (31, 40), dv=256, layout=rows_first, options={"window": (9, 3)}),
    Call(48, (4, 2), ragged=MIXED, bias=Bias("h", masked=True), options=CAUSAL),
    Call(16, (2, 1), ragged=MIXED, bias=Bias(""), sinks=torch.float32),
    Call(64, (2, 1), (65, 0), bias=Bias("hq")),
    Call(64, (2, 1), (0, 65), bias=Bias("hk")),
]


FP32 = {"sm80": ("fp32", "tf32"), "sm75": ("fp32",)}


@dataclass
class Experts:
    """A mixture of experts, with all its gradients."""

    shape: tuple[int, int, int, int, int]  # T, d, n, E, k
    activation: str = "swiglu"
    tile: str = ""  # forced
    layout: object = as_it_is
    biases: bool = True

    def case(self, dtype: torch.dtype, deterministic: bool) -> moe_oracle.Case:
        """On the CPU. Some pairs have no expert, and the last expert has no pair."""
        T, *_, E, k = self.shape
        ids = torch.randint(-1, max(E - 1, 1), (T, k))
        options = {"activation": self.activation, "biases": (self.biases, self.biases)}
        return moe_oracle.make(*self.shape, dtype=dtype, ids=ids, **options)

    def __str__(self) -> str:
        return f"experts {self.shape} {self.activation} {self.tile} {self.layout.__name__}"


# Each runs in every family and dtype that has its tile.
EXPERTS = [
    Experts((300, 136, 72, 4, 2), tile="128x128"),
    Experts((300, 136, 72, 4, 2), tile="128x256", layout=rows_apart),
    Experts((300, 136, 72, 4, 2), tile="128x64"),
    Experts((150, 80, 48, 3, 3), tile="64x64", layout=transposed),
    Experts((70, 144, 80, 9, 2), tile="16x64", layout=transposed),
    Experts((300, 144, 80, 4, 1), "geglu", "128x128", transposed),
    Experts((300, 144, 80, 4, 1), "gelu", "128x64", transposed),
    Experts((150, 67, 133, 3, 2), "relu", layout=odd_rows),
    Experts((150, 13, 31, 5, 1), "reglu"),
    Experts((2500, 40, 24, 2, 1), "silu", biases=False),
    Experts((1, 64, 40, 300, 8)),
    Experts((40, 64, 40, 50, 4)),
    Experts((0, 64, 40, 3, 2)),
]

# Over pages: few rows and many, chunks, splits, more items than CTAs, pages of any size.
OVER_PAGES = [
    pages.Problem(
        seed=i,
        dtype="float16",
        float8=float8,
        heads_q=8,
        heads_k=2,
        head_dim=d,
        head_dim_v=d,
        page=page,
        lengths=lengths,
    )
    for i, (d, float8, page, lengths) in enumerate(
        (
            (128, False, 16, ((1, 1500), (70, 200), (20, 33), (0, 9), (1, 1))),
            (128, False, 1, ((1, 600), (129, 300))),
            (128, False, 64, ((130, 200), (2, 300))),
            (64, False, 5, ((1, 40), (65, 65))),
            (256, False, 16, ((1, 600), (64, 130), (30, 31))),
            (512, False, 16, ((1, 300), (9, 40))),
            (128, True, 16, ((1, 1500), (70, 200), (1, 0))),
            (256, True, 1, ((1, 300), (9, 40))),
            # At most 8 rows.
            (64, False, 16, ((1, 600), (2, 40))),
            (128, False, 16, ((2, 900), (1, 1), (0, 5))),
            (128, True, 16, ((2, 900), (1, 1), (0, 5))),
            (256, False, 1, ((1, 300), (2, 40))),
            (512, True, 16, ((1, 300), (2, 40))),
        )
    )
]
# More items than have a CTA each, as far as the longest sequence tells. Few sequences: around the
# call torch goes through them one by one.
MANY_ITEMS = ((1, 2000), *((1, (70, 1, 0, 15)[i % 4]) for i in range(20)))
OVER_PAGES.append(replace(OVER_PAGES[0], seed=13, heads_q=32, heads_k=16, lengths=MANY_ITEMS))
