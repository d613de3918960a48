"""What a user installs, and what importing it does."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("hf_paged", "quant", "kernels", "eval")
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a "wheel" or "sdist" of `source` without build isolation, so without a network."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(out)], cwd=source, capture_output=True, text=True, check=True
    )
    return out / done.stdout.splitlines()[-1]


def run_python(code: str, cwd: Path = ROOT) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The files of a wheel that was built from the sdist of this tree, the longest way a file can get lost on."""
    tmp = tmp_path_factory.mktemp("build")
    tree = tmp / "tree"
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    with tarfile.open(build("sdist", tree, tmp)) as archive:
        archive.extractall(tmp / "sdist", filter="data")
    (unpacked,) = (tmp / "sdist").iterdir()
    with zipfile.ZipFile(build("wheel", unpacked, tmp)) as archive:
        assert not [info.filename for info in archive.infolist() if info.external_attr >> 28 == 0xA], (
            "a link, not a file"
        )
        return archive.namelist()


def test_the_wheel_brings_one_top_level_name_so_it_cannot_overwrite_another_package(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hf_paged"}


def test_the_wheel_holds_every_source_file_of_the_linked_folders(wheel_names: list[str]) -> None:
    for folder in SOURCES:
        prefix = "" if folder == "hf_paged" else "hf_paged/"
        sources = (path for pattern in ("*.py", "*.cu") for path in (ROOT / folder).rglob(pattern))
        expected = {prefix + path.relative_to(ROOT).as_posix() for path in sources}
        assert expected <= set(wheel_names)
    assert "hf_paged/py.typed" in wheel_names


def test_import_kernels_is_never_ours() -> None:
    """A regular package called `kernels` here would stand in for Hugging Face's and break Transformers."""
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or ROOT not in Path(spec.origin).parents
    for folder in ("quant", "kernels", "eval"):
        assert not (ROOT / folder / "__init__.py").exists()
        assert (ROOT / "hf_paged" / folder).resolve() == ROOT / folder


def test_importing_hf_paged_does_not_initialise_cuda() -> None:
    """A process that forks after the import, as data loaders and servers do, could not use the GPU any more."""
    assert run_python("import hf_paged, torch; print(torch.cuda.is_initialized())").strip() == "False"


def test_the_installed_package_imports_from_another_folder(tmp_path: Path) -> None:
    assert run_python("import hf_paged.kernels.layout as m; print(m.INT8_MAX)", cwd=tmp_path).strip() == "127.0"
