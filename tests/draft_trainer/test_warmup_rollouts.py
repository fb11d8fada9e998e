"""The sources of a warm-up's rollouts: files, and a server that completes prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draft_trainer.warmup import rollouts as reading
from draft_trainer.warmup.forward import forward, passes
from draft_trainer.warmup.report import FLAT_DECISIONS, Report
from draft_trainer.warmup.rollouts import (
    PLAIN,
    Endpoint,
    Prompts,
    Reading,
    Rollout,
    RolloutFile,
    shuffled,
)
from policy_bridge import extraction
from slipstream.errors import RefusedError
from slipstream.sample import prompt_hash
from slipstream.v1 import release_pb2
from tests.completions_server import Completions, choice, serving

VOCAB = 128


@pytest.fixture(scope="module")
def tokenizer(policy_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(policy_dir)


def file_of(path: Path, tokenizer: PreTrainedTokenizerBase, *lines: object) -> RolloutFile:
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return RolloutFile(path, VOCAB, tokenizer, temperature=1.0, seed=0)


def test_rollout_file_is_read_in_one_order_from_anywhere(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    lines = [{"prompt": [5, one], "completion": [one] * 3} for one in range(8, 40)]
    found = file_of(tmp_path / "r.jsonl", tokenizer, *lines)
    whole = [one for one in found.read(0) if one is not None]
    assert [one.number for one in whole] == list(range(32))
    assert sorted(one.prompt for one in whole) == [line["prompt"] for line in lines]
    assert [one.prompt for one in whole] != [line["prompt"] for line in lines]
    assert list(found.read(20)) == whole[20:] and list(found.read(32)) == []
    assert found.completion_tokens == 96
    assert found.groups == {prompt_hash(torch.tensor(line["prompt"])).hex() for line in lines}
    assert {one.group for one in whole} == found.groups
    # Pinned: a warm-up that goes on after an upgrade of Python reads the same order.
    assert shuffled(6, "0") == [5, 4, 0, 2, 1, 3]
    other = file_of(tmp_path / "o.jsonl", tokenizer, *lines[1:])
    assert other.facts != found.facts


def test_rollouts_of_another_tokenizer_are_refused_by_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    good = {"prompt": [1], "completion": [8, 9]}
    word = tokenizer.decode([8, 9])
    found = file_of(tmp_path / "r.jsonl", tokenizer, {**good, "text": word})
    assert found.completion_tokens == 2
    wrong: list[object] = [{"prompt": ids, "completion": [1]} for ids in ([128], [-1], [1.5], "1")]
    wrong += [{"prompt": [True], "completion": [1]}, {"prompt": [1], "completion": None}]
    wrong += [{"prompt": [1]}, "no", "[1]", {**good, "text": "another"}, {**good, "text": 5}]
    for line in wrong:
        with pytest.raises(RefusedError, match="line 2") as caught:
            file_of(tmp_path / "r.jsonl", tokenizer, good, line)
        assert caught.value.next_step
    with pytest.raises(RefusedError, match=r"text: found 'another' beside ids that say"):
        file_of(tmp_path / "r.jsonl", tokenizer, {**good, "text": "another"})


def prompts_of(
    path: Path, tokenizer: PreTrainedTokenizerBase, url: str = "http://h:1", **changes: Any
) -> Prompts:
    endpoint = Endpoint(url, "policy", {**PLAIN, "temperature": 0.5, "max_tokens": 4})
    how = {"samples": 1, "seed": 0, "endless": False} | changes
    return Prompts(path, tokenizer, VOCAB, endpoint, **how)


def test_prompts_are_ids_text_or_messages(
    tmp_path: Path, policy_dir: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    own = AutoTokenizer.from_pretrained(policy_dir)
    own.chat_template = "{{ messages[0]['content'] }}"
    word = own.convert_ids_to_tokens(9)
    path = tmp_path / "prompts.jsonl"
    lines: list[dict[str, object]] = [{"prompt": [5, 6]}, {"prompt": word}]
    lines.append({"messages": [{"role": "user", "content": word}]})
    path.write_text("\n".join(map(json.dumps, lines)))
    ids, text, messages = prompts_of(path, own)._prompts
    assert ids == [5, 6] and text[-1] == 9 and messages == [9]
    # Characters that a JSON string may have as they are, and that end a line elsewhere.
    path.write_text(json.dumps({"prompt": "a\u2028\u2029\u0085b"}, ensure_ascii=False), "utf-8")
    assert prompts_of(path, own)._prompts == [own.encode("a\u2028\u2029\u0085b")]
    for line in ('{"completion": [1]}', "no", '{"prompt": {"a": 1}}', "[1]", '{"prompt": [128]}'):
        path.write_text('{"prompt": [1]}\n' + line)
        with pytest.raises(RefusedError, match="line 2"):
            prompts_of(path, own)


class Echo(Completions):
    """Completes a prompt with its own tokens."""

    asked: list[dict[str, Any]]
    down = 0

    def answer(self, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        self.asked.append(body)
        if type(self).down:
            type(self).down -= 1
            return 503, []
        return 200, [choice(body["prompt"], [None] * len(body["prompt"]))] * body["n"]


@pytest.fixture
def echo() -> Iterator[tuple[type[Echo], str]]:
    class Own(Echo):
        asked: list[dict[str, Any]] = []  # noqa: RUF012 (of one test)

    with serving(Own) as port:
        yield Own, f"http://127.0.0.1:{port}"


def test_prompts_are_completed_in_rounds_that_a_restart_repeats(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    echo: tuple[type[Echo], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler, url = echo
    monkeypatch.setattr(reading, "AT_ONCE", 4)
    monkeypatch.setattr(reading, "RETRY_SECONDS", (0.01,))
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": [5, {one}]}}\n' for one in range(8, 13)))

    def read(first: int, count: int, **changes: Any) -> list[Rollout]:
        found = []
        with Reading(prompts_of(path, tokenizer, url, samples=2, **changes), first) as all_of_them:
            for one in all_of_them:
                if one is not None:
                    found.append(one)
                if len(found) == count:
                    break
        return found

    one_round = read(0, 99)
    assert [one.number for one in one_round] == list(range(10))
    assert all(one.prompt == one.completion for one in one_round)
    assert len({tuple(one.prompt) for one in one_round}) == 5
    assert all(body["temperature"] == 0.5 for body in handler.asked)
    two_rounds = read(0, 20, endless=True)
    assert two_rounds[:10] == one_round and two_rounds[10:] != one_round
    handler.down = 1  # It is asked again.
    assert read(7, 13, endless=True) == two_rounds[7:]
    handler.down = 99
    with pytest.raises(RefusedError, match=r"--endpoint: found http.*503"):
        read(0, 1)


def test_rollouts_that_were_looked_at_are_read_all_the_same(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    lines = [{"prompt": [5, one], "completion": [one] * 3} for one in range(8, 18)]
    found = file_of(tmp_path / "r.jsonl", tokenizer, *lines)
    with Reading(found, 2) as all_of_them:
        assert [one.number for one in all_of_them.look(4)] == [2, 3]
        assert [one.number for one in all_of_them.look(3)] == [2, 3]
        assert next(all_of_them) is not None
        assert [one.number for one in all_of_them.look(99)] == list(range(3, 10))
        assert [one.number for one in all_of_them if one] == list(range(3, 10))


def test_passes_hold_neighbours_in_length_up_to_a_bound() -> None:
    some = [Rollout(number, [1] * size, [2]) for number, size in enumerate((9, 1, 5, 1, 30, 4))]
    sizes = [[one.tokens for one in part] for part in passes(some, lambda: 12)]
    assert sizes == [[2, 2], [5, 6], [10], [31]]


def verdict(at: float, length: float, gain: float) -> release_pb2.Verdict:
    figures = release_pb2.GateFigures(
        incumbent_acceptance_length=length,
        candidate_acceptance_length=length + gain,
        difference=gain,
        difference_half_width=0.01,
        passed=gain > 0.01,
    )
    return release_pb2.Verdict(judged_at=at, gate=figures)


def test_report_is_flat_after_a_third_of_the_tokens_without_a_better_draft(tmp_path: Path) -> None:
    report = Report(tmp_path)
    assert not report.flat and report.acceptance_length is None
    (better,) = report.add([verdict(1.0, 1.1, 0.5), release_pb2.Verdict(judged_at=1.5)], 1000)
    assert better.acceptance_length == pytest.approx(1.6) and report.first == pytest.approx(1.1)
    for number in range(FLAT_DECISIONS - 1):
        assert report.add([verdict(2.0 + number, 1.6, 0.0)], 2000) == []
    assert not report.flat
    report.write(2000)
    # As another process goes on.
    again = Report(tmp_path)
    assert again.points == report.points and again.tokens == 2000
    assert again.add([verdict(2.0, 1.6, 0.0)], 2100) == [] and again.points == report.points
    again.add([verdict(90.0, 1.6, 0.0)], 2100)
    assert again.flat
    again.add([verdict(91.0, 1.6, 0.1)], 2200)
    assert not again.flat
    # Eight decisions of few tokens are too few.
    for number in range(FLAT_DECISIONS):
        again.add([verdict(92.0 + number, 1.7, 0.0)], 2300)
    assert not again.flat


class _Largest(TorchDispatchMode):
    """Elements of the largest float32 tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.float32:
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probs_of_a_pass_are_computed_in_blocks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of 16,384 tokens has 10 GB of float32 logits with a vocabulary of 152,000."""
    length, temperature = 64, 0.7
    monkeypatch.setattr(extraction, "_BLOCK_BYTES", 4 * 4 * VOCAB)
    rollouts = [
        Rollout(0, [], [7]),
        Rollout(1, [5], [6, 7, 8]),
        Rollout(2, [9], []),
        Rollout(3, [], []),
        Rollout(4, [*range(8)], [*range(length - 8)]),
    ]
    logits = (4 * torch.randn(len(rollouts), length, VOCAB)).to(dtype)
    model = MagicMock(device=torch.device("cpu"))
    model.return_value.logits = logits
    window = MagicMock()
    with _Largest() as largest:
        forward(model, window, rollouts, temperature)
    ship = window.__enter__.return_value.ship
    found, wanted = ship.call_args.kwargs["sampled_logprobs"], ship.call_args.kwargs["loss_mask"]
    assert largest.elements <= 4 * VOCAB
    expected = torch.zeros(len(rollouts), length)
    whole = (logits.float() / temperature).log_softmax(-1)
    for row, one in enumerate(rollouts):
        for at, token in enumerate(one.completion, len(one.prompt)):
            expected[row, at] = whole[row, at - 1, token] if at else 0.0
    torch.testing.assert_close(found * wanted, expected, atol=1e-5, rtol=1e-5)
