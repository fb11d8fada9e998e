"""``python -m docs.make_architecture``: the list of files and the release states in
docs/architecture.md.

One line for each hand-written file of the four packages, the first sentence of its docstring; one
for each transition of ``draft_trainer.releases.states``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from docs.generated import replaced, with_generated
from draft_trainer.releases.states import TRANSITIONS, ReleaseState

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).resolve().parent / "architecture.md"
PACKAGES = ("proto/slipstream", "policy_bridge", "draft_trainer", "rollout_server")


def files() -> list[Path]:
    """The hand-written Python and C files of the packages that say something, by path."""
    found = [
        path
        for package in PACKAGES
        for pattern in ("*.py", "*.c")
        for path in (ROOT / package).rglob(pattern)
        if "_pb2" not in path.name
    ]
    paths = [path.relative_to(ROOT) for path in found if path.name != "__init__.py"]
    return sorted(paths, key=lambda path: (path.parent, path.name))


def page() -> str:
    """The page with the current list."""
    parts, folder = [], Path()
    for path in files():
        if path.parent != folder:
            folder = path.parent
            parts.append(f"\n**`{folder}/`**\n\n| file | what it does |\n|---|---|")
        parts.append(f"| `{path.name}` | {_summary(ROOT / path)} |")
    text = with_generated(PAGE, "release_states", _states())
    return replaced(text, "make_architecture", "\n".join(parts).lstrip("\n") + "\n")


def _states() -> str:
    lines = ["| state | event | then |", "|---|---|---|"]
    for state in ReleaseState:
        for (before, event), after in TRANSITIONS.items():
            if before is state:
                then = " or ".join(one for one in ReleaseState if one in after)
                lines.append(f"| {state} | {event} | {then} |")
    return "\n".join(lines) + "\n"


def _summary(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".c":
        comment = re.search(r"/\*(.*?)\*/|//([^\n]*)", text, re.DOTALL)
        doc = (comment[1] or comment[2]) if comment else ""
        doc = re.sub(r"^\s*\*", "", doc, flags=re.MULTILINE)
    else:
        doc = ast.get_docstring(ast.parse(text)) or ""
    sentence = re.split(r"(?<=\.)\s", " ".join(doc.split("\n\n")[0].split()), maxsplit=1)[0]
    return sentence.replace("``", "`").replace("|", "\\|").rstrip(".")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
