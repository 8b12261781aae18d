"""The yardstick: attention in plain torch, and how far from it the library may be.

`reference` evaluates the formula in float64 and lets autograd differentiate it. `math` evaluates
the same formula as the math backend of F.scaled_dot_product_attention does in the inputs' dtype.
`check` holds the library to twice the error of `math`. Nothing here shares a line with the library.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")
# Multiplications of scores up to which compare() works on the CPU. On a GPU that would be hundreds
# of launches of next to nothing, and processes that share one wait for each other at every launch.
SMALL = 1 << 25


@dataclass
class Case:
    """One call of attention with its tensors: dense, or ragged when `cu_q` is there."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor | None = None  # None: lse takes no part in the loss
    bias: torch.Tensor | None = None  # bool: a mask, which has no gradient
    key_lengths: torch.Tensor | None = None
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None
    max_q: int = 0
    max_k: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # causal, window, scale, softcap
    deterministic: bool | None = None
    needs: str = "qkvbs"  # which of q, k, v, bias and sinks want a gradient
    use_out: bool = True  # False: out takes no part in the loss, and grad_out is 0
    dropout: dict[str, Any] = field(default_factory=dict)  # dropout_p and seed, and of these:
    kept: Any = None  # what each weight is multiplied by, (..., Hq, Sq, Sk); ragged: a list of them
    sinks: torch.Tensor | None = None
    of_gpu: bool | None = None  # whether results come from a GPU; None: as the tensors are

    @property
    def is_of_gpu(self) -> bool:
        return self.q.is_cuda if self.of_gpu is None else self.of_gpu

    def inputs(self) -> dict[str, torch.Tensor]:
        """What has a gradient."""
        bias = None if is_mask(self.bias) else self.bias
        named = {"q": self.q, "k": self.k, "v": self.v, "bias": bias, "sinks": self.sinks}
        return {name: x for name, x in named.items() if x is not None}

    def wants(self, name: str) -> bool:
        return name[0] in self.needs


def on_the_cpu(case: Case) -> Case:
    def moved(x):
        if isinstance(x, list):
            return [moved(one) for one in x]
        return x.cpu() if isinstance(x, torch.Tensor) else x

    values = {one.name: moved(getattr(case, one.name)) for one in fields(case)}
    return replace(case, **values | {"of_gpu": case.is_of_gpu})


def is_small(case: Case, most: int = SMALL) -> bool:
    longest = case.k.shape[-2] if case.cu_q is None else case.max_k or case.k.shape[0]
    return max(case.q.numel() * longest, case.k.numel()) <= most


def is_mask(bias: torch.Tensor | None) -> bool:
    return bias is not None and bias.dtype == torch.bool


def allowed_keys(len_q, len_k, lengths, causal, window) -> torch.Tensor:
    """(..., len_q, len_k) truth: row i sits at key position p = i + L - len_q."""
    j = torch.arange(len_k, device=lengths.device)
    p = torch.arange(len_q, device=lengths.device)[:, None] + lengths - len_q
    left, right = window if window is not None else (-1, -1)
    ok = (j < lengths).expand(*p.shape[:-1], len_k)
    if causal:
        ok = ok & (j <= p)
    if left >= 0:
        ok = ok & (j >= p - left)
    if right >= 0:
        ok = ok & (j <= p + right)
    return ok


