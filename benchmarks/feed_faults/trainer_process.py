"""``draft-trainer serve``, forked from a process that has imported it."""

from __future__ import annotations

import os
import sys

# Imported here for the fork server: what the command would import first.
import draft_trainer.server.app  # noqa: F401
from draft_trainer.cli.main import main


def serve(config: str, log: str) -> None:
    """The command with its output appended to ``log``. The process's whole life."""
    number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(number, 1)
    os.dup2(number, 2)
    sys.exit(main(["serve", "--config", config]))
