"""``draft-trainer completion bash|zsh|fish``: a script that completes commands and options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from slipstream.errors import RefusedError

SHELLS = ("bash", "zsh", "fish")


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "completion",
        help="print a shell's completion script",
        description="Prints a script that completes commands and options. bash: source "
        "<(draft-trainer completion bash). zsh: write it to a file _draft-trainer in a folder of "
        "$fpath. fish: write it to ~/.config/fish/completions/draft-trainer.fish.",
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=_completion, address="")


def _completion(arguments: argparse.Namespace) -> int:
    from draft_trainer.cli.main import build_parser

    try:
        import shtab
    except ModuleNotFoundError as error:
        raise RefusedError(
            "completion",
            "a Python without shtab",
            "the package shtab",
            "python -m pip install 'shtab>=1.8'",
        ) from error
    parser = build_parser()
    _complete_files(parser, shtab.FILE)
    print(shtab.complete(parser, shell=arguments.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, files: Any) -> None:
    """Options that take a path complete to files."""
    for action in parser._actions:
        if action.type is Path:
            action.complete = files  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, files)
