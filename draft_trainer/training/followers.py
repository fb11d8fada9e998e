"""Data-parallel training: rank 0 receives the samples and shares them with the other ranks.

Rank 0 is the server; it draws the samples of a step and sends every other rank its share, and each
policy version's matrices once. The others run ``follow``. A message is a safetensors file in
memory whose header says what to do.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors.torch
from torch import Tensor

from draft_trainer.config import TrainingConfig
from draft_trainer.drafters import DRAFTERS, Draft
from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from draft_trainer.training.learner import Learner
from draft_trainer.training.ranks import Ranks, shares
from slipstream.errors import RefusedError
from slipstream.sample import Sample
from slipstream.v1 import draft_trainer_pb2 as pb

logger = logging.getLogger(__name__)


class Followers:
    """The other ranks, as rank 0 sees them. Where it is alone, every method does nothing.

    Args:
        ranks: of which this process is number 0.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.patience = ranks.timeout_s / 3 if ranks.size > 1 else None
        """Seconds that rank 0 may wait between two messages; None for ever."""
        self._ranks = ranks
        self._heads: PolicyHeads | None = None
        self._sent: dict[int, tuple[bytes, bytes]] = {}

    def begin(self, draft: Draft, config: TrainingConfig) -> None:
        """Have them make their learners; rank 0's calls ``take_rank_0`` next."""
        document = draft.config.to_dict("float32")
        facts = {"kind": draft.kind, "draft": document, "config": config.model_dump_json()}
        self._tell("begin", facts)

    def take_rank_0(self) -> None:
        """Have them take rank 0's state; its learner calls ``take_rank_0`` next."""
        self._tell("take_rank_0", {})

    def give(self, samples: list[Sample], heads: PolicyHeads) -> list[Sample]:
        """Send them their shares of a step's samples.

        Returns:
            Rank 0's own share, for its learner's ``step``, which must come next.

        Raises:
            RefusedError: a policy version is not held; nothing was sent.
        """
        if self._ranks.size == 1:
            return samples
        for version in {sample.policy_version for sample in samples}:
            heads.get(version)
        versions, matrices = self._unsent(heads)
        parts = shares([sample.tokens for sample in samples], self._ranks.size)
        for rank in range(1, self._ranks.size):
            tensors = dict(matrices)
            facts = []
            for number, index in enumerate(parts[rank]):
                sample = samples[index]
                facts.append(sample.header.SerializeToString().hex())
                tensors[str(number)] = sample.block[: sample.nbytes]
            self._ranks.send(_pack("step", {"samples": facts, **versions}, tensors), rank)
        return [samples[index] for index in parts[0]]

    def keep_alive(self) -> None:
        """Send a message that asks for nothing, so that their deadline does not expire."""
        self._tell("wait", {})

    def end(self) -> None:
        """Have them end. Once only."""
        self._tell("end", {})
        self._ranks.leave()

    def _unsent(self, heads: PolicyHeads) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Policy versions they do not know: what they are made of, and the matrices they lack.

        They add the same versions in the same order, so what they hold is known here.
        """
        fresh = heads is not self._heads
        sent = {} if fresh else dict(self._sent)
        made_of: dict[str, list[str]] = {}
        matrices: dict[str, Tensor] = {}
        for version in heads.versions:
            if version in sent:
                continue
            head, digests = heads.get(version), heads.digests(version)
            known = {digest for pair in sent.values() for digest in pair}
            made_of[str(version)] = [digest.hex() for digest in digests]
            for digest, matrix in zip(digests, (head.lm_head_rows, head.embed_tokens), strict=True):
                if digest not in known:
                    matrices[digest.hex()] = matrix
            sent[version] = digests
            for old in sorted(sent)[: -heads.keep]:
                del sent[old]
        self._heads, self._sent = heads, sent
        return {"fresh": fresh, "keep": heads.keep, "versions": made_of}, matrices

    def _tell(self, command: str, facts: Mapping[str, Any]) -> None:
        for rank in range(1, self._ranks.size):
            self._ranks.send(_pack(command, facts, {}), rank)


def follow(ranks: Ranks, config: TrainingConfig) -> None:
    """Run the commands of rank 0 until it ends them.

    Args:
        ranks: of which this process is not number 0.
        config: must be that of rank 0.

    Raises:
        RefusedError: it is not.
        RankLostError: rank 0, or another rank, is gone.
    """
    command, facts, tensors = _unpack(ranks.receive(0))
    if facts["config"] != config.model_dump_json():
        raise RefusedError(
            f"[training] of rank {ranks.rank}", config, facts["config"], "configure all ranks alike"
        )
    head = DRAFTERS[facts["kind"]].build(facts["draft"])
    learner = Learner(head.to(ranks.device), config, ranks)
    learner.take_rank_0()
    heads = PolicyHeads(1)
    while command != "end":
        command, facts, tensors = _unpack(ranks.receive(0))
        if command == "take_rank_0":
            learner.take_rank_0()
        elif command == "step":
            if facts["fresh"]:
                heads = PolicyHeads(facts["keep"])
            _learn_versions(heads, facts["versions"], tensors)
            samples = [
                Sample(pb.VerifierStates.FromString(bytes.fromhex(header)), tensors[str(number)])
                for number, header in enumerate(facts["samples"])
            ]
            try:
                learner.step(samples, heads)
            except RefusedError as error:
                # Rank 0 was told, or was the one to refuse: what follows is its decision.
                logger.info("a batch was dropped: %s", error)
    ranks.leave()


def _learn_versions(
    heads: PolicyHeads, versions: Mapping[str, Sequence[str]], tensors: Mapping[str, Tensor]
) -> None:
    for version, names in versions.items():
        rows, embeddings = (
            tensors[name] if name in tensors else heads.tensor(bytes.fromhex(name))
            for name in names
        )
        assert rows is not None and embeddings is not None, "rank 0 forgot to send a matrix"
        heads.add(PolicyHead(int(version), rows, embeddings))


def _pack(command: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(whole, {"command": command, "facts": json.dumps(facts)})


def _unpack(message: bytes) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    size = int.from_bytes(message[:8], "little")
    header = json.loads(message[8 : 8 + size])["__metadata__"]
    return header["command"], json.loads(header["facts"]), safetensors.torch.load(message)
