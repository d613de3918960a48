"""The packed-weight kernels compile for the GPUs they promise, here, without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiling import run_compiling

pytest.importorskip("triton", reason="Triton exists on Linux only")

SCRIPT = """
import itertools, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_paged.kernels.fp8_gemm import fp8_gemm_kernel
from hf_paged.kernels.w4a16 import w4a16_kernel
from hf_paged.kernels.weight_dequantize import dequantize_kernel

arch = int(sys.argv[1])

def build(kernel, pointers, values, constants, aligned):
    signature = {**pointers, **dict.fromkeys(values, "i32"), **dict.fromkeys(constants, "constexpr")}
    names = list(signature)
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in [*pointers, *aligned]}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4, "num_stages": 4})

BASE = dict(BITS=4, MIDDLE=8, GROUP=128, HAS_ZEROS=False, HAS_PERM=False, HAS_BIAS=True, TOP_K=0, SPLIT_K=4,
            EVEN_N=True, SCALE_WEIGHTS=False, PTX=True, BLOCK_M=8, BLOCK_N=128)
CASES = [
    ("bf16", {}), ("fp16", dict(HAS_ZEROS=True, BLOCK_M=16)),
    ("bf16", dict(HAS_ZEROS=True, HAS_PERM=True, GROUP=32)),
    ("bf16", dict(BITS=8, MIDDLE=128, HAS_ZEROS=True)), ("fp16", dict(BITS=8, MIDDLE=128, EVEN_N=False)),
    ("bf16", dict(BITS=2, MIDDLE=2, GROUP=0)), ("bf16", dict(TOP_K=2, SPLIT_K=1, HAS_BIAS=False)),
    ("bf16", dict(SCALE_WEIGHTS=True, BLOCK_M=64, HAS_ZEROS=True)),
]
for dtype, changes in CASES:
    pointers = dict(x=f"*{dtype}", packed="*i32", scales="*fp16", zeros="*u8", perm="*i32", bias=f"*{dtype}",
                    expert_ids="*i64", out=f"*{dtype}", partial="*fp32", locks="*i32")
    made = build(w4a16_kernel, pointers, ["M", "N", "K", "num_tiles", "groups"], {**BASE, **changes}, ["N", "K"])
    text = made.asm["ttgir"]
    if dtype == "bf16" and not changes:  # the words go from shared memory straight into matrix registers
        loads = re.findall(r"ttg.local_load .*tensor<128x16xi32", text)
        assert len(loads) == 1, text
        assert not re.search(r"convert_layout .*tensor<128x(16xi32|32x)", text), text
pointers = dict(packed="*i32", scales="*fp16", zeros="*u8", out="*bf16")
constants = dict(BITS=4, MIDDLE=8, HAS_ZEROS=True, RUN=128)
made = build(dequantize_kernel, pointers, ["N", "K", "num_tiles", "group_size"], constants, ["N", "K"])
pointers = dict(x="*bf16", codes="*fp8e4nv", scales="*fp32", bias="*bf16", out="*bf16", partial="*fp32", locks="*i32")
if arch >= 90:
    constants = dict(HAS_BIAS=True, SPLIT_K=4, BLOCK_M=16, BLOCK_N=128, BLOCK_K=128)
    values = ["M", "N", "K", "scale_stride", "scale_rows", "scale_columns"]
    build(fp8_gemm_kernel, pointers, values, constants, ["N", "K"])
"""


@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile_and_keep_their_registers(arch: int, tmp_path: Path) -> None:
    """And no layout conversion crept in between the packed words and the matrix instruction: that halves the speed."""
    run_compiling(SCRIPT, arch, tmp_path)
