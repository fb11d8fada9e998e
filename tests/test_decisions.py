"""Nothing is decided by the words of a message: reasons are enums, and texts are for people."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.test_layers import ROOT, modules

TEXTS = {"detail", "error", "expected", "field", "found", "next_step", "not_ready", "text"}
"""Attributes that are words of a refusal, a failure, a server or the status."""
MAKERS = {"describe", "details", "failure_text", "for_wire", "getMessage", "not_ready_text"}
LOOKS = {"startswith", "endswith", "find", "index", "match", "fullmatch", "search"}

EXCEPTIONS = {
    "error.field not in self._logged": "one line of the log for each field",
    "control.not_ready != before": "lists of reasons, which are enums",
    "record.getMessage().startswith('ExecuteBatchError raised in core')": (
        "a line of gRPC's that is left out of the log, and has no code"
    ),
    "_UNTRUSTED.search(failure_text(error))": (
        "gRPC has no code for a certificate that is not trusted; it chooses the words of an error"
    ),
    "re.search(f'\\\\b{re.escape(name)}\\\\b', words)": (
        "vLLM's HTTP answer has no code; it chooses the words of an error"
    ),
    "'speculative' in words": "the same",
    "words in str(error)": "torch has no code for a library that gets no memory",
}
"""The code that may look into words, and why: but for the last, it decides what is said, not what
is done."""


def is_words(node: ast.AST, names: frozenset[str] = frozenset()) -> bool:
    """Tell whether an expression is words of a message, or a part of them."""
    if isinstance(node, ast.Attribute):
        return node.attr in TEXTS | {"training_error"}
    if isinstance(node, ast.IfExp):
        return is_words(node.body, names) or is_words(node.orelse, names)
    if isinstance(node, ast.Subscript):
        return is_words(node.value, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        errors = [arg for arg in node.args if ast.unparse(arg) in ("error", "refusal")]
        return node.func.id in MAKERS or (node.func.id == "str" and bool(errors))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in MAKERS or is_words(node.func.value, names)
    return isinstance(node, ast.Name) and node.id in names


def decisions(source: str) -> Iterator[str]:
    """The expressions of a file that compare words of a message, or look into them."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes = [*ast.walk(function)]
        set_to_words = [n for n in nodes if isinstance(n, ast.Assign) and is_words(n.value)]
        names = frozenset(ast.unparse(target) for n in set_to_words for target in n.targets)
        for node in nodes:
            looked: list[ast.expr] = []
            if isinstance(node, ast.Compare):
                compares = isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn)
                looked = [node.left, *node.comparators] if compares else []
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                looked = [node.func.value, *node.args] if node.func.attr in LOOKS else []
            if any(is_words(each, names) for each in looked):
                yield ast.unparse(node)


def test_no_product_code_compares_a_message() -> None:
    packages = ("draft_trainer", "policy_bridge", "rollout_server", "proto")
    found = {
        words: str(path.relative_to(ROOT))
        for package in packages
        for path in modules(ROOT / package)
        for words in decisions(path.read_text())
    }
    new = {words: path for words, path in found.items() if words not in EXCEPTIONS}
    assert not new, "decide by RefusedError.reason, NotReady.reason or another enum"
    assert found.keys() == EXCEPTIONS.keys(), "an exception that nothing needs any more"


@pytest.mark.parametrize(
    "source",
    [
        "error.field.split('.')[0] == 'model'",
        "'asleep' in str(error)",
        "status.training_error.startswith('training waits')",
    ],
)
def test_comparison_of_a_message_is_found(source: str) -> None:
    assert [*decisions(f"def decide():\n    return {source}")]
