"""``draft-trainer serve``: runs the trainer, on one rank or several."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    """Register the command. Nothing here loads torch: help answers at once."""
    parser = commands.add_parser(
        "serve",
        help="run the trainer",
        description="Runs the trainer until SIGTERM or SIGINT. Prints one line when it is ready. "
        "Several ranks: torchrun --nproc-per-node N --no-python draft-trainer serve ...; rank 0 "
        "is the server.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="TOML with the sections server, draft, replay, training, gate, publish and recording; "
        "paths in it are relative to its folder",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="what goes to stderr (default: info)",
    )
    parser.set_defaults(run=_serve, address="")


def _serve(arguments: argparse.Namespace) -> int:
    from draft_trainer.allocator import keep_freed_memory, settle_collector
    from draft_trainer.config import load_config
    from draft_trainer.kernels.library import use_kernels
    from draft_trainer.server.app import TrainerServer
    from draft_trainer.training.ranks import RankLostError, Ranks

    logging.basicConfig(
        level=arguments.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    config = load_config(arguments.config)
    # Here, so that no training step waits for a compiler.
    logging.getLogger(__name__).info(use_kernels(config.training.cpu_kernels))
    keep_freed_memory()
    try:
        ranks = Ranks.join(config.training.rank_timeout_s, config.training.device)
        if ranks.rank > 0:
            return _follow(ranks, config.training)
    except RankLostError as error:
        print(f"draft-trainer: {error}; start all ranks again", file=sys.stderr)
        return 1
    server = TrainerServer(config, ranks)
    ended = server.died
    signalled = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        signalled.set()
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    settle_collector()
    server.start()
    print(server.ready_line, flush=True)
    ended.wait()
    clean = server.stop()
    if not signalled.is_set():
        print(
            "draft-trainer: training ended with the error above; a restart resumes from the newest "
            "training state",
            file=sys.stderr,
        )
        return 1
    if not clean:
        print("draft-trainer: not everything ended in time", file=sys.stderr)
        return 1
    return 0


def _follow(ranks: Any, training: Any) -> int:
    import torch

    from draft_trainer.config import learner_config
    from draft_trainer.training.followers import follow

    # Whoever stops the ranks signals all of them: these end after rank 0's last step, at its word.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(training.threads)
    os.nice(training.nice)
    follow(ranks, learner_config(training))
    return 0
