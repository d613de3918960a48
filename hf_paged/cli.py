"""The command line: `hf-paged generate | info | quantize | calibrate | bench | eval`. The work is elsewhere.

Exit codes: 0 done, 1 something failed (one line on stderr says what), 2 bad use, 130 interrupted. Bad use is what the
options alone show, and a file to read that is not there; what takes a model, or what a file holds, to find is a
failure. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import io
import logging
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.logging import RichHandler

from hf_paged.cli_bench import bench
from hf_paged.cli_calibrate import calibrate
from hf_paged.cli_eval import evaluate
from hf_paged.cli_generate import generate
from hf_paged.cli_info import info
from hf_paged.cli_quantize import quantize
from hf_paged.cli_support import ERR, plain_errors

app = typer.Typer(
    name="hf-paged",
    help="Paged and quantized KV cache, and continuous batching, inside Hugging Face Transformers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 120},  # as wide as the terminal: at 80 the commands' summaries are cut off
)
app.command()(plain_errors(generate))
app.command()(plain_errors(info))
app.command()(plain_errors(quantize))
app.command()(plain_errors(calibrate))
app.add_typer(bench)
app.add_typer(evaluate)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"hf-paged {version('hf-paged')}")
        raise typer.Exit


@app.callback()
def settings(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the engine's choices.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a result is not lost to letters that the terminal lacks
    logger = logging.getLogger("hf_paged")
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    logger.handlers = [RichHandler(console=ERR, show_path=False)]
    logger.propagate = False
