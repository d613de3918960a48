"""The attention kernels compile here for the GPUs they promise, and the register kernel's operands are in place.

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
from hf_paged.kernels.decode_registers import decode_registers_kernel
from hf_paged.kernels.decode_join import join_kernel
from hf_paged.kernels.decode_recent import join_recent_kernel
from hf_paged.kernels.prefill_attention import _prefill
from hf_paged.kernels.prefill_workspace import _dequantize

arch = int(sys.argv[1])
TYPES = {"int8": "*i8", "fp8": "*fp8e4nv", "bf16": "*bf16", "int4": "*u8"}


def build(kernel, constants, num_warps, source=ASTSource, **pointers):
    names = kernel.arg_names
    floats = {"scale": "fp32", "softcap": "fp32"}
    signature = {n: "constexpr" if n in constants else pointers.get(n, floats.get(n, "i32")) for n in names}
    aligned = [n for n in names if n in pointers or (n.endswith("_stride") and n != "tables_stride")]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    made = source(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(made, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps})


INDICES = dict(tables_ptr="*i32", seq_lens_ptr="*i32", cu_seqlens_ptr="*i32", sinks_ptr="*bf16", offset_ptr="*fp32")
FEATURES = dict(WINDOW=True, SOFTCAP=True, SINKS=2, OFFSET=True)
for k, v, dims, group, tile in [
    ("int8", "int8", (128, 128), 4, 32), ("fp8", "bf16", (64, 128), 12, 16), ("bf16", "bf16", (256, 64), 8, 16),
]:
    if "fp8" in (k, v) and arch < 89:
        continue
    constants = dict(GROUP=group, N=8 if group <= 8 else 16, K_DIM=dims[0], V_DIM=dims[1], BLOCK_SIZE=32, TILE=tile,
                     LEAST=2, OVERLAP=arch >= 90, WAITS=arch >= 90, INT4=False, **FEATURES)
    made = build(decode_registers_kernel, constants, 1, GluonASTSource, out_ptr="*bf16", partial_ptr="*fp32",
                 lse_ptr="*fp32", q_ptr="*bf16", k_ptr=TYPES[k], v_ptr=TYPES[v], k_scale_ptr="*fp16",
                 v_scale_ptr="*fp16", **INDICES)
    assert made.metadata.shared == 0, made.metadata.shared
constants = dict(GROUP=7, HEADS=7, H_BLOCK=8, V_DIM=96, COLUMNS=128, TILE=32, LEAST=2, STEP=8, WINDOW=True, SINKS=2,
                 OFFSET=True, OVERLAP=arch >= 90)
build(join_kernel, constants, 4, out_ptr="*bf16", partial_ptr="*fp32", lse_ptr="*fp32", **INDICES)
constants = dict(DIM=128, BLOCK=128, BLOCK_SIZE=32, WINDOW=True, INT4=False)
build(_dequantize, constants, 4, out_ptr="*bf16", codes_ptr="*i8", scale_ptr="*fp16", **INDICES)
constants = dict(GROUP=4, GROUP_BLOCK=4, QUERIES=32, K_DIM=128, V_DIM=128, K_BLOCK=128, V_BLOCK=128, BLOCK_SIZE=1,
                 WORKSPACE=True, TILE=64, WINDOW=False, SOFTCAP=False, SINKS=False, K_SCALED=False, V_SCALED=False,
                 K_INT4=False, V_INT4=False, K_DOT=tl.bfloat16, V_DOT=tl.bfloat16, OWN_DOT=tl.bfloat16,
                 BYTE_PERMUTE=True, STAGES=2)
pages = dict.fromkeys(("out_ptr", "q_ptr", "k_ptr", "k_scale_ptr", "v_ptr", "v_scale_ptr"), "*bf16")
own = dict(own_k_ptr="*bf16", own_v_ptr="*bf16")
for recent in (0, 32):
    made = build(_prefill, dict(constants, RECENT=recent), 8, **pages, **own, **INDICES)
    assert made.metadata.shared <= 99 << 10, made.metadata.shared  # what a block may use on sm86, sm89 and sm120
    assert ("wgmma.mma_async" in made.asm["ptx"]) == (arch == 90)
parts = dict.fromkeys(("whole_ptr", "whole_lse_ptr", "partial_ptr", "lse_ptr"), "*fp32")
recent = dict(slots_ptr="*i32", starts_ptr="*i32") | {n: "*bf16" for n in ("out_ptr", "q_ptr", "k_ptr", "v_ptr")}
for group, h_block, columns, keys, warps in ((1, 1, 128, 32, 4), (7, 8, 128, 16, 4)):
    constants = dict(GROUP=group, HEADS=group, H_BLOCK=h_block, ROWS=16, K_DIM=128, V_DIM=128, K_BLOCK=128,
                     COLUMNS=columns, BLOCK_SIZE=32, KEYS=keys, TILE=32, LEAST=1, STEP=8, SOFTCAP=True, SINKS=2,
                     OFFSET=True, OVERLAP=arch >= 90)
    build(join_recent_kernel, constants, warps, **parts, **recent, **INDICES)
"""


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_attention_compiles_without_a_gpu(arch: int, tmp_path: Path) -> None:
    run_compiling(SCRIPT, arch, tmp_path)
