"""speculators on a policy's states, in a process of its own environment.

Model, loss, optimizer and shift are those of ``benchmarks.draft_training.peer_speculators``; the
batches hold whole sequences, as its own collator packs them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3.data import shift_batch
from torch import Tensor

from benchmarks.draft_training import peer_speculators
from benchmarks.draft_training.case import Case
from benchmarks.learning.states import read_states
from benchmarks.workers import answers, serve
from draft_trainer.checkpoints import read_policy
from slipstream.sample import Sample


class Trainer:
    """One run.

    Args:
        policy: checkpoint.
        states: on its rollouts.
        start: safetensors of the first weights and ``draft_vocab_ids``.
        case: shape of the head.
        rope_theta: of the head.
        eps: of its norms.
    """

    def __init__(
        self,
        policy: Path,
        states: Path,
        start: Path,
        case: dict[str, Any],
        rope_theta: float,
        eps: float,
        learning_rate: float,
    ) -> None:
        checkpoint, weights = read_policy(policy), load_file(start)
        ids = weights.pop("draft_vocab_ids")
        found = read_states(states)
        self.samples = found.samples
        tensors = SimpleNamespace(
            weights=weights,
            embed_tokens=found.head.embed_tokens.float(),
            lm_head=checkpoint.lm_head.float(),
            draft_vocab_ids=ids,
            token_ids=torch.zeros(0, 0),
        )
        peer_speculators.ROPE_THETA, peer_speculators.EPS = rope_theta, eps
        peer_speculators.LEARNING_RATE = learning_rate
        shape = dataclasses.replace(Case(**case), rows=0)
        self.peer = peer_speculators.Speculators(shape, tensors, "sdpa summed")  # type: ignore[arg-type]
        # Its model applies the policy's final norm, and these states are behind it.
        self.norm = checkpoint.final_norm.float()
        self.peer.model.verifier_norm.weight.data.copy_(self.norm)

    def run(
        self, order: Sequence[int], batch_tokens: int, marks: Sequence[int], out: str
    ) -> Iterator[dict[str, Any]]:
        """Train through ``order``; yields tokens and CPU seconds at each mark, weights on disk."""
        used, seconds, left, number = 0, 0.0, list(marks), 0
        while left:
            chosen: list[Sample] = []
            tokens = 0
            while tokens < batch_tokens:
                chosen.append(self.samples[order[number]])
                tokens += chosen[-1].tokens
                number += 1
            began = time.process_time()
            self.peer.batches = [self._packed(chosen)]
            self.peer.step()
            seconds += time.process_time() - began
            used += tokens
            if used >= left[0]:
                path = f"{out}-{left.pop(0)}.safetensors"
                save_file(self._weights(), path)
                yield {"tokens": used, "seconds": seconds, "weights": path}

    def _weights(self) -> dict[str, Tensor]:
        """Under the names of the plain checkpoint layout."""
        return {
            name.replace("layers.0.", "midlayer."): value.detach().contiguous()
            for name, value in self.peer.model.named_parameters()
            if not name.startswith(("embed_tokens", "verifier_"))
        }

    def _packed(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        parts = []
        for sample in samples:
            length = sample.tokens
            parts.append(
                shift_batch(
                    {
                        "input_ids": sample.token_ids.long(),
                        "hidden_states": sample.aux.reshape(length, -1),
                        "verifier_last_hidden_states": sample.final_hidden.float() / self.norm,
                        "loss_mask": sample.loss_mask.bool(),
                        "lengths": torch.tensor([length]),
                        "position_ids": torch.arange(length),
                    }
                )
            )
        batch = {
            name: torch.cat([part[name] for part in parts])[None]
            for name in parts[0]
            if name != "lengths"
        }
        for name in ("hidden_states", "verifier_last_hidden_states"):
            batch[name] = batch[name].to(self.peer.case.torch_dtype)
        lengths = torch.tensor([len(part["input_ids"]) for part in parts])
        documents = torch.arange(len(parts)).repeat_interleave(lengths)
        return batch | {"document_ids": documents[None]}


def main() -> None:
    """``python -m benchmarks.learning.speculators_process``."""
    answer = answers()
    torch.set_num_threads(1)

    def run(trainer: dict[str, Any], **arguments: Any) -> dict[str, Any]:
        for name in ("policy", "states", "start"):
            trainer[name] = Path(trainer[name])
        return {"marks": list(Trainer(**trainer).run(**arguments))}

    serve(answer, {"torch": torch.__version__}, {"run": run})


if __name__ == "__main__":
    main()
