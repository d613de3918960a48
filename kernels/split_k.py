"""The end of a product whose K dimension is split over programs: the last program to finish adds all partial sums.

The order of the sum is fixed, so a result does not depend on timing. Locks are zero before and after every launch, also
of a captured graph; two launches that run at the same time must not share them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finish(
    out,  # [M, N] floating
    at_out,  # [BLOCK_N, BLOCK_M] offsets into one split of `partial`, and into `out`
    accumulator,  # [BLOCK_N, BLOCK_M] fp32, this program's part
    partial,  # [SPLIT_K, M, N] fp32, with SPLIT_K > 1
    lock,  # [1] int32, of this block of the output
    bias,  # [N], with HAS_BIAS
    n,  # [BLOCK_N] columns
    keep,  # [BLOCK_N, BLOCK_M] which elements exist
    in_n,  # [BLOCK_N] which columns exist
    split,
    M,
    N,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    if SPLIT_K == 1:
        _store(out, at_out, accumulator, bias, n, keep, in_n, HAS_BIAS)
    else:
        tl.store(partial + split.to(tl.int64) * M * N + at_out, accumulator, mask=keep)
        tl.debug_barrier()  # every thread's partial sums are written before the ticket is drawn
        if tl.atomic_add(lock, 1, sem="acq_rel") == SPLIT_K - 1:
            total = tl.zeros_like(accumulator)
            for other in range(SPLIT_K):
                at = partial + at_out + tl.cast(other, tl.int64) * M * N
                total += tl.load(at, mask=keep, other=0.0, cache_modifier=".cg")
            _store(out, at_out, total, bias, n, keep, in_n, HAS_BIAS)
            tl.store(lock, 0)


@triton.jit
def _store(out, at, value, bias, n, keep, in_n, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        value += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=keep)
