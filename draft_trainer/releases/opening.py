"""How a trainer opens its registry: held against others, cleaned, with the initial draft in it."""

from __future__ import annotations

from draft_trainer.config import DraftConfig
from draft_trainer.releases.registry import Registry
from slipstream.refusal import RefusedError
from slipstream.v1 import release_pb2


def open_registry(draft: DraftConfig) -> Registry:
    """The registry, held against other writers, with the initial draft as release 0.

    Raises:
        RefusedError: the folder cannot be written, is another process's, or was started from
            another draft.
    """
    try:
        registry = Registry(draft.registry)
        registry.hold()
        try:
            registry.remove_leftovers()
            registry.import_initial(draft.initial, draft.policy)
        except BaseException:
            registry.close()
            raise
    except OSError as error:
        raise RefusedError(
            "draft.registry",
            f"{error.filename or draft.registry} ({error.strerror})",
            "a folder that can be made and written",
            "check its owner, its mode and the free space, or set another draft.registry",
        ) from error
    return registry


def newest_own(registry: Registry) -> release_pb2.ReleaseManifest:
    """The newest release that was trained here, or release 0: what training goes on from.

    Never an imported one: the training state and the optimizer's moments are of these.

    Raises:
        RefusedError: it, or one that is newer, is damaged.
    """
    manifests = (registry.get(version) for version in reversed(registry.versions()))
    imported = release_pb2.RELEASE_SOURCE_IMPORTED
    return next(manifest for manifest in manifests if manifest.source != imported)
