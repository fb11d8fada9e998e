"""Every block of README and docs runs, or is read, as it is printed: Python and TOML here.

What a block may take from the reader's surroundings is what ``SURROUNDINGS`` names, and ports: the
trainer's is one on which nothing listens, the rollout server's is answered by a double.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import secrets
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draft_trainer.config_file import parse_config
from examples.arithmetic_grpo.processes import free_port
from tests.completions_server import Completions, choice, serving

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = {
    "tutorial.md": "tests/docs/test_tutorial.py",
    "security.md": "tests/security/test_processes.py",
}
"""Pages whose blocks need what those before them made, and the test that runs them in order."""
RECIPES = ("recipes.md", "recipes_openrlhf.md", "recipes_pipelines.md")
"""Pages whose blocks need frameworks that are not here: ``test_snippet_imports.py`` reads them."""
TRANSFER = "Policies through vLLM's own weight transfer"
"""The section whose blocks ``test_weight_transfer.py`` runs."""
SURROUNDINGS = """\
import torch
from transformers import AutoModelForCausalLM
from policy_bridge import PolicyBridge

bridge, version, steps = PolicyBridge.disabled(), 3, 2
model = AutoModelForCausalLM.from_pretrained("examples/arithmetic_grpo/policy")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

def micro_batches():
    for _ in range(2):
        ids, ones = torch.randint(0, 128, (2, 16)), torch.ones(2, 16)
        yield ids, ones, torch.arange(16).expand(2, 16) >= 8, ones[:, :1], -ones

def sampled_log_probs(logits, ids):
    found = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(found, (1, 0))

def loss(log_probs, rollout_log_probs, advantages, mask):
    return -((log_probs - rollout_log_probs).exp() * advantages * mask).sum()

"""
# Importing these takes longer than most blocks do.
IMPORTED = multiprocessing.get_context("forkserver")
IMPORTED.set_forkserver_preload(["torch", "transformers", __name__])
MOUNTED = "/run/slipstream/credentials"
LOGGER = re.compile(r"^(import|from) (wandb|torch\.utils\.tensorboard|mlflow|trackio)\b", re.M)
"""Blocks that import one are read by ``test_snippet_imports.py`` alone."""


def blocks(language: str) -> Iterator[tuple[str, str, str]]:
    """(page, section, text) of every block in a language."""
    for page in PAGES:
        section = ""
        pattern = rf"^## ([^\n]*)$|^ *```{language}\n(.*?)^ *```"
        for found in re.finditer(pattern, page.read_text(), re.MULTILINE | re.DOTALL):
            if found[1] is not None:
                section = found[1]
            elif not (
                page.name in (*ELSEWHERE, *RECIPES)
                or section == TRANSFER
                or LOGGER.search(found[2])
            ):
                yield page.name, section, found[2]


class Answers(Completions):
    """A few tokens for every prompt."""

    def answer(self, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        return 200, [choice([7, 8, 2], [-1.0] * 3)] * body["n"]


def run_block(text: str, written: Path) -> None:
    """Runs in a process of its own; what it prints goes to a file."""
    with written.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(ROOT)
    os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
    sys.path.insert(0, str(ROOT))
    exec(compile(text, "block", "exec"), {"__name__": "__main__"})


@pytest.fixture
def completions() -> Iterator[str]:
    with serving(Answers) as port:
        yield f":{port}"


@pytest.mark.slow
@pytest.mark.parametrize(("page", "section", "text"), blocks("python"), ids=lambda v: str(v)[:40])
def test_python_block_runs_as_printed(
    page: str, section: str, text: str, tmp_path: Path, completions: str
) -> None:
    text = text.replace(":50051", f":{free_port()}").replace(":8000", completions)
    text = text.replace('"runs/', f'"{tmp_path}/runs/')
    if MOUNTED in text:
        from tests.security.certificates import Authority, write_token

        Authority(tmp_path).path.rename(tmp_path / "ca.crt")
        for name in ("feed", "rollout-operate"):
            write_token(tmp_path / name, secrets.token_hex(32))
        text = text.replace(MOUNTED, str(tmp_path))
    if "from_pretrained" not in text:
        text = SURROUNDINGS + text
    written = tmp_path / "written"
    process = IMPORTED.Process(target=run_block, args=(text, written))
    process.start()
    process.join(280)
    process.kill()
    process.join()
    assert process.exitcode == 0, written.read_text()[-3000:]
    if "capture_off_reason" in text:
        assert "was not reached" in written.read_text()


@pytest.mark.parametrize(("page", "section", "text"), blocks("toml"), ids=lambda v: str(v)[:40])
def test_toml_block_parses_as_trainer_config(page: str, section: str, text: str) -> None:
    raw = tomllib.loads(text)
    raw.setdefault("draft", {}).setdefault("initial", "DIR")
    config = parse_config(raw)
    assert set(raw) <= set(type(config).model_fields)
