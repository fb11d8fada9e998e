"""The Kubernetes manifests: sound by Kubernetes' own schemas, in agreement with the programs."""

from __future__ import annotations

import re

import pytest

from draft_trainer.cli.main import parse
from examples.torch_loop.options import build_parser
from policy_bridge.config import BridgeConfig
from policy_bridge.outbox import file_bytes
from slipstream.v1 import rollout_server_pb2
from tests.deploy.manifests import (
    OVERLAYS,
    Manifest,
    check_tolerations,
    container,
    containers,
    gpus,
    only,
    overlay,
    pods,
    port_of,
    size,
    trainer_config,
)

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="no schemas of Kubernetes: pip install kubernetes-validate"
)

# Not Kubernetes' own: whose schema is the operator's.
CUSTOM = {"ServiceMonitor"}
OLDEST = "1.30"
NEWEST = kubernetes_validate.latest_version()
TRANSFERS = {"weight-transfer-policy", "weight-transfer-servers"}
# rollout_server.control.service.READY_SERVICE, without an import of vLLM.
READY = f"{rollout_server_pb2.DESCRIPTOR.services_by_name['RolloutServer'].full_name}/ready"


@pytest.fixture(params=OVERLAYS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return overlay(request.param)


def test_manifests_match_kubernetes_schemas(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if manifest["kind"] not in CUSTOM:
            for version in (OLDEST, NEWEST):
                kubernetes_validate.validate(manifest, version, strict=True)
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == "slipstream"
            assert manifest["metadata"]["labels"]["app.kubernetes.io/part-of"] == "slipstream"


def test_manifests_trainer_publishes_to_stateful_set(manifests: list[Manifest]) -> None:
    fleet = only(manifests, "StatefulSet", "slipstream-rollout")
    service = only(manifests, "Service", fleet["spec"]["serviceName"])
    server = container(manifests, "rollout-server")
    port = next(p["containerPort"] for p in server["ports"] if p["name"] == "control")
    assert trainer_config(manifests).publish.rollout_servers == tuple(
        f"slipstream-rollout-{index}.slipstream-rollout:{port}"
        for index in range(fleet["spec"]["replicas"])
    )
    # Else a server that is not ready could not be mended.
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"].items() <= labels(fleet).items()
    lengths = [argument.partition("=")[2] for argument in server["args"] if "-length" in argument]
    assert lengths == [str(trainer_config(manifests).publish.num_speculative_tokens)]


def test_manifests_shared_memory_fits_the_bridge(manifests: list[Manifest]) -> None:
    server = trainer_config(manifests).server
    pod = dict(pods(manifests))["policy"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == "ring"]
    assert volume["emptyDir"]["medium"] == "Memory"
    room = size(volume["emptyDir"]["sizeLimit"])
    # The file of each GPU's bridge, and what it holds in the one before while it moves there.
    devices = gpus(container(manifests, "policy"))
    outbox = BridgeConfig("trainer:1", "run").bounds("cuda" if devices else "cpu")[1]
    assert room >= (devices or 1) * (file_bytes(outbox) + outbox)
    for name in ("policy", "draft-trainer"):
        mounted = {m["name"]: m["mountPath"] for m in container(manifests, name)["volumeMounts"]}
        assert mounted["ring"] == server.shared_memory
        # Its pages count as memory of the container that wrote them.
        assert size(container(manifests, name)["resources"]["limits"]["memory"]) > room


@pytest.mark.parametrize("name", ["gpu", "secure"])
def test_gpu_samples_are_in_memory_of_the_pod(name: str) -> None:
    """A network volume would take as many bytes as the bridges send."""
    manifests = overlay(name)
    replay, trainer = trainer_config(manifests).replay, container(manifests, "draft-trainer")
    volumes = {v["name"]: v for v in dict(pods(manifests))["policy"]["volumes"]}
    assert replay.directory is not None
    (mount,) = [
        m for m in trainer["volumeMounts"] if m["mountPath"] == str(replay.directory.parent)
    ]
    memory = volumes[mount["name"]]["emptyDir"]
    assert memory["medium"] == "Memory"
    # Beside the samples five policy versions, of an 8B policy's embeddings and lm_head rows.
    room = size(memory["sizeLimit"])
    assert room >= replay.capacity_bytes + (replay.max_policy_lag + 1) * (151_936 + 32_768) * 8192
    assert size(trainer["resources"]["limits"]["memory"]) >= room + size("32Gi")


@pytest.mark.parametrize("name", ["gpu", "secure"])
def test_gpu_training_share_is_trainers_share_of_gpus(name: str) -> None:
    manifests = overlay(name)
    servers = only(manifests, "StatefulSet", "slipstream-rollout")["spec"]["replicas"]
    loop = gpus(container(manifests, "policy"))
    loop += servers * gpus(container(manifests, "rollout-server"))
    share = gpus(container(manifests, "draft-trainer")) / loop
    assert trainer_config(manifests).economy.training_share == pytest.approx(share, abs=0.005)


def test_manifests_gpu_pods_tolerate_gpu_nodes(manifests: list[Manifest]) -> None:
    for _, pod in pods(manifests):
        check_tolerations(pod)


def test_manifests_container_arguments_parse(manifests: list[Manifest]) -> None:
    trainer = container(manifests, "draft-trainer")
    arguments = parse(trainer["args"])
    mounted = {m["mountPath"] for m in trainer["volumeMounts"]}
    assert str(arguments.config.parent) in mounted
    config = trainer_config(manifests)
    assert str(config.draft.registry.parent) in mounted
    policy = container(manifests, "policy")
    if "examples.torch_loop.train" in policy["command"]:
        options = build_parser().parse_args(policy["args"])
        assert port_of(options.trainer) == config.server.port
        assert options.shared_memory == config.server.shared_memory
        hosts = [
            url.removeprefix("http://").partition(":")[0] for url in options.servers.split(",")
        ]
        assert hosts == [address.partition(":")[0] for address in config.publish.rollout_servers]


def test_manifests_probes_ask_served_ports(manifests: list[Manifest]) -> None:
    config = trainer_config(manifests)
    ports = {"draft-trainer": config.server.port, "rollout-server": 50061}
    for name, port in ports.items():
        asked = container(manifests, name)
        assert port in {p["containerPort"] for p in asked["ports"]}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = asked[kind]
            if "grpc" in probe:
                found, service = probe["grpc"]["port"], probe["grpc"].get("service", "")
            else:
                words = probe["exec"]["command"]
                assert words[1:3] == ["-m", "slipstream.serving.server"]
                (address,) = [w for w in words if w.startswith("localhost:")]
                found, service = port_of(address), words[-1] if words[-1] != address else ""
                # A Python has to start first, beside an engine that is busy.
                assert probe["timeoutSeconds"] >= 5
            assert found == port
            ready = kind == "readinessProbe" and name == "rollout-server"
            assert service == (READY if ready else "")
    # Nothing is killed for a moment's silence, and a model may take minutes to load.
    server = container(manifests, "rollout-server")
    assert product(server["livenessProbe"]) >= 60 and product(server["startupProbe"]) >= 600
    assert product(container(manifests, "draft-trainer")["startupProbe"]) >= 300


def product(probe: Manifest) -> int:
    return int(probe["periodSeconds"]) * int(probe["failureThreshold"])


def test_manifests_least_privilege(manifests: list[Manifest]) -> None:
    for _, pod in pods(manifests):
        # Of one user, or the policy could not open the trainer's ring.
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for one in containers(pod):
            rights = one["securityContext"]
            assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= one["resources"]["limits"].keys()
            assert {"cpu", "memory"} <= one["resources"]["requests"].keys()
            assert ":" in one["image"] and not one["image"].endswith(":latest")
            assert "/tmp" in {m["mountPath"] for m in one["volumeMounts"]}
        for volume in pod["volumes"]:
            assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"]
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440
                assert pod["securityContext"]["fsGroup"] == 10001


def test_network_policy_admits_policy_only(
    manifests: list[Manifest],
) -> None:
    policies = {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"}
    assert policies.keys() - TRANSFERS == {"rollout-server", "policy"}
    servers = policies["rollout-server"]
    assert {"Ingress", "Egress"} == set(servers["policyTypes"])
    callers = [
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
        for rule in servers["ingress"]
        if 50061 in {port["port"] for port in rule["ports"]}
        for peer in rule["from"]
    ]
    assert callers == ["policy"]
    (names,) = servers["egress"]
    assert {(p["port"], p["protocol"]) for p in names["ports"]} == {(53, "UDP"), (53, "TCP")}
    opened = {p["port"] for rule in policies["policy"]["ingress"] for p in rule["ports"]}
    assert opened == {trainer_config(manifests).server.metrics_port}


def test_service_monitors_select_both_services(manifests: list[Manifest]) -> None:
    services = [m for m in manifests if m["kind"] == "Service"]
    exported = {"draft-trainer": trainer_config(manifests).server.metrics_port}
    exported["rollout-server"] = 8000
    monitors = {
        m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "ServiceMonitor"
    }
    assert monitors.keys() == exported.keys()
    for job, monitor in monitors.items():
        selected = [
            service
            for service in services
            if monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        ]
        (service,) = selected
        # The alerts know the jobs by these names.
        assert service["metadata"]["labels"][monitor["jobLabel"]] == job
        (endpoint,) = monitor["endpoints"]
        (port,) = [p for p in service["spec"]["ports"] if p["name"] == endpoint["port"]]
        assert port["port"] == exported[job]
        backed = [m for m in manifests if service["spec"]["selector"].items() <= labels(m).items()]
        assert len(backed) == 1


def test_disruption_budget_drains_one_server(manifests: list[Manifest]) -> None:
    budget = only(manifests, "PodDisruptionBudget", "slipstream-rollout")["spec"]
    fleet = only(manifests, "StatefulSet", "slipstream-rollout")
    assert budget["maxUnavailable"] == 1 < fleet["spec"]["replicas"]
    assert budget["selector"]["matchLabels"].items() <= labels(fleet).items()
    # The trainer has time for what its own deadline allows.
    grace = dict(pods(manifests))["policy"]["terminationGracePeriodSeconds"]
    assert grace > trainer_config(manifests).server.shutdown_timeout_s


def test_manifests_hold_no_secret(manifests: list[Manifest]) -> None:
    assert not [m for m in manifests if m["kind"] == "Secret"]
    for _, pod in pods(manifests):
        for one in containers(pod):
            for variable in one.get("env", []):
                assert not re.search("TOKEN$|PASSWORD|SECRET|KEY$", variable["name"])


def labels(manifest: Manifest) -> dict[str, str]:
    """Return the labels of the pods that a manifest makes; empty if it makes none."""
    template = manifest.get("spec", {}).get("template", {})
    return dict(template.get("metadata", {}).get("labels", {}))
