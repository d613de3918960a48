"""How tests compile Triton kernels here for GPUs that are elsewhere: in a process without the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_compiling(script: str, arch: int, cache: Path) -> None:
    """Run a script, which gets the compute capability as its argument; what it compiles goes to the folder `cache`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-W", "ignore", "-c", script, str(arch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
