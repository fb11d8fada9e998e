"""The calibration benchmark's own arithmetic, and the releases that it makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gate_calibration.__main__ import Point, make_releases, row, targets
from draft_trainer.releases.registry import Registry
from examples.arithmetic_grpo.rollouts import SpecCounters
from tests.draft_trainer.rig import write_draft


def point(version: int, predicted: float, accepted: int, drafts: int = 20_000) -> Point:
    """A release that was measured at 1 + accepted / drafts, one draft token a step."""
    measured = SpecCounters(drafts, drafts, accepted, (accepted,))
    return Point(version, 0.1, predicted, predicted, 0.01, (0.5,), measured, 1.0)


def test_targets_hold_predictions_to_two_per_cent() -> None:
    good = [point(v, 1.0 + 0.1 * v, 2000 * v) for v in range(11)]
    assert [target.ok for target in targets(good)] == [True] * 5
    assert good[5].relative == pytest.approx(0.0) and row(good[5])[6] == "+0.00%"
    off = [*good[:10], point(10, 2.0 * 1.021, 20_000)]
    assert [t.ok for t in targets(off)] == [True, True, True, False, False]
    few = good[1:10]
    assert [t.ok for t in targets(few)][:2] == [False, False]
    # 100 drafts at 1.5 leave a standard error of 0.05, three per cent.
    vague = [*good[:10], point(10, 1.5, 50, 100)]
    assert vague[10].measured_error == pytest.approx(0.05 / 1.5)
    assert [t.ok for t in targets(vague)][2] is False


def test_releases_go_from_the_draft_to_noise(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "releases")
    versions = make_releases(write_draft(tmp_path / "draft"), registry, [0.1, 1.0], seed=3)
    assert versions == [0, 1, 2]
    zero, one, two = (registry.tensors(v)["fc.weight"].double() for v in versions)

    def cosine(a: torch.Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(zero.flatten(), a.flatten(), dim=0))

    assert cosine(one) > 0.98 and abs(cosine(two)) < 0.15
    assert float(two.std() / zero.std()) == pytest.approx(1.0, abs=0.1)
    assert torch.equal(registry.tensors(0)["d2t"], registry.tensors(2)["d2t"])
