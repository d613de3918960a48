"""The kernels of GPTQ, coordinate descent and AWQ compile for the GPUs they promise, and fit into their memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiling import run_compiling

pytest.importorskip("triton", reason="Triton exists on Linux only")

SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_paged.kernels import range_products as ranges
from hf_paged.kernels.descent_block import descent_block_kernel
from hf_paged.kernels.gptq_block import gptq_block_kernel

arch = int(sys.argv[1])
TYPES = {"codes": "*u8", "group": "*i64", "high": "*fp16", "low": "*fp16"}
INTS, VARY = ("N", "unit_stride"), ("columns", "tried", "each")

def build(kernel, constants, warps):
    names = [p.name for p in kernel.params]
    types = {**dict.fromkeys(names, "*fp32"), **TYPES, **dict.fromkeys(INTS + VARY, "i32")}
    given = {name: types[name] for name in names if name not in constants}
    signature = {name: given.get(name, "constexpr") for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in given if name not in VARY}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "num_stages": 1})
    assert built.metadata.shared <= 99 * 1024, built.metadata.shared  # of sm120, the least
    return built.asm["ptx"]

for kernel in (gptq_block_kernel, descent_block_kernel):
    build(kernel, dict(TOP=15.0, BLOCK=128, ROWS=16), 1)
for columns in (128, 64, 8):
    constants = dict(COLUMNS=columns, TOP=15.0, BLOCK=max(16, columns), ROWS=ranges._ROWS)
    ptx = build(ranges.range_products_kernel, constants, ranges._WARPS)
    assert "mma" in ptx, ptx  # on tensor cores
"""


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_kernels_compile_and_fit(arch: int, tmp_path: Path) -> None:
    run_compiling(SCRIPT, arch, tmp_path)
