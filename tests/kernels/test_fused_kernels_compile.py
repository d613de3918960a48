"""The fused kernels compile for the GPUs they promise, here, without one: an error would otherwise wait for a user."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiling import run_compiling

pytest.importorskip("triton", reason="Triton exists on Linux only")

SCRIPT = """
import re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_paged.kernels.gated_activation import _gated_activation
from hf_paged.kernels.gather_channels import _gather_channels
from hf_paged.kernels.interleave import _interleave
from hf_paged.kernels.rms_norm import _rms_norm
from hf_paged.kernels.rope_write import _rope_write
from hf_paged.kernels.rotary_tables import _rotary_tables
from hf_paged.kernels.step_tokens import _embedding, _input_tokens, _likeliest, _likeliest_parts

arch = int(sys.argv[1])

def build(kernel, pointers, ints, floats, constants, warps, ones=(), order=False):
    names = [p.name for p in kernel.params]
    values = {**pointers, **dict.fromkeys(ints, "i32"), **dict.fromkeys(floats, "fp32")}
    signature = {name: values.get(name, "constexpr") for name in names}
    constants = {**constants, **dict.fromkeys(ones, 1), "OVERLAP": arch >= 90}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in [*pointers, *ints]}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": warps, "launch_pdl": arch >= 90}
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ptx"]
    waits = ptx.find("griddepcontrol.wait")
    reads = ptx.rfind("ld.global") if order else ptx.find("ld.global")  # an order of channels is no kernel's work
    assert (waits >= 0) == (arch >= 90) and waits < reads, ptx
    assert ptx.find("griddepcontrol.launch_dependents") <= waits, ptx  # else the chain of a step stops here
    return ptx

def widest(ptx, what):
    return max(int(n or 1) * int(b) for n, b in re.findall(what + r"\\S*?(?:\\.v(\\d))?\\.b(\\d+)", ptx))

for dtype, form in (("bf16", (0.0, True)), ("fp16", (1.0, False))):
    flags = dict(POST=True, POST_OFFSET=form[0], POST_CAST_FIRST=form[1], ADD=True,
                 NORM=True, OFFSET=form[0], CAST_FIRST=form[1])
    rows = dict.fromkeys(["x_ptr", "residual_ptr", "post_ptr", "weight_ptr", "sum_ptr", "out_ptr"], "*" + dtype)
    for order in (False, True):
        constants = dict(N=4096, BLOCK=4096, ROWS=1, ORDER=order, **flags)
        pointers = {**rows, "order_ptr": "*i32"}
        ptx = build(_rms_norm, pointers, ["num_rows", "x_stride"], ["post_eps", "eps"], constants, 16)
        assert widest(ptx, r"ld\\.global") == widest(ptx, r"st\\.global") == 128, ptx
        assert ptx.count("shfl") < 32, ptx  # an order in shared memory, not lane by lane
for kind in ("silu", "gelu", "gelu_tanh"):
    pointers = {**dict.fromkeys(["gate_ptr", "up_ptr", "out_ptr"], "*bf16"), "order_ptr": "*i32"}
    constants = dict(N=11008, KIND=kind, BLOCK=1024, ORDER=False)
    ptx = build(_gated_activation, pointers, ["gate_stride", "up_stride"], [], constants, 4)
    assert widest(ptx, r"ld\\.global") == widest(ptx, r"st\\.global") == 128, ptx
constants = dict(N=11008, KIND="silu", BLOCK=1024, ORDER=True)
ptx = build(_gated_activation, pointers, ["gate_stride", "up_stride"], [], constants, 4, order=True)
assert widest(ptx, r"ld\\.global") == widest(ptx, r"st\\.global") == 128, ptx
pointers = {"x_ptr": "*bf16", "out_ptr": "*bf16", "order_ptr": "*i32"}
for constants, warps in ((dict(BLOCK=8192, WHOLE=True), 16), (dict(BLOCK=1024, WHOLE=False), 4)):
    ptx = build(_gather_channels, pointers, [], [], dict(K=8192, **constants), warps, order=True)
    assert widest(ptx, r"ld\\.global") == widest(ptx, r"st\\.global") == 128, ptx
