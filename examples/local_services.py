"""A draft trainer and a rollout server for the arithmetic policy, as processes on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from examples.arithmetic_grpo.processes import Service, free_port

ARITHMETIC = Path(__file__).resolve().parent / "arithmetic_grpo"
READY_TIMEOUT = 240.0  # seconds; vLLM alone takes 12 to 36
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def draft_trainer(out: Path, server: str, *sections: str) -> Service:
    """``draft-trainer serve`` for the arithmetic draft.

    Args:
        out: where its configuration, log and releases go.
        server: control address of the rollout server that it publishes to.
        sections: more of the configuration, for example ``"[gate]\\nmin_gain = 0.1"``.
    """
    port, config = free_port(), out / "draft-trainer.toml"
    draft, releases = ARITHMETIC / "draft", (out / "releases").resolve()
    config.write_text(
        f"[server]\nport = {port}\nmetrics_port = {free_port()}\n"
        f'[draft]\ninitial = "{draft}"\nregistry = "{releases}"\n'
        "[replay]\nheld_out_fraction = 0.2\nmax_epochs = 6\n"
        "[training]\nlearning_rate = 2e-3\nttt_steps = 3\nbatch_tokens = 1024\n"
        f'[publish]\nrollout_servers = ["{server}"]\n' + "\n".join(sections)
    )
    command = [_script("draft-trainer"), "serve", "--config", str(config)]
    log = out / "draft-trainer.log"
    return Service("draft-trainer", command, log, f"127.0.0.1:{port}", _ONE_THREAD)


def rollout_server(out: Path) -> tuple[Service, str]:
    """``rollout-server serve`` for the arithmetic policy, and the URL of its OpenAI API."""
    http, control = free_port(), free_port()
    command = [_script("rollout-server"), "serve", str(ARITHMETIC / "policy")]
    command += ["--draft", str(ARITHMETIC / "draft"), "--draft-length", "3"]
    command += ["--host", "127.0.0.1", "--port", str(http), "--control-port", str(control)]
    command += ["--served-model-name", "policy", "--generation-config", "vllm"]
    command += ["--max-model-len", "256", "--max-num-seqs", "128", "--enforce-eager"]
    # A loop compares log-probabilities at its sampling temperature.
    command += ["--logprobs-mode", "processed_logprobs"]
    env = {**_ONE_THREAD, "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = out / "rollout-server.log"
    server = Service("rollout-server", command, log, f"127.0.0.1:{control}", env)
    return server, f"http://127.0.0.1:{http}"


def _script(name: str) -> str:
    """The console script that was installed beside this interpreter."""
    return str(Path(sys.executable).parent / name)
