"""The interface of a draft mechanism to the rest of the rollout server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rollout_server.control.draft_folder import read_config
from slipstream.checkpoints import read_layout, text_config, without_code
from slipstream.errors import RefusedError


class Served(ABC):
    """One mechanism as vLLM serves it.

    Attributes:
        name: ``--draft-kind``; vLLM's ``method`` as a rule.
        follows_policy: modules of the draft that are the verifier's own: they follow policy pushes,
            so no stage of a draft may bring their weights.
        names: prefixes of the draft's tensors in a policy's checkpoint; empty if a policy's
            checkpoint has none.
        runner_v2: vLLM serves it on Model Runner V2 alone.
    """

    name: ClassVar[str]
    follows_policy: ClassVar[tuple[str, ...]] = ()
    names: ClassVar[tuple[str, ...]] = ()
    runner_v2: ClassVar[bool] = False

    def has(self, name: str, config: Config) -> bool:
        """Return whether a tensor of a checkpoint with this config.json is the draft's."""
        return name.startswith(self.names)

    @abstractmethod
    def check(self, model_dir: Path, draft_dir: Path) -> None:
        """Refuse a draft that cannot propose for this model.

        Raises:
            RefusedError: a directory or file is missing, or sizes or tensors do not fit.
        """

    def speculative_config(
        self, draft_dir: Path | None, draft_length: int, sample_method: str
    ) -> dict[str, Any] | None:
        """vLLM's ``speculative_config``; None: no speculation."""
        return {
            "method": self.name,
            "model": str(draft_dir),
            "num_speculative_tokens": draft_length,
            "draft_sample_method": sample_method,
        }


Config = Mapping[str, Any]


def check_sizes(
    model_dir: Path, draft_dir: Path, names: Sequence[str], next_step: str
) -> tuple[Config, Config]:
    """Return the language models' configurations of a policy and a draft that agree in ``names``.

    Raises:
        RefusedError: a directory or file is missing or damaged, or they differ.
    """
    model, draft = (
        text_config(without_code(read_config(folder, option)))
        for folder, option in ((model_dir, "MODEL"), (draft_dir, "--draft"))
    )
    read_layout(model_dir)
    # The speculators library nests the sizes.
    draft = draft.get("transformer_layer_config") or draft
    for name in names:
        if draft.get(name) is None or draft.get(name) != model.get(name):
            field, expected = f"{draft_dir / 'config.json'}: {name}", f"{model.get(name)}"
            raise RefusedError(field, draft.get(name), f"{expected} (the model's)", next_step)
    return model, draft


def check_path(draft_dir: Path) -> None:
    """Refuse a path by which vLLM would take the draft for another mechanism's.

    Unless the method is an EAGLE's or a block draft's, vLLM 0.32 first looks for these words in the
    draft's path, whatever method was given (``SpeculativeConfig.__post_init__``).

    Raises:
        RefusedError: naming the word.
    """
    for word in ("eagle-", "eagle3", "dflash", "dspark"):
        if word in str(draft_dir).lower():
            raise RefusedError(
                f"--draft {draft_dir}",
                f"{word} in its path",
                "a path without it: vLLM would take the draft for one of that mechanism",
                "rename the folder, or give a symbolic link to it",
            )


class WithoutWeights(Served):
    """A mechanism of vLLM's own rules, or none: nothing is trained, staged or swapped."""

    def __init__(self, name: str, settings: dict[str, Any] | None) -> None:
        self.name = name  # type: ignore[misc]
        self._settings = settings

    def check(self, model_dir: Path, draft_dir: Path) -> None:
        """Raise RefusedError: no draft could fit."""
        raise RefusedError(
            "--draft",
            str(draft_dir),
            f"none with --draft-kind {self.name}",
            "leave one of them out",
        )

    def speculative_config(
        self, draft_dir: Path | None, draft_length: int, sample_method: str
    ) -> dict[str, Any] | None:
        """See ``Served.speculative_config``."""
        if self._settings is None:
            return None
        return {
            "method": self.name,
            "num_speculative_tokens": draft_length,
            **self._settings,
        }
