"""The receiving process: a trainer whose learner never starts, and a bare stream beside it.

``python -m benchmarks.transport.receiver --hidden-size H --replay-bytes N --ring-bytes N``. Prints
the trainer's address and the bare server's; then, for every line on standard input, the process's
CPU seconds so far.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.transport.bare import bare_server
from benchmarks.transport.case import AUX_LAYERS, MAX_TOKENS, POLICY_VERSION, RUN, VOCAB
from draft_trainer.cli.main import tune_memory
from draft_trainer.config import parse_config
from draft_trainer.drafters.eagle3.checkpoint import save_draft
from draft_trainer.drafters.eagle3.config import HeadConfig
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.drafters.policy import PolicyHead
from draft_trainer.kernels.library import use_kernels
from draft_trainer.server.app import TrainerServer
from slipstream.client import MAX_MESSAGE_BYTES
from slipstream.tensors import SCHEMA_VERSION
from slipstream.v1 import draft_trainer_pb2 as pb


def _draft(folder: Path, hidden_size: int) -> Path:
    """A head as narrow as can be, for a policy of this width."""
    config = HeadConfig(
        hidden_size=64,
        target_hidden_size=hidden_size,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        aux_layer_ids=AUX_LAYERS,
        own_embeddings=True,
    )
    folder.mkdir()
    head = Eagle3Head(config, None)
    save_draft(folder, head)
    return folder


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden-size", type=int, required=True)
    parser.add_argument("--replay-bytes", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = parse_config(
            {
                "server": {
                    "port": 0,
                    "metrics_port": 0,
                    "max_tokens_per_sample": MAX_TOKENS,
                    "receive_window_bytes": MAX_MESSAGE_BYTES,
                },
                "draft": {
                    "initial": str(_draft(Path(folder) / "draft", options.hidden_size)),
                    "registry": str(Path(folder) / "registry"),
                },
                "replay": {"capacity_bytes": options.replay_bytes},
            }
        )
        use_kernels(config.training.cpu_kernels)
        trainer = TrainerServer(config)
        # What is measured ends in the replay buffer; training would take the core from it.
        trainer.loop.start = lambda: None  # type: ignore[method-assign]
        trainer.start()
        run = trainer.runs.open(
            pb.OpenRunRequest(
                run_id=RUN,
                schema_version=SCHEMA_VERSION,
                policy=pb.PolicySpec(
                    hidden_size=options.hidden_size, vocab_size=VOCAB, num_hidden_layers=36
                ),
            )
        ).run
        matrix = torch.zeros(VOCAB, options.hidden_size, dtype=torch.bfloat16)
        run.add_policy(PolicyHead(POLICY_VERSION, matrix, matrix))
        bare, port = bare_server()
        bare.start()
        tune_memory()
        try:
            print(trainer.address, f"127.0.0.1:{port}", flush=True)
            for _ in sys.stdin:
                print(time.process_time(), flush=True)
        finally:
            bare.stop(grace=None).wait(10.0)
            trainer.stop()


if __name__ == "__main__":
    main()
