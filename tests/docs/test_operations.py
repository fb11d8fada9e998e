"""docs/operations.md names every configuration key with its default, and every option;
docs/security.md every method.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.make_site import FRAGMENTS
from docs.make_site import page as site_page
from draft_trainer.config import TrainerConfig
from draft_trainer.state import KINDS
from slipstream.serving.identity import METHODS

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def documented_defaults() -> dict[str, str]:
    rows = re.findall(r"^\| ((?:`\w+\.\w+`(?:, )?)+) \|(.*?)\|", OPERATIONS, re.MULTILINE)
    return {
        key: text.strip().strip("`") for keys, text in rows for key in re.findall(r"`(\S+)`", keys)
    }


def actual_defaults() -> dict[str, object]:
    found: dict[str, object] = {}
    for section, outer in TrainerConfig.model_fields.items():
        annotation = outer.annotation
        assert annotation is not None
        for name, field in annotation.model_fields.items():
            found[f"{section}.{name}"] = field.default
    return found


def test_config_keys_documented_with_defaults() -> None:
    documented, actual = documented_defaults(), actual_defaults()
    assert documented.keys() == actual.keys()
    units = {"MiB": 1 << 20, "GiB": 1 << 30}
    for key, text in documented.items():
        default = actual[key]
        if text in ("", "none", "derived"):
            assert default in ((), None, "") or "Undefined" in repr(default), key
        elif text.split()[-1] in units:
            number, unit = text.split()
            assert int(number) * units[unit] == default, key
        elif isinstance(default, bool):
            assert text == str(default).lower(), key
        elif isinstance(default, str | Path):
            assert text == str(default), key
        else:
            assert float(text) == pytest.approx(float(default)), key  # type: ignore[arg-type]


def test_documented_config_keys_exist() -> None:
    actual = actual_defaults()
    sections = "|".join({key.partition(".")[0] for key in actual})
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for key in re.findall(rf"`((?:{sections})\.[a-z_]+)(?: = [^`]*)?`", page.read_text()):
            assert key in actual or Path(key).suffix in (".py", ".jsonl", ".svg"), (
                f"{page.name}: {key}"
            )


def test_event_kinds_documented() -> None:
    for kind in KINDS:
        assert f"`{kind}`" in OPERATIONS, kind


def test_rollout_server_options_documented() -> None:
    text = (ROOT / "rollout_server" / "vllm" / "launch.py").read_text()
    options = re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", text)
    options += re.findall(r"\(\"(--control-[\w-]+)\", \"", text)
    assert len(options) >= 6
    for option in options:
        assert f"`{option}" in OPERATIONS, option


def test_security_page_lists_role_of_every_method() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| (feed|observe|operate) \|(.*)\|(.*)\|$", page, re.MULTILINE)
    assert len(rows) == 3
    for role, *cells in rows:
        for service, cell in zip(("DraftTrainer", "RolloutServer"), cells, strict=True):
            path = f"/slipstream.v1.{service}/"
            methods = {
                m.removeprefix(path) for m, of in METHODS.items() if of == role and path in m
            }
            names = re.sub(r"\(.*?\)", "", cell.partition(";")[0]).split(",")
            assert {name.strip() for name in names} - {""} == methods, (role, service)
            assert ("reflection" in cell) == (role == "observe")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {text.replace(" ", "-") for text in plain}


def test_documentation_section_links_resolve() -> None:
    seen = 0
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for file, anchor in re.findall(r"\]\(([\w./]*)#([^)]+)\)", page.read_text()):
            target = page.parent / file if file else page
            assert anchor in anchors(target), f"{page.name}: {file}#{anchor}"
            seen += 1
    assert seen > 5


def test_site_has_every_page_and_internal_links() -> None:
    names = {path.name for path in (ROOT / "docs").glob("*.md")} - {*FRAGMENTS}
    listed = re.findall(r"[\w]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert sorted(listed) == sorted({*names, "index.md"})
    for path in (ROOT / "README.md", *(ROOT / "docs" / name for name in names)):
        for target in re.findall(r"\]\(([^)#:]+)\)", site_page(path)):
            assert target in {*names, "index.md"} or (ROOT / "docs" / target).exists(), target


def test_files_named_in_documentation_exist() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
        for path in re.findall(r"`((?:\w+/)+[\w.]+\.(?:py|proto|md|toml))`", text):
            # Others' repositories are cited too.
            if not path.startswith("runs/") and (ROOT / path.partition("/")[0]).is_dir():
                assert (ROOT / path).exists(), f"{page.name}: {path}"
