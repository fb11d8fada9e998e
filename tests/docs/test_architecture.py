"""docs/architecture.md lists the files that exist."""

from __future__ import annotations

import re

from docs.make_architecture import PAGE, ROOT, files

TEXT = PAGE.read_text(encoding="utf-8")


def section(title: str) -> str:
    """A section's text, from its heading to the next one."""
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_file_is_listed_once() -> None:
    listed, folder = [], ""
    for line in section("Every file").splitlines():
        if heading := re.fullmatch(r"\*\*`(.+)/`\*\*", line):
            folder = heading[1]
        elif row := re.match(r"\| `(\S+)` \|", line):
            listed.append(f"{folder}/{row[1]}")
    assert listed == list(map(str, files())), "run python -m docs.make_architecture"


def test_the_ways_of_a_sample_and_of_a_release_exist_and_are_short() -> None:
    for title, most in (("The life of a sample", 30), ("The life of a release", 40)):
        passed = re.findall(r"^\d+\. `(\S+)`$", section(title), re.MULTILINE)
        assert 10 < len(passed) <= most and len(set(passed)) == len(passed), title
        for path in passed:
            assert (ROOT / path).exists(), path


def test_ten_questions_are_answered_by_files() -> None:
    answers = re.findall(r"^\| .*\? \| `(\S+)`.* \|$", section("Ten questions"), re.MULTILINE)
    assert len(answers) == 10
    for path in answers:
        assert (ROOT / path).exists(), path
