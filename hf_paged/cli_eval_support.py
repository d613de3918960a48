"""What the eval commands share: options, lists of KV formats, texts, models, progress and plot files.

All that can be refused is refused before a model is loaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hf_paged import cli_support as cli
from hf_paged.config import AUTO_QUALITY, EngineConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLOT_SUFFIXES = (".png", ".svg", ".pdf")

Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Model folders or hub names.")]
TextFile = Annotated[
    Path | None, typer.Option("--text", help="A UTF-8 text file to read.", exists=True, dir_okay=False)
]
DatasetName = Annotated[
    str | None,
    typer.Option(
        "--dataset", help="Or a data set with a column `text`, NAME[:CONFIG]; wikitext2 is WikiText-2 raw, test."
    ),
]
KVFormats = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-cache-dtype",
        help="Formats, a list such as auto,int8,k=int8,v=int4; may be repeated. Default: auto and 8 bits.",
    ),
]
Naive = Annotated[bool, typer.Option("--naive", help="Also each quantized format without smoothing and protection.")]
Recent = Annotated[
    bool, typer.Option("--recent", help="Also each quantized format with current blocks in 16 bits (kv_recent_block).")
]
KVScales = Annotated[str, typer.Option(help="Smoothing of K and V: auto, off, or a file of `hf-paged calibrate`.")]
KVErrorBudget = Annotated[
    str, typer.Option(help="Relative error over which a layer is stored finer: auto, off, or a number such as 0.05.")
]
Stride = Annotated[int | None, typer.Option(help="Tokens between windows; default: the window, no overlap.")]
MaxWindows = Annotated[int | None, typer.Option(min=1, help="Windows to score, from the start; default: all.")]
Chunk = Annotated[int | None, typer.Option(min=1, help="Tokens computed per step; the result does not depend on it.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Also draw the result: a .png, .svg or .pdf file.")]


def engine_options(block_size: int, kv_scales: str, kv_error_budget: str) -> dict[str, Any]:
    """The engine options that all caches of a command share, checked."""
    return cli.engine_options({"block_size": block_size, "kv_scales": kv_scales, "kv_error_budget": kv_error_budget})


def formats_of(values: Sequence[str] | None, default: str) -> list[str]:
    """The formats of a repeated option, each value a list with commas; "k=..." and "v=..." side by side are one.

    Raises:
        typer.BadParameter: one that does not exist.
    """
    words = [word.strip() for value in values or [default] for word in value.split(",")]
    formats: list[str] = []
    while words:
        word = words.pop(0)
        if "=" in word and words and "=" in words[0]:
            word = f"{word},{words.pop(0)}"
        cli.checked(EngineConfig, {"kv_cache_dtype": word})
        if word not in formats:
            formats.append(word)
    return formats


def caches_of(formats: Sequence[str], naive: bool, recent: bool = False) -> list[dict[str, Any]]:
    """Engine options of each cache to measure: the formats, after each its naive form and that with the current block
    in 16 bits, if these are asked for.
    """
    caches: list[dict[str, Any]] = []
    for name in formats:
        caches.append({"kv_cache_dtype": name})
        if naive and name != "auto":
            caches.append({"kv_cache_dtype": name, "kv_scales": "off"})
        if recent and name not in ("auto", AUTO_QUALITY):
            caches.append({"kv_cache_dtype": name, "kv_recent_block": True})
    return caches


def name_of(cache: Mapping[str, Any]) -> str:
    """A cache of `caches_of` in words."""
    naive = " naive" if cache.get("kv_scales") == "off" else ""
    return f"{cache['kv_cache_dtype']}{naive}{' + recent block' if cache.get('kv_recent_block') else ''}"


def check_source(text: Path | None, dataset: str | None) -> None:
    """Refuse two sources of a text, or none."""
    if (text is None) == (dataset is None):
        raise typer.BadParameter("give --text FILE or --dataset NAME, one of them")


def text_of(text: Path | None, dataset: str | None) -> str:
    """The text of the one source that was given."""
    from hf_paged.eval.texts import dataset_text, read_text

    if text is not None:
        return read_text(text)
    assert dataset is not None
    return dataset_text(dataset)


def check_plot(file: Path | None) -> None:
    """Refuse a plot that could not be written, before the work that it is to show."""
    if file is None:
        return
    if file.suffix not in PLOT_SUFFIXES:
        raise typer.BadParameter(
            f"--plot {file} is not allowed; allowed: a file that ends in {', '.join(PLOT_SUFFIXES)}"
        )
    if not file.parent.is_dir():
        raise OSError(f"there is no folder {file.parent} for the plot")
    cli.check_writable("--plot", file)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--plot needs the package matplotlib: pip install "hf_paged[eval]"')


def config_of(model: str) -> Any:
    """The config of a model that is not loaded yet."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(cli.existing(model))


def load(model: str, dtype: cli.DType, device: str | None) -> tuple[PreTrainedModel, Any]:
    """A model and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cli.quiet_unless_terminal()
    device = cli.usable(device) or ("cuda" if torch.cuda.is_available() else "cpu")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype.value, device_map=device)
    return loaded.eval(), AutoTokenizer.from_pretrained(model)


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal; what it yields is told how much more is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hidden = not cli.ERR.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=cli.ERR, transient=True, disable=hidden) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)
