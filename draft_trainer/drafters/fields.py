"""Refuses fields of a config.json that ask for what a draft mechanism does not represent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from slipstream.errors import RefusedError


@dataclass(frozen=True)
class Refuse:
    """Raises RefusedError for a field of one kind of file.

    Attributes:
        file: the file in words; a field's name follows it.
        next_step: of a refusal that names no other.
    """

    file: str
    next_step: str

    def __call__(
        self, name: str, found: object, expected: object, next_step: str | None = None
    ) -> NoReturn:
        """Refuse a field."""
        field = f"{self.file} {name}"
        raise RefusedError(field, found, expected, next_step or self.next_step)

    def other_values(
        self,
        config: Mapping[str, Any],
        allowed: Mapping[str, tuple[Any, ...]],
        prefix: str = "",
    ) -> None:
        """Refuse the first field that has none of its allowed values; an absent one has None.

        Args:
            config: the file, or an object in it.
            allowed: values by field; a refusal names the first.
            prefix: what leads to ``config`` in the file.
        """
        for name, values in allowed.items():
            if config.get(name) not in values:
                self(f"{prefix}{name}", config.get(name), values[0])
