"""Building layers: stage a tree, make its image, publish it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

from dsec.layers import history
from dsec.layers.copy import copy_tree
from dsec.layers.erofs import make_image, read_superblock
from dsec.layers.manifest import Config, Kind, Provenance
from dsec.layers.names import check_name, check_version
from dsec.layers.oci import Layout
from dsec.layers.scan import Bounds, Survey, survey
from dsec.layers.store import LayerStore, no_space
from dsec.layers.tar import TarReader, apply_tar
from dsec.layers.tree import Name, TreeWriter, parse_name
from dsec.layers.unpack import Hashing, Source, Unpacked, open_regular
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import LayerRef

# mkfs.erofs 1.5 does not look at the result of its last flush (a stdio buffer): on a disk with less than this left, its
# success proves nothing.
_SPARE = 256 * 1024
_NONE: Mapping[str, str] = MappingProxyType({})
_NO_CONFIG = Config()
_BOUNDS = Bounds()


def build_directory(
    store: LayerStore,
    path: Path,
    *,
    name: str,
    version: str,
    kind: Kind,
    config: Config = _NO_CONFIG,
    labels: Mapping[str, str] = _NONE,
    prefix: str = "/",
    owner: tuple[int, int] | None = None,
    upper: bool = False,
    cut_history: bool = False,
    bounds: Bounds = _BOUNDS,
    force: bool = False,
) -> LayerRef:
    """Publish the tree below `path` as layer `name@version`; it appears at `prefix` in sandboxes.

    Owners, modes, times, attributes, hard links, devices and holes are kept; `owner` (uid, gid) overrides the owners.
    The directories above the prefix are made with mode 0755 and root as owner, and hide those of layers below in that.
    upper: the tree is the upper directory of an overlay, whose whiteouts and opaque directories hide things; otherwise the
    overlay attributes of the tree mean nothing and are left out. cut_history: git repositories in the layer hold what their HEAD
    reaches and not one object more (`layers/history.py`); the tree itself stays as it is.
    Faults: INVALID, TOO_LARGE (bounds), NO_SPACE, CONFLICT (the version is there with other content, and not `force`).
    """
    check_name(name)
    check_version(version)
    where = _prefix(prefix)
    path = path.resolve()  # the top may be a link; nothing below it is followed
    found = survey(path, bounds)
    with store.staging() as stage:
        tree = path
        if where or cut_history or not found.as_is:
            tree = _new_tree(stage)
            with TreeWriter(tree, prefix=where, bounds=bounds, keep_whiteouts=upper) as writer:
                copy_tree(os.fsencode(path), writer, upper=upper)
                writer.finish()
            for work in history.repositories(tree) if cut_history else ():
                history.cut(work)
            found = survey(tree, bounds)
        return publish_tree(
            store,
            stage,
            tree,
            found,
            name=name,
            version=version,
            kind=kind,
            config=config,
            labels=labels,
            provenance=Provenance("directory"),
            owner=owner,
            force=force,
        )


def build_tar(
    store: LayerStore,
    source: Path | Source,
    *,
    name: str,
    version: str,
    kind: Kind,
    config: Config = _NO_CONFIG,
    labels: Mapping[str, str] = _NONE,
    prefix: str = "/",
    owner: tuple[int, int] | None = None,
    whiteouts: bool = True,
    bounds: Bounds = _BOUNDS,
    force: bool = False,
) -> LayerRef:
    """Publish the contents of a tar archive (plain, gzip, bzip2, xz or zstd; a path or anything with `read`).

    whiteouts: names `.wh.X` and `.wh..wh..opq` hide X, or what a directory holds, in the layers below. Of several entries
    with one name the last counts. Faults as `build_directory`; INVALID also for archives that are damaged or would
    reach outside their root.
    """
    check_name(name)
    check_version(version)
    where = _prefix(prefix)
    with ExitStack() as stack:
        stream, what = source, "the archive"
        if isinstance(stream, Path):
            what = str(stream)
            stream = stack.enter_context(open_regular(stream))
        hashing = Hashing(stream)
        stage = stack.enter_context(store.staging())
        tree = _new_tree(stage)
        with TreeWriter(tree, prefix=where, bounds=bounds, keep_whiteouts=kind != "base") as writer:
            apply_tar(TarReader(Unpacked(hashing, what), what), writer, whiteouts=whiteouts)
            writer.finish()
        return publish_tree(
            store,
            stage,
            tree,
            survey(tree, bounds),
            name=name,
            version=version,
            kind=kind,
            config=config,
            labels=labels,
            provenance=Provenance("tar", hashing.digest()),
            owner=owner,
            force=force,
        )


def build_oci_layout(
    store: LayerStore,
    path: Path,
    reference: str | None = None,
    *,
    name: str,
    version: str,
    kind: Kind = "base",
    skip_layers: int = 0,
    config: Config | None = None,
    labels: Mapping[str, str] = _NONE,
    bounds: Bounds = _BOUNDS,
    force: bool = False,
) -> LayerRef:
    """Publish an image of an OCI layout (a directory with `index.json`, or a tar of one) as one layer.

    The image's layers are collapsed; its environment, working directory, user and entry point become the layer's config
    unless `config` is given. skip_layers leaves out that many of the lowest, for a workspace or toolkit whose image was
    made from the base it will lie on: removals then hide what the base has. reference chooses among several images.
    """
    check_name(name)
    check_version(version)
    with store.staging() as stage:
        layout = Layout(path if path.is_dir() else _unpack_layout(stage, path, bounds))
        image = layout.image(reference)
        if not 0 <= skip_layers < len(image.layers):
            raise Fault(
                ErrorKind.INVALID,
                f"cannot skip {skip_layers} layers of an image that has {len(image.layers)}",
                hint=f"skip_layers may be 0 to {len(image.layers) - 1}",
            )
        tree = _new_tree(stage)
        with TreeWriter(tree, bounds=bounds, keep_whiteouts=kind != "base") as writer:
            layout.apply(image, writer, skip=skip_layers)
            writer.finish()
        return publish_tree(
            store,
            stage,
            tree,
            survey(tree, bounds),
            name=name,
            version=version,
            kind=kind,
            config=image.config if config is None else config,
            labels=labels,
            provenance=Provenance("oci", image.digest),
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
    labels: Mapping[str, str],
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
            ErrorKind.INTERNAL, f"mkfs.erofs made no image of {tree}", hint="erofs-utils 1.5 or later is needed"
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
        labels=dict(labels),
        provenance=provenance,
        entries=found.entries,
        uncompressed_size=found.size,
        force=force,
    )


def _prefix(prefix: str) -> Name:
    if not prefix.startswith("/"):
        raise Fault(ErrorKind.INVALID, f"the prefix {prefix!r} is not an absolute path", hint="for example /opt/tool")
    return parse_name(os.fsencode(prefix.lstrip("/")))


def _new_tree(stage: Path) -> Path:
    tree = stage / "tree"
    tree.mkdir(mode=0o700)
    return tree


def _unpack_layout(stage: Path, archive: Path, bounds: Bounds) -> Path:
    """The layout directory from an archive of it."""
    directory = stage / "layout"
    directory.mkdir(mode=0o700)
    with open_regular(archive) as file, TreeWriter(directory, bounds=bounds) as writer:
        apply_tar(TarReader(Unpacked(file, str(archive)), str(archive)), writer, whiteouts=False)
    return directory
