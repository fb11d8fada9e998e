"""Configuration, what the import loads, and the bridge that is off."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from policy_bridge import BridgeConfig, DisabledBridge, PolicyBridge
from slipstream.errors import RefusedError

from .conftest import batch, make_model, ship


def test_import_of_policy_bridge_loads_no_vllm_or_transformers() -> None:
    code = """
import json, sys
import policy_bridge
own = {"draft_trainer", "rollout_server"}
banned = own | {"vllm", "ray", "transformers", "prometheus_client"}
print(json.dumps(sorted(banned & set(sys.modules))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("trainer", "nowhere"),
        ("run_id", ""),
        ("rollout_servers", ["http://a:1"]),
        ("rollout_servers", ("a:1", "a:1")),
        ("bytes_per_step", -1),
        ("bytes_per_step", 1.5),
        ("states_dtype", "int8"),
        ("logit_scale", 0.0),
        ("logit_scale", True),
        ("stall_seconds", float("nan")),
    ],
)
def test_bad_values_are_refused_by_field(field: str, value: object) -> None:
    values: dict[str, object] = {"trainer": "127.0.0.1:1", "run_id": "r", field: value}
    with pytest.raises(RefusedError) as refused:
        BridgeConfig(**values)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_disabled_bridge_has_same_methods() -> None:
    model, data = make_model(), batch((6,))
    public = {name for name in dir(PolicyBridge) if not name.startswith("_")}
    assert public - {"disabled"} == {n for n in dir(DisabledBridge()) if not n.startswith("_")}
    with PolicyBridge.disabled() as bridge:
        with bridge.sync(1) as window:
            pass
        assert window.result is not None and window.result.policy_version == 1
        ship(bridge, model, data)  # type: ignore[arg-type]
        assert bridge.stats().captures_skipped == 1
        assert not bridge.wait_connected(0.0) and bridge.flush(0.0)
