"""The files of deploy/ as tests read them: rendered overlays, and parts of every form."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from draft_trainer.config import TrainerConfig
from draft_trainer.config_file import parse_config

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = ("cpu-demo", "gpu", "secure")

Manifest = dict[str, Any]


@functools.cache
def overlay(name: str) -> list[Manifest]:
    """An overlay as ``kubectl apply -k`` would send it."""
    if shutil.which("kubectl") is None:
        pytest.skip(
            "kubectl is not installed; for its kustomize: apt-get install kubernetes-client "
            "(1.21 or later), or from kubernetes.io"
        )
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / "overlays" / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def only(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The one of that kind and name."""
    (found,) = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """(name, pod's spec) of everything that makes pods."""
    for manifest in manifests:
        if "template" in manifest.get("spec", {}):
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]


def containers(pod: Manifest) -> list[Manifest]:
    """All of a pod, those that are started first included."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def container(manifests: list[Manifest], name: str) -> Manifest:
    """The one of that name, in whichever pod."""
    (found,) = [c for _, pod in pods(manifests) for c in containers(pod) if c["name"] == name]
    return found


def gpus(one: Manifest) -> int:
    """Count the GPUs of a container."""
    return int(one["resources"]["limits"].get("nvidia.com/gpu", 0))


def check_tolerations(pod: Manifest) -> None:
    """A pod with GPUs runs on nodes that admit only such pods."""
    tolerated = [each["key"] for each in pod.get("tolerations", [])]
    assert tolerated == ["nvidia.com/gpu"] * any(map(gpus, containers(pod)))


def trainer_config(manifests: list[Manifest]) -> TrainerConfig:
    """The draft trainer's configuration in its ConfigMap, every key checked."""
    (config,) = [m for m in manifests if m["kind"] == "ConfigMap"]
    return parse_config(tomllib.loads(config["data"]["trainer.toml"]))


def size(text: str) -> int:
    """Bytes of ``640Mi``, ``160m`` and the like."""
    number, unit = re.fullmatch(r"(\d+)([kmgKMG]?)i?", text).groups()  # type: ignore[union-attr]
    return int(number) << {"": 0, "k": 10, "m": 20, "g": 30}[unit.lower()]


def port_of(address: str) -> int:
    """Port of ``host:port``."""
    return int(address.rpartition(":")[2])
