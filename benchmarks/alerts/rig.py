"""Two rollout servers, a Prometheus, the policy's side, and one draft trainer after the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, start_http_server
from safetensors.torch import load_file, save_file

from benchmarks.alerts.policy_loop import PolicyLoop
from benchmarks.alerts.sightings import Sightings
from examples.arithmetic_grpo.processes import Service, ServiceError, free_port
from examples.local_prometheus import LocalPrometheus
from examples.local_services import (
    ARITHMETIC,
    LOGPROBS,
    ONE_THREAD,
    READY_TIMEOUT,
    RolloutServer,
    script,
    start_all,
)
from policy_bridge import BridgeConfig
from policy_bridge.metrics import BridgeCollector

FASTER = 60.0
"""The factor by which the rules' windows and waits are shorter."""
INTERVAL = 0.5
"""Seconds between two scrapes."""
OUTBOX_BYTES = 1 << 20


class Rig:
    """Everything that runs. ``with`` starts it and ends it, whatever happened.

    Args:
        folder: for logs, registries and Prometheus's data.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.servers = [
            RolloutServer(folder / f"rollout-{name}.log", *LOGPROBS) for name in ("a", "b")
        ]
        self.urls = [server.http for server in self.servers]
        self._metrics_port, self._trainer_port = free_port(), free_port()
        self._trainer: Service | None = None
        self._trainers = 0
        self.policy = PolicyLoop(self.urls)
        registry = CollectorRegistry()
        registry.register(BridgeCollector(self.policy))
        self._bridge_http, _ = start_http_server(0, "127.0.0.1", registry)
        targets = {
            "rollout-server": [urlsplit(url).netloc for url in self.urls],
            "draft-trainer": [f"127.0.0.1:{self._metrics_port}"],
            "policy": [f"127.0.0.1:{self._bridge_http.server_port}"],
        }
        self.prometheus = LocalPrometheus(folder / "prometheus", targets, INTERVAL, FASTER)
        self.sightings = Sightings(self.prometheus)
        self._watching = False

    def __enter__(self) -> Rig:
        try:
            start_all(self.servers, 2 * READY_TIMEOUT)
            self.policy.start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def watch(self) -> None:
        """Have Prometheus scrape, and note what fires."""
        self.prometheus.service.start()
        self.prometheus.wait_ready(60)
        deadline = time.monotonic() + 60
        # Before its first scrapes Prometheus knows of no trainer, which is an alert's reason.
        while len(self.prometheus.query("up == 1")) < 4 or self.prometheus.firing():
            if time.monotonic() > deadline:
                raise ServiceError(f"alerts at the start: {self.prometheus.firing()}")
            time.sleep(0.25)
        self.sightings.start()
        self._watching = True

    def trainer(self, servers: Sequence[int], **sections: Mapping[str, Any]) -> None:
        """A new trainer with a registry of its own in the place of the one before.

        Args:
            servers: that it publishes to.
            sections: of its configuration, over what the phases share.
        """
        self.end_trainer()
        self._trainers += 1
        folder = self._folder / f"trainer-{self._trainers}"
        folder.mkdir()
        settings: dict[str, dict[str, Any]] = {
            "server": {"port": self._trainer_port, "metrics_port": self._metrics_port},
            "draft": {
                "initial": str(ARITHMETIC / "draft"),
                "registry": str(folder / "releases"),
            },
            "replay": {"capacity_bytes": 64 << 20, "max_epochs": 1},
            "training": {"ttt_steps": 3, "batch_tokens": 1024},
            # Nothing that was trained here is to go live: what does is put there by hand.
            "gate": {"min_gain": 9.0},
            "economy": {"mode": "always"},
            "publish": {"rollout_servers": [self.servers[index].control for index in servers]},
        }
        for name, values in sections.items():
            settings[name] = {**settings.get(name, {}), **values}
        config = folder / "trainer.toml"
        config.write_text(_toml(settings))
        self._trainer = Service(
            "draft-trainer",
            [script("draft-trainer"), "serve", "--config", str(config)],
            folder / "log",
            f"127.0.0.1:{self._trainer_port}",
            ONE_THREAD,
        )
        self._trainer.start()
        self._trainer.wait_ready(READY_TIMEOUT)

    def end_trainer(self) -> None:
        """SIGTERM, if one runs."""
        if self._trainer is not None:
            self._trainer.stop()
            self._trainer = None

    def kill_trainer(self) -> None:
        """SIGKILL."""
        assert self._trainer is not None
        os.kill(self._trainer.pid, signal.SIGKILL)
        self.end_trainer()

    def kill_server(self, index: int) -> None:
        """SIGKILL, to the engine's process too."""
        os.killpg(self.servers[index].service.pid, signal.SIGKILL)
        self.servers[index].stop()

    def connect(self, servers: Sequence[int]) -> None:
        """A new bridge to the trainer and these servers."""
        self.policy.connect(
            BridgeConfig(
                f"127.0.0.1:{self._trainer_port}",
                f"alerts-{self._trainers}",
                tuple(self.servers[index].control for index in servers),
                # A version stays for many batches.
                bytes_per_step=sys.maxsize,
                outbox_bytes=OUTBOX_BYTES,
                states_dtype="bfloat16",
            )
        )

    def command(self, *arguments: str) -> None:
        """A ``draft-trainer`` command to the trainer. Raises CalledProcessError."""
        address = f"127.0.0.1:{self._trainer_port}"
        subprocess.run(
            [script("draft-trainer"), *arguments, "--address", address],
            check=True,
            timeout=300,
            stdout=subprocess.DEVNULL,
        )

    def promote_ruined(self) -> None:
        """Import a draft whose proposals are never accepted and promote it past the gate."""
        ruined = self._folder / "ruined"
        if not ruined.exists():
            ruined.mkdir()
            for path in (ARITHMETIC / "draft").iterdir():
                (ruined / path.name).write_bytes(path.read_bytes())
            tensors = load_file(ruined / "model.safetensors")
            # What the draft took for likeliest is now what it takes for least likely.
            tensors["lm_head.weight"] = -4 * tensors["lm_head.weight"]
            save_file(tensors, ruined / "model.safetensors", metadata={"format": "pt"})
        self.command("releases", "import", str(ruined))
        self.command("releases", "promote", "1")

    def _stop(self) -> None:
        self.policy.stop()
        if self._watching:
            self.sightings.stop()
        self.prometheus.service.stop()
        self.end_trainer()
        for server in self.servers:
            server.stop()
        self._bridge_http.shutdown()
        self._bridge_http.server_close()


def _toml(settings: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for section, values in settings.items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            text = str(value).lower() if isinstance(value, bool) else repr(value)
            lines.append(f"{key} = {text}".replace("'", '"'))
    return "\n".join(lines) + "\n"
