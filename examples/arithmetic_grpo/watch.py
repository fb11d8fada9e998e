"""``--watch``: Prometheus with the project's rules beside the demo, and where to look."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from prometheus_client import CollectorRegistry, start_http_server

from examples.local_prometheus import LocalPrometheus
from policy_bridge.metrics import BridgeCollector, Counting
from slipstream.errors import RefusedError

# A shorter window than the rules': every step of the demo puts another draft on the server.
ACCEPTANCE = (
    "1 + sum by (draft_version) (rate(slipstream_rollout_accepted_tokens_total[1m]))"
    " / (sum by (draft_version) (rate(slipstream_rollout_drafts_total[1m])) > 0)"
)
STALENESS = "slipstream_rollout_draft_staleness_versions"


def prometheus_beside(directory: Path, ports: dict[str, int]) -> LocalPrometheus | None:
    """Prometheus for the demo's processes, not started; None where it is not installed.

    Args:
        directory: of the run.
        ports: "http" of the rollout server, "metrics" of the trainer, "bridge" of this process.
    """
    jobs = {"rollout-server": "http", "draft-trainer": "metrics", "policy": "bridge"}
    targets = {job: [f"127.0.0.1:{ports[name]}"] for job, name in jobs.items()}
    try:
        return LocalPrometheus(directory / "prometheus", targets, interval=2.0)
    except RefusedError as error:
        print(f"{error}\n(without it there are the web page and the plain metrics)\n")
        return None


def addresses(trainer_log: Path, prometheus: LocalPrometheus | None) -> dict[str, str]:
    """Return the URLs to open in a browser, by what they show.

    Args:
        trainer_log: log of a trainer that is ready: its ready line names its addresses.
        prometheus: the one that runs, if any.
    """
    ready = re.findall(r"^draft-trainer ready: (.*)", trainer_log.read_text(), re.MULTILINE)
    named = dict(re.findall(r"(\w+)=(\S+)", ready[-1]))
    found = {"web page": named["web"]} if "web" in named else {}
    if prometheus is not None:
        graphs = "&".join(
            f"g{index}.expr={quote(expression)}&g{index}.tab=0&g{index}.range_input=15m"
            for index, expression in enumerate((ACCEPTANCE, STALENESS))
        )
        found["acceptance"] = f"{prometheus.url}/graph?{graphs}"
        found["alerts"] = f"{prometheus.url}/alerts"
    found["metrics"] = named["metrics"]
    return found


@contextmanager
def served(bridge: Counting, port: int | None) -> Iterator[None]:
    """The bridge's metrics on a port of loopback for as long as the block lasts; None for none."""
    if port is None:
        yield
        return
    registry = CollectorRegistry()
    registry.register(BridgeCollector(bridge))
    server, thread = start_http_server(port, "127.0.0.1", registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
