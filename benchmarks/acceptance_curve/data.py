"""The recorded states of the demo's policy, the initial draft, and the order of the samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from draft_trainer.drafters.eagle3.checkpoint import load_head
from draft_trainer.offline.fit import DataOrder, Position
from draft_trainer.recordings.recording import Recording
from draft_trainer.sample import Sample


class TrainingData:
    """The same for every contestant, in every process.

    Args:
        states: the recording.
        initial: the draft that everybody begins with.
        batch_tokens: bound on the tokens of a step.
        seed: of the order.

    Attributes:
        initial_head: float32.
        draft_vocab_ids: int64 [draft_vocab].
        heads: the policy's matrices.
        policy_version: the one that was recorded.
    """

    def __init__(self, states: Path, initial: Path, batch_tokens: int, seed: int) -> None:
        self.initial_head = load_head(initial)
        config = self.initial_head.config
        self._recording = Recording(states)
        self._recording.fit_to(config)
        self.draft_vocab_ids = self.initial_head.target_ids()
        self.heads = self._recording.policy_heads(self.draft_vocab_ids)
        [self.policy_version] = self.heads.versions
        self._lengths = self._recording.lengths()
        self._order = DataOrder(self._lengths, batch_tokens, seed)

    def steps(self) -> Iterator[list[Sample]]:
        """The samples of each step, epoch after epoch without an end."""
        for chosen in self._chosen():
            yield [self._recording[i] for i in chosen]

    def steps_to(self, tokens: int) -> int:
        """How many steps it takes to have trained on so many tokens."""
        for number, chosen in enumerate(self._chosen(), 1):
            tokens -= sum(self._lengths[i] for i in chosen)
            if tokens <= 0:
                return number
        raise AssertionError("the order has no end")

    def _chosen(self) -> Iterator[list[int]]:
        position = Position()
        while True:
            chosen, position = self._order.next_step(position)
            yield chosen
