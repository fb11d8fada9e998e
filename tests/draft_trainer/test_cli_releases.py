"""``draft-trainer releases``: offline on a registry's folder, and asked of a running trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from draft_trainer.cli.main import main
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.releases.pointer import promote_offline
from draft_trainer.releases.registry import Registry
from draft_trainer.server.app import TrainerServer
from slipstream.errors import RefusedError
from slipstream.v1 import release_pb2
from tests.draft_trainer.registry_rig import create, flip, flip_bit
from tests.draft_trainer.rig import make_config, running, write_draft
from tests.draft_trainer.synthetic import head

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: object) -> tuple[int, str]:
    """Exit code and stdout of ``draft-trainer releases ...``."""
    code = main(["releases", *map(str, arguments)])
    return code, capsys.readouterr().out


def as_json(capsys: Capture, *arguments: object) -> tuple[int, object]:
    code, text = run(capsys, *arguments, "--json")
    return code, json.loads(text)


def refused(capsys: Capture, *arguments: object) -> str:
    assert main(["releases", *map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A registry without a trainer: an initial draft and two more, one of them gated."""
    root = tmp_path / "registry"
    registry = Registry(root)
    registry.import_initial(write_draft(tmp_path / "initial"))
    gate = release_pb2.GateFigures(
        candidate_acceptance_length=2.5,
        incumbent_acceptance_length=2.25,
        difference=0.25,
        difference_half_width=0.125,
        confidence=0.95,
        prompts=12,
        anchors=345,
        passed=True,
        draft_sample_method="probabilistic",
        num_speculative_tokens=3,
        by_position=[
            release_pb2.SpanFigures(
                first_position=1024,
                candidate_acceptance_length=2.125,
                incumbent_acceptance_length=2.0,
            )
        ],
    )
    against = "trained_against_policy_version"
    create(registry, 0, parent_version=0, **{against: 7}, gate=gate, num_speculative_tokens=3)
    create(registry, 2, parent_version=1, **{against: 8})
    return root


def test_list_and_show_offline(folder: Path, capsys: Capture) -> None:
    promote_offline(Registry(folder), 0, pin=False)
    promote_offline(Registry(folder), 1, pin=False)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, listed = as_json(capsys, "list", "--registry", folder)
    assert code == 0 and isinstance(listed, list)
    assert [one["draft_version"] for one in listed] == ["0", "1", "2"]
    assert listed[0]["use"]["kept_as"] == ["previous", "initial"]
    assert listed[1]["use"]["kept_as"] == ["promoted", "served"]
    assert listed[2]["use"]["kept_as"] == ["parent", "newest"]
    code, text = run(capsys, "list", "--registry", folder)
    rows = [line.split() for line in text.splitlines()]
    assert rows[0] == ["draft", "source", "parent", "policy", "length", "gain", "MiB", "kept", "as"]
    assert rows[1][:7] == ["0", "initial", "-", "-", "-", "not", "gated"]
    assert rows[2][:8] == ["1", "trained", "0", "7", "2.500", "+0.250", "±", "0.125"]
    code, text = run(capsys, "show", 1, "--registry", folder)
    lines = {line[:24].strip(): line[24:].strip() for line in text.splitlines()}
    assert lines["gain"] == "+0.250 ± 0.125 (95%)"
    assert lines["measured on"] == "12 prompts, 345 anchors"
    assert lines["from position 1024"] == "2.125 against 2.000"
    assert lines["TTT depth"] == "3" and lines["source"] == "trained"
    assert "fc.weight" in text and "16 x 48" in text
    assert "expected one of [0, 1, 2]" in refused(capsys, "show", 9, "--registry", folder)
    # Reading leaves no trace, not even a lock.
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_damaged_release_does_not_hide_the_others(folder: Path, capsys: Capture) -> None:
    flip(folder / "release-000001" / "config.json", "1e-05", "1e-06")
    code, text = run(capsys, "list", "--registry", folder)
    assert code == 0 and "DAMAGED" in text and "not the text in the manifest" in text
    code, found = as_json(capsys, "verify", "--registry", folder)
    assert code == 1 and isinstance(found, list)
    assert [bool(one["damage"]) for one in found] == [False, True, False]
    assert run(capsys, "verify", 0, 2, "--registry", folder) == (
        0,
        "draft 0: ok\ndraft 2: ok\n",
    )
    assert "not the text" in refused(capsys, "show", 1, "--registry", folder)
    flip_bit(folder / "release-000002" / "model.safetensors")
    code, text = run(capsys, "verify", 2, "--registry", folder)
    assert code == 1 and "is not the one released" in text


