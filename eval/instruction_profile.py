"""What a tile of a decode attention kernel asks of a multiprocessor, read from its machine code: no GPU is needed.

    python -m hf_paged.eval.instruction_profile                              # int8 and int4; 1, 4, 8 heads per KV head
    python -m hf_paged.eval.instruction_profile --formats bf16 --groups 4 --show

Compiles for compute capability 9.0 what the package launches for 128 channels and blocks of 32 tokens, disassembles it
(`nvdisasm`, which comes with Triton) and takes the loop over tiles without its rare branches, those of an edge and of a
raised maximum. Instructions are counted by the unit that executes them. Cycles are those of a warp that has its
scheduler to itself: it issues in order, stalls as the compiler wrote, and waits for the scoreboards that an instruction
names (both stand in the instruction, bits 105 to 121). A scoreboard counts loads, so who waits for one of them waits
for all that share it. Shuffles take 25 cycles, special functions 30, loads of pages 0, 1,000 or 2,000, of the block
table (in a cache) 250 at most. Prints a table, with `--show` the loads and long waits at 1,000, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from hf_paged.kernels import decode_int4, decode_registers
from hf_paged.kernels.layout import GroupPages, LayerKV, Pages, PlainPages, ScaledPages

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
POINTERS = {"bf16": "*bf16", "int8": "*i8", "fp8": "*fp8e4nv", "int4": "*u8"}
UNITS = {  # of the first pattern that an opcode begins with
    "matrix": "HMMA",
    "fp32": "FFMA|FMUL|FADD|HADD2|HFMA2|IMAD",
    "special": "MUFU",
    "memory": "LD|ST|SHFL|REDUX",
    "control": "U|R2UR|BRA|BSSY|BSYNC|NOP|S2R",
    "integer": "",
}
LATENCY = {"SHFL": 25, "REDUX": 30, "MUFU": 30, "R2UR": 12}  # cycles
TABLE_LATENCY = 250


class Instruction(NamedTuple):
    """One of a warp's, with what its control bits say."""

    text: str
    opcode: str  # with its modifiers
    stall: int  # cycles until the next one may issue
    result: int  # the scoreboard that its result releases, 7: none
    waits: tuple[int, ...]  # scoreboards
    target: str | None  # label that it branches to

    @property
    def unit(self) -> str:
        return next(unit for unit, opcodes in UNITS.items() if re.match(opcodes, self.opcode))


def pages(name: str) -> Pages:
    """A block of 32 tokens of one KV head of 128 channels."""
    shape = (1, 1, 32, 128)
    if name == "int4":
        return GroupPages(codes=torch.zeros(1, 1, 32, 64, dtype=torch.uint8), scale=torch.zeros(1, 1, 32, 2, 2).half())
    if name == "bf16":
        return PlainPages(data=torch.zeros(shape, dtype=torch.bfloat16))
    return ScaledPages(codes=torch.zeros(shape, dtype=CODES[name]), scale=torch.zeros(shape[:3]).half())


def compiled(name: str, group: int) -> tuple[bytes, int]:
    """The cubin that decodes pages of a format with `group` heads per KV head, and its programs per multiprocessor."""
    layer, int4 = LayerKV(k=pages(name), v=pages(name)), name == "int4"
    if int4:
        tile, registers = decode_int4.launch(layer, group)
        programs = 4 * (512 // registers)
    else:
        tile, registers, programs = decode_registers.launch(layer)
    constants = {"GROUP": group, "N": decode_int4.padded_heads(group) if int4 else 8, "K_DIM": 128, "V_DIM": 128}
    constants |= {"BLOCK_SIZE": 32, "TILE": tile, "LEAST": 1, "INT4": int4, "OVERLAP": True, "WAITS": False}
    constants |= {"WINDOW": False, "SOFTCAP": False, "SINKS": 0, "OFFSET": False}
    kernel = decode_registers.decode_registers_kernel
    types = dict.fromkeys(("tables_ptr", "seq_lens_ptr"), "*i32") | dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32")
    types |= dict.fromkeys(("k_ptr", "v_ptr"), POINTERS[name]) | dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "*fp16")
    types |= dict.fromkeys(("scale", "softcap"), "fp32") | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    signature = {n: types.get(n, "*bf16" if n.endswith("_ptr") else "i32") for n in names}
    aligned = [n for n in names if n.endswith("_ptr") or ("stride" in n and n != "tables_stride")]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": 1, "maxnreg": registers}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"], programs


