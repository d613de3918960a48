"""The instruction profile counts what the kernel must do at least, and waits as scoreboards make a warp wait."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.eval.instruction_profile import Instruction, tile_of, timeline  # noqa: E402


def instruction(opcode: str, result: int = 7, waits: tuple[int, ...] = (), target: str | None = None) -> Instruction:
    return Instruction(f"{opcode} ;", opcode, 1, result, waits, target)


def test_who_waits_for_one_load_waits_for_all_that_share_its_scoreboard() -> None:
    """Else a load that was issued just before the wait would seem to cost nothing."""
    alu = [instruction("LOP3.LUT")] * 400
    late = [instruction("LDG.E.128", 5), *alu, instruction("LDG.E.128", 5), instruction("MOV", waits=(5,))]
    apart = [instruction("LDG.E.128", 5), *alu, instruction("LDG.E.128", 4), instruction("MOV", waits=(5,))]
    assert timeline(late, 1000)[0] == 402 + 1000
    assert timeline(apart, 1000)[0] == 1 + 1000
    assert timeline(late, 0)[0] == timeline(apart, 0)[0] == 403


def test_rare_branches_do_not_count_as_part_of_a_tile() -> None:
    code = [instruction("MOV"), instruction("HMMA"), instruction("BRA", target="L_x_1"), *[instruction("FMUL")] * 9]
    code += [instruction("FADD"), instruction("BRA", target="L_x_0"), instruction("EXIT")]
    tile = tile_of(code, {"L_x_0": 1, "L_x_1": 12})
    assert [x.opcode for x in tile] == ["HMMA", "BRA", "FADD", "BRA"]


@pytest.mark.skipif(
    not Path(triton.__file__).with_name("backends").joinpath("nvidia/bin/nvdisasm").exists()
    and shutil.which("nvdisasm") is None,
    reason="needs nvdisasm",
)
def test_the_profile_finds_the_loop_over_tiles(tmp_path: Path) -> None:
    """Another loop, or half of this one, would have fewer matrix products than 32 tokens of 8 heads need."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "hf_paged.eval.instruction_profile", "--groups", "8"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    int8, int4 = json.loads(line)["rows"]
    for row in (int8, int4):
        assert row["matrix"] >= 2 * 32 * 8 * 128 // (16 * 8 * 16), row
        assert row["all"] < row["cycles@0"] < row["cycles@1000"] < row["cycles@2000"], row
    assert int4["integer"] < int8["integer"], "4-bit codes need no conversion"
