"""The yardstick of forward mode and second derivatives: torch's autograd over the plain formula.

With tangents of q, k, v, bias and sinks: how out and lse move along them (`out'`, `lse'`), and the
gradients of <grad_out, out'> + <grad_lse, lse'> (`ddq`, `ddk`, `ddv`, `ddbias`, `ddsinks`). The
same two calls of torch.autograd.grad ask the library, the formula in float64, and the formula in
the inputs' dtype. `compare` allows what oracle.py allows.
"""

from __future__ import annotations

import dataclasses

import torch

import oracle
from oracle import Case

UNITS = 2  # of the accumulator's precision
RESULTS = ("out'", "lse'", "ddq", "ddk", "ddv", "ddbias", "ddsinks")


def differentiable(case: Case) -> Case:
    """The case without dropout, which has no more than gradients."""
    return dataclasses.replace(case, dropout={}, kept=None)


def tangents_of(case: Case, seed: int) -> dict[str, torch.Tensor]:
    """One for each input whose gradient the case wants. NaN where a bias masks: nobody looks."""
    generator = torch.Generator().manual_seed(seed)
    tangents = {}
    for name, x in case.inputs().items():
        tangent = torch.randn(x.shape, generator=generator).to(x.dtype)
        if name == "bias":
            tangent = tangent.masked_fill(x == -torch.inf, torch.nan)
        if case.wants(name):
            tangents[name] = tangent
    return tangents


def seen(case: Case, tangents) -> dict[str, torch.Tensor]:
    """For the formula, which multiplies what is masked by 0."""
    return {
        name: t.masked_fill(case.bias == -torch.inf, 0) if name == "bias" else t
        for name, t in tangents.items()
    }


def call_ours(case: Case, tensors: dict[str, torch.Tensor]):
    import flashmoe_science as fm

    q, k, v = (tensors.get(name) for name in ("q", "k", "v"))
    bias = tensors.get("bias", case.bias)
    extra = {**case.options, "return_lse": True, "deterministic": case.deterministic}
    extra["sinks"] = tensors.get("sinks")
    if case.cu_q is None:
        return fm.flash_attention(q, k, v, bias=bias, key_lengths=case.key_lengths, **extra)
    lengths = (case.cu_q, case.cu_k, case.max_q, case.max_k)
    return fm.flash_attention_varlen(q, k, v, *lengths, bias=bias, **extra)


def differentiate_twice(case: Case, tangents, call, wide=False) -> dict[str, torch.Tensor]:
    """Everything, by differentiating a backward pass."""

    def leaf(x):
        return (x.double() if wide else x).detach().requires_grad_()

    leaves = {name: leaf(x) for name, x in case.inputs().items()}
    out, lse = call(case, leaves)
    seeds, outputs = {}, []
    if case.use_out:
        seeds["out'"], outputs = leaf(case.grad_out), [out]
    if case.grad_lse is not None:
        seeds["lse'"], outputs = leaf(case.grad_lse), [*outputs, lse]
    inputs = {**{f"dd{name}": x for name, x in leaves.items()}, **seeds}
    wanted, along = [leaves[name] for name in tangents], list(tangents.values())
    found = [torch.zeros_like(x) for x in inputs.values()]
    if wanted and outputs and all(x.requires_grad for x in outputs):
        options = {"allow_unused": True, "materialize_grads": True}
        grads = torch.autograd.grad(
            outputs, wanted, list(seeds.values()), create_graph=True, **options
        )
        moving = [i for i, grad in enumerate(grads) if grad.requires_grad]
        if moving:
            found = torch.autograd.grad(
                [grads[i] for i in moving],
                list(inputs.values()),
                [along[i].to(grads[i].dtype) for i in moving],
                **options,
            )
    return {name: x.detach() for name, x in zip(inputs, found, strict=True)}


