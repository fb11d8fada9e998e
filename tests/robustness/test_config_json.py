"""Somebody else's config.json may have anything in it: refused by name, never a stack trace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draft_trainer.drafters import DRAFTERS, Draft, Drafter
from draft_trainer.drafters.draft_model import DraftLm, LmConfig
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.drafters.mtp import MtpConfig, MtpHead
from slipstream.errors import RefusedError
from tests.draft_trainer.synthetic import HIDDEN, QWEN, dflash_head, dspark_head
from tests.draft_trainer.test_draft_model import SIZES

pytestmark = pytest.mark.contract("hostile peers")

CHECKPOINTS = Path(__file__).resolve().parents[1] / "draft_trainer" / "checkpoints"
ODD: list[Any] = [
    *(None, True, -1, 0, 10**30, 0.5, float("inf"), float("nan"), "x", ""),
    *([], ["x"], [[]], [None], [10**30], list(range(100)), {}, {"a": []}),
]


def paths(document: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every field, and every field in it."""
    for name, value in document.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from paths(value, (*before, name))


@pytest.mark.parametrize("layout", ["specforge_hf", "speculators", "modelopt"])
def test_eagle3_config_json_odd_values_refused(layout: str, tmp_path: Path) -> None:
    folder = CHECKPOINTS / layout
    for path in folder.iterdir():
        if path.name != "config.json":
            shutil.copy(path, tmp_path)
    assert refusals(Eagle3(), (folder / "config.json").read_text(), tmp_path) > 20


@pytest.mark.parametrize("kind", ["mtp", "draft_model", "dflash", "dspark"])
def test_other_mechanisms_config_json_odd_values_refused(kind: str, tmp_path: Path) -> None:
    model = {"model_type": "qwen3", "hidden_act": "silu", "rope_theta": 1e4, **SIZES}
    drafts: dict[str, Draft] = {
        "mtp": MtpHead(MtpConfig.from_dict(QWEN)),
        "draft_model": DraftLm(LmConfig.from_dict({**model, "target_hidden_size": HIDDEN})),
        "dflash": dflash_head(),
        "dspark": dspark_head(),
    }
    DRAFTERS[kind].save(tmp_path, drafts[kind])
    DRAFTERS[kind].read(tmp_path)
    assert refusals(DRAFTERS[kind], (tmp_path / "config.json").read_text(), tmp_path) > 20


def refusals(drafter: Drafter, text: str, folder: Path) -> int:
    """Count the odd values that are refused, trying each in every field."""
    refused = 0
    for path in paths(json.loads(text)):
        for odd in ODD:
            document = json.loads(text)
            inner = document
            for name in path[:-1]:
                inner = inner[name]
            inner[path[-1]] = odd
            (folder / "config.json").write_text(json.dumps(document))
            try:
                drafter.read(folder)
            except RefusedError as error:
                assert error.next_step
                refused += 1
    return refused


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "\0", "1e999", "null"])
def test_config_json_malformed_text_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RefusedError):
        Eagle3().read(tmp_path)
