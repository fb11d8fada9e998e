"""``python -m tests.contracts``: the table of contracts and their tests in CONTRIBUTING.md.

A file names its contract: ``pytestmark = pytest.mark.contract("lossless")``. Tests, slow ones and
contracts are read from the source, so that nothing is imported for it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.generated import with_generated

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
CONTRACTS = {
    "exactly once": "an acknowledged sample is neither lost nor trained on twice, over kill -9",
    "all or none": "a draft goes live on all servers or on none, whoever dies",
    "alignment": "the trainer computes what vLLM serves, and what other trainers train",
    "lossless": "the output distribution does not change, under swaps and switches either",
    "never waits": "the policy never waits, and its gradients are bit-identical",
    "hostile peers": "what a peer sends is checked, bounded and refused by name",
    "gate": "a candidate is released only if it is better by more than chance",
    "trial": "a release that is worse on live traffic is rolled back",
    "economy": "training stops where it costs more than it saves",
    "draft length": "a server drafts as many tokens as pay, none included",
}


@dataclass(frozen=True)
class TestFile:
    """A test file of a contract: how many of its test functions are in the fast tier, and not."""

    path: Path
    contract: str
    fast: int
    slow: int


def test_files() -> Iterator[TestFile]:
    """Yield the files that name a contract. Raises ValueError: it is none of ``CONTRACTS``."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        marks = [node for node in tree.body if isinstance(node, ast.Assign)]
        of_file = _marks([node.value for node in marks if _name(node.targets[0]) == "pytestmark"])
        contract = of_file.get("contract")
        if contract is None:
            continue
        if contract not in CONTRACTS:
            raise ValueError(f"{path}: found contract {contract!r}, expected one of {[*CONTRACTS]}")
        tests = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name.startswith("test_")
        ]
        slow = sum("slow" in of_file.keys() | _marks(node.decorator_list).keys() for node in tests)
        yield TestFile(path.relative_to(ROOT / "tests"), contract, len(tests) - slow, slow)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _marks(expressions: list[ast.expr]) -> dict[str, str]:
    """Return the pytest marks in some expressions, each with its first argument if it is a text."""
    found: dict[str, str] = {}
    for expression in expressions:
        # Marks of single parameters lie in calls of parametrize: those tests are fast in part.
        nodes = expression.elts if isinstance(expression, ast.List) else [expression]
        for node in nodes:
            call = node if isinstance(node, ast.Call) else None
            mark = call.func if call else node
            if isinstance(mark, ast.Attribute) and ast.unparse(mark.value) == "pytest.mark":
                first = call.args[0] if call and call.args else None
                text = first.value if isinstance(first, ast.Constant) else ""
                found[mark.attr] = str(text)
    return found


def page() -> str:
    """Return CONTRIBUTING.md with the current table. Raises ValueError: it has no place for it."""
    lines = ["| contract | `make test` | only `make test-all` |", "|---|---|---|"]
    files = list(test_files())
    for name, text in CONTRACTS.items():
        fast, slow = (
            ", ".join(
                f"`{file.path}` {count}"
                for file in files
                if file.contract == name and (count := getattr(file, tier))
            )
            for tier in ("fast", "slow")
        )
        lines.append(f"| **{name}**: {text} | {fast} | {slow} |")
    return with_generated(PAGE, "contracts", "\n".join(lines) + "\n")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
