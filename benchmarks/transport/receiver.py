"""The receiving process: a trainer whose learner never starts."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.workers import answers, serve
from draft_trainer.cli.main import tune_memory
from draft_trainer.config_file import parse_config
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.drafters.eagle3.config import HeadConfig
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.drafters.policy import PolicyHead
from draft_trainer.kernels.library import use_kernels
from draft_trainer.server.app import TrainerServer
from slipstream.client import MAX_MESSAGE_BYTES
from slipstream.tensors import SCHEMA_VERSION
from slipstream.v1 import draft_trainer_pb2 as pb

RUN = "benchmark"
POLICY_VERSION = 1
VOCAB = 64
AUX_LAYERS = (2, 18, 33)
MAX_TOKENS = 2048


def _draft(folder: Path, hidden_size: int) -> Path:
    """A narrow head for a policy of this width."""
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
    Eagle3().save(folder, Eagle3Head(config, None))
    return folder


def main() -> None:
    """Greets with the trainer's address; answers ``cpu`` with its CPU seconds so far."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden-size", type=int, required=True)
    parser.add_argument("--replay-bytes", type=int, required=True)
    chosen = parser.parse_args()
    answer = answers()
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
                    "initial": str(_draft(Path(folder) / "draft", chosen.hidden_size)),
                    "registry": str(Path(folder) / "registry"),
                },
                "replay": {"capacity_bytes": chosen.replay_bytes},
                "economy": {"mode": "always"},
            }
        )
        use_kernels(config.training.cpu_kernels)
        trainer = TrainerServer(config)
        # What is measured ends in the store; training would take the core from it.
        trainer.loop.start = lambda: None  # type: ignore[method-assign]
        trainer.start()
        run = trainer.runs.open(
            pb.OpenRunRequest(
                run_id=RUN,
                schema_version=SCHEMA_VERSION,
                policy=pb.PolicySpec(
                    hidden_size=chosen.hidden_size, vocab_size=VOCAB, num_hidden_layers=36
                ),
            )
        ).run
        matrix = torch.zeros(VOCAB, chosen.hidden_size, dtype=torch.bfloat16)
        run.add_policy(PolicyHead(POLICY_VERSION, matrix, matrix))
        tune_memory()
        try:
            greeting = {"address": trainer.address}
            serve(answer, greeting, {"cpu": lambda: {"seconds": time.process_time()}})
        finally:
            trainer.stop()


if __name__ == "__main__":
    main()
