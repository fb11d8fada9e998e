"""Options of ``examples.torch_loop.train``, without torch: what starts it checks them."""

from __future__ import annotations

import argparse
from pathlib import Path


def build_parser() -> argparse.ArgumentParser:
    """Options of the example."""
    parser = argparse.ArgumentParser(prog="python -m examples.torch_loop.train")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/torch-loop"))
    parser.add_argument("--trainer", default="", help="address of a trainer that runs already")
    parser.add_argument("--servers", default="", help="URLs of its rollout servers, with commas")
    parser.add_argument("--shared-memory", default="/dev/shm", help="the trainer's, as seen here")
    return parser
