"""`draft-trainer doctor`: what is wrong, in the user's words, with the key to turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.publish_faults.memory_server import MemoryServer
from draft_trainer.cli.doctor import first_problem
from draft_trainer.cli.main import main
from draft_trainer.config_file import load_config, parse_config
from draft_trainer.server.diagnosis import OK, PROBLEM, WAITING, ProblemLog, diagnose
from slipstream.v1 import release_pb2
from slipstream.v1.console_pb2 import Diagnosis, ServerView, TrialView
from slipstream.v1.draft_trainer_pb2 import TrainerStatus
from slipstream.v1.release_pb2 import GateFigures, Verdict
from slipstream.v1.rollout_server_pb2 import NOT_READY_REASON_ASLEEP, NotReady, ServerState
from tests.draft_trainer.rig import make_config, rollouts, running, write_draft
from tests.draft_trainer.synthetic import Policy
from tests.draft_trainer.test_cli import run, write_config

CONFIG = parse_config(
    {
        "draft": {"initial": "draft", "registry": "registry"},
        "replay": {"held_out_fraction": 0.1},
        "publish": {"rollout_servers": ["a:1"]},
    }
)


def healthy(**changes: Any) -> TrainerStatus:
    """A trainer that releases drafts, but for ``changes``."""
    state = ServerState(
        speculation_enabled=True, num_speculative_tokens=3, draft_sample_method="probabilistic"
    )
    fields: dict[str, Any] = {
        "run_id": "grpo-1",
        "policy_version": 7,
        "samples_accepted": 1000,
        "samples_held_out": 100,
        "train_steps": 50,
        "last_verdict": Verdict(outcome="passed", reason="passed: 3.1 against 2.9"),
        "promoted_release": 4,
        "served_release": 4,
        "newest_release": 4,
        "servers": [ServerView(address="a:1", reachable=True, state=state)],
    }
    return TrainerStatus(**{**fields, **changes})


def found(status: TrainerStatus) -> dict[str, Diagnosis]:
    return {one.part: one for one in diagnose(status, CONFIG)}


@pytest.mark.parametrize("outcome", ["write_failed", "not_measured"])
def test_failed_verdict_is_no_problem_while_training_is_paused(
    outcome: str,
) -> None:
    """Nor is one of another run, of which this one has not had any yet."""
    verdict = Verdict(outcome=outcome, reason="it was not", run_id="grpo-1")
    assert found(healthy(last_verdict=verdict))["gate"].severity == PROBLEM
    paused = found(healthy(last_verdict=verdict, training_paused=True))["gate"]
    assert (
        paused.severity == WAITING and "paused; of the last candidate: it was not" in paused.found
    )
    verdict.run_id = "another"
    assert "no candidate yet" in found(healthy(last_verdict=verdict))["gate"].found


@pytest.mark.parametrize("outcome", ["write_failed", "not_measured"])
def test_verdict_from_before_restart_is_no_problem(outcome: str) -> None:
    verdict = Verdict(outcome=outcome, reason="it was not", judged_at=1.0)
    left = {"samples_accepted": 0, "train_steps": 0, "last_verdict": verdict}
    restarted = found(healthy(started_at=2.0, **left))
    assert restarted["training"].severity == restarted["gate"].severity == WAITING
    assert "no optimizer step" in restarted["training"].found
    assert "no candidate yet" in restarted["gate"].found
    assert found(healthy(started_at=0.5, last_verdict=verdict))["gate"].severity == PROBLEM
    verdict.outcome = "passed"
    assert found(healthy(started_at=2.0, **left))["gate"].severity == OK


def test_samples_dropped_at_start_are_not_accepted_ones() -> None:
    few = {"samples_accepted": 20, "samples_held_out": 80, "samples_pending": 20}
    samples = found(healthy(evicted_by_reason={"stale": 60}, **few))["samples"]
    assert samples.severity == PROBLEM and samples.found.startswith("60 of 160 samples")
    samples = found(healthy(evicted_by_reason={"stale": 10}, **few))["samples"]
    assert samples.severity == OK


def test_tokens_outside_the_draft_vocabulary_are_named() -> None:
    """Those of the last minute: a draft that once fitted hides nothing."""
    told = {}
    for outside in (0, 30, 300):
        before = healthy(tokens_trained=1_000_000, tokens_outside=100.0)
        status = healthy(tokens_trained=1_010_000, tokens_outside=100.0 + outside)
        (told[outside],) = (d for d in diagnose(status, CONFIG, before) if d.part == "training")
    assert "outside" not in told[0].found and told[0].severity == told[30].severity == OK
    assert "samples 0.3% of its tokens outside the draft vocabulary" in told[30].found
    assert told[300].severity == PROBLEM and "samples 3.0% of its tokens" in told[300].found
    assert "draft-trainer warmup" in told[300].next_step


@pytest.mark.parametrize(
    ("part", "went_wrong"),
    [
        ("samples", {"samples_refused": 900, "refused_by_field": {"teacher": 900}}),
        ("samples", {"evicted_by_reason": {"capacity": 900}}),
        ("training", {"train_steps_skipped": 900}),
    ],
)
def test_problem_shares_count_recent_samples_only(part: str, went_wrong: dict[str, Any]) -> None:
    weeks = {"samples_accepted": 2_000_000, "train_steps": 400_000}
    sound, wrong = healthy(**weeks), healthy(**weeks, **went_wrong)
    for before, now, severity in ((sound, wrong, PROBLEM), (wrong, wrong, OK), (None, wrong, OK)):
        diagnosis = {one.part: one for one in diagnose(now, CONFIG, before)}
        assert diagnosis[part].severity == severity
    # Whether there was any is asked of the whole time.
    assert "2000000 accepted" in found(sound)["samples"].found
    assert {one.severity for one in diagnose(sound, CONFIG, sound)} == {OK}
    # A bad first day is over.
    first = {"samples_accepted": 100, "train_steps": 1}
    assert found(healthy(**first, **went_wrong))[part].severity == PROBLEM
    after = {"samples_accepted": 600, "train_steps": 600}
    diagnosis = diagnose(healthy(**after, **went_wrong), CONFIG, healthy(**first, **went_wrong))
    assert {one.severity for one in diagnosis} == {OK}


WIDE = "no real gain: 1.703 against 1.663, difference +0.040 ± 0.071"
FEW = "124 held-out anchors in 3 prompts, 200 in 6 are needed"


@pytest.mark.parametrize(
    ("changes", "part", "severity", "text", "key"),
    [
        (
            {
                "samples_refused": 900,
                "refused_by_field": {"policy_logprobs": 890, "temperature": 10},
            },
            *("samples", PROBLEM, "890 of them for policy_logprobs", "the log of the training job"),
        ),
        ({"samples_refused": 90}, "samples", OK, "1000 accepted", ""),
        (
            {"evicted_by_reason": {"capacity": 600}},
            *("samples", PROBLEM, "600 of 1000", "replay.capacity_bytes"),
        ),
        (
            {"evicted_by_reason": {"stale": 600, "undone": 900}},
            *("samples", PROBLEM, "(stale)", "replay.max_policy_lag"),
        ),
        (
            {"train_steps_skipped": 51},
            *("training", PROBLEM, "51 steps were skipped", "training.learning_rate"),
        ),
        (
            {"train_steps": 0, "samples_pending": 0},
            *("training", PROBLEM, "all 100 samples", "replay.held_out_fraction (0.1)"),
        ),
        (
            {"training_paused": True, "training_decision": "saves 1 s, costs 9 s"},
            *("training", WAITING, "paused: saves 1 s, costs 9 s", "economy.mode"),
        ),
        (
            {"training_error": "full", "training_waits_for": release_pb2.REFUSAL_REASON_DISK},
            *("training", PROBLEM, "full", "free space"),
        ),
        ({"training_error": "an error"}, "training", PROBLEM, "an error", "in the log"),
        (
            {
                "training_error": "too little",
                "training_waits_for": release_pb2.REFUSAL_REASON_DEVICE_MEMORY,
            },
            *("training", PROBLEM, "too little", "training.forward_tokens"),
        ),
        (
            {"last_verdict": Verdict(outcome="not_measured", reason="no anchor")},
            *("gate", PROBLEM, "no anchor", "gate.min_anchors (200)"),
        ),
        (
            {
                "last_verdict": Verdict(
                    outcome="not_measured", reason=FEW, held_out_anchors=124, held_out_prompts=3
                )
            },
            *("gate", PROBLEM, FEW, "set replay.held_out_fraction to 0.2 (0.1 now)"),
        ),
        (
            {
                "held_out_by_completion": True,
                "last_verdict": Verdict(
                    outcome="not_measured",
                    reason=FEW,
                    held_out_anchors=200,
                    held_out_prompts=1,
                    held_out_completions=3,
                ),
            },
            *("gate", PROBLEM, FEW, "set replay.held_out_fraction to 0.2 (0.1 now)"),
        ),
        (
            {
                "last_verdict": Verdict(
                    outcome="failed", reason=WIDE, gate=GateFigures(difference=0.04, prompts=10)
                )
            },
            *("gate", WAITING, "10 held-out prompts do not decide it", "replay.max_policy_lag (4)"),
        ),
        (
            {"history": 2},
            *("policy", OK, "its job resumed from an older checkpoint 2 time(s)", ""),
        ),
        (
            {"held_out_by_completion": True},
            *("samples", OK, "by completion: prompts are too few", ""),
        ),
        (
            {"last_verdict": Verdict(outcome="write_failed", reason="not written: full")},
            *("gate", PROBLEM, "full", "draft.registry"),
        ),
        (
            {"last_verdict": Verdict(outcome="failed", reason="no real gain", incumbent_version=4)},
            *("gate", WAITING, "not better than draft 4: no real gain", "nothing while"),
        ),
        (
            {"pinned": True, "newest_release": 6},
            *("release", PROBLEM, "draft 4 is pinned manually", "releases promote 4"),
        ),
        ({"promoted_release": 5}, "release", WAITING, "next weight sync", "publish.on"),
        (
            {"servers": [ServerView(address="a:1", error="UNAVAILABLE: refused")]},
            *("servers", PROBLEM, "a:1 does not answer: UNAVAILABLE", "publish.rollout_servers"),
        ),
        (
            {
                "servers": [
                    ServerView(
                        address="a:1",
                        reachable=True,
                        state=ServerState(speculation_enabled=True, num_speculative_tokens=6),
                    )
                ]
            },
            *("servers", PROBLEM, "drafts 6 tokens a step", "set training.ttt_steps = 6"),
        ),
        (
            {
                "servers": [
                    ServerView(
                        address="a:1",
                        reachable=True,
                        state=ServerState(speculation_enabled=True, draft_sample_method=method),
                    )
                    for method in ("greedy", "probabilistic")
                ]
            },
            *("servers", PROBLEM, "0 tokens greedy, 0 tokens probabilistic", "--draft-length"),
        ),
        (
            {"servers": [ServerView(address="a:1", reachable=True, state=ServerState())]},
            *("servers", PROBLEM, "a:1 generates without drafts", "SetSpeculation"),
        ),
        (
            {
                "servers": [
                    ServerView(
                        address="a:1",
                        reachable=True,
                        state=ServerState(speculation_wanted=True, speculation_enabled=drafts),
                    )
                    for drafts in (False, True)
                ]
            },
            *("servers", OK, "2 answer, 1 draft nothing: there no draft length pays", ""),
        ),
        (
            {
                "servers": [
                    ServerView(
                        address="a:1",
                        reachable=True,
                        state=ServerState(not_ready=[NotReady(reason=NOT_READY_REASON_ASLEEP)]),
                        not_ready="it sleeps",
                    )
                ]
            },
            *("servers", PROBLEM, "a:1 is not ready: it sleeps", "restart it"),
        ),
        (
            {
                "trainer": "1",
                "servers": [
                    ServerView(
                        address="a:1",
                        reachable=True,
                        state=ServerState(trainer="2", speculation_wanted=True),
                    )
                ],
            },
            *("servers", PROBLEM, "a:1 belongs to trainer 2, this one is 1", "of its own"),
        ),
        (
            {"trial": TrialView(draft_version=5, undecided="too little traffic")},
            *("trial", WAITING, "without a verdict: too little traffic", "trial.min_drafts"),
        ),
        (
            {"trial": TrialView(draft_version=5, incumbent_version=4)},
            *("trial", WAITING, "draft 5 is on trial against draft 4", "requests"),
        ),
    ],
)
def test_problem_names_the_config_key(
    changes: dict[str, Any], part: str, severity: int, text: str, key: str
) -> None:
    diagnosis = found(healthy(**changes))
    one = diagnosis[part]
    assert one.severity == severity and text in one.found and key in one.next_step
    if severity != OK:
        assert first_problem([*diagnosis.values()]) == one


def test_problem_is_logged_once_until_it_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = ProblemLog()
    few = healthy(last_verdict=Verdict(outcome="not_measured", reason=FEW))
    for status in (few, few, healthy(), few):
        log.note(diagnose(status, CONFIG))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == ["gate"] * 3
    assert lines[0].startswith(f"gate: {FEW}. Next step: wait for more prompts")
    assert "resolved" in lines[1] and lines[2] == lines[0]


def test_problem_replaced_by_another_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = ProblemLog()
    many = Verdict(outcome="not_measured", reason=FEW, held_out_anchors=124, held_out_prompts=3)
    more = Verdict(outcome="not_measured", reason=FEW, held_out_anchors=150, held_out_prompts=3)
    for changes in (
        {"samples_refused": 900, "last_verdict": many},
        {"samples_refused": 901, "last_verdict": more},
        {"evicted_by_reason": {"stale": 600}, "last_verdict": more},
    ):
        log.note(diagnose(healthy(**changes), CONFIG))
    told = [line.partition(" (")[0] for line in caplog.messages]
    assert [line.split(":")[0] for line in told] == ["samples", "gate", "samples"]
    assert "samples were refused" in told[0] and "samples were dropped" in told[2]


def test_doctor_of_a_running_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, publish={"rollout_servers": ["127.0.0.1:9"], "reconcile_s": 0.5})
    with running(config, train=False) as (server, client):
        client.open()
        client.announce(5)
        client.send(*rollouts(7, version=5))
        client.wait_for(lambda s: s.servers and s.servers[0].error)
        code, text = run(capsys, "doctor", "--address", server.address)
        lines = text.splitlines()
        assert code == 1
        assert lines[0].startswith("ok       policy   run run is at policy version 5")
        assert any(
            line.startswith("PROBLEM  servers  127.0.0.1:9 does not answer") for line in lines
        )
        assert "or correct publish.rollout_servers" in text and lines[-1] == "waits for: servers"
        code, text = run(capsys, "doctor", "--json", "--address", server.address)
        assert code == 1 and json.loads(text)[-2]["severity"] == "SEVERITY_PROBLEM"
        assert (
            "127.0.0.1:9 does not answer" in run(capsys, "status", "--address", server.address)[1]
        )
        server.status.keep_snapshot()
    assert sum("servers: 127.0.0.1:9 does not answer" in m for m in caplog.messages) == 1


def test_serve_check_finds_fleet_and_draft_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy_dir: Path
) -> None:
    double = MemoryServer(draft_length=2, draft_sample_method="greedy")
    publish = {"rollout_servers": [double.address, "127.0.0.1:9"]}
    config = write_config(tmp_path, publish=publish, server={"port": 9})
    code, text = run(capsys, "serve", "--check", "--config", str(config))
    assert code == 1 and "# ok       draft" in text and "# ok       device" in text
    assert (
        f"PROBLEM  {double.address}" in text and "leave publish.num_speculative_tokens out" in text
    )
    assert "PROBLEM  127.0.0.1:9" in text and "--control-port" in text
    double.stop()
    config = write_config(tmp_path, draft={"initial": str(policy_dir), "registry": "r"})
    code, text = run(capsys, "serve", "--check", "--config", str(config))
    assert code == 1 and "a language model (Qwen3ForCausalLM, 10 layers)" in text
    assert f"draft-trainer init --policy {policy_dir}" in text and 'kind = "draft_model"' in text
    theirs = Path(__file__).parent / "checkpoints"
    draft = {"initial": str(theirs / "specforge_sglang"), "policy": str(theirs / "policy")}
    config = write_config(tmp_path, draft=draft | {"registry": "r"})
    code, text = run(capsys, "serve", "--check", "--config", str(config))
    assert code == 0 and "eagle_aux_hidden_state_layer_ids = [2, 5, 7]" in text
    assert main(["serve", "--check", "--config", str(tmp_path / "absent.toml")]) == 2


def test_minimal_toml_releases_a_draft(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """24 prompts of 12 to 20 tokens a policy version: far below what the defaults once needed."""
    double = MemoryServer(write_draft(tmp_path / "draft"))
    file = tmp_path / "trainer.toml"
    file.write_text(
        f'[draft]\ninitial = "draft"\n[publish]\nrollout_servers = ["{double.address}"]\n'
    )
    config = load_config(file)
    # Not to meet another trainer on this machine.
    server = config.server.model_copy(update={"port": 0, "metrics_port": 0})
    policy = Policy(0, 4.0)
    with running(config.model_copy(update={"server": server})) as (_, client):
        client.open()
        for version in range(1, 11):
            client.announce(version, policy)
            samples = policy.samples(24, seed=version)
            client.send(*(sample.repacked(policy_version=version) for sample in samples))
            # What this double generates is not known, and counts as paying.
            trained = client.wait_for(
                lambda s: (
                    s.idle and "counts as paying" in s.training_decision and not s.samples_pending
                )
            )
            client.prepare(version)
            client.complete(version)
            if trained.newest_release:
                break
        status = client.wait_for(lambda s: s.newest_release)
        assert status.last_verdict.gate.num_speculative_tokens == 3
    assert sorted(folder.name for folder in (tmp_path / "releases").glob("release-*"))[:2] == [
        *("release-000000", "release-000001")
    ]
    double.stop()
