"""Reads the TOML file of ``draft-trainer serve --config FILE`` and checks every key at start-up.

Relative paths are relative to the file's folder.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from draft_trainer.config import Section, TrainerConfig
from slipstream.errors import RefusedError
from slipstream.hub import local_folder

M = TypeVar("M", bound=Section)

_PAIR = re.compile(r"\\u(?:d[89ab]..)\\u(?:d[c-f]..)")
"""A character beyond the first 65,536 as JSON escapes it; TOML allows no surrogates."""

REMOVED = {
    "training.rank_timeout_s": "remove it: the trainer is one process; train a larger draft on a "
    "larger GPU",
    "canary": "rename it to [trial]; leave share out: a release is tried on the whole fleet",
    "recording": "remove it: draft-trainer warmup makes a draft, and records nothing",
    "publish.quorum": "remove it: a server that is late or gone is left out and caught up, and one "
    "that refuses a release keeps it from all",
    "publish.straggler_s": "remove it: publish.stage_timeout_s and publish.commit_timeout_s bound "
    "the time of one server",
}
"""Keys and sections that earlier editions had, and what to do instead."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainerConfig:
    """Read and check a configuration file; its paths become absolute.

    ``draft.initial`` and ``draft.policy`` may be names of models on the hub: they are fetched.

    Args:
        path: the file.
        overrides: ``section.key=value`` each, over the file's; the value as in TOML, text also
            without quotes.

    Raises:
        RefusedError: no such file, not TOML, or a key that is unknown, missing, of the wrong type
            or out of range; ``field`` is the dotted key.
    """
    raw, folder = read_toml(path), path.resolve().parent
    for text in overrides:
        _override(raw, text)
    draft = raw.get("draft")
    for key in ("initial", "policy"):
        if isinstance(draft, dict) and isinstance(named := draft.get(key), str):
            draft[key] = str(local_folder(named, f"draft.{key}", folder))
    return validated(TrainerConfig, raw, folder)


def _override(raw: dict[str, object], text: str) -> None:
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    held = raw.setdefault(section, {})
    if not equals or not dot or not name or not isinstance(held, dict):
        next_step = "write it as in --set training.learning_rate=3e-4"
        raise RefusedError("--set", repr(text), "section.key=value", next_step)
    try:
        held[name] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        held[name] = value.strip()


def changed_keys(config: TrainerConfig) -> list[tuple[str, object]]:
    """Return the dotted keys that were set, with their values."""
    return [
        (f"{section}.{key}", getattr(part, key))
        for section, part in config
        for key in sorted(part.model_fields_set)
    ]


def shown(config: TrainerConfig) -> str:
    """Return the whole configuration as TOML; a key without a value is a comment."""
    lines = []
    for section, part in config:
        lines.append(f"[{section}]")
        for key, value in part:
            if value is None:
                lines.append(f"# {key}: not set")
            else:
                lines.append(f"{key} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: object) -> str:
    """Return a value as TOML, whose strings, numbers and lists are JSON's but for surrogates."""
    if isinstance(value, tuple):
        value = [str(one) for one in value]
    text = json.dumps(value if isinstance(value, list | int | float) else str(value))
    return _PAIR.sub(lambda pair: rf"\U{ord(json.loads(chr(34) + pair[0] + chr(34))):08x}", text)


def read_toml(path: Path) -> dict[str, object]:
    """Parse a configuration file. Raises RefusedError: no such file, or not TOML."""
    try:
        # A byte order mark is not TOML, but editors on Windows write one.
        with open(path, encoding="utf-8-sig", opener=_without_waiting) as file:
            return tomllib.loads(file.read())
    except OSError as error:
        raise RefusedError(
            "--config", f"{path} ({error.strerror})", "a readable TOML file", "check the path"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RefusedError(
            "--config", f"{path}: {error}", "valid TOML in UTF-8", "correct that line"
        ) from error


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without blocking: a pipe that has no writer is empty."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def parse_config(raw: Mapping[str, object]) -> TrainerConfig:
    """Check a parsed file. Raises RefusedError naming the first wrong key and all others."""
    return validated(TrainerConfig, raw)


def validated(model: type[M], raw: Mapping[str, object], folder: Path | None = None) -> M:
    """Validate ``raw`` as a ``model``; paths are relative to ``folder`` if one is given.

    Raises:
        RefusedError: naming the first wrong key, and the others in its next step.
    """
    try:
        return model.model_validate(raw, context=folder)
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_context=True)
        key, found, expected, next_step = _problem(model, first)
        if others:
            told = []
            for other in others:
                unknown = other["type"] == "extra_forbidden"
                told.append(("unknown key: " if unknown else "also wrong: ") + _key(other))
                if _key(other) in REMOVED:
                    told[-1] = f"removed key: {_key(other)}, {REMOVED[_key(other)]}"
            next_step += f" ({', '.join(told)})"
        raise RefusedError(key, found, expected, next_step) from None


def _key(detail: ErrorDetails) -> str:
    return ".".join(str(part) for part in detail["loc"])


def _problem(model: type[BaseModel], detail: ErrorDetails) -> tuple[str, str, str, str]:
    """Return field, found, expected and next step of the refusal."""
    key = _key(detail)
    if detail["type"] == "missing":
        kind = "a [section]" if len(detail["loc"]) == 1 else "a value"
        return key, "nothing", f"{kind} for this required key", f"add {key}"
    if detail["type"] == "extra_forbidden":
        known = _known_keys(model, detail)
        if key in REMOVED:
            return key, "a key that was removed", f"one of {known}", REMOVED[key]
        near = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
        return (
            key,
            "an unknown key",
            f"one of {known}",
            (f"rename it to {near[0]}" if near else "remove it"),
        )
    expected = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return key, repr(detail["input"]), _TYPES.get(detail["type"], expected), f"fix {key}"


_TYPES = {
    "tuple_type": 'a list, as in ["a", "b"]',
    "model_type": "a [section] with keys",
    "string_type": 'text in quotes, as in "a"',
    "path_type": 'a path in quotes, as in "folder/file"',
    "int_type": "an integer, without quotes",
    "float_type": "a number, without quotes",
    "bool_type": "true or false, without quotes",
}
"""The TOML that pydantic's types expect."""


def _known_keys(model: type[BaseModel], detail: ErrorDetails) -> list[str]:
    for part in detail["loc"][:-1]:
        annotation = model.model_fields[str(part)].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return sorted(model.model_fields)
