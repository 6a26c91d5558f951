"""Unfold a dense llama GGUF into a mixture of experts that computes the same."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from ggml_async import models
from ggml_async.errors import GgmlAsyncError, UsageError


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("-e", "--experts", type=int, default=8, help="Experts of each layer; divides the FFN's quant blocks.")
@click.option("-u", "--used", type=int, help="Experts used per token.  [default: all]")
@click.option("--router-scale", type=float, default=0.0, help="Deviation of random router weights; 0: all alike.")
@click.option("--seed", type=int, default=0, help="Seed of the router's weights.")
@click.option("-f", "--force", is_flag=True, help="Replace TARGET when it exists.")
def main(  # noqa: PLR0917
    source: Path, target: Path, experts: int, used: int | None, router_scale: float, seed: int, force: bool
) -> None:
    """Unfold the dense FFN of SOURCE (a llama GGUF) into experts, and write the mixture of experts to TARGET.

    With all experts used and a uniform router the new model computes what the dense one does, but for the order of
    sums (a number of used experts that is no power of two also rounds the scales). With fewer used it is a real sparse
    decode, of poorer text.

    \b
    Examples:
      python tools/make_moe.py dense.gguf moe.gguf                 8 experts, all used
      python tools/make_moe.py dense.gguf moe.gguf -e 16 -u 2      a sparse decode
    """
    logging.basicConfig(format="warning: %(message)s", level=logging.WARNING)
    try:
        if target.exists() and not force:
            raise UsageError(f"{target}: exists already", "Add --force to replace it.")
        if seed < 0:
            raise UsageError(f"seed {seed} is negative", "Use 0 or more.")
        models.make_moe(source, target, experts, used, router_scale, seed)
    except GgmlAsyncError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(f"{target}: {target.stat().st_size / 1e6:.1f} MB", err=True)


if __name__ == "__main__":
    main()
