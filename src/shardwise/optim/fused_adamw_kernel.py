"""The kernel of `fused_adamw`. Only where GPUs are is there Triton, and this module is imported."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def adamw(  # type: ignore[no-untyped-def]
    addresses, chunks, lengths, rates, roots, nothing, divisor, count, keep, beta1, rest1, beta2, rest2, eps,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
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
        whole = begin + CHUNK <= length
        for i in range(0, CHUNK, BLOCK):
            at = begin + i + tl.arange(0, BLOCK)
            if whole:
                weight, gradient = tl.load(p + at), tl.load(g + at)
                first, second = tl.load(m + at), tl.load(v + at)
            else:
                inside = at < length
                weight, gradient = tl.load(p + at, mask=inside), tl.load(g + at, mask=inside)
                first, second = tl.load(m + at, mask=inside), tl.load(v + at, mask=inside)
            gradient = tl.div_rn(gradient, tl.full([BLOCK], 1.0, tl.float32) * by)
            first = beta1 * first + rest1 * gradient
            second = beta2 * second + rest2 * gradient * gradient
            weight = keep * weight - rate * first / (tl.sqrt_rn(second) / root + eps)
            if whole:
                tl.store(p + at, weight)
                tl.store(m + at, first)
                tl.store(v + at, second)
                if by != 1:
                    tl.store(g + at, gradient)
            else:
                inside = at < length
                tl.store(p + at, weight, mask=inside)
                tl.store(m + at, first, mask=inside)
                tl.store(v + at, second, mask=inside)
                if by != 1:
                    tl.store(g + at, gradient, mask=inside)