def floors(case: Case, tangents) -> dict[str, float]:
    """Per result, what no implementation can avoid: oracle.floors() for these."""
    with torch.no_grad():
        zeros = {name: torch.zeros_like(x) for name, x in case.inputs().items()}
        moves = {name: x.double() for name, x in {**zeros, **seen(case, tangents)}.items()}
        q, k, v, bias = (
            None if x is None else x.double() for x in (case.q, case.k, case.v, case.bias)
        )
        g = case.grad_out.double() if case.use_out else torch.zeros_like(case.grad_out).double()
        gl = g.new_zeros(g.shape[:-1]) if case.grad_lse is None else case.grad_lse.double()
        a, b, c, beta = (moves.get(name) for name in ("q", "k", "v", "bias"))
        dtype, options = case.q.dtype, {**case.options, "of_gpu": case.is_of_gpu}
        if case.sinks is not None:
            options |= {"sinks": case.sinks.double(), "sink_moves": moves["sinks"]}
        if case.cu_q is None:
            lengths = {"key_lengths": case.key_lengths}
            return dense_floors(
                dtype, (q, k, v, bias), (a, b, c, beta), g, gl, **lengths, **options
            )
        most = dict.fromkeys(RESULTS, 0.0)
        gl = gl[..., None]
        parts = zip(
            oracle.sequences(case.cu_q, case.cu_k, q, k, v, bias, g, gl),
            oracle.sequences(case.cu_q, case.cu_k, a, b, c, beta),
            strict=True,
        )
        for (*x, g_one, gl_one), moves_one in parts:
            found = dense_floors(dtype, x, moves_one, g_one, gl_one[..., 0], **options)
            shared = most["ddsinks"] + found["ddsinks"]
            most = {name: max(most[name], found[name]) for name in RESULTS} | {"ddsinks": shared}
        return most


def product(a, b):
    """What a matrix product would be if the signs of its terms were random, as rounding errors'."""
    return (a.square() @ b.square()).sqrt()


def total(x):
    return x.square().sum(-1, keepdim=True).sqrt()


