"""Somebody else's config.json may have anything in it: refused by name, never a stack trace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from slipstream.errors import RefusedError

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
def test_no_value_of_any_field_is_more_than_a_refusal(layout: str, tmp_path: Path) -> None:
    folder = CHECKPOINTS / layout
    for path in folder.iterdir():
        if path.name != "config.json":
            shutil.copy(path, tmp_path)
    text = (folder / "config.json").read_text()
    refused = 0
    for path in paths(json.loads(text)):
        for odd in ODD:
            document = json.loads(text)
            inner = document
            for name in path[:-1]:
                inner = inner[name]
            inner[path[-1]] = odd
            (tmp_path / "config.json").write_text(json.dumps(document))
            try:
                Eagle3().read(tmp_path)
            except RefusedError as error:
                assert error.next_step
                refused += 1
    assert refused > 20


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "\0", "1e999", "null"])
def test_no_text_is_more_than_a_refusal(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RefusedError):
        Eagle3().read(tmp_path)
