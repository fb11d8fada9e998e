"""Recording without a loop: capture of a Hugging Face policy against the policy's own states."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from draft_trainer.cli.main import main
from draft_trainer.offline.record import Recorder, Rollout, read_prompts, read_rollouts
from draft_trainer.recordings.recording import Recording
from examples.arithmetic_grpo.processes import free_port
from examples.arithmetic_grpo.sampling import solutions
from slipstream.errors import RefusedError
from tests.alignment.recorded import record
from tests.completions_server import Completions, choice, serving

LAYERS = (2, 5, 7)


@pytest.fixture(scope="module")
def model(policy_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def rollouts(model: PreTrainedModel) -> list[Rollout]:
    (drawn,) = solutions(model, 6, seed=3)
    return drawn


def test_states_are_the_policys_own(
    tmp_path: Path, model: PreTrainedModel, rollouts: list[Rollout]
) -> None:
    with Recorder(model, tmp_path, aux_layer_ids=LAYERS, states_dtype=None) as recorder:
        recorder.add(rollouts, batch_tokens=150)  # padded rows, several passes
    recording = Recording(tmp_path)
    prompts, completions = zip(*rollouts, strict=True)
    expected = {tuple(s.token_ids.tolist()): s for s in record(model, prompts, completions, LAYERS)}
    assert len(recording) == len(expected) == 6
    for found in (recording[i] for i in range(6)):
        own = expected[tuple(found.token_ids.tolist())]
        assert torch.equal(found.loss_mask, own.loss_mask)
        assert torch.equal(found.positions, own.positions.int())
        for name in ("aux", "final_hidden", "sampled_logprobs", "sampled_logits"):
            torch.testing.assert_close(
                getattr(found, name), getattr(own, name), rtol=1e-4, atol=1e-4, msg=name
            )
    heads = recording.policy_heads(torch.arange(128))
    assert torch.equal(heads.get(0).lm_head_rows, model.lm_head.weight)
    assert torch.equal(heads.get(0).embed_tokens, model.model.embed_tokens.weight)


def test_long_sequences_become_windows(
    tmp_path: Path, model: PreTrainedModel, rollouts: list[Rollout]
) -> None:
    """Every completion token is a target once; what windows repeat is context."""
    with Recorder(model, tmp_path, aux_layer_ids=LAYERS, max_tokens=24) as recorder:
        recorder.add(rollouts)
    recording = Recording(tmp_path)
    samples = [recording[i] for i in range(len(recording))]
    assert max(sample.tokens for sample in samples) == 24 and len(samples) > 6
    assert samples[0].aux.dtype == torch.bfloat16
    targets = sum(int(sample.loss_mask.sum()) for sample in samples)
    assert targets == sum(len(completion) for _, completion in rollouts)


def test_rollouts_are_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"prompt": [1, 2], "completion": [3]}\n{"prompt": [4], "completion": []}\n')
    assert read_rollouts(path, 5) == [([1, 2], [3]), ([4], [])]
    wrong = [f'{{"prompt": {ids}, "completion": [1]}}' for ids in ("[5]", "[-1]", "[1.5]", '"1"')]
    wrong += ['{"prompt": [true], "completion": [1]}', '{"prompt": [1], "completion": null}']
    for line in ('{"prompt": [1]}', "no", "[1]", *wrong):
        path.write_text('{"prompt": [1], "completion": [2]}\n' + line)
        with pytest.raises(RefusedError, match="line 2"):
            read_rollouts(path, 5)


def test_prompts_are_ids_text_or_messages(tmp_path: Path, policy_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    word = tokenizer.convert_ids_to_tokens(9)
    path = tmp_path / "prompts.jsonl"
    lines: list[dict[str, object]] = [{"prompt": [5, 6]}, {"prompt": word}]
    lines.append({"messages": [{"role": "user", "content": word}]})
    path.write_text("\n".join(map(json.dumps, lines)))
    ids, text, messages = read_prompts(path, tokenizer)
    assert ids == [5, 6] and text[-1] == 9 and messages == [9]
    # Characters that a JSON string may have as they are, and that end a line elsewhere.
    path.write_text(json.dumps({"prompt": "a\u2028\u2029\u0085b"}, ensure_ascii=False), "utf-8")
    assert read_prompts(path, tokenizer) == [tokenizer.encode("a\u2028\u2029\u0085b")]
    for line in ('{"completion": [1]}', "no", '{"prompt": {"a": 1}}', "[1]"):
        path.write_text('{"prompt": [1]}\n' + line)
        with pytest.raises(RefusedError, match="line 2"):
            read_prompts(path, tokenizer)


# What a request leaves out, vLLM takes from the policy's generation_config.json.
NEUTRAL = {
    **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
}


class Answers(Completions):
    """Completes every prompt with its own tokens, ``n`` times."""

    def answer(self, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        tokens = body["prompt"]
        status = 200 if body["model"] == "policy" and NEUTRAL.items() <= body.items() else 404
        return status, [choice(tokens, [-1.0] * len(tokens))] * body["n"]


@pytest.fixture
def endpoint() -> Iterator[str]:
    with serving(Answers) as port:
        yield f"http://127.0.0.1:{port}"


def test_the_command_records_what_a_server_completes(
    tmp_path: Path, policy_dir: Path, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [1, 7, 9, 11]}\n{"prompt": [1, 8, 8]}\n')
    given = ["record", "--policy", str(policy_dir), "--prompts", str(prompts)]
    given += ["--endpoint", endpoint, "--samples", "2", "--threads", "1"]
    # The last layer whose input can be captured.
    last = json.loads((policy_dir / "config.json").read_text())["num_hidden_layers"] - 1
    asked = ["--out", str(tmp_path / "a"), "--model", "policy", "--aux-layers", f"0,{last}"]
    assert main([*given, *asked]) == 0
    assert "4 rollouts" in capsys.readouterr().out
    recording = Recording(tmp_path / "a")
    assert recording.facts.aux_layer_ids == (0, last)
    found = sorted(tuple(recording[i].token_ids.tolist()) for i in range(len(recording)))
    assert found == [(1, 7, 9, 11) * 2] * 2 + [(1, 8, 8) * 2] * 2
    # The model's name is the policy's by default: this server has no such model.
    assert main([*given, "--out", str(tmp_path / "b")]) == 2
    assert "--endpoint: found http://127.0.0.1:" in capsys.readouterr().err


def test_record_counts_and_leaves_out_non_finite_samples(
    tmp_path: Path, policy_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = shutil.copytree(policy_dir, tmp_path / "policy")
    tensors = load_file(policy / "model.safetensors")
    tensors["model.embed_tokens.weight"][9] = torch.nan
    save_file(tensors, policy / "model.safetensors", {"format": "pt"})
    bad, good = ({"prompt": [1, 7], "completion": [token, 8]} for token in (9, 11))
    file, out = tmp_path / "rollouts.jsonl", tmp_path / "out"
    given = ["record", "--policy", str(policy), "--rollouts", str(file), "--threads", "1", "--out"]
    file.write_text("\n".join(map(json.dumps, (bad, good))))
    assert main([*given, str(out)]) == 0
    assert "2 rollouts" in (said := capsys.readouterr().out)
    assert said.endswith("; samples left out: 1 non_finite\n")
    recording = Recording(out)
    assert [recording[i].token_ids.tolist() for i in range(len(recording))] == [[1, 7, 11, 8]]
    file.write_text(json.dumps(bad))
    assert main([*given, str(tmp_path / "none")]) == 2
    text = "--rollouts: found 1 rollouts, no sample; samples left out: 1 non_finite"
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("place", ["policy_bridge.capture.sampled_of", "the policy's forward"])
def test_record_without_device_memory_is_refused(
    tmp_path: Path,
    model: PreTrainedModel,
    rollouts: list[Rollout],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if place == "the policy's forward":
        monkeypatch.setattr(model.model, "forward", full)
    else:
        monkeypatch.setattr(place, full)
    recorder = Recorder(model, tmp_path, aux_layer_ids=LAYERS)
    with pytest.raises(RefusedError, match="without memory for a pass") as caught:
        recorder.add(rollouts)
    assert caught.value.field == "--device"


def test_record_options_are_checked_before_loading_policy(
    tmp_path: Path,
    policy_dir: Path,
    draft_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    file = tmp_path / "rollouts.jsonl"
    file.write_text('{"prompt": [1, 7], "completion": [9]}\n')
    rollouts = ("--rollouts", file)
    (empty := tmp_path / "empty.jsonl").touch()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [1, 7]}\n')
    stopped = f"http://127.0.0.1:{free_port()}"
    config = json.loads((policy_dir / "config.json").read_text())
    depth, vocabulary = config["num_hidden_layers"], config["vocab_size"]
    unknown = tmp_path / "unknown.jsonl"
    unknown.write_text(f'{{"prompt": [1], "completion": [9, {vocabulary}]}}\n')
    for policy, options, text in (
        (policy_dir, (), "--rollouts: found none or both"),
        (policy_dir, (*rollouts, "--prompts", file), "--rollouts: found none or both"),
        (policy_dir, ("--prompts", file), "--endpoint: found nothing, expected http://HOST:PORT"),
        (policy_dir, ("--prompts", file, "--endpoint", "h:1"), "--endpoint: found h:1"),
        (policy_dir, (*rollouts, "--temperature", "0"), "--temperature: found 0"),
        (policy_dir, (*rollouts, "--aux-layers", "x"), "--aux-layers"),
        (policy_dir, (*rollouts, "--aux-layers", "1,0"), "--aux-layers: found [1, 0]"),
        (policy_dir, (*rollouts, "--aux-layers", f"0,{depth}"), f"from 0 to {depth - 1}"),
        (policy_dir, ("--rollouts", unknown), f"line 1: found completion [{vocabulary}]"),
        (policy_dir, ("--rollouts", tmp_path / "none"), "--rollouts: found"),
        (policy_dir, ("--rollouts", empty), "empty.jsonl: no line"),
        (policy_dir, ("--prompts", prompts, "--endpoint", stopped), "start the server"),
        (policy_dir, (*rollouts, "--device", "gpu"), "--device: found gpu (Expected one of cpu"),
        (policy_dir, (*rollouts, "--device", "cuda:99"), "--device: found cuda:99 ("),
        (tmp_path / "none", rollouts, "none: found no such folder, expected"),
        (draft_dir, rollouts, "so a draft"),
    ):
        given = ["record", "--policy", policy, "--out", tmp_path / "out", *options]
        assert main([*map(str, given)]) == 2, text
        assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
