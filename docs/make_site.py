"""``python -m docs.make_site FOLDER``: the pages as mkdocs takes them, README as the first one.

Links between pages stay; what a page links to outside of docs/ becomes the file's path, because a
site does not have the checkout.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FRAGMENTS = ("metrics_notes.md",)
"""Parts of another page."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#: ]*)(#[^)]*)?\)")


def page(path: Path) -> str:
    """A page's text with its links as they are in the site."""

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found[1], found[2], found[3], found[4] or ""
        if not target:
            return found[0]
        file = (path.parent / target).resolve()
        if file == ROOT / "README.md":
            return f"[{text}](index.md{anchor})"
        if file.parent == DOCS and file.suffix in (".md", ".png"):
            return f"{image}[{text}]({file.name}{anchor})"
        return f"{text} (`{file.relative_to(ROOT)}`)"

    return _LINK.sub(link, path.read_text(encoding="utf-8"))


def main() -> None:
    """Command line entry."""
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "index.md").write_text(page(ROOT / "README.md"), encoding="utf-8")
    for path in DOCS.glob("*.md"):
        if path.name not in FRAGMENTS:
            (folder / path.name).write_text(page(path), encoding="utf-8")
    for path in DOCS.glob("*.png"):
        shutil.copy(path, folder)


if __name__ == "__main__":
    main()
