"""The batch that is drawn and collated while another one trains."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from draft_trainer.training import learner as learner_module
from draft_trainer.training.learner import Collated, Learner, StepMetrics, TrainingConfig
from draft_trainer.training.loop import TrainingLoop
from slipstream.errors import RefusedError
from tests.draft_trainer.rig import DEADLINE, feeding, make_config, rollouts
from tests.draft_trainer.synthetic import Policy, head

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


def test_losses_and_draws_are_those_without_a_look_ahead(tmp_path: Path) -> None:
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


def test_batch_ahead_is_trained_on_after_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The undo of the draw ahead is refused once, before a gate."""
    monkeypatch.setattr("draft_trainer.training.loop._BETWEEN_GATES", 0)
    options = {
        "training": {**OPTIONS["training"], "steps_per_candidate": 1000, "candidate_seconds": 0.01},
        "replay": {"max_epochs": 1, "capacity_bytes": 1 << 22},
    }
    with feeding(make_config(tmp_path, **options), train=False) as (server, client):
        client.send(*rollouts(80))
        store, undo, refused = server._store, server._store.put_back, list[str]()
        trained, step = list[str](), server.loop.learner.step

        def noted(samples: Any, heads: Any, ready: Collated | None) -> StepMetrics:
            metrics = step(samples, heads, ready)
            trained.extend(sample.sample_id for sample in samples)
            return metrics

        def once(drawn: Any) -> None:
            if not refused:
                refused.extend(sample.sample_id for sample in drawn.samples)
                raise RefusedError("replay.directory", "a full disk", "space", "free some")
            undo(drawn)

        server.loop.learner.step = noted  # type: ignore[method-assign,assignment]
        store.put_back = once  # type: ignore[method-assign]
        TrainingLoop.start(server.loop)
        client.wait_for(drained)
    assert refused and set(refused) <= set(trained) and len(trained) == len(set(trained))


def test_training_goes_on_where_no_thread_takes_work(tmp_path: Path) -> None:
    """The state of an interpreter that ends while the caller's threads still run."""
    with feeding(make_config(tmp_path, **OPTIONS), train=False) as (server, client):
        client.send(*rollouts(80))
        server.loop._helper.shutdown()
        TrainingLoop.start(server.loop)
        status = client.wait_for(drained)
    assert status.tokens_trained > 0 and not status.training_error


def test_long_samples_are_collated_pass_by_pass() -> None:
    policy = Policy()
    samples, heads = policy.samples(6), policy.heads()

    def loss(ahead: bool) -> float:
        learner = Learner(head(0), TrainingConfig(forward_tokens=8, ttt_steps=3, warmup_steps=0))
        collated = learner.collate(samples, heads) if ahead else None
        assert collated is None or collated.parts is None
        return learner.step(samples, heads, collated).loss

    whole = Learner(head(0), TrainingConfig(ttt_steps=3, warmup_steps=0))
    assert whole.collate(samples, heads).parts is not None
    assert loss(True) == loss(False) == pytest.approx(whole.step(samples, heads).loss, rel=1e-5)
