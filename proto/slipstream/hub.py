"""Resolves names on the Hugging Face hub, and reads JSON files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from slipstream.errors import RefusedError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def local_folder(name: str | Path, field: str, base: Path | None = None) -> Path:
    """The folder that ``name`` means: itself, or a snapshot of the hub's ORG/NAME[@REVISION].

    Args:
        name: a folder, which wins where it exists, or a name on the hub.
        field: named in a refusal.
        base: the folder that a relative path starts from; the working directory if None.

    Raises:
        RefusedError: it looks like a name on the hub, and cannot be fetched.
    """
    path = Path(name) if base is None else base / name
    text = str(name)
    if path.exists() or not _ID.fullmatch(text):
        return path
    found = f"{text}: no such folder here"
    expected = "a folder, or the name of a model on the hub"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError as error:
        next_step = "correct the path, or pip install huggingface-hub to name a model of the hub"
        raise RefusedError(field, found, expected, next_step) from error
    repository, _, revision = text.partition("@")
    try:
        snapshot = snapshot_download(repository, revision=revision or None, allow_patterns=_FILES)
    except (HFValidationError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RefusedError(
            field,
            f"{found}, and the hub did not give it ({first})",
            expected,
            "correct the path; or download it where there is a network (hf download "
            f"{repository}), and give that folder",
        ) from error
    return Path(snapshot)


def check_folder(directory: Path) -> None:
    """Raise RefusedError unless a checkpoint's folder is there."""
    if not directory.is_dir():
        next_step = "correct the path (in trainer.toml, it is relative to that file)"
        raise RefusedError(str(directory), "no such folder", "a checkpoint's folder", next_step)


def read_json(path: Path, next_step: str, expected: str = "a JSON object") -> dict[str, Any]:
    """Read the object in a JSON file such as config.json. Raises RefusedError: there is none."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        check_folder(path.parent)
        found = getattr(error, "strerror", None) or str(error)
        raise RefusedError(str(path), found, expected, next_step) from error
    if not isinstance(document, dict):
        raise RefusedError(str(path), type(document).__name__, expected, next_step)
    return document
