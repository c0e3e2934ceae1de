"""OCI image layouts: finding the image, checking its blobs, and collapsing its layers into one tree."""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
from pathlib import Path
from typing import TypeVar

import msgspec

from dsec.layers.manifest import Config
from dsec.layers.tar import TarReader, apply_tar
from dsec.layers.tree import TreeWriter
from dsec.layers.unpack import Unpacked, open_regular
from dsec.protocol.errors import ErrorKind, Fault

T = TypeVar("T")

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_JSON = 4 << 20
_MAX_LAYERS = 1024
_MAX_NESTING = 4
_REF_NAME = "org.opencontainers.image.ref.name"
_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}
_INDEX_TYPES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_LAYER = re.compile(
    r"application/vnd\.(oci\.image\.layer\.(nondistributable\.)?v1\.tar(\+gzip|\+zstd)?|docker\.image\.rootfs\.diff\.tar(\.gzip)?)"
)


class Platform(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""


class Descriptor(msgspec.Struct, frozen=True, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    annotations: dict[str, str] | None = None
    platform: Platform | None = None


class Index(msgspec.Struct, frozen=True):
    manifests: list[Descriptor]


class ImageManifest(msgspec.Struct, frozen=True):
    config: Descriptor
    layers: list[Descriptor]


class ImageDefaults(msgspec.Struct, frozen=True, rename="pascal"):
    env: list[str] | None = None
    working_dir: str | None = None
    user: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None


class ImageConfig(msgspec.Struct, frozen=True):
    config: ImageDefaults | None = None
    os: str = "linux"


class Image(msgspec.Struct, frozen=True):
    """One image of a layout: its manifest's digest, its defaults, and its layers, lowest first."""

    digest: str
    config: Config
    layers: tuple[Descriptor, ...]


class Layout:
    """An OCI image layout directory. Everything in it is checked against the digest that names it before it is used."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def image(self, reference: str | None = None) -> Image:
        """The image tagged `reference` (annotation `org.opencontainers.image.ref.name`), or the only one there is.

        Of several platforms, this machine's. Faults INVALID, NOT_FOUND (no such reference), UNSUPPORTED.
        """
        index = self._decode(open_regular(self._root / "index.json"), "index.json", Index)
        chosen = self._choose(index, reference)
        for _ in range(_MAX_NESTING):
            if chosen.media_type not in _INDEX_TYPES:
                return self._read_image(chosen)
            chosen = self._of_platform(self._decode(self._blob(chosen), "image index", Index))
        raise _invalid(self._root, "nests image indexes too deeply")

    def apply(self, image: Image, writer: TreeWriter, *, skip: int = 0) -> None:
        """Unpack the image's layers, without the lowest `skip`, one over the other."""
        for descriptor in image.layers[skip:]:
            if _LAYER.fullmatch(descriptor.media_type) is None:
                raise Fault(
                    ErrorKind.UNSUPPORTED,
                    f"a layer of {self._root} has the media type {descriptor.media_type!r}",
                    hint="convert the image to plain, gzip or zstd tar layers (skopeo copy --dest-compress-format=gzip)",
                )
            what = f"the layer {descriptor.digest}"
            writer.next_layer()
            with self._blob(descriptor) as file:
                apply_tar(TarReader(Unpacked(file, what), what, whole=True), writer, whiteouts=True)

    def _choose(self, index: Index, reference: str | None) -> Descriptor:
        names = [(entry.annotations or {}).get(_REF_NAME, "") for entry in index.manifests]
        if reference is None:
            if len(index.manifests) == 1:
                return index.manifests[0]
            if index.manifests and not any(names):
                return self._of_platform(index)
        for name, entry in zip(names, index.manifests, strict=True):
            if reference is not None and reference in (name, name.rpartition(":")[2], entry.digest):
                return entry
        known = ", ".join(name for name in names if name) or "none has a name"
        raise Fault(
            ErrorKind.NOT_FOUND if reference else ErrorKind.INVALID,
            f"{self._root} has no image {reference!r}" if reference else f"{self._root} holds {len(names)} images",
            hint=f"say which by its reference name: {known}",
        )

    def _of_platform(self, index: Index) -> Descriptor:
        wanted = _ARCHITECTURE.get(platform.machine(), platform.machine())
        for entry in index.manifests:
            if entry.platform is None or (entry.platform.os, entry.platform.architecture) == ("linux", wanted):
                return entry
        raise Fault(
            ErrorKind.UNSUPPORTED, f"{self._root} has no image for linux/{wanted}", hint="pull it for this platform"
        )

    def _read_image(self, descriptor: Descriptor) -> Image:
        manifest = self._decode(self._blob(descriptor), "image manifest", ImageManifest)
        if not 0 < len(manifest.layers) <= _MAX_LAYERS:
            raise _invalid(self._root, f"has an image of {len(manifest.layers)} layers")
        config = self._decode(self._blob(manifest.config), "image config", ImageConfig)
        if config.os != "linux":
            raise Fault(
                ErrorKind.UNSUPPORTED, f"the image in {self._root} is for {config.os}", hint="use a Linux image"
            )
        return Image(descriptor.digest, _defaults(config.config or ImageDefaults()), tuple(manifest.layers))

    def _blob(self, descriptor: Descriptor) -> io.FileIO:
        """A blob, opened, after comparing its size and digest."""
        if _DIGEST.fullmatch(descriptor.digest) is None:
            raise _invalid(self._root, f"names a blob by {descriptor.digest[:100]!r}, which is no sha256 digest")
        file = open_regular(self._root / "blobs" / "sha256" / descriptor.digest.removeprefix("sha256:"))
        size = os.fstat(file.fileno()).st_size
        if size != descriptor.size or _sha256(file) != descriptor.digest:
            file.close()
            raise _invalid(self._root, f"has a damaged blob {descriptor.digest} ({size} bytes of {descriptor.size})")
        return file

    def _decode(self, file: io.FileIO, what: str, kind: type[T]) -> T:
        """Parse a JSON file and close it."""
        with file:
            text = file.read(_MAX_JSON + 1)
        if len(text) > _MAX_JSON:
            raise _invalid(self._root, f"has an {what} of more than {_MAX_JSON} bytes")
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError as error:
            raise _invalid(self._root, f"has a malformed {what}: {error}") from None


def _sha256(file: io.FileIO) -> str:
    digest = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0)
    return digest


def _defaults(found: ImageDefaults) -> Config:
    pairs = (entry.partition("=") for entry in found.env or [])
    return Config(
        env={name: value for name, _, value in pairs if name},
        workdir=found.working_dir or None,
        user=found.user or None,
        entrypoint=tuple(found.entrypoint or ()),
        cmd=tuple(found.cmd or ()),
    )


def _invalid(root: Path, why: str) -> Fault:
    return Fault(
        ErrorKind.INVALID,
        f"the OCI layout {root} {why}",
        hint="copy the image again, for example with skopeo copy docker-daemon:NAME oci:DIRECTORY",
    )
