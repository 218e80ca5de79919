"""The kernel of `fused_adamw`. Only where GPUs are is there Triton, and this module is imported."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def adamw(  # type: ignore[no-untyped-def]
    addresses, chunks, lengths, rates, roots, nothing, divisor, count, keep, beta1, rest1, beta2, rest2, eps,
    CHUNK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    if tl.load(nothing) == 0:
        which = tl.load(chunks + 2 * tl.program_id(0))
        begin = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
        p = tl.load(addresses + which).to(tl.pointer_type(tl.float32))
        g = tl.load(addresses + count + which).to(tl.pointer_type(tl.float32))
        m = tl.load(addresses + 2 * count + which).to(tl.pointer_type(tl.float32))
        v = tl.load(addresses + 3 * count + which).to(tl.pointer_type(tl.float32))
        if ALIGNED:
            p, g = tl.multiple_of(p, 16), tl.multiple_of(g, 16)
            m, v = tl.multiple_of(m, 16), tl.multiple_of(v, 16)
        length = tl.load(lengths + which)
        rate, root, by = tl.load(rates + which), tl.load(roots + which), tl.load(divisor)
        at = begin + tl.arange(0, CHUNK)
        if begin + CHUNK <= length:  # without a mask the loads are of 16 bytes
            _step(p + at, g + at, m + at, v + at, None, rate, root, by, keep, beta1, rest1, beta2, rest2, eps, CHUNK)
        else:
            inside = at < length
            _step(p + at, g + at, m + at, v + at, inside, rate, root, by, keep, beta1, rest1, beta2, rest2, eps, CHUNK)


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    p, g, m, v, inside, rate, root, by, keep, beta1, rest1, beta2, rest2, eps, CHUNK: tl.constexpr
):  # fmt: skip
    weight, gradient = tl.load(p, mask=inside), tl.load(g, mask=inside)
    first, second = tl.load(m, mask=inside), tl.load(v, mask=inside)
    gradient = tl.div_rn(gradient, tl.full([CHUNK], 1.0, tl.float32) * by)
    first = beta1 * first + rest1 * gradient
    second = beta2 * second + rest2 * gradient * gradient
    weight = keep * weight - rate * first / (tl.sqrt_rn(second) / root + eps)
    tl.store(p, weight, mask=inside)
    tl.store(m, first, mask=inside)
    tl.store(v, second, mask=inside)
    if by != 1:
        tl.store(g, gradient, mask=inside)
