"""The vLLM versions that are refused before anything is loaded, and the places of its names."""

from __future__ import annotations

import logging
import os
import sys
import types
from pathlib import Path

import pytest

from docs.make_vllm_versions import PAGE, wheels
from rollout_server.vllm import versions as vllm_versions
from rollout_server.vllm.launch import serve
from rollout_server.vllm.versions import (
    DRAFT_LENGTHS_V2,
    HOOKS,
    KNOWN,
    PLACES,
    TESTED,
    Hook,
    Sources,
    check_hooks,
    check_version,
    installed_source,
    load,
    missing,
)
from slipstream.errors import RefusedError

WHEELS = "SLIPSTREAM_VLLM_WHEELS"
"""A folder that ``python -m docs.make_vllm_versions --download`` filled."""


def test_unknown_vllm_version_is_refused_unless_allowed(caplog: pytest.LogCaptureFixture) -> None:
    for version in ("0.28.1", "0.34.0", "1.0.0", "dev"):
        with pytest.raises(RefusedError, match=rf"{version}.*0\.29 to 0\.33.*--untested-vllm"):
            check_version(version, untested=False)
        with caplog.at_level(logging.WARNING):
            check_version(version, untested=True)
        assert f"vLLM {version} is outside" in caplog.text


def test_untested_vllm_version_is_served_with_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        for version, _, _ in TESTED:
            check_version(f"{version}.1+cpu", untested=False)
        assert not caplog.text
        monkeypatch.setattr(vllm_versions, "_TESTED_VERSIONS", KNOWN[1:])
        check_version(f"{KNOWN[0]}.0", untested=False)
        assert f"vLLM {KNOWN[0]}.0" in caplog.text


def test_installed_vllm_has_every_hook() -> None:
    assert missing(Sources(installed_source)) == []
    assert not Sources(installed_source).lacks(DRAFT_LENGTHS_V2)
    for name in PLACES:
        assert callable(load(name))


def test_renamed_hooks_are_refused_before_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def renamed(module: str) -> str | None:
        text = installed_source(module)
        if module.endswith("sched.scheduler") and text is not None:
            return text.replace("dynamic_sd_lookup", "length_table")
        if module.endswith("gpu_worker") and text is not None:
            return text.replace("def sleep(self, level", "def sleep(self, depth")
        return None if module.endswith("eagle.utils") else text

    with pytest.raises(RefusedError) as refused:
        check_hooks("0.32.0", renamed)
    for text in (
        "Scheduler.dynamic_sd_lookup is absent",
        "Worker.sleep takes ('self', 'depth'), not ('self', 'level')",
        "eagle.utils._should_share is absent",
    ):
        assert text in str(refused.value)

    # The launcher asks before it parses an option.
    monkeypatch.setattr(vllm_versions, "installed_source", renamed)
    monkeypatch.setenv("VLLM_PLUGINS", "")
    with pytest.raises(RefusedError, match="dynamic_sd_lookup"):
        serve(["--no-such-option"])


def test_load_finds_function_of_installed_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newer, older = PLACES["cli_env_setup"]
    for place in (older, newer):
        module = types.ModuleType(place)
        module.cli_env_setup = lambda place=place: place  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, place, module)
    for present, expected in (({older}, older), ({older, newer}, newer)):
        monkeypatch.setattr(
            vllm_versions,
            "installed_source",
            lambda name, present=present: "" if name in present else None,
        )
        assert load("cli_env_setup")() == expected
    monkeypatch.setattr(vllm_versions, "installed_source", lambda name: None)
    with pytest.raises(RefusedError, match="cli_env_setup"):
        load("cli_env_setup")


def test_sources_follow_imports_bases_and_instances() -> None:
    modules = {
        "a.b.m": "from ..c import Base as Mother\nfrom a.d import moved\n"
        "class Child(Mother):\n  def __init__(self):\n    self.own: int = 1\n",
        "a.c": "class Base:\n  field: int = 0\n  def method(self, x, y=1): ...\n",
        "a.d": "if True:\n  def moved(one, *, two): ...\n",
    }
    sources = Sources(modules.get)
    for name in ("Child.own", "Child.field", "Child.method", "moved"):
        assert sources.lacks(Hook("a.b.m", name)) == ""
    for name in ("Child.other", "Child.own.deep", "nothing"):
        assert "is absent" in sources.lacks(Hook("a.b.m", name))
    assert sources.lacks(Hook("a.b.m", "Child.method", ("self", "x"))) == ""
    assert "takes" in sources.lacks(Hook("a.b.m", "Child.method", ("self", "y")))
    assert "takes" in sources.lacks(Hook("a.b.m", "moved", ("one",))), "two is required"
    assert sources.lacks(Hook("a.b.m", "moved", ("one", "..."))) == ""
    assert "not a function" in sources.lacks(Hook("a.b.m", "Child.own", ()))


def test_wheels_of_known_versions_have_every_hook() -> None:
    folder = os.environ.get(WHEELS)
    if folder is None:
        pytest.skip(f"{WHEELS} names no folder of wheels")
    found = {version: missing(Sources(read)) for version, _, read in wheels(Path(folder))}
    assert found, f"no wheel in {folder}"
    assert {v: lacking for v, lacking in found.items() if v in KNOWN and lacking} == {}


def test_versions_page_has_row_per_known_version() -> None:
    text, names = PAGE.read_text(encoding="utf-8"), len(HOOKS) + len(PLACES)
    for version in KNOWN:
        row = text.partition(f"| {version} |")[2].partition("\n")[0]
        run = f"run python -m docs.make_vllm_versions --wheels DIR ({version})"
        assert f"all {names} |" in row, run
