"""The diagnosis: why no draft is released, one finding for each part, with the next step.

A pure function of the status and the configuration. `draft-trainer doctor`, `status` and the page
show its texts, and a problem is logged once when it begins.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from functools import partial

from draft_trainer.config import (
    ENOUGH_HELD_OUT,
    ENOUGH_PROMPTS,
    HELD_OUT_MOST,
    TrainerConfig,
)
from draft_trainer.releases.gate import MIN_CLUSTERS
from draft_trainer.releases.rollout_client import drafts_wanted
from slipstream.errors import clean
from slipstream.v1 import release_pb2
from slipstream.v1.console_pb2 import Diagnosis
from slipstream.v1.draft_trainer_pb2 import TrainerStatus
from slipstream.v1.rollout_server_pb2 import ServerState

logger = logging.getLogger(__name__)

OK, WAITING, PROBLEM = (
    Diagnosis.SEVERITY_OK,
    Diagnosis.SEVERITY_WAITING,
    Diagnosis.SEVERITY_PROBLEM,
)
Found = tuple[Diagnosis.Severity, str, str]
"""Severity, what was found, and the next step, if any."""

REFUSED_SHARE = EVICTED_SHARE = 0.1
"""The share of samples below which a run is healthy: the first of a version may come too early."""
OUTSIDE_SHARE, OUTSIDE_SAID = 0.02, 0.001
"""Shares of the policy's tokens outside the draft vocabulary: a problem, and worth a word."""


PARTS = ("policy", "samples", "training", "gate", "release", "servers", "trial")
"""The parts, in the order in which a release comes about."""


def diagnose(
    status: TrainerStatus, config: TrainerConfig, before: TrainerStatus | None = None
) -> list[Diagnosis]:
    """Return a finding for each of ``PARTS``.

    Args:
        status: now.
        config: the trainer's.
        before: of the same process, since which shares of samples and steps are judged; None: its
            start.
    """
    since = before or TrainerStatus()
    samples, training = partial(_samples, since), partial(_training, since)
    examine = (_policy, samples, training, _gate, _release, _servers, _trial)
    found = [each(status, config) for each in examine]
    return [
        Diagnosis(part=part, severity=severity, found=clean(text), next_step=next_step)
        for part, (severity, text, next_step) in zip(PARTS, found, strict=True)
    ]


def _policy(status: TrainerStatus, config: TrainerConfig) -> Found:
    server = config.server
    if not status.run_id:
        return (
            WAITING,
            "no training job has connected since the start",
            f"open a PolicyBridge there with trainer = HOST:{server.port or 'PORT'} of this "
            "machine; bridge.stats().capture_off_reason says why it does not capture",
        )
    if not status.HasField("policy_version"):
        return (
            WAITING,
            f"run {status.run_id} is open, and has registered no policy version",
            "run one step of the loop with bridge.sync(version) and bridge.capture()",
        )
    found = f"run {status.run_id} is at policy version {status.policy_version}"
    if status.history:
        found += f"; its job resumed from an older checkpoint {status.history} time(s)"
    return OK, found, ""


def _samples(since: TrainerStatus, status: TrainerStatus, config: TrainerConfig) -> Found:
    accepted = status.samples_accepted - since.samples_accepted
    refused = status.samples_refused - since.samples_refused
    if refused > REFUSED_SHARE * (accepted + refused):
        field, count = _most(_grown(since.refused_by_field, status.refused_by_field))
        return (
            PROBLEM,
            f"{refused} of {accepted + refused} samples were refused lately, {count} of them for "
            f"{field}",
            "the log of the training job has the refusal with its next step; "
            "bridge.stats().refused counts them",
        )
    if not status.samples_accepted:
        return WAITING, "no sample has arrived", "ship sequences with completion tokens"
    evicted = _grown(since.evicted_by_reason, status.evicted_by_reason)
    dropped = {name: evicted.get(name, 0) for name in ("capacity", "stale", "damaged")}
    resident = status.samples_pending + status.samples_held_out + status.samples_unsaved
    # A trainer that continues a run holds, and may drop, samples that it did not accept itself.
    samples = max(accepted, sum(dropped.values()) + resident)
    lost = {name: count for name, count in dropped.items() if count > EVICTED_SHARE * samples}
    if lost:
        reason, count = _most(lost)
        keys = {
            "capacity": "raise replay.capacity_bytes, or lower BridgeConfig.bytes_per_step",
            "stale": "raise replay.max_policy_lag, or lower BridgeConfig.bytes_per_step so that "
            "training keeps up",
            "damaged": "look at the disk of replay.directory",
        }
        found = f"{count} of {samples} samples were dropped before they were trained on ({reason})"
        return PROBLEM, found, keys[reason]
    accepted, held = status.samples_accepted, status.samples_held_out
    found = f"{accepted} accepted, {held} of those in memory held out for the gate"
    if status.held_out_by_completion:
        found += ", by completion: prompts are too few"
    return OK, found, ""


