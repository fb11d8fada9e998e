"""Every wrong configuration is one refusal that names the key and what to do."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from draft_trainer.config_file import changed_keys, load_config, parse_config, read_toml, shown
from slipstream.errors import RefusedError

GOOD: dict[str, Any] = {"draft": {"initial": "draft"}}


def refused(**sections: Any) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        parse_config({**GOOD, **sections})
    return caught.value


@pytest.mark.parametrize(
    ("sections", "field", "found", "expected", "next_step"),
    [
        ({"draft": {"registry": "r"}}, "draft.initial", "nothing", "a value", "add draft.initial"),
        ({"recording": {}}, "recording", "removed", "replay", "draft-trainer warmup"),
        ({"draft": {"x": 1}}, "draft.initial", "nothing", "a value", "(unknown key: draft.x)"),
        (
            {"training": {"learning_rat": 0.1}},
            "training.learning_rat",
            "unknown key",
            "learning_rate",
            "rename it to learning_rate",
        ),
        (
            {"training": {"rank_timeout_s": 300.0}},
            "training.rank_timeout_s",
            "removed",
            "learning_rate",
            "the trainer is one process; train a larger draft on a larger GPU",
        ),
        (
            {"training": {"rank_timeout_s": 300.0, "ttt_steps": 0}},
            "training.ttt_steps",
            "0",
            "greater than",
            "removed key: training.rank_timeout_s, remove it",
        ),
        (
            {"canary": {"share": 0.25}},
            "canary",
            "a key that was removed",
            "trial",
            "rename it to [trial]",
        ),
        ({"draft": {}, "canary": {"share": 0.25}}, "draft.initial", "", "", "removed key: canary"),
        ({"server": {"port": "50051"}}, "server.port", "'50051'", "integer", "fix"),
        ({"server": 7}, "server", "7", "a [section]", "fix"),
        (
            {"publish": {"rollout_servers": "a:1"}},
            "publish.rollout_servers",
            "'a:1'",
            'a list, as in ["a", "b"]',
            "fix",
        ),
        (
            {"publish": {"rollout_servers": ["a:1", "a:1"]}},
            "publish.rollout_servers",
            "a:1",
            "once",
            "fix",
        ),
        (
            {"training": {"ttt_steps": 2}, "publish": {"num_speculative_tokens": 3}},
            "training.ttt_steps",
            "2",
            "num_speculative_tokens = 3",
            "raise training.ttt_steps",
        ),
    ],
)
def test_config_wrong_key_is_named(
    sections: dict[str, Any], field: str, found: str, expected: str, next_step: str
) -> None:
    error = refused(**sections)
    assert error.field == field
    assert found in error.found
    assert expected in error.expected
    assert next_step in error.next_step


def test_config_missing_or_invalid_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="No such file"):
        load_config(tmp_path / "absent.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[server\nport = 1\n")
    with pytest.raises(RefusedError, match="line 1"):
        load_config(bad)


def test_config_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "marked.toml"
    path.write_text('[draft]\r\ninitial = "d"\r\n', encoding="utf-8-sig")
    assert read_toml(path) == {"draft": {"initial": "d"}}


def test_config_from_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_toml(tmp_path / "pipe") == {}
    reader, writer = os.pipe()  # As bash's <(...).

    def write() -> None:
        with os.fdopen(writer, "w") as file:
            file.write("[draft]")

    late = threading.Thread(target=write)
    late.start()
    assert read_toml(Path(f"/dev/fd/{reader}")) == {"draft": {}}
    late.join()
    os.close(reader)


def test_config_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "trainer.toml"
    file.write_text('[draft]\ninitial = "draft"\nregistry = "/elsewhere/registry"\n')
    config = load_config(file)
    assert config.draft.initial == tmp_path / "draft"
    assert config.draft.registry == Path("/elsewhere/registry")
    assert config.draft.policy is None
    file.write_text('[draft]\ninitial = "draft"\npolicy = "policy"\n')
    config = load_config(file)
    assert config.draft.policy == tmp_path / "policy"
    assert config.draft.registry == tmp_path / "releases"


def test_set_option_overrides_file_and_is_checked(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    path = tmp_path / "trainer.toml"
    path.write_text('[draft]\ninitial = "draft"\n[training]\nttt_steps = 4\n')
    over = ["training.learning_rate=3e-4", "publish.on = promotion", "server.allow_plaintext=true"]
    over.append('publish.rollout_servers=["h:1", "h:2"]')
    config = load_config(path, over)
    assert config.training.learning_rate == 3e-4 and config.training.ttt_steps == 4
    assert config.publish.on == "promotion" and config.server.allow_plaintext is True
    assert config.publish.rollout_servers == ("h:1", "h:2")
    assert ("training.ttt_steps", 4) in changed_keys(config)
    assert all(key != "training.seed" for key, _ in changed_keys(config))
    for wrong, text in (
        ("training.lerning_rate=1", "rename it to learning_rate"),
        ("training.seed=a", "training.seed: found 'a', expected an integer"),
        ("training", "--set: found 'training', expected section.key=value"),
        ("training.seed", "--set"),
        ("=1", "--set"),
    ):
        with pytest.raises(RefusedError, match=re.escape(text)):
            load_config(path, [wrong])


def test_shown_config_round_trips(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    path = tmp_path / "trainer.toml"
    path.write_text('[draft]\ninitial = "draft"\nregistry = "\\u00e9 \\U0001f680 \\\\ud83d"\n')
    over = ["access.feed_tokens=['a', 'b']", "replay.held_out_fraction=0.2", "gate.min_gain=0.5"]
    config = load_config(path, over)
    again = tmp_path / "shown.toml"
    again.write_text(shown(config))
    assert load_config(again) == config
    assert "# gate.min_anchors" not in again.read_text() and "# min_anchors: not set" in shown(
        config
    )
