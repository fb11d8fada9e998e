"""Docstrings begin with a verb or a noun with its article, those of constants too."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    *("benchmarks", "deploy", "docs", "draft_trainer", "examples", "policy_bridge"),
    *("proto/slipstream", "rollout_server", "tests"),
)
FORBIDDEN = re.compile(
    r"\s*(As|At|By|For|From|How|In|Of|On|To|What|When|Where|Whether|Which|Who|Why|With)\b(?!-)"
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_verb_or_noun(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_pb2" not in path.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(text := node.value.value, str) and FORBIDDEN.match(text)
    ]
    assert not found, "\n".join(found)
