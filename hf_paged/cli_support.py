"""What the commands share: two consoles, errors in one line, and the engine options."""

from __future__ import annotations

import functools
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from safetensors import SafetensorError

from hf_paged.config import EngineConfig

# In a file or pipe rich would lay tables out for 80 columns.
OUT = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)
ERR = Console(stderr=True, soft_wrap=True)

_LONGEST = 600  # characters of an error: Transformers lists every model it knows

P = ParamSpec("P")
R = TypeVar("R")


class DType(str, Enum):
    auto = "auto"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder or hub name.", show_default=False)]
Device = Annotated[str | None, typer.Option(help="Where to run, e.g. cuda:1; default: the first GPU, else the CPU.")]
WeightDType = Annotated[DType, typer.Option("--dtype", help="Of the weights; auto = as stored.")]
KVCacheDType = Annotated[
    str,
    typer.Option(
        help='auto (the model\'s dtype), fp8, int8, int4, a pair: "k=int8,v=int4", or auto-quality (measured).'
    ),
]
BlockSize = Annotated[int, typer.Option(help="Tokens per KV block: 16, 32, 64, 128 or 256.")]
SkipLayers = Annotated[
    str | None,
    typer.Option(help="Layers that keep the model's dtype in the cache, e.g. 0,1,29.", show_default=False),
]
JSONOutput = Annotated[bool, typer.Option("--json", help="Write JSON, one object per line.")]


def plain_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Errors that a user can cause become one line and exit code 1, Ctrl-C becomes 130. Bugs keep their traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:  # the reader of our output had enough; click ends quietly
            raise
        except (ValueError, OSError, SafetensorError) as error:
            message = textwrap.shorten(str(error), _LONGEST, placeholder=" ...")
            ERR.print("error:", message, style="red", markup=False, highlight=False)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as interrupt:
            ERR.print("interrupted")
            raise typer.Exit(130) from interrupt

    return run


def existing(model: str) -> str:
    """`model`, once something is there: Transformers would retry for a minute, and not name what it looked for.

    Raises:
        OSError: there is no such folder, nor such a model in the hub or its cache.
        ValueError: its config.json is labelled as nothing that could be read.
    """
    from hf_paged.quant.sidecar import check_label  # not for --help

    hub_name = not model.startswith(("/", ".", "~")) and not model.endswith("/") and model.count("/") <= 1
    if not Path(model).is_dir():
        if Path(model).exists() or not hub_name:
            raise OSError(f"there is no model folder {model}")
        _ask_hub(model)
    check_label(Path(model))
    return model


def _ask_hub(name: str) -> None:
    from httpx import HTTPError
    from huggingface_hub import model_info, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        model_info(name, timeout=10)
    except (HTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise OSError(f"there is no folder {name} here, and the hub gave no such model: {reason}") from error


def usable(device: str | None) -> str | None:
    """`device`, unless this machine has none such: torch would say so late and with an assertion.

    Raises:
        ValueError: no such device here.
    """
    import torch  # not for --help and bad use

    if device is None:
        return None
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")
    if found.type == "meta":  # holds no values
        raise ValueError(f"device={device!r} is no device to run on; allowed: cpu, cuda, cuda:1 and so on")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={device!r} is not here; GPUs that PyTorch sees: {torch.cuda.device_count()}")
    return device


def check_writable(option: str, file: Path) -> None:
    """Refuse a file that cannot be written, before the work that ends in it. What is there stays as it is.

    Raises:
        OSError: a folder of that name, no such folder, or no permission.
    """
    if not file.parent.is_dir():
        raise OSError(f"there is no folder {file.parent} for {option}")
    existed = file.exists()
    try:
        file.open("ab").close()
    except OSError as error:
        raise OSError(f"{option} {file} cannot be written: {error.strerror}") from error
    if not existed:
        file.unlink()


def quiet_unless_terminal() -> None:
    """Keep Transformers' progress bars out of logs and pipes."""
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


def checked(make: Callable[..., R], options: dict[str, Any]) -> R:
    """`make(**options)`; a value that it refuses is bad use (exit code 2)."""
    try:
        return make(**options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """The `EngineConfig` fields among a command's arguments (None = the default), checked before anything loads."""
    chosen = {field.name: options[field.name] for field in fields(EngineConfig) if options.get(field.name) is not None}
    if (layers := chosen.get("skip_layers")) is not None:
        chosen["skip_layers"] = _indices("--skip-layers", layers)
    if isinstance(budget := chosen.get("kv_error_budget"), str):
        with suppress(ValueError):  # "auto" and "off" are words, all else is judged by EngineConfig
            chosen["kv_error_budget"] = float(budget)
    checked(EngineConfig, chosen)
    if (scales := chosen.get("kv_scales", "auto")) not in ("auto", "off") and not Path(scales).is_file():
        raise typer.BadParameter(f"there is no file {scales}; `hf-paged calibrate MODEL -o FILE` writes one")
    return chosen


def _indices(option: str, text: str) -> tuple[int, ...]:
    """ "0,1,29" -> (0, 1, 29)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} {text!r} is not allowed; allowed: numbers with commas between") from None
