"""The yardstick of a mixture of experts: plain torch, and how far from it the library may be.

`reference` evaluates the formula in float64 and lets autograd differentiate it. `plain` evaluates
it as a loop over the experts does in the inputs' dtype. `check` holds the library to twice the
error of `plain`. Nothing here shares a line with the library.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

import oracle

ACTIVATIONS = ("swiglu", "geglu", "reglu", "silu", "gelu", "relu")
CURVES = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu}
CURVES |= {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}
GATED = ACTIVATIONS[:3]
DIFFERENTIABLE = ("x", "gate_up", "down", "up_bias", "down_bias", "weights")


@dataclass
class Case:
    """One call with its tensors. T tokens in one dimension: leading ones are tested apart."""

    x: torch.Tensor  # (T, d)
    gate_up: torch.Tensor  # (E, 2n or n, d)
    down: torch.Tensor  # (E, d, n)
    ids: torch.Tensor  # (T, k)
    grad_out: torch.Tensor  # (T, d)
    weights: torch.Tensor | None = None  # (T, k)
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    activation: str = "swiglu"
    needs: tuple[str, ...] = DIFFERENTIABLE

    def inputs(self) -> dict[str, torch.Tensor]:
        named = {name: getattr(self, name) for name in DIFFERENTIABLE}
        return {name: x for name, x in named.items() if x is not None}

    def to(self, device) -> Case:
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return Case(
            **{n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in moved.items()}
        )


def make(
    T=24,
    d=16,
    n=12,
    E=5,
    k=2,
    dtype=torch.float32,
    activation="swiglu",
    weighted=True,
    biases=(False, False),
    ids=None,
    generator=None,
    **more,
) -> Case:
    """Random numbers of a size at which every activation bends and no result is small."""

    def randn(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    rows = 2 * n if activation in GATED else n
    if ids is None:
        ids = torch.rand(T, max(E, k), generator=generator).argsort(-1)[:, :k]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.rand(T, k, generator=generator, dtype=torch.float64) + 0.25
    return Case(
        x=randn(T, d),
        gate_up=randn(E, rows, d, scale=1.5 / max(d, 1) ** 0.5),
        down=randn(E, d, n, scale=1.5 / max(n, 1) ** 0.5),
        ids=ids,
        grad_out=randn(T, d),
        weights=weights.to(wide) if weighted else None,
        up_bias=randn(E, rows) if biases[0] else None,
        down_bias=randn(E, d) if biases[1] else None,
        activation=activation,
        **more,
    )


def pairs_of(ids: torch.Tensor, experts: int):
    """(expert, tokens, choices) of every expert that has any."""
    for e in ids.unique().tolist():
        if 0 <= e < experts:
            yield e, *torch.where(ids == e)


# PyTorch multiplies fewer rows as vectors, with sums side by side that round less than those of a
# product, which everyone's sums are compared with.
ROWS_OF_A_PRODUCT = 8


def moe(x, gate_up, down, ids, weights=None, up_bias=None, down_bias=None, activation="swiglu"):
    """A loop over the experts, every step in the dtype of x, as transformers' eager experts."""
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for e, t, j in pairs_of(ids, gate_up.shape[0]):
        rows = F.pad(x[t], (0, 0, 0, max(0, ROWS_OF_A_PRODUCT - len(t))))
        h = F.linear(rows, gate_up[e], None if up_bias is None else up_bias[e])
        if activation in GATED:
            gate, up = h.chunk(2, dim=-1)
            a = CURVES[activation](gate) * up
        else:
            a = CURVES[activation](h)
        y = F.linear(a, down[e], None if down_bias is None else down_bias[e])[: len(t)]
        if weights is not None:
            y = y * weights[t, j, None]
        out = out.index_add(0, t, y.to(x.dtype))
    return out


def differentiate(case: Case, leaves, out) -> dict[str, torch.Tensor]:
    """Gradients by name, of the inputs the case wants them for."""
    names = [name for name in leaves if name in case.needs]
    wanted = [leaves[name] for name in names]
    if wanted and out.requires_grad:
        grad = case.grad_out.to(out.dtype)
        values = torch.autograd.grad(out, wanted, grad, allow_unused=True, materialize_grads=True)
    else:  # nothing wanted, or no pair has an expert
        values = [torch.zeros_like(leaf) for leaf in wanted]
    return {f"d{name}": value for name, value in zip(names, values, strict=True)}


def evaluate(case: Case, leaves) -> dict[str, torch.Tensor]:
    out = moe(**leaves, ids=case.ids, activation=case.activation)
    return {"out": out.detach(), **differentiate(case, leaves, out)}


