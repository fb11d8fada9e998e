"""A Prometheus on this machine with the project's rules, scraping services that are given."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from examples.arithmetic_grpo.processes import Service, ServiceError, free_port
from slipstream.errors import RefusedError

RULES = Path(__file__).resolve().parents[1] / "deploy" / "prometheus"
INSTALL = "apt-get install --no-install-recommends prometheus"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class LocalPrometheus:
    """Prometheus as a ``Service``: started and stopped with the others.

    Args:
        folder: where its configuration, log and data go; made if it is missing.
        targets: ``host:port`` of what is scraped, by job name of prometheus.yml.
        interval: seconds between two scrapes, and between two evaluations of the rules.
        faster: windows and waits in the rules are divided by this.

    Raises:
        RefusedError: Prometheus is not installed.
    """

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, Sequence[str]],
        interval: float = 5.0,
        faster: float = 1.0,
    ) -> None:
        binary = shutil.which("prometheus")
        if binary is None:
            raise RefusedError("prometheus", "nothing on PATH", "Prometheus 2.42 or later", INSTALL)
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "prometheus.yml"
        config.write_text(_config(folder.resolve(), targets, interval, faster))
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        command = [binary, f"--config.file={config}", f"--web.listen-address={address}"]
        command += [f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn"]
        self.service = Service("prometheus", command, folder / "prometheus.log", address)

    def wait_ready(self, timeout: float) -> None:
        """Wait until it answers queries.

        Raises:
            ServiceError: it ended, or was not ready within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.service.check()
            try:
                if httpx.get(f"{self.url}/-/ready", timeout=2).is_success:
                    return
            except httpx.TransportError:
                pass  # not listening yet: that is what is being waited for
            time.sleep(0.1)
        raise ServiceError(f"prometheus was not ready in {timeout:.0f} s; see {self.service.log}")

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """An expression's value now: labels and number of each series, none where there is none.

        Raises:
            RefusedError: Prometheus refused it.
        """
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30)
        body = answer.json()
        if body["status"] != "success":
            raise RefusedError("query", expression, "PromQL", body["error"])
        result = body["data"]["result"]
        if body["data"]["resultType"] == "scalar":
            return [({}, float(result[1]))]
        return [(series["metric"], float(series["value"][1])) for series in result]

    def alerts(self) -> list[dict[str, Any]]:
        """Alerts that are pending or firing, as Prometheus describes them."""
        body = httpx.get(f"{self.url}/api/v1/alerts", timeout=30).json()
        return list(body["data"]["alerts"])

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        return {a["labels"]["alertname"] for a in self.alerts() if a["state"] == "firing"}


def shortened(text: str, faster: float) -> str:
    """Rules with every window, wait and limit in seconds divided by ``faster``.

    ``[5m]``, ``offset 5m``, ``for: 5m``, and numbers that are marked: ``3600 # seconds``.
    """
    text = re.sub(
        r"(\[|offset |(?:for|interval): )(\d+)([smh])",
        lambda m: f"{m[1]}{max(1, round(1000 * int(m[2]) * _UNITS[m[3]] / faster))}ms",
        text,
    )
    return re.sub(r"(\d+)(?= *# seconds)", lambda m: f"{int(m[1]) / faster:g}", text)


def _config(
    folder: Path, targets: Mapping[str, Sequence[str]], interval: float, faster: float
) -> str:
    config = yaml.safe_load((RULES / "prometheus.yml").read_text())
    every = f"{round(1000 * interval)}ms"
    config["global"] = {
        "scrape_interval": every,
        "scrape_timeout": every,
        "evaluation_interval": every,
    }
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": list(targets.get(job["job_name"], ()))}]
    files = []
    for name in config["rule_files"]:
        file = folder / name
        file.write_text(shortened((RULES / name).read_text(), faster))
        files.append(str(file))
    config["rule_files"] = files
    return str(yaml.safe_dump(config))
