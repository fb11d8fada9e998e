"""``draft-trainer doctor``: why no draft is being released, and what to do about it.

It also holds the checks of ``draft-trainer serve --check``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from draft_trainer.cli.trainer import Connection, as_dict, print_json
from slipstream.errors import RefusedError, clean, failure_text
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1.console_pb2 import Diagnosis

if TYPE_CHECKING:
    from draft_trainer.config import TrainerConfig

WORDS = {
    Diagnosis.SEVERITY_OK: "ok",
    Diagnosis.SEVERITY_WAITING: "waiting",
    Diagnosis.SEVERITY_PROBLEM: "PROBLEM",
}
ASK_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Doctor(Connection):
    """Say why no draft is being released, and which key to change.

    Asks the running trainer; before it is started, use serve --check. Exit status 1: there is a
    problem; 2: the trainer was not reached or an option is wrong, as for every command.
    """

    json: bool = False
    """The findings as JSON."""

    def run(self) -> int:
        with self.trainer() as stub:
            found = stub.GetStatus(pb.GetStatusRequest(), timeout=self.timeout).diagnosis
        if self.json:
            print_json([as_dict(one) for one in found])
        else:
            for line in described(found):
                print(line)
        return 1 if has_problem(found) else 0


def described(diagnosis: list[Diagnosis]) -> Iterator[str]:
    """Yield the findings as lines for people; the last line says what releases wait for."""
    for one in diagnosis:
        yield f"{WORDS.get(one.severity, '?'):8} {one.part:8} {clean(one.found)}"
        if one.next_step and one.severity != Diagnosis.SEVERITY_OK:
            yield f"{'':17} {clean(one.next_step)}"
    first = first_problem(diagnosis)
    yield f"waits for: {first.part}" if first is not None else "nothing keeps drafts from the fleet"


def has_problem(diagnosis: list[Diagnosis]) -> bool:
    """Return whether a finding needs somebody to act."""
    return any(one.severity == Diagnosis.SEVERITY_PROBLEM for one in diagnosis)


def first_problem(diagnosis: list[Diagnosis]) -> Diagnosis | None:
    """Return what releases wait for: the first problem, else the first finding that only waits."""
    for severity in (Diagnosis.SEVERITY_PROBLEM, Diagnosis.SEVERITY_WAITING):
        for one in diagnosis:
            if one.severity == severity:
                return one
    return None


def check_configuration(config: TrainerConfig) -> list[Diagnosis]:
    """Check what can be checked of a configuration without starting a trainer."""
    checks: dict[str, Callable[[TrainerConfig], str]] = {"draft": _draft, "device": _device}
    found = []
    for part, check in checks.items():
        try:
            text = check(config)
            found.append(Diagnosis(part=part, severity=Diagnosis.SEVERITY_OK, found=text))
        except RefusedError as error:
            found.append(_problem(part, error))
    return found + list(_rollout_servers(config))


def _problem(part: str, error: RefusedError) -> Diagnosis:
    text = f"{error.field}: found {error.found}, expected {error.expected}"
    severity = Diagnosis.SEVERITY_PROBLEM
    return Diagnosis(part=part, severity=severity, found=text, next_step=error.next_step)


def _draft(config: TrainerConfig) -> str:
    from draft_trainer.drafters import DRAFTERS

    section = config.draft
    checkpoint = DRAFTERS[section.kind].read(section.initial, section.policy)
    shape = checkpoint.config
    text = f"{section.kind}, {shape.draft_vocab_size} of {shape.vocab_size} tokens"
    return f"{section.initial}: " + "; ".join(filter(None, (text, checkpoint.told)))


def _device(config: TrainerConfig) -> str:
    import torch

    from draft_trainer.training.device import training_device

    device = training_device(config.training.device).type
    if device == "cpu" and (count := torch.cuda.device_count()):
        return f'training.device = cpu, and torch sees {count} GPU(s): set "cuda" to train on one'
    return f"training.device = {device}"


def _rollout_servers(config: TrainerConfig) -> Iterator[Diagnosis]:
    from draft_trainer.releases.fleet import look_up

    for entry in config.publish.rollout_servers:
        try:
            addresses = look_up(entry)
        except (OSError, ValueError) as error:
            expected = "a name that is known, or a file with a HOST:PORT a line"
            next_step = "correct the entry, or what it names"
            refused = RefusedError("publish.rollout_servers", error, expected, next_step)
            yield _problem(entry, refused)
            continue
        if not addresses:
            yield Diagnosis(part=entry, severity=Diagnosis.SEVERITY_WAITING, found="no address yet")
        for address in addresses:
            try:
                yield _rollout_server(address, config)
            except RefusedError as error:
                yield _problem(address, error)


def _rollout_server(address: str, config: TrainerConfig) -> Diagnosis:
    from draft_trainer.config import credentials_of
    from draft_trainer.server.diagnosis import drafts_otherwise
    from slipstream.client import open_channel
    from slipstream.v1 import rollout_server_pb2 as rollout
    from slipstream.v1.rollout_server_pb2_grpc import RolloutServerStub

    try:
        with open_channel(address, credentials=credentials_of(config)) as channel:
            request = rollout.GetStateRequest()
            state = RolloutServerStub(channel).GetState(request, timeout=ASK_SECONDS)
    except grpc.RpcError as error:
        found, expected = failure_text(error), "a rollout server's control plane"
        next_step = "start rollout-server serve with --control-port, or correct the address"
        raise RefusedError("publish.rollout_servers", found, expected, next_step) from error
    wrong = drafts_otherwise(state, config)
    if wrong is not None:
        severity = Diagnosis.SEVERITY_PROBLEM
        return Diagnosis(part=address, severity=severity, found=wrong[0], next_step=wrong[1])
    found = f"serves draft {state.draft_version}"
    return Diagnosis(part=address, severity=Diagnosis.SEVERITY_OK, found=found)
