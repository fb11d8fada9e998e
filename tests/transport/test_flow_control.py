"""Several bridges before one small trainer: they send what it can hold and train on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from policy_bridge import BridgeConfig, PolicyBridge
from tests.draft_trainer.rig import DEADLINE, make_config, running
from tests.draft_trainer.synthetic import HIDDEN, VOCAB
from tests.tiny import tiny_qwen3
from tests.waiting import until

BRIDGES, VERSIONS, TOKENS = 4, 5, 24
SAMPLES = 16
"""Those that every bridge has of a version: all together three times what the trainer holds."""


def test_bridges_into_small_store_lose_a_fifth_at_most(tmp_path: Path) -> None:
    sample = TOKENS * 277  # bytes, in float32
    config = make_config(
        tmp_path,
        server={"max_tokens_per_sample": 32},
        replay={"capacity_bytes": BRIDGES * SAMPLES * sample // 3},
    )
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 8}
    models = [tiny_qwen3(**sizes).eval() for _ in range(BRIDGES)]
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(TOKENS).expand(SAMPLES, TOKENS) >= 4
    with running(config) as (server, client), ExitStack() as owned:
        settings = BridgeConfig(trainer=server.address, run_id="run", strict=True)
        bridges = [owned.enter_context(PolicyBridge(model, settings)) for model in models]

        def share() -> int:
            """The tokens of the version that every bridge was told; 0 before."""
            if server._policy_version() != version:
                return 0  # what is told still counts what was trained on of the version before
            told = {bridge._connection.wanted_tokens for bridge in bridges if bridge._connection}
            ingest = server._service.ingest
            wanted, streams = ingest.wanted_tokens(), sum(ingest.streams.values())
            return wanted if told == {wanted} and streams == BRIDGES else 0

        for version in range(1, VERSIONS + 1):
            for number, bridge in enumerate(bridges):
                with bridge.sync(version, lead=number == 0):
                    pass
            until(lambda: share() > 0, what="all are told")
            assert BRIDGES * share() * 277 <= config.replay.capacity_bytes
            for model, bridge in zip(models, bridges, strict=True):
                ids = torch.randint(1, VOCAB, (SAMPLES, TOKENS), generator=generator)
                with torch.no_grad(), bridge.capture(temperature=1.0) as capture:
                    model(ids)
                    capture.ship(ids, loss_mask=mask)
            for bridge in bridges:
                assert bridge.flush(DEADLINE)
            client.wait_for(lambda status: status.idle and not status.samples_pending)
        status = client.status()
        sent = [bridge.stats().accepted for bridge in bridges]
    assert status.samples_accepted == sum(sent) and min(sent) >= VERSIONS
    evicted = status.evicted_by_reason
    assert status.samples_refused == 0
    assert evicted["capacity"] + evicted["stale"] <= status.samples_accepted / 5
