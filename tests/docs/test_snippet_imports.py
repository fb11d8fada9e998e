"""Every Python snippet of README, integrations and recipes compiles and imports what it uses.

What recipes import of frameworks is looked up in their sources (``tests/adapters``).
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("docs/recipes_openrlhf.md", "docs/recipes_pipelines.md")
PAGES = ("README.md", "docs/integrations.md", "docs/recipes.md", *OTHERS)
YOURS = {
    *("model", "optimizer", "rewards", "args", "dataset", "prompts", "steps", "loss", "T"),
    *("generate_and_score", "sampled_log_probs", "micro_batches", "whole", "policy", "worker"),
    *("data", "generation", "finals", "bridge", "version", "pipeline_ranks"),
    *("num_layers", "lm_head", "embed_tokens"),
    *("names", "dtypes", "shapes", "broadcast_weights", "whole_weights"),
}
"""Names that a snippet takes from the loop that it goes into."""
FRAMEWORKS = {"megatron", "openrlhf", "prime_rl", "skyrl", "verl"}
"""Packages that recipes are for and that import a GPU's libraries."""


def snippets() -> Iterator[tuple[str, str]]:
    """Page and line of each, and its text."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
            yield f"{page}:{text.count(chr(10), 0, found.start()) + 2}", found[1]


SNIPPETS = dict(snippets())
assert len(SNIPPETS) >= 7


def bound(tree: ast.AST) -> set[str]:
    """Names that a snippet makes itself, anywhere in it."""
    names = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


@pytest.mark.parametrize("place", SNIPPETS)
def test_snippet_imports_every_name_it_uses(place: str) -> None:
    tree = ast.parse(SNIPPETS[place])
    used = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    assert used - bound(tree) - YOURS == set()


@pytest.mark.parametrize("place", SNIPPETS)
def test_imports_of_snippet_exist(place: str) -> None:
    for node in ast.walk(ast.parse(SNIPPETS[place])):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            package = node.module.partition(".")[0]
            if package in FRAMEWORKS or find_spec(package) is None:
                continue
            if node.module == "torch.utils.tensorboard":
                pytest.importorskip("tensorboard")
            module = import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module}.{alias.name}"
