"""Write a random model of any shape: for timing, not for text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from ggml_async import models
from ggml_async.errors import GgmlAsyncError, UsageError

_SHAPE = (
    ("--layers", "n_layer", "blocks"),
    ("--experts", "n_expert", "experts of each layer"),
    ("--used", "n_expert_used", "experts used per token"),
    ("--embd", "n_embd", "width of the model"),
    ("--ff", "n_ff", "width of one expert's FFN, or of the dense FFN"),
    ("--heads", "n_head", "attention heads"),
    ("--kv-heads", "n_head_kv", "key/value heads"),
    ("--head-dim", "head_dim", "size of a head"),
    ("--vocab", "n_vocab", "tokens"),
    ("--ctx", "n_ctx", "context length that the model claims"),
)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--preset", type=click.Choice(list(models.PRESETS)), default="tiny", help="Shape to start from.")
@click.option("--quant", type=click.Choice(models.QUANTS), default="q4_0", help="Type of all matrices.")
@click.option("--seed", type=int, default=1, help="Seed of all weights.")
@click.option("-f", "--force", is_flag=True, help="Replace TARGET when it exists.")
def main(target: Path, preset: str, quant: str, seed: int, force: bool, **shape: int | None) -> None:
    """Write a random qwen3moe GGUF (qwen3 for a dense preset) without a tokenizer to TARGET.

    The shape is the preset's, with what the options name replaced. The same arguments give the same file.

    \b
    Examples:
      python tools/make_synthetic.py tiny.gguf
      python tools/make_synthetic.py big.gguf --preset qwen3-30b-a3b --layers 4
      python tools/make_synthetic.py kq.gguf --quant q4_k --experts 16 --used 4
    """
    arguments: dict[str, Any] = models.PRESETS[preset] | {k: v for k, v in shape.items() if v is not None}
    console = Console(stderr=True)
    try:
        if target.exists() and not force:
            raise UsageError(f"{target}: exists already", "Add --force to replace it.")
        columns = ("writing", BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("writing", total=None)
            models.make_synthetic(
                target,
                **arguments,
                quant=quant,
                seed=seed,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except GgmlAsyncError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(f"{target}: {target.stat().st_size / 1e6:.1f} MB", err=True)


for _flag, _name, _help in reversed(_SHAPE):
    click.option(_flag, _name, type=int, help=f"Instead of the preset's: {_help}.")(main)

if __name__ == "__main__":
    main()
