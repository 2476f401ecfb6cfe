"""Runs of several seeds in this process: their flags, and the text that is learned."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch

SOURCE = f"{sysconfig.get_paths()['stdlib']}/[a-d]*.py"


def parser_of(text: str | None, *, seeds: int, steps: int) -> argparse.ArgumentParser:
    """The flags that all have; `text` is the module's."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", type=Path, help="a Markdown file whose measured part is replaced")
    parser.add_argument("--save", type=Path, help="a JSON file of what runs found; those in it are left out")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What was given; torch has its threads."""
    arguments = parser.parse_args()
    if arguments.table is not None and not arguments.table.is_file():
        parser.error(f"--table {arguments.table}: there is no such file")
    torch.set_num_threads(arguments.threads)
    return arguments