def test_import_tells_what_the_checkpoint_does_not_say(tmp_path: Path, capsys: Capture) -> None:
    theirs = Path(__file__).parent / "checkpoints"
    draft, policy, root = theirs / "specforge_sglang", theirs / "policy", tmp_path / "registry"
    Registry(root).import_initial(draft, policy)
    capsys.readouterr()
    given = ["import", str(draft), "--policy", str(policy), "--registry", str(root)]
    assert main(["releases", *given]) == 0
    unsaid = "eagle_aux_hidden_state_layer_ids = [2, 5, 7]"
    assert f"(add what is right): {unsaid}; norm_before" in capsys.readouterr().err
    assert unsaid in Registry(root).get(1).assumed
    assert unsaid in run(capsys, "show", 1, "--registry", root)[1]


def test_export_and_import_again(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    registry = Registry(folder)
    code, _ = run(capsys, "export", 2, tmp_path / "as-is", "--registry", folder)
    assert code == 0
    assert {p.name for p in (tmp_path / "as-is").iterdir()} == {
        *("config.json", "model.safetensors", "manifest.json", "README.md"),
    }
    # A hub reads the lines between the dashes as YAML.
    _, front, card = (tmp_path / "as-is" / "README.md").read_text().split("---\n")
    assert yaml.safe_load(front)["library_name"] == "vllm" and "# Draft 2 of run" in card
    exported = load_file(tmp_path / "as-is" / "model.safetensors")
    assert all(torch.equal(exported[n], t) for n, t in registry.tensors(2).items())
    code, _ = run(
        capsys, "export", 2, tmp_path / "other", "--layout", "speculators", "--registry", folder
    )
    document = json.loads((tmp_path / "other" / "config.json").read_text())
    assert code == 0 and document["speculators_model_type"] == "eagle3"
    assert not (tmp_path / "other" / "manifest.json").exists()
    line = refused(capsys, "export", 2, tmp_path / "other", "--registry", folder)
    assert "something there" in line
    # Another layout comes back as what it is, written like the registry's other releases.
    code, text = run(capsys, "import", tmp_path / "other", "--registry", folder)
    assert code == 0 and text.startswith("draft 3, not gated and not promoted")
    manifest = registry.get(3)
    assert manifest.source == release_pb2.RELEASE_SOURCE_IMPORTED
    assert manifest.origin == str(tmp_path / "other") and not manifest.HasField("gate")
    assert list(manifest.tensors) == list(registry.get(2).tensors)
    assert manifest.config_json == registry.get(2).config_json


def test_import_refuses_what_is_not_this_registrys_draft(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    before = {path.name for path in folder.iterdir()}
    wide = head(0, intermediate_size=40)
    (tmp_path / "wide").mkdir()
    Eagle3().save(tmp_path / "wide", wide)
    line = refused(capsys, "import", tmp_path / "wide", "--registry", folder)
    assert "intermediate_size: found intermediate_size 40, expected intermediate_size 32" in line
    (tmp_path / "other").mkdir()
    ids = torch.arange(8, 24)
    Eagle3().save(tmp_path / "other", Eagle3Head(head(0).config, ids))
    line = refused(capsys, "import", tmp_path / "other", "--registry", folder)
    assert "draft vocabulary" in line
    pickled = write_draft(tmp_path / "pickled")
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    assert "a pickle" in refused(capsys, "import", pickled, "--registry", folder)
    assert "which is no folder" in refused(capsys, "list", "--registry", tmp_path / "nothing")
    assert "without a release" in refused(capsys, "list", "--registry", tmp_path / "wide")
    assert "a running trainer" in refused(
        capsys, "import", tmp_path / "wide", "--gate", "--registry", folder
    )
    assert {path.name for path in folder.iterdir()} == before


def test_a_folder_that_a_trainer_holds(tmp_path: Path, capsys: Capture) -> None:
    """Everything can be read beside the trainer; who would write is told whom to ask."""
    config = make_config(tmp_path)
    with running(config, train=False) as (server, _):
        root = config.draft.registry
        assert run(capsys, "verify", 0, "--registry", root)[0] == 0
        rows = run(capsys, "list", "--registry", root)[1].splitlines()
        assert rows[1].split()[-5:-2] == ["promoted,", "served,", "parent,"]
        assert rows[1].split()[-2:] == ["initial,", "newest"]
        assert as_json(capsys, "verdicts", "--registry", root) == (0, [])
        draft = write_draft(tmp_path / "other", 1)
        line = refused(capsys, "import", draft, "--registry", root)
        assert "held by process" in line and "--address" in line
        # A second trainer does not start on it.
        with pytest.raises(RefusedError, match="held by process"), running(config):
            pass
        at = ("--address", server.address)
        code, text = run(capsys, "import", draft, *at)
        assert code == 0 and text.startswith("draft 1, not gated and not promoted")
        rows = [line.split() for line in run(capsys, "list", *at)[1].splitlines()]
        assert [row[:2] for row in rows[1:]] == [["0", "initial"], ["1", "imported"]]
        assert rows[1][-4:] == ["promoted,", "served,", "parent,", "initial"]
        assert "expected one of [0, 1]" in refused(capsys, "promote", 5, *at)
        assert run(capsys, "verify", *at) == (0, "draft 0: ok\ndraft 1: ok\n")
        code, found = as_json(capsys, "verify", 7, 0, *at)
        assert code == 1 and isinstance(found, list)
        assert [one["damage"][:22] for one in found] == ["draft_version: found 7", ""]
        assert as_json(capsys, "verdicts", *at) == (0, [])
        assert run(capsys, "export", 1, tmp_path / "exported", *at)[0] == 0
        exported = Eagle3().read(tmp_path / "exported").draft()
        wanted = Eagle3().read(draft).draft()
        for name, tensor in wanted.state_dict().items():
            assert torch.equal(exported.state_dict()[name], tensor)
        assert Eagle3().read(tmp_path / "exported").as_stored
        assert "no run" in refused(capsys, "import", draft, "--gate", *at)
        promoted = run(capsys, "promote", 1, *at)
        assert promoted == (0, "the fleet serves draft 1\n")
        assert "no release before 0 that is good" in refused(capsys, "rollback", *at)
    # Promoted or not, training goes on from what was trained here.
    with running(config, train=False) as (_, client):
        assert client.status().newest_release == 0


def test_a_damaged_promoted_release_is_replaced_offline(tmp_path: Path, capsys: Capture) -> None:
    config = make_config(tmp_path)
    with running(config, train=False) as (server, _):
        folder, at = config.draft.registry, ("--address", server.address)
        for seed in (1, 2):
            assert run(capsys, "import", write_draft(tmp_path / f"{seed}", seed), *at)[0] == 0
        weights = folder / "release-000001" / "model.safetensors"
        flip_bit(weights)
        code, text = run(capsys, "verify", *at)
        first, second, third = text.splitlines()
        assert code == 1 and (first, third) == ("draft 0: ok", "draft 2: ok")
        assert "is not the one released" in second
        flip_bit(weights)
    assert run(capsys, "promote", 1, "--registry", folder)[0] == 0
    assert run(capsys, "promote", 2, "--pin", "--registry", folder)[0] == 0
    flip(folder / "release-000002" / "config.json", "1e-05", "1e-06")
    with pytest.raises(RefusedError, match="not the text in the manifest") as caught:
        TrainerServer(config)
    assert f"releases promote N --registry {folder} (or rollback)" in caught.value.next_step
    assert "not the text" in refused(capsys, "promote", 2, "--registry", folder)
    assert "expected one of" in refused(capsys, "promote", 7, "--registry", folder)
    code, text = run(capsys, "rollback", "--registry", folder)
    assert (code, text) == (0, "the fleet serves draft 0\n"), "draft 1 was never tried"
    assert main(["events", "--registry", str(folder), "--newest", "1"]) == 0
    assert "rolled_back_by_hand" in capsys.readouterr().out
    with running(config, train=False) as (server, client):
        assert client.status().promoted_release == 0
        assert "held by process" in refused(capsys, "promote", 1, "--registry", folder)
    assert run(capsys, "promote", 1, "--registry", folder)[0] == 0
    with running(config, train=False) as (_, client):
        status = client.status()
        assert (status.promoted_release, status.served_release) == (1, 1)
        assert (status.trial.draft_version, status.trial.incumbent_version) == (1, 0)