def reference(case: Case) -> dict[str, torch.Tensor]:
    """Everything the case asks for, in float64 from the first step to the last."""
    return evaluate(
        case, {n: x.detach().double().requires_grad_() for n, x in case.inputs().items()}
    )


def plain(case: Case) -> dict[str, torch.Tensor]:
    """The same in the inputs' own dtype."""
    return evaluate(
        case, {n: x.detach().clone().requires_grad_() for n, x in case.inputs().items()}
    )


def ours(case: Case) -> dict[str, torch.Tensor]:
    """What the library says; the inputs keep their strides."""
    import flashmoe_science as fm

    leaves = {n: x.detach().requires_grad_(n in case.needs) for n, x in case.inputs().items()}
    out = fm.moe(**leaves, ids=case.ids, activation=case.activation)
    assert out.requires_grad == any(leaf.requires_grad for leaf in leaves.values())
    return {"out": out.detach(), **differentiate(case, leaves, out)}


def slopes(curve, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and second derivative of an activation."""
    with torch.enable_grad():
        h = h.detach().requires_grad_()
        (first,) = torch.autograd.grad(curve(h).sum(), h, create_graph=True)
        second = torch.zeros_like(h)
        if first.requires_grad:
            (second,) = torch.autograd.grad(first.sum(), h)
    return first.detach(), second.detach()


def floors(case: Case, of_gpu: bool | None = None) -> dict[str, float]:
    """Per result, an error that plain PyTorch escapes by luck alone: see tolerance().

    Every intermediate result that plain PyTorch rounds to the dtype (h, a, y, their gradients) has
    half a unit of error, every term of a sum one unit of fp32. Such errors are independent, so
    their squares are followed to the results, through the formula and its gradient. At the end:
    three standard deviations; an error of rounding is uniform, and its variance a third of its
    bound's square.
    """
    of_gpu = case.x.is_cuda if of_gpu is None else of_gpu
    c = {name: x.detach().double() for name, x in case.inputs().items()}
    x, gate_up, down, g = c["x"], c["gate_up"], c["down"], case.grad_out.double()
    weights = c.get("weights", x.new_ones(case.ids.shape))
    if case.x.dtype == torch.float64:  # reference and plain are one computation
        u = unit = 4 * torch.finfo(torch.float64).eps
    else:
        u, unit = torch.finfo(case.x.dtype).eps / 2, torch.finfo(torch.float32).eps

    def rounded(*values: torch.Tensor) -> torch.Tensor:
        return sum((u * v).square() for v in values)

    def terms(values: torch.Tensor, depth: int = 0) -> torch.Tensor:
        # Tensor cores add in fp32 but cut off what does not fit, where ordinary adders round: up to
        # one unit for each of the depth / 16 steps of a product, always the same way.
        steps = max(1, depth / 16) if of_gpu else 1
        return (unit * steps * values).square()

    per_token = {"out": torch.zeros_like(x), "dx": torch.zeros_like(x)}
    per_token["dweights"] = torch.zeros_like(weights)
    most = dict.fromkeys(("dgate_up", "ddown", "dup_bias", "ddown_bias"), 0.0)

    def grow(name: str, squares: torch.Tensor) -> None:
        if squares.numel():
            most[name] = max(most[name], squares.max().item())

    curve, gated = CURVES[case.activation], case.activation in GATED
    for e, t, j in pairs_of(case.ids, gate_up.shape[0]):
        # Forward: h, a, y. A name with a 2 is the square of an error.
        b = c["up_bias"][e] if "up_bias" in c else x.new_zeros(())
        h = x[t] @ gate_up[e].mT + b
        sum2 = terms(x[t], x.shape[1]) @ gate_up[e].mT.square() + terms(b)
        h2 = sum2 + rounded(h)
        (gate, up), (gate2, up2) = (v.chunk(2, -1) if gated else (v, None) for v in (h, h2))
        if not gated:
            up, up2 = torch.ones_like(h), torch.zeros_like(h)
        s, (slope, bend) = curve(gate), slopes(curve, gate)
        s2 = slope.square() * gate2 + terms(gate)  # 1 + erf loses what cancels
        a = s * up
        a2 = s2 * up.square() + s.square() * up2 + rounded(a, a)
        b = c["down_bias"][e] if "down_bias" in c else x.new_zeros(())
        y = a @ down[e].mT + b
        y2 = (a2 + terms(a, a.shape[1])) @ down[e].mT.square() + terms(b) + rounded(y)
        w = weights[t, j, None]
        per_token["out"].index_add_(0, t, w.square() * y2 + rounded(w * y) + terms(w * y))

        # Backward: dy, da, dh.
        gy = g[t] * y
        dot2 = g[t].square() * y2 + rounded(gy) + terms(gy, y.shape[1])
        per_token["dweights"][t, j] = dot2.sum(-1)
        dy = w * g[t]
        da = dy @ down[e]
        da2 = (rounded(dy) + terms(dy, dy.shape[1])) @ down[e].square() + rounded(da)
        slope2 = bend.square() * gate2 + terms(torch.ones_like(gate))
        if curve is F.relu:  # its slope jumps where the sign of the gate is not certain
            certain2 = 9 * (sum2.chunk(2, -1)[0] if gated else sum2)
            slope2 = 1.0 * (gate.square() <= certain2)
        dh, dup = da * up * slope, da * s
        dh2 = da2 * (up * slope).square() + rounded(dh, dh, dh)
        dh2 = dh2 + da.square() * (slope.square() * up2 + up.square() * slope2)
        if gated:
            dup2 = da2 * s.square() + da.square() * s2 + rounded(dup, dup, dup)
            dh, dh2 = torch.cat([dh, dup], -1), torch.cat([dh2, dup2], -1)
        dx = dh @ gate_up[e]
        dx2 = (dh2 + terms(dh, dh.shape[1])) @ gate_up[e].square() + rounded(dx, dx)
        per_token["dx"].index_add_(0, t, dx2)

        dh2, dy2 = dh2 + terms(dh, len(t)), rounded(dy) + terms(dy, len(t))
        grow("dgate_up", dh2.mT @ x[t].square())
        grow("ddown", dy.square().mT @ a2 + dy2.mT @ a.square())
        # Products are sums in a row for everyone. These two PyTorch adds up in a cascade, so the
        # floor is a row's: one unit of all terms, as attention's is.
        grow("dup_bias", dh2.sum(0) + terms(dh.abs().sum(0)))
        grow("ddown_bias", dy2.sum(0) + terms(dy.abs().sum(0)))
    most |= dict.fromkeys(per_token, 0.0)
    for name, squares in per_token.items():
        grow(name, squares)
    return {name: 3 * (square / 3) ** 0.5 for name, square in most.items()}


def tolerance(got, want, by_plain, floor: float) -> float:
    """The largest error we may have in one result.

    Twice that of plain PyTorch, or the floor where that is larger: few numbers can be right by
    luck. And rounding the exact result to its dtype, once. For float64 inputs plain and reference
    are one computation, so the floor, with a few units for both, is all there is.
    """
    if want.numel() == 0:
        return 0.0
    theirs = (by_plain.double() - want).abs().max().item()
    info = torch.finfo(got.dtype)
    rounding = info.eps / 2 * want.abs().max().item() + info.smallest_normal * info.eps
    return max(0 if got.dtype == torch.float64 else 2 * theirs, floor) + rounding


def compare(case: Case, got: dict[str, torch.Tensor]) -> list[str]:
    """What is wrong with `got`, one line per result; empty when all is well."""
    of_gpu = case.x.is_cuda
    if of_gpu and case.ids.numel() * case.down[0].numel() <= oracle.SMALL:  # see there
        case, got = case.to("cpu"), {name: x.cpu() for name, x in got.items()}
    want, by_plain, floor = reference(case), plain(case), floors(case, of_gpu)
    complaints = []
    for name, a in got.items():
        b = want[name]
        dtype = (case.inputs() | {"out": case.x})[name.removeprefix("d")].dtype
        if a.shape != b.shape or a.dtype != dtype:
            complaints.append(f"{name}: {a.dtype} {tuple(a.shape)}, not {dtype} {tuple(b.shape)}")
            continue
        if not a.isfinite().all():
            bad = (~a.isfinite()).nonzero()
            complaints.append(f"{name}: {len(bad)} not finite, first {bad[:4].tolist()}")
            continue
        limit = tolerance(a, b, by_plain[name], floor[name])
        error = (a.double() - b).abs()
        if error.numel() and error.max().item() > limit:
            at = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
            values = f"{a[tuple(at)]:.6g}, not {b[tuple(at)]:.6g}"
            complaints.append(f"{name}: error {error.max():.3g} > {limit:.3g} at {at}: {values}")
    missing = want.keys() - got.keys()
    return complaints + [f"{name} is missing" for name in sorted(missing)]


def check(case: Case) -> dict[str, torch.Tensor]:
    """Runs the case through the library and fails unless every result is within its tolerance."""
    got = ours(case)
    complaints = compare(case, got)
    assert not complaints, "\n  ".join(["against the float64 oracle:", *complaints])
    return got


# The router.


def route(logits, k, scoring="softmax", normalize=True, bias=None):
    """ids (int64) and weights, every step in the dtype of the logits."""
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    choice = scores.detach() if bias is None else scores.detach() + bias
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    weights = scores.gather(-1, ids)
    return ids, weights / weights.sum(-1, keepdim=True) if normalize else weights