def dense_floors(
    dtype, x, moves, g, gl, of_gpu, key_lengths=None, sinks=None, sink_moves=None, **options
) -> dict[str, float]:
    """The formulas over terms of random signs, times some units of the accumulator.

    And for the half types what follows from out and out' that come rounded to them: half a unit in
    each term of delta = out . dO and of mean = out' . dO, by which dS and Z are off.
    """
    (q, k, v, bias), (a, b, c, beta) = x, moves
    eps = oracle.unit(dtype, q.shape[-1], of_gpu)
    if not (q.numel() and k.numel()):
        none = dict.fromkeys(RESULTS, 0.0)
        if sinks is None or not q.numel():
            return none
        # The weight of a sink alone is 1, and its gradient 0: a difference of two numbers.
        there = sinks != -torch.inf
        move = UNITS * eps * ((1 + sinks.abs()) * sink_moves.abs()).where(there, 0)
        rows = gl.abs().flatten(0, -3).sum(0).sum(-1)
        return none | {"lse'": move.max().item(), "ddsinks": (move * rows).max().item()}
    group = q.shape[-3] // k.shape[-3]
    k, v, b, c = (y.repeat_interleave(group, dim=-3) for y in (k, v, b, c))
    scale = abs(options["scale"]) if options.get("scale") is not None else q.shape[-1] ** -0.5
    p, _ = oracle.attention(q, k, None, bias, key_lengths=key_lengths, sinks=sinks, **options)
    score = scale * product(q, k.mT)
    if bias is not None:
        score = score + bias.masked_fill(bias == -torch.inf, 0).abs()
    # Of the sink, with a row for each query: its weight and how it moves.
    sink, sink_move = torch.zeros_like(p[..., :1]), torch.zeros_like(p[..., :1])
    if sinks is not None:
        there = sinks != -torch.inf
        size = sinks.where(there, 0).abs()[:, None, None]
        score = score + size
        sink = ((1 - p.sum(-1, keepdim=True)).abs() * (1 + size)).where(there[:, None, None], 0)
        sink_move = sink_moves.where(there, 0).abs()[:, None, None].expand(sink.shape)
    p_a = p * (1 + score)
    raw = scale * (product(a, k.mT) + product(q, b.mT))
    move = raw if beta is None else raw + beta.abs()
    lse_move = total(p * move) + sink * sink_move
    dp, w, gl = product(g, v.mT), product(g, c.mT), gl.abs()[..., None]
    mean_slope = total(p * dp) + gl
    slope = dp + mean_slope
    by_weight = slope * move + dp * lse_move + w
    ds, y = p_a * slope, p_a * (move + lse_move)
    by_sink = mean_slope * sink_move
    mean_by_weight = total(p * by_weight) + sink * by_sink
    z = p_a * (by_weight + mean_by_weight)
    z_sink = UNITS * eps * sink * (by_sink + mean_by_weight)
    # tanh'' is below 0.77.
    z_raw = z + ds * raw / options["softcap"] if options.get("softcap") else z
    ds, z, z_raw, y = (UNITS * eps * tile for tile in (ds, z, z_raw, y))
    lse = UNITS * eps * (total(p_a * move) + sink * sink_move)
    out = UNITS * eps * (product(p_a * move, v) + product(p_a, c)) + lse * (p @ v).abs()
    if dtype in (torch.float16, torch.bfloat16):
        half = torch.finfo(dtype).eps / 2
        out = out + half * lse_move * (p @ v).abs()
        delta = half * total((p @ v) * g)
        mean = half * total((product(p * move, v) + product(p, c)) * g) + delta * lse_move
        ds = ds + p * delta
        off = p * (delta * (move + lse_move) + mean)
        z, z_raw = z + off, z_raw + off
        z_sink = z_sink + sink * (delta * (sink_move + lse_move) + mean)

    def per_key_head(rows):
        return rows.unflatten(-3, (-1, group)).sum(-3)

    found = {
        "out'": out,
        "lse'": lse,
        "ddq": scale * (product(z_raw, k) + product(ds, b)),
        "ddk": scale * per_key_head(product(z_raw.mT, q) + product(ds.mT, a)),
        "ddv": per_key_head(product(y.mT, g)),
        "ddsinks": z_sink.sum(-2).flatten(0, -3).sum(0),
        "ddbias": z if bias is None else z.square().sum_to_size(bias.shape).sqrt(),
    }
    return {name: value.max().item() for name, value in found.items()}


def reference(case: Case, tangents) -> dict[str, torch.Tensor]:
    return differentiate_twice(case, seen(case, tangents), oracle.call, wide=True)


def compare(case: Case, tangents, got: dict[str, torch.Tensor]) -> list[str]:
    """What is wrong with `got`, one line per result; empty when all is well."""
    if case.q.is_cuda and oracle.is_small(case):
        case = oracle.on_the_cpu(case)
        tangents, got = ({name: x.cpu() for name, x in given.items()} for given in (tangents, got))
    want = reference(case, tangents)
    by_math = differentiate_twice(case, seen(case, tangents), oracle.call)
    floor = floors(case, tangents)
    complaints = []
    for name, a in got.items():
        b = want[name]
        if a.shape != b.shape:
            complaints.append(f"{name}: {tuple(a.shape)}, not {tuple(b.shape)}")
            continue
        if not a.isfinite().all():
            complaints.append(f"{name}: not finite at {(~a.isfinite()).nonzero()[:4].tolist()}")
            continue
        limit = oracle.tolerance(a, b, by_math[name], floor[name])
        error = (a.double() - b).abs()
        if error.numel() and error.max().item() > limit:
            at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
            values = f"{a[at]:.6g}, not {b[at]:.6g}"
            complaints.append(f"{name}: error {error.max():.3g} > {limit:.3g} at {at}: {values}")
    return complaints
