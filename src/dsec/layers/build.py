"""Building layers from a directory: stage, make the image, publish."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from dsec.layers.erofs import make_image, read_superblock
from dsec.layers.manifest import Config, Kind, Provenance
from dsec.layers.names import check_name, check_version
from dsec.layers.scan import Bounds, Survey, survey
from dsec.layers.store import LayerStore, no_space
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import LayerRef

# mkfs.erofs 1.5 does not look at the result of its last flush (a stdio buffer): on a disk with less than this left, its
# success proves nothing.
_SPARE = 256 * 1024
_NONE: Mapping[str, str] = MappingProxyType({})


def build_directory(
    store: LayerStore,
    path: Path,
    *,
    name: str,
    version: str,
    kind: Kind,
    config: Config = Config(),
    labels: Mapping[str, str] = _NONE,
    owner: tuple[int, int] | None = None,
    bounds: Bounds = Bounds(),
    force: bool = False,
) -> LayerRef:
    """Publish the tree below `path` (which becomes `/`) as layer `name@version`.

    Owners, modes, times, attributes, hard links, devices and holes are kept; `owner` (uid, gid) overrides the owners.
    Faults: INVALID, TOO_LARGE (bounds), NO_SPACE, CONFLICT (the version is there with other content, and not `force`).
    """
    check_name(name)
    check_version(version)
    found = survey(path, bounds)
    with store.staging() as stage:
        return publish_tree(
            store,
            stage,
            path,
            found,
            name=name,
            version=version,
            kind=kind,
            config=config,
            labels=dict(labels),
            provenance=Provenance("directory"),
            owner=owner,
            force=force,
        )


def publish_tree(
    store: LayerStore,
    stage: Path,
    tree: Path,
    found: Survey,
    *,
    name: str,
    version: str,
    kind: Kind,
    config: Config,
    labels: dict[str, str],
    provenance: Provenance,
    owner: tuple[int, int] | None = None,
    force: bool = False,
) -> LayerRef:
    """Make the image of `tree` in `stage` and publish it; `found` is the survey of the tree."""
    meta, data = stage / "meta.erofs", stage / "data.erofs"
    make_image(tree, meta, data, owner=owner)
    superblock = read_superblock(meta)
    if superblock is None:
        raise Fault(
            ErrorKind.INTERNAL, f"mkfs.erofs made no EROFS image of {tree}", hint="erofs-utils 1.5 or later is needed"
        )
    space = os.statvfs(stage)
    if superblock.size > meta.stat().st_size or space.f_bfree * space.f_frsize < _SPARE:
        raise no_space(store.root)
    return store.publish(
        meta,
        [data],
        name=name,
        version=version,
        kind=kind,
        config=config,
        labels=labels,
        provenance=provenance,
        entries=found.entries,
        uncompressed_size=found.size,
        force=force,
    )
