"""deploy/ray: what Ray and Kubernetes can check of it, and that it agrees with the programs."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from draft_trainer.config_file import parse_config
from policy_bridge.config import BridgeConfig
from policy_bridge.outbox import file_bytes
from rollout_server.ray.fleet import build_parser
from tests.deploy.manifests import DEPLOY, check_tolerations, containers, gpus, size

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="no schemas of Kubernetes: pip install kubernetes-validate"
)

FOLDER = DEPLOY / "ray"
TEXT = (FOLDER / "kuberay.yaml").read_text()
MANIFESTS = list(yaml.safe_load_all(TEXT))
(JOB,) = (one for one in MANIFESTS if one["kind"] == "RayJob")
(POLICY,) = (one for one in MANIFESTS if one["kind"] == "NetworkPolicy")
CLUSTER = JOB["spec"]["rayClusterSpec"]
TRAINER = parse_config(tomllib.loads((FOLDER / "trainer.toml").read_text()))
# Of KubeRay's ray.io/v1 as its API reference has it; the pods are checked with Kubernetes' schemas.
JOB_KEYS = {"entrypoint", "submissionMode", "shutdownAfterJobFinishes", "rayClusterSpec"}
GROUP_KEYS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


def groups() -> dict[str, dict[str, Any]]:
    return {"head": CLUSTER["headGroupSpec"]} | {
        group["groupName"]: group for group in CLUSTER["workerGroupSpecs"]
    }


def test_ray_job_matches_kuberay_schema() -> None:
    assert (JOB["apiVersion"], JOB["kind"]) == ("ray.io/v1", "RayJob")
    assert JOB["spec"].keys() == JOB_KEYS
    assert CLUSTER.keys() == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    for name, group in groups().items():
        assert group.keys() <= GROUP_KEYS
        # Numbers too are texts here, or the operator refuses them.
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), name
        pod = {"apiVersion": "v1", "kind": "Pod"} | group["template"]
        pod["metadata"] = {"name": name} | pod["metadata"]
        for version in ("1.30", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(pod, version, strict=True)
        chosen = POLICY["spec"]["podSelector"]["matchLabels"]
        assert chosen.items() <= pod["metadata"]["labels"].items()
    for manifest in MANIFESTS:
        if manifest is not JOB:
            kubernetes_validate.validate(manifest, "1.30", strict=True)
    image = (DEPLOY / "docker" / "gpu.Dockerfile").read_text()
    assert f"ray[default]=={CLUSTER['rayVersion']}" in image


def test_ray_fleet_fits_cluster_and_trainer_config() -> None:
    program, command, *arguments = shlex.split(JOB["spec"]["entrypoint"])
    assert (program, command) == ("rollout-server", "fleet")
    options, serve = build_parser().parse_known_args(arguments)
    for group in groups().values():
        check_tolerations(group["template"]["spec"])
    trainer, head = containers(groups()["head"]["template"]["spec"])
    (worker,) = containers(groups()["rollouts"]["template"]["spec"])
    program, command, option, file = trainer["command"]
    assert (program, command, option) == ("draft-trainer", "serve", "--config")
    address = f"{TRAINER.server.host}:{TRAINER.server.port}"
    for probe in ("startupProbe", "livenessProbe"):
        assert trainer[probe]["exec"]["command"][-2:] == ["slipstream.serving.server", address]
    mounted = [{m["mountPath"] for m in one["volumeMounts"]} for one in (trainer, head, worker)]
    assert all(TRAINER.server.shared_memory in paths for paths in mounted)
    assert str(Path(file).parent) in mounted[0]
    # The policy is on the head, and the servers are not: they ask for more CPUs than it has.
    assert gpus(worker) == options.gpus and gpus(head) > 0
    cpus = [int(groups()[name]["rayStartParams"]["num-cpus"]) for name in ("head", "rollouts")]
    assert cpus[0] < options.cpus <= cpus[1]
    assert {"name": "OMP_NUM_THREADS", "value": "1"} in worker["env"]
    assert options.replicas == groups()["rollouts"]["replicas"]
    share = gpus(trainer) / (gpus(head) + options.replicas * options.gpus)
    assert TRAINER.economy.training_share == pytest.approx(share, abs=0.005)
    assert TRAINER.training.device == "cuda"
    assert TRAINER.publish.rollout_servers == (f"file:{options.members}",)
    assert f"--draft-length {TRAINER.publish.num_speculative_tokens}" in " ".join(serve)
    # Who writes the file and who reads it see the same folder.
    shared_folders = {str(options.members.parent), str(TRAINER.draft.registry.parent)}
    assert shared_folders <= mounted[0] & mounted[1]
    # A file for the bridge on each of the policy's GPUs, and the one that it moves from.
    bridge = BridgeConfig(address, "run")
    assert bridge.shared_memory == TRAINER.server.shared_memory
    volumes = groups()["head"]["template"]["spec"]["volumes"]
    (shared,) = (size(v["emptyDir"]["sizeLimit"]) for v in volumes if v["name"] == "shm")
    outbox = bridge.bounds("cuda")[1]
    files = gpus(head) * (file_bytes(outbox) + outbox)
    # Ray takes the memory of its objects there too, up to nearly all of it where none is given.
    assert shared > files + int(groups()["head"]["rayStartParams"]["object-store-memory"])
    assert shared < size(head["resources"]["limits"]["memory"])
    machines = (FOLDER / "cluster.yaml").read_text()
    cpus = [int(number) for number in re.findall(r"- ray start .*--num-cpus=(\d+)", machines)]
    assert cpus[0] < options.cpus <= cpus[1] and "--env=OMP_NUM_THREADS=1" in machines
    (shm,) = re.findall(r"--shm-size=(\w+)", machines)
    (objects,) = re.findall(r"ray start --head .*--object-store-memory=(\d+)", machines)
    assert size(shm) > files + int(objects)


def test_ray_cluster_yaml_accepted_by_ray() -> None:
    util = pytest.importorskip(
        "ray.autoscaler._private.util",
        reason="Ray is not installed: pip install 'slipstream-rl[ray]'",
    )
    config = yaml.safe_load((FOLDER / "cluster.yaml").read_text())
    prepared = util.prepare_config(dict(config))
    util.validate_config(prepared)
    assert prepared["docker"]["image"] == "your-registry/ray:gpu"
    workers = prepared["available_node_types"]["local.cluster.node"]
    assert workers["max_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])