pointers = {"x_ptr": "*bf16", "places_ptr": "*i32", "out_ptr": "*bf16"}
ptx = build(_interleave, pointers, ["M"], [], dict(K=4096, BLOCK=32, TOGETHER=8), 1, order=True)
assert widest(ptx, r"ld\\.global") == widest(ptx, r"st\\.global") == 128, ptx
tokens = dict.fromkeys(["out_ptr", "ids_ptr", "rows_ptr", "last_ptr"], "*i64")
build(_input_tokens, tokens, ["count"], [], dict(BLOCK=256), 4)
rows = {"out_ptr": "*bf16", "ids_ptr": "*i64", "weight_ptr": "*bf16"}
ptx = build(_embedding, rows, [], [], dict(K=4096, BLOCK=1024), 4)
assert widest(ptx, r"ld\\.global") == widest(ptx, r"st\\.global") == 128, ptx
parts = {"best_ptr": "*fp32", "token_ptr": "*i32"}
ptx = build(_likeliest_parts, {**parts, "logits_ptr": "*bf16"}, ["stride", "V"], [], dict(BLOCK=4096), 8)
assert widest(ptx, r"ld\\.global") == 128, ptx
tokens = dict.fromkeys(["out_ptr", "last_ptr", "rows_ptr"], "*i64")
build(_likeliest, {**parts, **tokens}, ["parts"], [], dict(BLOCK=32), 1)
tables = {**dict.fromkeys(["cos_ptr", "sin_ptr"], "*bf16"), "positions_ptr": "*i64", "frequencies_ptr": "*fp32"}
ptx = build(_rotary_tables, tables, [], ["scale"], dict(HALF=64, BLOCK=64), 1)
assert "cos.approx" not in ptx, ptx  # angles reach the length of the context
FULL = dict(ROTARY_DIM=128, INTERLEAVED=False)
PLAIN = dict(TRANSFORM=False, V_OFFSET=False, K_ROTATION=1, V_ROTATION=1)
SMOOTH = dict(TRANSFORM=True, V_OFFSET=True, K_ROTATION=1, V_ROTATION=1)
ROTATED = dict(TRANSFORM=True, V_OFFSET=False, K_ROTATION=128, V_ROTATION=128)
for codes, code_max, rope, norm, transform in (
    ("bf16", 0.0, FULL, False, PLAIN), ("i8", 127.0, FULL, True, PLAIN), ("i8", 127.0, FULL, False, SMOOTH),
    ("i8", 127.0, dict(ROTARY_DIM=32, INTERLEAVED=True), False, ROTATED),
    ("fp8e4nv" if arch >= 89 else "fp16", 448.0 if arch >= 89 else 0.0, dict(ROTARY_DIM=0, INTERLEAVED=False), False,
     SMOOTH),
):
    names = ["q_ptr", "k_ptr", "v_ptr", "cos_ptr", "sin_ptr", "q_weight_ptr", "k_weight_ptr", "out_ptr"]
    scale = "*fp16" if code_max else "*" + codes
    pointers = {**dict.fromkeys(names, "*bf16"), "k_pages_ptr": "*" + codes, "k_scale_ptr": scale,
                "v_pages_ptr": "*" + codes, "v_scale_ptr": scale, "slot_ptr": "*i64",
                **dict.fromkeys(["k_offset_ptr", "k_factor_ptr", "v_offset_ptr"], "*fp32")}
    strides = ["q_stride_t", "q_stride_h", "k_stride_t", "k_stride_h", "v_stride_t", "v_stride_h", "angle_stride_t",
               "k_stride", "k_scale_stride", "v_stride", "v_scale_stride"]
    shape = dict(Q_HEADS=32, KV_HEADS=8, HEAD_DIM=128, V_DIM=128, BLOCK_D=128, BLOCK_V=128, Q_ROWS=16, KV_ROWS=8,
                 BLOCK_SIZE=32)
    constants = dict(**shape, **rope, **transform, NORM=norm, OFFSET=0.0, CAST_FIRST=norm, K_CODE_MAX=code_max,
                     V_CODE_MAX=code_max)
    ptx = build(_rope_write, pointers, strides, ["q_eps", "k_eps"], constants, 4, ones=["angle_stride"])
    if rope is FULL:
        assert not re.findall(r"ld\\.global\\S*16 ", ptx), ptx  # 2-byte loads
        assert ptx.count("bar.sync") <= 2, ptx  # those of the scales: nothing else passes through shared memory
"""


@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile_and_move_sixteen_bytes_at_a_time(arch: int, tmp_path: Path) -> None:
    """Vector width hangs on what the compiler can prove of strides and masks; 2-byte loads would take far longer."""
    run_compiling(SCRIPT, arch, tmp_path)