def attention(
    q,
    k,
    v,
    bias=None,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    key_lengths=None,
    sinks=None,
    contain=False,
    kept=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, every product in the dtype of q; softmax of half types in float32, as torch's.

    Without v the weights take the place of out. `kept` multiplies them, after lse is known.

    `contain` multiplies element by element and leaves masked pairs out of every product, so that a
    NaN behind a mask stays there (0 * NaN is NaN), in the gradients too. Costs Sq * Sk * D memory.
    """
    len_q, len_k, group = q.shape[-2], k.shape[-2], q.shape[-3] // k.shape[-3]
    k, v = (x if x is None else x.repeat_interleave(group, dim=-3) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    lengths = torch.tensor(len_k) if key_lengths is None else key_lengths.long()
    lengths = lengths.to(q.device)
    lengths = lengths.expand(q.shape[:-3])[..., None, None, None]
    ok = allowed_keys(len_q, len_k, lengths, causal, window)
    ok = ok.expand(*q.shape[:-2], len_q, len_k)
    if is_mask(bias):
        ok, bias = ok & bias, None
    elif bias is not None:
        ok = ok & (bias != -torch.inf)

    if contain:
        pair = ok[..., None]
        scores = (q[..., :, None, :].where(pair, 0) * k[..., None, :, :].where(pair, 0)).sum(-1)
    else:
        scores = q @ k.mT
    scores = scores * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()

    # Masked scores are replaced before exp, never multiplied by 0 after it; a row without keys
    # divides by 1. So no branch of the gradient meets inf or NaN that the inputs did not have.
    # A sink is one more score, whose weight is dropped.
    seen = ok.any(-1, keepdim=True)
    top = scores.detach().masked_fill(~ok, -torch.inf)
    top = top.amax(-1, keepdim=True) if len_k else top.new_full(seen.shape, -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None]
        there = sink != -torch.inf
        seen, top = seen | there, torch.maximum(top, sink.detach())
    top = top.where(seen, 0)
    weights = torch.exp((scores - top).where(ok, 0)).where(ok, 0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp((sink - top).where(there, 0)).where(there, 0)
    total = total.where(seen, 1)
    lse = (top + total.log()).where(seen, -torch.inf).squeeze(-1)
    p = (weights / total).to(q.dtype)
    if kept is not None:
        p, ok = (p * kept.to(p.dtype)).where(kept != 0, 0), ok & (kept != 0)
    if v is None:
        out = p
    elif contain:
        out = (p.where(ok, 0)[..., None] * v[..., None, :, :].where(ok[..., None], 0)).sum(-2)
    else:
        out = p @ v
    return out, lse


def sequences(cu_q, cu_k, q, k, v, bias, *rows):
    """A ragged batch as dense problems of batch size 1; `rows` are more tensors shaped like q."""
    start = 0
    for (q0, q1), (k0, k1) in zip(spans(cu_q), spans(cu_k), strict=True):
        dense = [x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1])]
        pairs = (q1 - q0) * (k1 - k0)
        packed = None if bias is None else bias[start : start + pairs]
        if packed is not None:
            packed = packed.reshape(q1 - q0, k1 - k0, bias.shape[1]).permute(2, 0, 1)[None]
        start += pairs
        yield *dense, packed, *(x[q0:q1].transpose(0, 1)[None] for x in rows)


def spans(cu_seqlens: torch.Tensor) -> list[tuple[int, int]]:
    ends = cu_seqlens.tolist()
    return list(pairwise(ends))


def attention_varlen(q, k, v, bias, cu_q, cu_k, kept=None, **options):
    """One sequence after the other. Tokens behind the last sequence give 0 and -inf."""
    kept = [None] * (len(cu_q) - 1) if kept is None else kept
    every = zip(sequences(cu_q, cu_k, q, k, v, bias), kept, strict=True)
    parts = [attention(*one, kept=pairs, **options) for one, pairs in every]
    rest = (q.shape[0] - int(cu_q[-1]), q.shape[1])
    outs = [out[0].transpose(0, 1) for out, _ in parts] + [q.new_zeros(*rest, v.shape[-1])]
    lses = [lse[0].transpose(0, 1) for _, lse in parts] + [q.new_full(rest, -torch.inf)]
    return torch.cat(outs), torch.cat(lses)


def call(case: Case, tensors: dict[str, torch.Tensor], **extra):
    """The formula above applied to a case, with `tensors` in place of the case's own inputs."""
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    bias = tensors.get("bias", case.bias)
    options = {**case.options, "sinks": tensors.get("sinks"), **extra, "kept": case.kept}
    if case.cu_q is None:
        return attention(q, k, v, bias, key_lengths=case.key_lengths, **options)
    return attention_varlen(q, k, v, bias, case.cu_q, case.cu_k, **options)


def differentiate(case: Case, leaves, out, lse) -> dict[str, torch.Tensor]:
    """Gradients by name, of the inputs the case wants them for."""
    outputs, grads = [], []
    if case.use_out:
        outputs, grads = [out], [case.grad_out.to(out.dtype)]
    if case.grad_lse is not None:
        outputs, grads = [*outputs, lse], [*grads, case.grad_lse.to(lse.dtype)]
    names = [name for name in leaves if case.wants(name)]
    wanted = [leaves[name] for name in names]
    if wanted and all(x.requires_grad for x in outputs):
        values = torch.autograd.grad(
            outputs, wanted, grads, allow_unused=True, materialize_grads=True
        )
    else:  # nothing wanted, or a batch of no sequences
        values = [torch.zeros_like(leaf) for leaf in wanted]
    return {f"d{name}": value for name, value in zip(names, values, strict=True)}


def reference(case: Case, contain=False) -> dict[str, torch.Tensor]:
    """Everything the case asks for, in float64 from the first step to the last."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in case.inputs().items()}
    out, lse = call(case, leaves, contain=contain)
    grads = differentiate(case, leaves, out, lse)
    return {"out": out.detach(), "lse": lse.detach(), **grads}


def math(case: Case) -> dict[str, torch.Tensor]:
    """As SDPA's math backend in the inputs' own dtype: every product rounded to it.

    (By default that backend works in float32 for the half types and rounds once at the end; with
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True) it works as here. The same dtype is
    what we compare with: products of 16-bit numbers are what matrix units have.) Only for lse,
    made of sums that everyone keeps in float32, is the comparison with float32 throughout.
    Where torch allows TF32, products are of TF32.
    """
    fp32_on_a_gpu = case.is_of_gpu and case.q.dtype == torch.float32
    allowed = fp32_on_a_gpu and torch.get_float32_matmul_precision() != "highest"
    with Tf32Products() if allowed else nullcontext():
        leaves = {name: x.detach().clone().requires_grad_() for name, x in case.inputs().items()}
        out, lse = call(case, leaves)
        grads = differentiate(case, leaves, out, lse)
        wide = torch.promote_types(case.q.dtype, torch.float32)
        with torch.no_grad():
            _, lse = call(case, {name: x.to(wide) for name, x in leaves.items()})
        return {"out": out.detach(), "lse": lse, **grads}


class Tf32Products(TorchDispatchMode):
    """Products of TF32, whatever their shape. Torch's own are of fp32 where it thinks these faster,
    and then tell nothing about TF32."""

    @staticmethod
    def round(x: torch.Tensor) -> torch.Tensor:
        bits = (x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF
        return bits.view(torch.float32).double()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            return func(*(self.round(x) for x in args)).float()
        return func(*args, **(kwargs or {}))


def ours(case: Case) -> dict[str, torch.Tensor]:
    """What the library says, through its public functions; the inputs keep their strides."""
    import flashmoe_science as fm

    leaves = {
        name: x.detach().requires_grad_(case.wants(name)) for name, x in case.inputs().items()
    }
    bias = leaves.get("bias", case.bias)
    extra = {**case.options, **case.dropout, "sinks": leaves.get("sinks")}
    extra |= {"return_lse": True, "deterministic": case.deterministic}
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    if case.cu_q is None:
        out, lse = fm.flash_attention(q, k, v, bias=bias, key_lengths=case.key_lengths, **extra)
    else:
        out, lse = fm.flash_attention_varlen(
            q, k, v, case.cu_q, case.cu_k, case.max_q, case.max_k, bias=bias, **extra
        )
    differentiable = any(leaf.requires_grad for leaf in leaves.values())
    assert out.requires_grad == lse.requires_grad == differentiable
    grads = differentiate(case, leaves, out, lse)
    return {"out": out.detach(), "lse": lse.detach(), **grads}


def floors(case: Case) -> dict[str, float]:
    """Per result, what no implementation can avoid: see tolerance().

    How large each result would be if no two terms cancelled, which rounding is relative to.

    Rounding in one score s = scale * q.k + bias is eps * A with A = scale * |q|.|k| + |bias|; it
    changes the weight p by the factor 1 + eps * A and travels on from there. So: the sums of the
    formula and of its gradient, taken over absolute values, with p * (1 + 2 A) for p.

    And for the half types: the backward pass is given `out` as the forward pass returned it,
    rounded once, and needs delta = out . dO. Half a unit of the dtype in each term of it reaches
    every gradient through dS = p * (dP - delta), also where dP and delta cancel (one key).
    """
    with torch.no_grad():
        wide = {name: x.double() for name, x in case.inputs().items()}
        q, k, v, sinks = (wide.get(name) for name in ("q", "k", "v", "sinks"))
        bias = wide.get("bias", case.bias)
        dtype, options = case.q.dtype, {**case.options, "sinks": sinks}
        g = case.grad_out.double()
        gl = g.new_zeros(g.shape[:-1]) if case.grad_lse is None else case.grad_lse.double()
        if case.cu_q is None:
            rest = (g, gl, case.key_lengths, case.kept)
            return dense_floors(dtype, q, k, v, bias, *rest, case.is_of_gpu, **options)
        most = dict.fromkeys(RESULTS, 0.0)
        gl = gl[..., None]  # with a last dimension, as sequences() wants
        parts = list(sequences(case.cu_q, case.cu_k, q, k, v, bias, g, gl))
        every = [None] * len(parts) if case.kept is None else case.kept
        for (*one, g_one, gl_one), kept in zip(parts, every, strict=True):
            rest = (g_one, gl_one[..., 0], None, kept, case.is_of_gpu)
            found = dense_floors(dtype, *one, *rest, **options)
            shared = most["dsinks"] + found["dsinks"]
            most = {name: max(most[name], found[name]) for name in RESULTS} | {"dsinks": shared}
        return most


def unit(dtype: torch.dtype, head_dim: int, of_gpu: bool) -> float:
    """Of the precision that sums are kept in.

    Tensor cores add in fp32 but cut off what does not fit, where ordinary adders round: up to one
    unit for each of the head_dim / 16 steps of a product, always the same way.
    """
    if dtype == torch.float64:
        return 4 * torch.finfo(dtype).eps
    return torch.finfo(torch.float32).eps * (max(1, head_dim / 16) if of_gpu else 1)


def dense_floors(
    dtype, q, k, v, bias, g, gl, key_lengths, kept, of_gpu, *, sinks, **options
) -> dict[str, float]:
    eps = unit(dtype, q.shape[-1], of_gpu)
    if not (q.numel() and k.numel()):
        none = dict.fromkeys(RESULTS, 0.0)
        if sinks is None or not q.numel():
            return none
        lse = sinks[:, None].expand(q.shape[:-1])
        return none | {"dsinks": sink_floor(eps, sinks, lse, gl.abs()).max().item()}
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(group, dim=-3) for x in (k, v))
    scale = abs(options["scale"]) if options.get("scale") is not None else q.shape[-1] ** -0.5
    p, lse = attention(q, k, None, bias, key_lengths=key_lengths, sinks=sinks, **options)
    a = scale * (q.abs() @ k.abs().mT)
    bias = None if is_mask(bias) else bias
    if bias is not None:
        a = a + bias.masked_fill(bias == -torch.inf, 0).abs()
    if sinks is not None:  # in lse, which scores are subtracted from
        a = a + sinks.masked_fill(sinks == -torch.inf, 0).abs()[:, None, None]
    p_a = p * (1 + 2 * a)
    kept = torch.ones_like(p) if kept is None else kept.double()
    dp = kept * (g.abs() @ v.abs().mT)
    mean = (p * dp).sum(-1, keepdim=True) + gl.abs()[..., None]
    ds = eps * p_a * (dp + mean)
    rounded = torch.zeros_like(mean)
    if dtype in (torch.float16, torch.bfloat16):
        delta = ((p * kept) @ v).abs() * g.abs()
        rounded = torch.finfo(dtype).eps / 2 * delta.sum(-1, keepdim=True)
        ds = ds + p * rounded

    def per_key_head(x):
        return x.unflatten(-3, (-1, group)).sum(-3)

    found = {
        "out": 2 * eps * ((p_a * kept) @ v.abs()),
        "lse": eps * (p_a.sum(-1) + lse.abs()).masked_fill(lse == -torch.inf, 0),
        "dq": scale * (ds @ k.abs()),
        "dk": scale * per_key_head(ds.mT @ q.abs()),
        "dv": eps * per_key_head((p_a * kept).mT @ g.abs()),
        "dbias": ds if bias is None else ds.sum_to_size(bias.shape),
        "dsinks": lse.new_zeros(1)
        if sinks is None
        else sink_floor(eps, sinks, lse, mean[..., 0], rounded[..., 0]),
    }
    return {name: x.max().item() for name, x in found.items()}


def sink_floor(eps, sinks, lse, mean, rounded=0) -> torch.Tensor:
    """Of each head, for the sum over its rows of exp(sink - lse) * (dlse - mean)."""
    there = (sinks != -torch.inf)[:, None].expand(lse.shape)
    sink = sinks[:, None].expand(lse.shape).where(there, 0)
    lse = lse.where(there, 0)
    error = eps * (1 + 2 * (sink.abs() + lse.abs())) * mean + rounded
    return (torch.exp(sink - lse) * error).where(there, 0).sum(-1).flatten(0, -2).sum(0)


def tolerance(got, want, by_math, floor: float) -> float:
    """The largest error we may have in one result: twice that of the math backend, plus a floor.

    The floor is for results where math is right by luck (one key: p is exactly 1) and is what no
    implementation can avoid: rounding the exact result to its dtype once, and an error of one unit
    in the precision that sums are kept in, relative to the terms summed. For float64 inputs math
    and reference are one computation, so the floor, with a few units for both, is all there is.
    """
    if want.numel() == 0:
        return 0.0
    finite = want.isfinite()
    largest = want[finite].abs().max().item() if finite.any() else 0.0
    theirs = (by_math.double() - want)[finite].abs().max().item() if finite.any() else 0.0
    info = torch.finfo(got.dtype)
    rounding = info.eps / 2 * largest + info.smallest_normal * info.eps
    return (0 if got.dtype == torch.float64 else 2 * theirs) + rounding + floor


def compare(case: Case, got: dict[str, torch.Tensor], rounded: Case | None = None) -> list[str]:
    """What is wrong with `got`, one line per result; empty when all is well.

    `rounded` is the case as plain torch can compute it, where that has inputs of its own.
    """
    rounded = case if rounded is None else rounded
    if case.q.is_cuda and is_small(case):
        case, rounded = on_the_cpu(case), on_the_cpu(rounded)
        got = {name: x.cpu() for name, x in got.items()}
    want, by_math, floor = reference(case), math(rounded), floors(rounded)
    complaints = []
    for name, a in got.items():
        b = want[name]
        dtype = {"dbias": case.bias, "dsinks": case.sinks}.get(name, case.q).dtype
        if name == "lse" and dtype != torch.float64:
            dtype = torch.float32
        if a.shape != b.shape or a.dtype != dtype:
            complaints.append(f"{name}: {a.dtype} {tuple(a.shape)}, not {dtype} {tuple(b.shape)}")
            continue
        legal = torch.where(b == -torch.inf, a == -torch.inf, a.isfinite())
        if not legal.all():
            bad = (~legal).nonzero()
            complaints.append(f"{name}: {len(bad)} not finite, or finite, first {bad[:4].tolist()}")
            continue
        limit = tolerance(a, b, by_math[name], floor[name])
        error = (a.double() - b).where(b.isfinite(), 0).abs()
        if error.numel() and error.max().item() > limit:
            at = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
            values = f"{a[tuple(at)]:.6g}, not {b[tuple(at)]:.6g}"
            complaints.append(f"{name}: error {error.max():.3g} > {limit:.3g} at {at}: {values}")
    return complaints


def check(case: Case) -> dict[str, torch.Tensor]:
    """Runs the case through the library and fails unless every result is within its tolerance."""
    return accept(case, ours(case))


def accept(case: Case, got: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    complaints = compare(case, got)
    assert not complaints, "\n  ".join(["against the float64 oracle:", *complaints])
    return got


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit: 0 and -0 differ, a NaN equals itself."""
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    a, b = a.contiguous(), b.contiguous()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(whole), b.view(whole))
