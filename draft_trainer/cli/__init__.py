"""The ``draft-trainer`` command; names the extra that a missing package belongs to."""

from __future__ import annotations

import sys

from slipstream import __version__
from slipstream.errors import missing_package

REFUSED = 2
EXTRAS = dict.fromkeys(("transformers", "huggingface_hub"), "warmup")
"""The extras of packages that only some commands import; all others are the trainer's."""


def run() -> int:
    """Run the command line; the exit status is that of ``draft_trainer.cli.main.main``."""
    if sys.argv[1:] == ["--version"]:
        print(__version__)
        return 0
    try:
        from draft_trainer.cli.main import main

        return main()
    except ModuleNotFoundError as error:
        refused = missing_package(error, EXTRAS, "trainer")
        print(f"draft-trainer: {refused}", file=sys.stderr)
        return REFUSED