def _share(config: TrainerConfig) -> float:
    """The largest share of prompts that are held out."""
    fraction = config.replay.held_out_fraction
    return HELD_OUT_MOST if fraction is None else fraction


def _training(since: TrainerStatus, status: TrainerStatus, config: TrainerConfig) -> Found:
    if status.training_error:
        next_step = "read the error in the log; a restart resumes from the newest training state"
        if status.training_waits_for == release_pb2.REFUSAL_REASON_DEVICE_MEMORY:
            next_step = "lower training.forward_tokens, or free memory on the GPU"
        elif status.training_waits_for == release_pb2.REFUSAL_REASON_DISK:
            next_step = "free space there"
        return PROBLEM, status.training_error, next_step
    steps = status.train_steps - since.train_steps
    skipped = status.train_steps_skipped - since.train_steps_skipped
    if skipped > steps:
        return (
            PROBLEM,
            f"{skipped} steps were skipped lately, {steps} were not: losses or gradients are not "
            "finite, or no token of a sample can be trained on, as past a draft's sliding window",
            "check the log, the loss in /metrics and the loss_mask that is shipped; lower "
            "training.learning_rate",
        )
    if status.training_paused:
        mode = config.economy.mode
        next_step = f'nothing, or set economy.mode = "always" ("{mode}" now) to train regardless'
        return WAITING, f"training is paused: {status.training_decision}", next_step
    steps, held, pending = status.train_steps, status.samples_held_out, status.samples_pending
    # After a restart, what the process before left may be held out alone.
    if status.samples_accepted and not steps and held and not pending:
        share = f"replay.held_out_fraction ({_share(config):g})"
        found = f"all {held} samples in memory are held out, none is left to train on"
        return PROBLEM, found, f"send more prompts, or lower {share}"
    if not steps:
        return WAITING, f"no optimizer step yet, {pending} samples wait for it", ""
    tokens = status.tokens_trained - since.tokens_trained
    outside = (status.tokens_outside - since.tokens_outside) / max(tokens, 1)
    told = f"the policy samples {outside:.1%} of its tokens outside the draft vocabulary"
    if outside > OUTSIDE_SHARE:
        next_step = (
            "make a draft with the tokens that the policy samples now (draft-trainer warmup with "
            "recent rollouts); begin a new registry with it (draft.initial), and start the servers "
            "with it"
        )
        return PROBLEM, f"{told}, where no draft is accepted", next_step
    told = f"; {told}" if outside >= OUTSIDE_SAID else ""
    decision = f"; {status.training_decision}" if status.training_decision else ""
    return OK, f"{steps} steps, {pending} samples wait{told}{decision}", ""