def disassembled(cubin: bytes) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions, and the places of labels."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", "-hex", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    code: list[Instruction] = []
    labels = {}
    words = r"/\*[0-9a-f]{4,}\*/ +(.*?) *; +/\* 0x[0-9a-f]+ \*/\s+/\* 0x([0-9a-f]+) \*/"
    for label, line, word in re.findall(rf"^\.(L_x_\d+):|{words}", text, re.MULTILINE):
        if label:
            labels[label] = len(code)
            continue
        bits = int(word, 16) >> 41
        opcode = re.sub(r"^@!?U?P\w+ ", "", line).split()[0]
        target = re.search(r"L_x_\d+", line) if opcode == "BRA" else None
        waits = tuple(i for i in range(6) if bits >> 11 + i & 1)
        code.append(Instruction(line, opcode, bits & 15, bits >> 5 & 7, waits, target[0] if target else None))
    return code, labels


def tile_of(code: Sequence[Instruction], labels: dict[str, int]) -> list[Instruction]:
    """The innermost loop with matrix products, as it runs when all its forward branches are taken."""
    places = [labels[x.target] if x.target else len(code) for x in code]
    matrix = [i for i, x in enumerate(code) if x.unit == "matrix"]
    length, place = min((i - begin, begin) for i, begin in enumerate(places) if any(begin <= m < i for m in matrix))
    last, tile = place + length, []
    while place <= last:
        tile.append(code[place])
        place = places[place] if place < places[place] < len(code) else place + 1
    return tile


def timeline(tile: Sequence[Instruction], latency: int) -> tuple[int, list[str]]:
    """Cycles of a tile that follows others, and when its loads are issued and waited for."""
    free = [0] * 8  # when a scoreboard is
    now = start = 0
    notes: list[str] = []
    for _ in range(4):
        start, notes = now, []
        for x in tile:
            ready = max((free[i] for i in x.waits), default=0)
            if ready > now + 50:
                notes.append(f"{now - start:6} waits {ready - now} for scoreboard {x.waits}: {x.text}")
            now = max(now, ready)
            late = LATENCY.get(x.opcode.split(".")[0], 20)
            if x.opcode.startswith("LDG"):
                late = min(latency, TABLE_LATENCY) if x.opcode == "LDG.E" else latency
                notes.append(f"{now - start:6} on scoreboard {x.result}: {x.text}")
            free[x.result] = max(free[x.result], now + late)
            now += max(x.stall, 1)
    return now - start, notes


def profile(name: str, group: int) -> tuple[dict[str, Any], list[str]]:
    """A row of figures, and the notes of `timeline`."""
    cubin, programs = compiled(name, group)
    tile = tile_of(*disassembled(cubin))
    units = Counter(x.unit for x in tile)
    row = {"format": name, "group": group, "programs": programs, "all": len(tile)} | {u: units[u] for u in UNITS}
    row |= {f"cycles@{latency}": timeline(tile, latency)[0] for latency in (0, 1000, 2000)}
    return row, timeline(tile, 1000)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="int8,int4", help=f"of {', '.join(POINTERS)}")
    parser.add_argument("--groups", default="1,4,8", help="heads per KV head, at most 8")
    parser.add_argument("--show", action="store_true", help="loads of a tile, and who waits for them")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.formats.split(","):
        for group in (int(text) for text in args.groups.split(",")):
            row, notes = profile(name, group)
            if not rows:
                print("".join(f"{key:>12}" for key in row))
            print("".join(f"{value:>12}" for value in row.values()), flush=True)
            if args.show:
                print(*notes, sep="\n")
            rows.append(row)
    print(json.dumps({"triton": triton.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
