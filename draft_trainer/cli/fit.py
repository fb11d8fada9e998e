"""``draft-trainer fit``: trains a draft on recorded states."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path
from typing import Any

# Option, dotted key of the configuration, type, and what it says.
_OPTIONS: tuple[tuple[str, str, type, str], ...] = (
    ("--epochs", "fit.epochs", int, "passes over the data (default: 3)"),
    (
        "--draft-length",
        "fit.num_speculative_tokens",
        int,
        "k that is served (default: 3)",
    ),
    ("--learning-rate", "training.learning_rate", float, "AdamW's, after warm-up (default: 1e-3)"),
    ("--batch-tokens", "training.batch_tokens", int, "tokens of one step (default: 4096)"),
    ("--ttt-steps", "training.ttt_steps", int, "depth of the training-time test (default: 5)"),
    ("--compute-dtype", "training.compute_dtype", str, "float32 (default) or bfloat16"),
    ("--device", "training.device", str, "cpu (default) or cuda"),
    ("--threads", "training.threads", int, "torch threads (default: torch's own choice)"),
    ("--seed", "training.seed", int, "orders the data (default: 0)"),
)


def add_to(commands: Any) -> None:
    """Register the command. Nothing here loads torch: help answers at once."""
    parser = commands.add_parser(
        "fit",
        help="train a draft on recorded states",
        description="Trains a draft offline on recorded states, estimates its acceptance length on "
        "held-out prompts before, while and after, and keeps its best weights. --out is a draft "
        "that vLLM loads, with training.jsonl and training.svg beside it. SIGTERM and SIGINT end "
        "it after the present step; so ended, or killed, it goes on with --resume. Several ranks: "
        "torchrun --standalone --nproc-per-node N --no-python draft-trainer fit ...",
    )
    for name, text in (
        ("--states", "recorded states"),
        ("--draft", "the draft to begin with, as draft-trainer init makes it"),
        ("--out", "the trained draft; must not exist, unless it is resumed"),
    ):
        parser.add_argument(name, type=Path, required=True, metavar="DIR", help=text)
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="DIR",
        help="the draft's policy; needed where the draft's checkpoint does not say everything",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML with the sections fit and training; the options below override it",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the unfinished fit in --out; begin one if there is none",
    )
    for option, key, kind, text in _OPTIONS:
        metavar = {int: "N", float: "X", str: "NAME"}[kind]
        parser.add_argument(option, dest=key, type=kind, metavar=metavar, help=text)
    parser.set_defaults(run=_fit)


def _fit(arguments: argparse.Namespace) -> int:
    import torch

    from draft_trainer.kernels.library import use_kernels
    from draft_trainer.offline.fit import Fit, FitFolders, Progress, fit_config
    from draft_trainer.training.ranks import RankLostError, Ranks

    given = {key: getattr(arguments, key) for _, key, _, _ in _OPTIONS}
    options = {key: value for key, value in given.items() if value is not None}
    config = fit_config(arguments.config, options)
    training = config.training
    if "threads" in training.model_fields_set:
        torch.set_num_threads(training.threads)
    if training.device == "cpu":
        use_kernels(training.cpu_kernels)
    stopping = threading.Event()
    caught: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        caught.append(number)
        stopping.set()
        # A second one ends it at once.
        signal.signal(number, signal.SIG_DFL)

    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, on_signal) for number in signals}
    try:
        ranks = Ranks.join(training.rank_timeout_s, training.device)
        progress = Progress(sys.stderr if ranks.rank == 0 else None)
        folders = FitFolders(arguments.states, arguments.draft, arguments.out, arguments.policy)
        done = Fit(folders, config, ranks, progress).run(stopping, arguments.resume)
        ranks.leave()
    except RankLostError as error:
        print(f"draft-trainer: {error}; start all ranks again with --resume", file=sys.stderr)
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0 if done else 128 + (caught or [signal.SIGTERM])[0]
