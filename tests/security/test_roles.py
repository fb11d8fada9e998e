"""Every method has one role, and the rooms' services are in one table."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from slipstream.serving.identity import GRANTS, METHODS, Access, Role, TokenFiles, roles_granted
from slipstream.v1 import draft_trainer_pb2, rollout_server_pb2

pytestmark = pytest.mark.contract("hostile peers")

FILES = (draft_trainer_pb2, rollout_server_pb2, health_pb2, reflection_pb2)


def every_method() -> set[str]:
    return {
        f"/{service.full_name}/{method.name}"
        for module in FILES
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


def test_every_method_has_one_role() -> None:
    """Fails when a method is added to a .proto and not to ``slipstream.serving.identity``."""
    assert every_method() == METHODS.keys()
    for method, role in METHODS.items():
        assert (role is None) == ("health" in method), method


@pytest.mark.parametrize(
    ("role", "method"),
    [
        (Role.FEED, "/slipstream.v1.DraftTrainer/StreamStates"),
        (Role.FEED, "/slipstream.v1.DraftTrainer/AnnouncePolicy"),
        (Role.OBSERVE, "/slipstream.v1.DraftTrainer/GetStatus"),
        (Role.OBSERVE, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
        (Role.OPERATE, "/slipstream.v1.DraftTrainer/PromoteRelease"),
        (Role.OPERATE, "/slipstream.v1.DraftTrainer/ImportRelease"),
        (Role.OPERATE, "/slipstream.v1.RolloutServer/Commit"),
    ],
)
def test_methods_need_expected_roles(role: Role, method: str) -> None:
    assert METHODS[method] is role


def test_roles_grant_no_other_role() -> None:
    assert GRANTS.keys() == set(Role)
    assert roles_granted(frozenset({Role.OBSERVE})) == {Role.OBSERVE}
    assert Role.OPERATE not in roles_granted(frozenset({Role.FEED}))
    assert Role.FEED not in roles_granted(frozenset({Role.OPERATE}))


def test_method_without_role_is_closed() -> None:
    everything = Access(None, TokenFiles({}, ""), {role: ["*"] for role in Role})
    assert everything.judge(Role.OPERATE, None, ["me"]) is None
    refused = everything.judge(METHODS.get("/slipstream.v1.DraftTrainer/New"), None, ["me"])
    assert refused is not None and refused.reason == "role"
