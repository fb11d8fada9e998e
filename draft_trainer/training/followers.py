"""Data-parallel training: rank 0 receives the samples and shares them with the other ranks.

Rank 0 is the server; it draws the samples of a step and sends every other rank its share, and each
policy version's matrices once. The others run ``follow``. A message is a safetensors file in
memory whose header says what to do.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import safetensors.torch
from torch import Tensor

from draft_trainer.config import TrainingConfig
from draft_trainer.drafters import DRAFTERS, Draft
from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from draft_trainer.training.learner import Learner
from draft_trainer.training.ranks import RankLostError, Ranks, shares
from slipstream.errors import RefusedError
from slipstream.sample import Sample
from slipstream.sampling import LogitForm
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
        self._held: set[str] = set()  # hashes of the tensors of policies that they hold

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
        versions: dict[int, tuple[list[str], tuple[float, ...]]] = {}
        policies: dict[str, Tensor] = {}
        for version in {sample.policy_version for sample in samples}:
            head, names = heads.get(version), [each.hex() for each in heads.digests(version)]
            versions[version] = (names, astuple(head.form))
            policies |= zip(names, head.tensors, strict=True)
        matrices = {name: policies[name] for name in policies.keys() - self._held}
        kept = {each.hex() for version in heads.versions for each in heads.digests(version)}
        self._held = policies.keys() | self._held & kept
        policy_facts = {"versions": versions, "held": [*self._held]}
        parts = shares([sample.tokens for sample in samples], self._ranks.size)
        for rank in range(1, self._ranks.size):
            message, facts = dict(matrices), []
            for number, index in enumerate(parts[rank]):
                sample = samples[index]
                facts.append(sample.header.SerializeToString().hex())
                message[str(number)] = sample.block[: sample.nbytes]
            self._ranks.send(_pack("step", {"samples": facts, **policy_facts}, message), rank)
        return [samples[index] for index in parts[0]]

    def keep_alive(self) -> None:
        """Send a message that asks for nothing, so that their deadline does not expire."""
        self._tell("wait", {})

    @contextmanager
    def kept_waiting(self) -> Iterator[None]:
        """While rank 0 works alone: their deadline does not expire, however long it takes.

        Nothing else may be exchanged with them meanwhile.

        Raises RankLostError: at the end, if one of them is gone.
        """
        if self.patience is None:
            yield
            return
        over, lost = threading.Event(), list[RankLostError]()

        def tell() -> None:
            try:
                self.keep_alive()
                while not over.wait(self.patience):
                    self.keep_alive()
            except RankLostError as error:
                lost.append(error)

        teller = threading.Thread(target=tell, name="keep-ranks-waiting", daemon=True)
        teller.start()
        try:
            yield
        finally:
            over.set()
            teller.join()
        if lost:
            raise lost[0]

    def end(self) -> None:
        """Have them end. Once only."""
        self._tell("end", {})
        self._ranks.leave()

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
    held: dict[str, Tensor] = {}
    versions, heads = None, PolicyHeads(1)
    while command != "end":
        command, facts, tensors = _unpack(ranks.receive(0))
        if command == "take_rank_0":
            learner.take_rank_0()
        elif command == "step":
            held |= tensors
            held = {name: held[name] for name in facts["held"]}
            if facts["versions"] != versions:
                # Otherwise those of the step before, with what they have on the device.
                versions = facts["versions"]
                heads = _heads(versions, held)
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


def _heads(
    versions: Mapping[str, tuple[Sequence[str], Sequence[float]]], held: Mapping[str, Tensor]
) -> PolicyHeads:
    """The policy versions of a step, of tensors by their hash."""
    heads = PolicyHeads(len(versions))
    for version, (names, form) in sorted(versions.items(), key=lambda item: int(item[0])):
        tensors = (held[name] for name in names)
        head = PolicyHead(int(version), *tensors, form=LogitForm(*form))
        heads.add(head, tuple(map(bytes.fromhex, names)))
    return heads


def _pack(command: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(whole, {"command": command, "facts": json.dumps(facts)})


def _unpack(message: bytes) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    size = int.from_bytes(message[:8], "little")
    header = json.loads(message[8 : 8 + size])["__metadata__"]
    return header["command"], json.loads(header["facts"]), safetensors.torch.load(message)
