"""The int4 kernels compile here for the GPUs they promise, and the register kernel's operands are in place.

`convert_layout(assert_trivial=True)` makes compiling fail where a lane would not already hold what the matrix unit
wants from it; no interpreter runs that kernel.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from compiling import run_compiling

pytest.importorskip("triton", reason="Triton exists on Linux only")

SCRIPT = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from hf_paged.kernels.decode_int4 import padded_heads
from hf_paged.kernels.decode_registers import decode_registers_kernel
from hf_paged.kernels.write_kernel import _write_kv

arch = int(sys.argv[1])
TYPES = {"int8": "*i8", "fp8": "*fp8e4nv", "int4": "*u8"}


def build(kernel, constants, num_warps, source=ASTSource, **pointers):
    names = kernel.arg_names
    floats = {"scale": "fp32", "softcap": "fp32"}
    signature = {n: "constexpr" if n in constants else pointers.get(n, floats.get(n, "i32")) for n in names}
    aligned = [n for n in names if n in pointers or (n.endswith("_stride") and n != "tables_stride")]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    made = source(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(made, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps})


indices = dict(tables_ptr="*i32", seq_lens_ptr="*i32", sinks_ptr="*bf16", offset_ptr="*fp32")
for k, v, dims, group, tile in [
    ("int4", "int4", (128, 128), 4, 32), ("int4", "int4", (64, 128), 7, 16),
    ("int8", "int4", (128, 64), 1, 32), ("int4", "fp8", (64, 64), 8, 16),
]:
    if "fp8" in (k, v) and arch < 89:
        continue
    constants = dict(GROUP=group, N=padded_heads(group), K_DIM=dims[0], V_DIM=dims[1], BLOCK_SIZE=32, TILE=tile,
                     LEAST=2, OVERLAP=arch >= 90, WAITS=arch >= 90, INT4=True, WINDOW=True, SOFTCAP=True,
                     SINKS=True, OFFSET=True)
    made = build(decode_registers_kernel, constants, 1, GluonASTSource, out_ptr="*bf16", partial_ptr="*fp32",
                 lse_ptr="*fp32", q_ptr="*bf16", k_ptr=TYPES[k], v_ptr=TYPES[v], k_scale_ptr="*fp16",
                 v_scale_ptr="*fp16", **indices)
    assert made.metadata.shared == 0, made.metadata.shared
pages = dict(k_ptr="*u8", k_scale_ptr="*fp16", v_ptr="*u8", v_scale_ptr="*fp16", slot_ptr="*i64")
constants = dict(K_DIM=128, V_DIM=80, K_BLOCK=128, V_BLOCK=128, K_CODE_MAX=15.0, V_CODE_MAX=15.0, BLOCK_SIZE=32,
                 ROWS=16, key_stride_d=1, value_stride_d=1)
build(_write_kv, constants, 4, key_ptr="*bf16", value_ptr="*bf16", **pages)
"""


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_int4_kernels_compile_without_a_gpu(arch: int, tmp_path: Path) -> None:
    run_compiling(SCRIPT, arch, tmp_path)
