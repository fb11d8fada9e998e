"""Which tests share a worker: all that start vLLM, all of vLLM's own classes, those of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import conftest

MARKED = """
@pytest.mark.parametrize(
    "what", ["def test_pure(", "engine"]
)
def test_pure(what):
    from vllm import config

@pytest.mark.vllm
@pytest.mark.parametrize(
    "what", [1, 2]
)
def test_live(what):
    pass

def test_pure_too():
    pass
"""


def scope(nodeid: str) -> str:
    return conftest.OneEngineAtATime.__new__(conftest.OneEngineAtATime)._split_scope(nodeid)


@pytest.mark.parametrize(
    ("mark", "whole"),
    [
        ("pytestmark = pytest.mark.vllm", True),
        ("pytestmark = [\n    pytest.mark.vllm,\n    pytest.mark.skipif(False, reason='')]", True),
        ("pytestmark = pytest.mark.skipif(False, reason='pytest.mark.vllm')", False),
        ("", False),
    ],
)
def test_a_mark_is_a_files_or_a_tests(
    mark: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "ROOT", tmp_path)
    file = "tests/area/test_it.py"
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(mark + MARKED)
    assert scope(f"{file}::test_live[2]") == scope(f"{file}::test_live") == "vllm"
    for test in ("test_pure[a::b]", "test_pure_too"):
        assert scope(f"{file}::{test}") == ("vllm" if whole else file)


def test_tests_of_vllms_classes_share_a_worker_and_their_live_ones_do_not() -> None:
    for file in ("tests/rollout_server/test_swap.py", "tests/deploy/test_rollout_options.py"):
        assert scope(f"{file}::test_it") == "engine modules"
    for file in ("tests/rollout_server/test_store.py", "tests/deploy/test_compose.py"):
        assert scope(f"{file}::test_it") == file
    live = "test_two_ranks_serve_one_draft_and_one_policy_under_load"
    assert scope(f"tests/rollout_server/test_data_parallel.py::{live}") == "vllm"


def test_the_chain_is_what_is_marked(request: pytest.FixtureRequest) -> None:
    """Of every test that was collected."""
    for item in request.session.items:
        marked = item.get_closest_marker("vllm") is not None
        assert (scope(item.nodeid) == "vllm") is marked, item.nodeid