def _gate(status: TrainerStatus, config: TrainerConfig) -> Found:
    result = status.last_verdict
    others = result.run_id not in ("", status.run_id)
    # The next step of one that the process before could not finish may have been taken since.
    others |= result.judged_at < status.started_at and result.outcome not in ("passed", "failed")
    if others or not status.HasField("last_verdict"):
        steps, seconds = config.training.steps_per_candidate, config.training.candidate_seconds
        found = (
            f"no candidate yet: the gate decides after {steps} steps, {seconds:g} s, or when idle"
        )
        return WAITING, found, ""
    if result.outcome == "passed":
        return OK, result.reason, ""
    if status.training_paused and result.outcome in ("write_failed", "not_measured"):
        return WAITING, f"training is paused; of the last candidate: {result.reason}", ""
    if result.outcome == "write_failed":
        return PROBLEM, result.reason, "free space on the disk of draft.registry"
    if result.outcome == "not_measured" and result.held_out_prompts:
        share, gate, prompts = _share(config), config.gate, result.held_out_prompts
        few = status.held_out_by_completion and prompts < MIN_CLUSTERS
        clusters = result.held_out_completions if few else prompts
        needed = gate.needed_anchors(clusters)
        more = max(needed / max(result.held_out_anchors, 1), MIN_CLUSTERS / max(clusters, 1))
        # Fewer prompts than that are never left out for it.
        bound = f" or gate.max_tokens ({gate.max_tokens})"
        bound = bound if clusters >= ENOUGH_PROMPTS else ""
        return (
            PROBLEM,
            result.reason,
            f"set replay.held_out_fraction to {min(0.5, math.ceil(100 * share * more) / 100):g} "
            f"({share:g} now), send more prompts per policy version, or raise "
            f"replay.max_policy_lag ({config.replay.max_policy_lag}){bound}",
        )
    if result.outcome == "not_measured":
        return (
            PROBLEM,
            result.reason,
            f"wait for more prompts, raise replay.held_out_fraction "
            f"({_share(config):g}), or lower gate.min_anchors "
            f"({config.gate.needed_anchors(0)})",
        )
    figures = result.gate
    clusters = figures.completions or figures.prompts
    if figures.difference > figures.min_gain and clusters < ENOUGH_HELD_OUT:
        return (
            WAITING,
            f"the newest candidate may be better than draft {result.incumbent_version}, but "
            f"{clusters} held-out {'completions' if figures.completions else 'prompts'} do not "
            f"decide it: {result.reason}",
            "send more prompts per policy version, of fewer completions each; or raise "
            f"replay.max_policy_lag ({config.replay.max_policy_lag}) or "
            f"replay.held_out_fraction ({_share(config):g})",
        )
    return (
        WAITING,
        f"the newest candidate was not better than draft {result.incumbent_version}: "
        f"{result.reason}",
        "nothing while the acceptance length holds; if it falls, raise BridgeConfig.bytes_per_step "
        "or training.learning_rate",
    )


def _release(status: TrainerStatus, config: TrainerConfig) -> Found:
    promoted, newest = status.promoted_release, status.newest_release
    if status.pinned:
        found = (
            f"draft {promoted} is pinned manually, so no candidate replaces it (newest: {newest})"
        )
        # Not the newest: what somebody pinned another release for may be wrong with it.
        next_step = f"draft-trainer releases promote {promoted} (without --pin)"
        return PROBLEM, found, next_step
    if not status.HasField("promoted_release"):
        return WAITING, "no release is promoted", ""
    served = status.HasField("served_release") and status.served_release == promoted
    if config.publish.rollout_servers and not served and config.publish.on == "sync":
        return (
            WAITING,
            f"draft {promoted} is promoted and goes live with the policy's next weight sync",
            'enter bridge.sync(version) around each weight sync, or set publish.on = "promotion"',
        )
    return OK, f"draft {promoted} is promoted", ""


