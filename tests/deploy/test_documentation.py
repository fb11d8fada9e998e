"""docs/deployment.md against deploy/: images, secrets and options. The commands of Slipstream in it
are run by ``tests/docs/test_shell.py``.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator

from draft_trainer.config_file import parse_config
from rollout_server.ray.fleet import build_parser
from tests.deploy.manifests import (
    DEPLOY,
    OVERLAYS,
    ROOT,
    container,
    containers,
    overlay,
    pods,
    trainer_config,
)

PAGE = (ROOT / "docs" / "deployment.md").read_text()


def commands(program: str) -> Iterator[list[str]]:
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith(f"{program} "):
                yield shlex.split(line)


def test_documented_images_are_the_deployed_ones() -> None:
    built = set()
    for words in commands("docker"):
        if words[1] == "build":
            file, tag = (words[words.index(option) + 1] for option in ("-f", "-t"))
            built.add(tag)
            assert " ".join(words) in (ROOT / file).read_text()
        else:
            assert f"`{words[words.index('-p') + 1]}_ring`" in PAGE
    texts = [path.read_text() for path in (DEPLOY / "ray").glob("*.yaml")]
    registry = {i for text in texts for i in re.findall(r"image: your-registry/(\S+)", text)}
    for name in OVERLAYS:
        images = {c["image"] for _, pod in pods(overlay(name)) for c in containers(pod)}
        registry |= {i.removeprefix("your-registry/") for i in images}
    compose = (DEPLOY / "compose" / "compose.yml").read_text()
    local = re.findall(r"image: (slipstream/\S+)", compose)
    used = {f"slipstream/{name}" for name in registry - {"policy:1"}} | {*local}
    assert used == built


def test_documented_secrets_match_secure_overlay() -> None:
    made: dict[str, set[str]] = {}
    for words in commands("kubectl"):
        if "secret" in words:
            name = words[words.index("generic") + 1]
            files = [w.removeprefix("--from-file=") for w in words if w.startswith("--from-file=")]
            made[name] = {file.partition("=")[0] for file in files}
    needed: dict[str, set[str]] = {}
    for _, pod in pods(overlay("secure")):
        for volume in pod["volumes"]:
            sources = volume.get("projected", {}).get("sources", [])
            for secret in [s["secret"] for s in sources] + [volume.get("secret")]:
                if secret:
                    name = secret.get("secretName") or secret["name"]
                    items = secret.get("items") or [{"key": k} for k in ("tls.crt", "tls.key")]
                    needed.setdefault(name, set()).update(item["key"] for item in items)
    assert made.keys() == needed.keys()
    for name, keys in needed.items():
        assert keys <= made[name], name
    assert made["slipstream-tokens"] == needed["slipstream-tokens"]
    # The certificates have the names by which the trainer and Prometheus check them.
    hosts = re.findall(r"`for host in ([^`]*)`", PAGE)[0].split()
    checked = set(re.findall(r"'serverName': '([\w-]+)'", str(overlay("secure"))))
    assert checked | {trainer_config(overlay("secure")).credentials.server_name} == {*hosts}


def test_documented_bridge_matches_secure_overlay() -> None:
    text, _ = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    manifests = overlay("secure")
    config = trainer_config(manifests)
    assert f'trainer="localhost:{config.server.port}"' in text
    assert f'shared_memory="{config.server.shared_memory}"' in text
    assert f'server_name="{config.credentials.server_name}"' in text
    mounted = {m["name"]: m["mountPath"] for m in container(manifests, "policy")["volumeMounts"]}
    assert f'Path("{mounted["credentials"]}")' in text
    (volume,) = [
        v for v in dict(pods(manifests))["policy"]["volumes"] if v["name"] == "credentials"
    ]
    items = [i for s in volume["projected"]["sources"] for i in s["secret"]["items"]]
    assert set(re.findall(r'files / "(.*?)"', text)) == {item["path"] for item in items}


def test_documented_bridge_matches_ray_trainer() -> None:
    _, text = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    server = parse_config(tomllib.loads((DEPLOY / "ray" / "trainer.toml").read_text())).server
    assert f'trainer="{server.host}:{server.port}"' in text
    assert f'shared_memory="{server.shared_memory}"' in text


def test_fleet_options_documented_with_defaults() -> None:
    rows = dict(re.findall(r"^\| `(--[^|]*?)` \|([^|]*)\|", PAGE, re.MULTILINE))
    documented = {}
    for options, default in rows.items():
        names = [name.split()[0] for name in re.split("`, `", options)]
        values = [v.strip(" `") for v in default.split(",")]
        documented |= dict(zip(names, values * len(names), strict=False))
    for action in build_parser()._actions:
        for name in action.option_strings:
            if name not in ("-h", "--help"):
                default = documented[name]
                if action.default is None:
                    assert default == ""
                elif isinstance(action.default, str):
                    assert default == action.default
                else:
                    assert float(default) == action.default
