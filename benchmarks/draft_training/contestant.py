"""What a contestant is, and how a worker process finds one."""

from __future__ import annotations

import importlib
from typing import Protocol

from benchmarks.draft_training.case import Case, CaseTensors


class Contestant(Protocol):
    """A trainer that holds the case's inputs, a head and an optimizer."""

    def step(self) -> float:
        """One full training step; returns the loss.

        Forward of the unroll with the teacher computed from the final hidden state, loss,
        metrics, backward, clipping and the optimizer's step.
        """
        ...


# Name: module with ``build(case, tensors, setting) -> Contestant``. Peers' modules import only in
# their own environment.
MODULES = {
    "ours": "benchmarks.draft_training.ours",
    "speculators": "benchmarks.draft_training.peer_speculators",
    "specforge": "benchmarks.draft_training.peer_specforge",
    "modelopt": "benchmarks.draft_training.peer_modelopt",
    "floor": "benchmarks.draft_training.floor",
}
PEERS = ("speculators", "specforge", "modelopt")


def build(name: str, case: Case, tensors: CaseTensors, setting: str) -> Contestant:
    """Import the contestant's module and make it."""
    return importlib.import_module(MODULES[name]).build(case, tensors, setting)  # type: ignore[no-any-return]
