"""The batch that is drawn and collated while another one trains."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from draft_trainer.training import learner as learner_module
from draft_trainer.training.learner import Collated, StepMetrics
from draft_trainer.training.loop import TrainingLoop
from tests.draft_trainer.rig import DEADLINE, feeding, make_config, rollouts

OPTIONS: dict[str, Any] = {
    "training": {"batch_tokens": 60, "steps_per_candidate": 8, "candidate_seconds": 3600.0},
    # Half of it is more than two batches.
    "replay": {"max_epochs": 2, "capacity_bytes": 1 << 22},
}


def drained(status: Any) -> bool:
    return bool(status.idle and not status.samples_pending)


def test_next_batch_is_collated_while_one_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objective of a step does not end before the next batch is there: no clock is asked."""
    there, waited, draws = threading.Event(), list[bool](), list[tuple[int, int]]()
    objective = learner_module.ttt_objective
    with feeding(make_config(tmp_path, **OPTIONS), train=False) as (server, client):
        client.send(*rollouts(80))
        learner = server.loop.learner
        collate, step = learner.collate, learner.step

        def collated(*given: Any) -> Collated:
            made = collate(*given)
            if threading.current_thread() is not server.loop._thread:
                there.set()
            return made

        def slow(*given: Any, **named: Any) -> Any:
            # The first step of a run measures how large the next one is.
            if learner.steps == 1:
                waited.append(there.wait(DEADLINE))
                draws.append((server.loop.position.draws, server._store.draws))
            return objective(*given, **named)

        taken = list[bool]()

        def counted(samples: Any, heads: Any, ready: Collated | None) -> StepMetrics:
            taken.append(ready is not None)
            return step(samples, heads, ready)

        monkeypatch.setattr(learner, "collate", collated)
        monkeypatch.setattr(learner, "step", counted)
        monkeypatch.setattr(learner_module, "ttt_objective", slow)
        TrainingLoop.start(server.loop)
        client.wait_for(drained)
    assert waited == [True]
    # A training state of this moment contains the first draw, not the third.
    assert draws == [(1, 3)]
    # None ahead of the first two steps, nor over a gate, nor of a batch that is not full.
    assert taken[:9] == [False] * 2 + [True] * 6 + [False]


def test_losses_and_draws_are_those_of_a_trainer_that_does_not_look_ahead(tmp_path: Path) -> None:
    def trained(folder: Path, ahead: bool) -> tuple[list[tuple[str, list[str]]], int]:
        folder.mkdir()
        steps: list[tuple[str, list[str]]] = []
        with feeding(make_config(folder, **OPTIONS), train=False) as (server, client):
            client.send(*rollouts(80))
            loop, step = server.loop, server.loop.learner.step

            def noted(samples: Any, heads: Any, ready: Collated | None) -> StepMetrics:
                metrics = step(samples, heads, ready)
                steps.append((metrics.loss.hex(), [sample.sample_id for sample in samples]))
                return metrics

            loop.learner.step = noted  # type: ignore[method-assign,assignment]
            if not ahead:
                loop._look_ahead = lambda run: None  # type: ignore[method-assign]
            TrainingLoop.start(loop)
            status = client.wait_for(drained)
        return steps, status.tokens_trained

    ahead, plain = trained(tmp_path / "ahead", True), trained(tmp_path / "plain", False)
    assert ahead == plain and len(plain[0]) > 20