def _servers(status: TrainerStatus, config: TrainerConfig) -> Found:
    if not config.publish.rollout_servers:
        next_step = 'set publish.rollout_servers = ["HOST:PORT"], their --control-port'
        found = "no rollout servers are configured: releases are made, and none is served"
        return PROBLEM, found, next_step
    if not status.servers:
        return WAITING, "no rollout server is known yet", ""
    for server in status.servers:
        name = server.address
        if not server.reachable and server.error:
            next_step = "start it, or correct publish.rollout_servers"
            return PROBLEM, f"{name} does not answer: {server.error}", next_step
        if server.state.trainer not in ("", status.trainer):
            theirs, ours = server.state.trainer, status.trainer
            found = f"{name} belongs to trainer {theirs}, this one is {ours}"
            return PROBLEM, found, "give every trainer servers of its own, or stop the other one"
        if server.state.not_ready:
            next_step = "wait two minutes for the trainer to repair it; if it does not, restart it"
            return PROBLEM, f"{name} is not ready: {server.not_ready}", next_step
        if server.reachable and not drafts_wanted(server.state):
            next_step = "turn it on with SetSpeculation"
            return PROBLEM, f"{name} generates without drafts", next_step
        wrong = drafts_otherwise(server.state, config) if server.reachable else None
        if wrong is not None:
            return PROBLEM, f"{name}: {wrong[0]}", wrong[1]
    ways = {
        f"{server.state.num_speculative_tokens} tokens {server.state.draft_sample_method}"
        for server in status.servers
        if server.reachable
    }
    if len(ways) > 1:
        found = f"the servers draft with different settings: {', '.join(sorted(ways))}"
        return PROBLEM, found, "start them with the same --draft-length and sampling method"
    plain = sum(s.reachable and not s.state.speculation_enabled for s in status.servers)
    if plain:
        found = f"{len(status.servers)} answer, {plain} draft nothing: there no draft length pays"
        return OK, found, ""
    return OK, f"{len(status.servers)} answer and draft", ""


def drafts_otherwise(state: ServerState, config: TrainerConfig) -> tuple[str, str] | None:
    """Say what is wrong where a rollout server does not draft as candidates are judged, and give
    the next step."""
    publish, depth = config.publish, config.training.ttt_steps
    for key, theirs in (
        ("num_speculative_tokens", state.num_speculative_tokens),
        ("draft_sample_method", state.draft_sample_method),
    ):
        ours = getattr(publish, key)
        if theirs and ours is not None and theirs != ours:
            found = f"it drafts with {key} = {theirs}, and candidates are measured for {ours}"
            return found, f"leave publish.{key} out, or start the server with {ours}"
    if state.num_speculative_tokens > depth:
        tokens = state.num_speculative_tokens
        found = f"it drafts {tokens} tokens a step, and training.ttt_steps = {depth} trains {depth}"
        return found, f"set training.ttt_steps = {tokens}, or start it with --draft-length {depth}"
    return None


def _trial(status: TrainerStatus, config: TrainerConfig) -> Found:
    if not status.HasField("trial"):
        return OK, "no release is on trial", ""
    trial = status.trial
    found = f"draft {trial.draft_version} is on trial against draft {trial.incumbent_version}"
    if trial.undecided:
        next_step = (
            f"send requests: {config.trial.min_drafts} verification steps of each draft are "
            "needed (trial.min_drafts); a release that stays undecided is never rolled back to. "
            "To go back to the last good one now: draft-trainer releases rollback"
        )
        return WAITING, f"{found}, without a verdict: {trial.undecided}", next_step
    return WAITING, found, "keep sending requests: live acceptance decides"


def _grown(since: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: count - since.get(name, 0) for name, count in now.items()}


def _most(counts: Mapping[str, int]) -> tuple[str, int]:
    return max(counts.items(), key=lambda entry: entry[1], default=("an unknown reason", 0))


class ProblemLog:
    """Logs a problem when it begins, and that it is over; not every time that it is found.

    Problems of a part are told apart by their next step without its numbers, which change.
    """

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    def note(self, diagnosis: list[Diagnosis]) -> None:
        """Note what was found now."""
        for one in diagnosis:
            if one.severity != PROBLEM:
                if self._told.pop(one.part, None) is not None:
                    logger.warning("%s: resolved (%s)", one.part, one.found)
                continue
            problem = re.sub(r"[\d.]+", "", one.next_step)
            if self._told.get(one.part) != problem:
                self._told[one.part] = problem
                logger.warning("%s: %s. Next step: %s", one.part, one.found, one.next_step)
