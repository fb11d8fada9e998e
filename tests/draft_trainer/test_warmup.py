"""``draft-trainer warmup``: learns, holds little, goes on, and names what it cannot use."""

from __future__ import annotations

import itertools
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_trainer.cli.main import main
from draft_trainer.cli.warmup import Warmup as WarmupCommand
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.warmup import rollouts as reading
from draft_trainer.warmup import run as warming
from draft_trainer.warmup.report import Report
from draft_trainer.warmup.run import Warmup, held_out_share
from examples.arithmetic_grpo.processes import free_port
from examples.arithmetic_grpo.states import States
from policy_bridge import capture
from tests.completions_server import Completions, choice, serving
from tests.draft_trainer.warmup_rig import (
    COUNT,
    EPOCHS,
    Rollout,
    command,
    expected_tokens,
    report,
    write_rollouts,
)
from tests.gpu.shortages import shortage

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def refused(capsys: Capture, arguments: Sequence[str]) -> str:
    """The last line of stderr of a command that must end with 2."""
    assert main(arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("draft-trainer: ") and "Next step: " in line
    return line


def test_warmup_trains_every_rollout_and_raises_acceptance(
    tmp_path: Path, policy_dir: Path, drawn: list[Rollout], fresh: States, capsys: Capture
) -> None:
    """The rollouts are several times what the replay buffer holds."""
    file = write_rollouts(tmp_path / "rollouts.jsonl", drawn)
    assert main(command(tmp_path, policy_dir, "--rollouts", file)) == 0
    out = tmp_path / "draft"
    said = capsys.readouterr()
    assert "acceptance length" in said.out and "held-out prompts" in said.err
    names = ["acceptance.json", "acceptance.png", "config.json", "model.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert (out / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    found = report(tmp_path)
    assert found["finished"] and found["tokens"] == expected_tokens(drawn)
    assert found["acceptance_length"] > found["acceptance_length_at_start"] + 0.2
    passed = [one for one in found["decisions"] if one["passed"]]
    assert passed and all(one["gain"] > one["half_width"] for one in passed)
    draft = Eagle3().read(out).draft()
    assert fresh.acceptance_length(draft, 3) > 1.25
    counts = torch.zeros(128, dtype=torch.int64)
    for _, answer in drawn:
        counts += torch.bincount(torch.tensor(answer), minlength=128)
    assert draft.draft_vocab_ids is not None
    assert counts[draft.target_ids()].sum() / counts.sum() > 0.999
    # It is done: the same command changes nothing.
    before = (out / "model.safetensors").read_bytes()
    assert main(command(tmp_path, policy_dir, "--rollouts", file)) == 0
    assert "is finished" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_warmup_stopped_by_signal_goes_on_where_it_was(
    tmp_path: Path,
    policy_dir: Path,
    drawn: list[Rollout],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = write_rollouts(tmp_path / "rollouts.jsonl", drawn)
    arguments = command(tmp_path, policy_dir, "--rollouts", file)
    monkeypatch.setattr(warming, "AT_ONCE", 16)
    monkeypatch.setattr(warming, "LOOK_SECONDS", 0.05)
    gave, given = Warmup._gave, []

    def stop_later(self: Warmup, part: Any) -> None:
        gave(self, part)
        given.extend(one.number for one in part)
        if len(given) in (32, 64):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Warmup, "_gave", stop_later)
    for _ in range(2):
        assert main(arguments) == 128 + signal.SIGTERM
        assert "the same command goes on" in capsys.readouterr().err
        assert report(tmp_path)["finished"] is False
    # With other rollouts it does not.
    other = write_rollouts(tmp_path / "other.jsonl", drawn[1:])
    line = refused(capsys, command(tmp_path, policy_dir, "--rollouts", other))
    assert "draft: rollouts: found" in line and "another --out" in line
    assert main(arguments) == 0
    assert given == list(range(COUNT)) and report(tmp_path)["tokens"] == expected_tokens(drawn)


def test_warmup_of_a_draft_ends_after_so_many_tokens(
    tmp_path: Path, policy_dir: Path, draft_dir: Path, drawn: list[Rollout]
) -> None:
    file = write_rollouts(tmp_path / "rollouts.jsonl", drawn)
    options = ("--draft", draft_dir, "--rollouts", file, "--tokens", 3000)
    assert main(command(tmp_path, policy_dir, *options)) == 0
    longest = max(len(answer) for _, answer in drawn)
    found = report(tmp_path)
    assert 3000 <= found["tokens"] < 3000 + EPOCHS * longest
    assert found["acceptance_length_at_start"] > 3.0
    weights = (tmp_path / "draft" / "model.safetensors").read_bytes()
    better = any(one["passed"] for one in found["decisions"])
    assert better != (weights == (draft_dir / "model.safetensors").read_bytes())


def test_warmup_ends_once_it_is_flat(
    tmp_path: Path, policy_dir: Path, drawn: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Report, "flat", property(lambda self: len(self.points) > 0))
    file = write_rollouts(tmp_path / "rollouts.jsonl", drawn)
    assert main(command(tmp_path, policy_dir, "--rollouts", file, "--until-flat")) == 0
    found = report(tmp_path)
    assert found["finished"] and 0 < found["tokens"] < expected_tokens(drawn)


class Server(Completions):
    """Completes every prompt as ``drawn`` does, for as long as it may."""

    answers: Mapping[tuple[int, ...], list[int]] = {}
    left = sys.maxsize
    served = ("policy",)
    logprob = -1.0

    def answer(self, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        type(self).left -= 1
        if self.left < 0 or not reading.PLAIN.items() <= body.items():
            return 500, []
        tokens = self.answers[tuple(body["prompt"])]
        return 200, [choice(tokens, [self.logprob] * len(tokens))] * body["n"]


@pytest.fixture
def server(drawn: list[Rollout]) -> Iterator[tuple[type[Server], str]]:
    """A server with answers for the prompts of ``drawn``, and its address."""
    answers = {tuple(prompt): answer for prompt, answer in drawn}

    class Answers(Server):
        pass

    Answers.answers = answers
    with serving(Answers) as port:
        yield Answers, f"http://127.0.0.1:{port}"


def write_prompts(path: Path, rollouts: Sequence[Rollout]) -> Path:
    path.write_text("".join(f"{json.dumps({'prompt': prompt})}\n" for prompt, _ in rollouts))
    return path


@pytest.mark.slow
def test_warmup_goes_on_after_its_endpoint_died(
    tmp_path: Path,
    policy_dir: Path,
    drawn: list[Rollout],
    server: tuple[type[Server], str],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler, url = server
    monkeypatch.setattr(reading, "AT_ONCE", 32)
    monkeypatch.setattr(reading, "RETRY_SECONDS", (0.01,))
    few = drawn[:64]
    file = write_prompts(tmp_path / "prompts.jsonl", few)
    asked = ("--prompts", file, "--endpoint", url, "--model", "policy", "--samples", 2)
    # All tokens: rollouts need not be counted before training begins.
    asked += ("--draft-vocab", 128)
    handler.left = 40
    line = refused(capsys, command(tmp_path, policy_dir, *asked))
    assert f"--endpoint: found {url}" in line and "give the command again" in line
    Eagle3().read(tmp_path / "draft").draft()
    taken = json.loads((tmp_path / "draft" / "work" / "position.json").read_text())["rollouts"]
    assert 64 <= taken < 128
    handler.left = sys.maxsize
    assert main(command(tmp_path, policy_dir, *asked)) == 0
    assert report(tmp_path)["tokens"] == 2 * expected_tokens(few)


@pytest.mark.slow
def test_warmup_repeats_prompts_until_it_has_its_tokens(
    tmp_path: Path, policy_dir: Path, drawn: list[Rollout], server: tuple[type[Server], str]
) -> None:
    _, url = server
    few = [(prompt, answer[:8]) for prompt, answer in drawn[:60]]
    file = write_prompts(tmp_path / "prompts.jsonl", few)
    asked = ("--prompts", file, "--endpoint", url, "--model", "policy")
    wanted = expected_tokens(few) + 200
    assert main(command(tmp_path, policy_dir, *asked, "--tokens", wanted)) == 0
    assert report(tmp_path)["tokens"] >= wanted


def test_warmup_of_an_endpoint_with_another_policy_is_refused(
    tmp_path: Path,
    policy_dir: Path,
    drawn: list[Rollout],
    server: tuple[type[Server], str],
    capsys: Capture,
) -> None:
    handler, url = server
    file = write_prompts(tmp_path / "prompts.jsonl", drawn)
    asked = ("--prompts", file, "--endpoint", url, "--model", "policy")
    handler.served = ("another",)
    line = refused(capsys, command(tmp_path, policy_dir, *asked))
    assert f"--model: found policy, and {url} serves another" in line
    assert not (tmp_path / "draft").exists()
    # One that has the name, and other probabilities.
    handler.served, handler.logprob = ("policy",), -9.0
    line = refused(capsys, command(tmp_path, policy_dir, *asked))
    assert "--endpoint: found log-probabilities that differ from --policy's by" in line
    handler.logprob = -0.5
    line = refused(capsys, command(tmp_path, policy_dir, *asked, "--tokens", 300))
    assert "too few to know of a draft whether it is better" in line and "--tokens" in line


@pytest.mark.slow
def test_warmup_leaves_out_and_counts_non_finite_samples(
    tmp_path: Path,
    policy_dir: Path,
    drawn: list[Rollout],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampled_of, calls = capture.sampled_of, itertools.count()

    def of_some(*arguments: Any) -> Any:
        return None if next(calls) < 3 else sampled_of(*arguments)

    monkeypatch.setattr(capture, "sampled_of", of_some)
    file = write_rollouts(tmp_path / "rollouts.jsonl", drawn)
    assert main(command(tmp_path, policy_dir, "--rollouts", file)) == 0
    assert "samples left out: 3 non_finite" in capsys.readouterr().out
    # None is left.
    monkeypatch.setattr(capture, "sampled_of", lambda *_: None)
    out = ("--out", tmp_path / "none")
    line = refused(capsys, command(tmp_path, policy_dir, "--rollouts", file, *out))
    assert "--rollouts: found no sample; left out: " in line and "non_finite" in line


@pytest.mark.parametrize("place", ["policy_bridge.capture.sampled_of", "the policy's forward"])
def test_warmup_without_device_memory_is_refused(
    tmp_path: Path,
    policy_dir: Path,
    drawn: list[Rollout],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise shortage("handle")

    name = place
    if place == "the policy's forward":
        name = "transformers.models.qwen3.modeling_qwen3.Qwen3Model.forward"
    monkeypatch.setattr(name, full)
    file = write_rollouts(tmp_path / "rollouts.jsonl", drawn)
    line = refused(capsys, command(tmp_path, policy_dir, "--rollouts", file))
    assert "--device: found no memory for a pass of" in line
    Eagle3().read(tmp_path / "draft").draft()


@pytest.mark.parametrize("faster", ["float32", "bfloat16"])
@pytest.mark.parametrize("given", ["auto", "bfloat16"])
def test_policy_is_of_the_faster_type_unless_one_is_given(
    tmp_path: Path, policy_dir: Path, monkeypatch: pytest.MonkeyPatch, faster: str, given: Any
) -> None:
    monkeypatch.setattr("draft_trainer.drafters.ops.cpu_precision", lambda: faster)
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "policy")
    command = WarmupCommand(policy=tmp_path / "policy", out=tmp_path / "out", dtype=given)
    expected = faster if given == "auto" else given
    assert str(command._loaded(tmp_path / "policy").dtype) == f"torch.{expected}"


def test_warmup_options_are_checked_before_loading_policy(
    tmp_path: Path,
    policy_dir: Path,
    draft_dir: Path,
    drawn: list[Rollout],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    file = write_rollouts(tmp_path / "rollouts.jsonl", drawn)
    rollouts = ("--rollouts", file)
    prompts = write_prompts(tmp_path / "prompts.jsonl", drawn)
    alike = write_prompts(tmp_path / "alike.jsonl", [drawn[0]] * 50)
    (empty := tmp_path / "empty.jsonl").touch()
    unknown = write_rollouts(tmp_path / "unknown.jsonl", [([1, 7], [9, 128])])
    stopped = f"http://127.0.0.1:{free_port()}"
    (fleet := tmp_path / "fleet.toml").write_text('[publish]\nrollout_servers = ["h:1"]\n')
    (wrong := tmp_path / "wrong.toml").write_text('[replay]\nheld_out_fraction = "x"\n')
    (serve := tmp_path / "serve.toml").write_text("[server]\nport = 1\n")
    (tmp_path / "there").mkdir()
    for policy, options, text in (
        (policy_dir, (), "--rollouts: found none or both"),
        (policy_dir, (*rollouts, "--prompts", prompts), "--rollouts: found none or both"),
        (policy_dir, ("--prompts", prompts), "--endpoint: found nothing"),
        (policy_dir, ("--prompts", prompts, "--endpoint", "h:1"), "--endpoint: found h:1"),
        (policy_dir, ("--prompts", alike, "--endpoint", stopped), "found 1 different prompts"),
        (policy_dir, ("--prompts", prompts, "--endpoint", stopped), "start the server"),
        (policy_dir, (*rollouts, "--temperature", "0"), "--temperature: found 0"),
        (policy_dir, (*rollouts, "--tokens", "0"), "--tokens: found 0"),
        (policy_dir, (*rollouts, "--tokens", "9", "--until-flat"), "--tokens: found"),
        (policy_dir, (*rollouts, "--draft-kind", "dflash"), "init --draft-kind dflash"),
        (
            *(policy_dir, (*rollouts, "--draft", draft_dir, "--draft-vocab", 9)),
            "--draft-vocab: found 9",
        ),
        (policy_dir, (*rollouts, "--config", wrong), "replay.held_out_fraction: found 'x'"),
        (policy_dir, (*rollouts, "--config", fleet), "--config: publish.rollout_servers"),
        (policy_dir, (*rollouts, "--config", serve), "--config: server"),
        (policy_dir, ("--rollouts", unknown), "line 1: found completion with [128]"),
        (policy_dir, ("--rollouts", tmp_path / "none"), "--rollouts: found"),
        (policy_dir, ("--rollouts", empty), "empty.jsonl: no line"),
        (policy_dir, (*rollouts, "--device", "gpu"), "--device: found gpu (Expected one of cpu"),
        (policy_dir, (*rollouts, "--device", "cuda:99"), "--device: found cuda:99 ("),
        (policy_dir, (*rollouts, "--out", tmp_path / "there"), "there: found something there"),
        (tmp_path / "none", rollouts, "none: found no such folder, expected"),
        (draft_dir, rollouts, "so a draft"),
    ):
        assert text in refused(capsys, command(tmp_path, policy, *options)), text
    assert not (tmp_path / "draft").exists()


def test_held_out_share_suits_the_number_of_prompts() -> None:
    class Some(reading.Rollouts):
        option = "--prompts"

        def __init__(self, count: int) -> None:
            self.groups = {f"{number}" for number in range(count)}

        def read(self, first: int) -> Any:
            raise NotImplementedError

    shares = [held_out_share(Some(count), None) for count in (64, 128, 256, 10_000)]
    assert shares == [0.25, 0.25, 0.125, 0.05]
    assert held_out_share(Some(64), 0.5) == 0.5
    for count in (1, 4):
        with pytest.raises(Exception, match=rf"--prompts: found {count} different prompts"):
            held_out_share(Some(count), None)


@pytest.mark.parametrize("name", ["record", "fit"])
def test_commands_that_are_gone_name_their_successor(name: str, capsys: Capture) -> None:
    assert main([name, "--states", "x"]) == 2
    told = capsys.readouterr().err
    assert f"found {name}, which was removed" in told and "use draft-trainer warmup" in told
