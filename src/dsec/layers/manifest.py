"""The manifest: what a layer is. Its canonical JSON is hashed with sha256, and that digest is the layer's identity.

Blobs are named by blake3 (`blake3:<hex>`), which hashes gigabytes in a second; manifests by sha256, as users know it.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Literal

import msgspec

from dsec.protocol.specs import LayerRef

Kind = Literal["base", "workspace", "toolkit"]


class Blob(msgspec.Struct, frozen=True):
    """A file of the store: `blake3:<hex>` of its bytes, and its size in bytes."""

    digest: str
    size: int


class Config(msgspec.Struct, frozen=True, omit_defaults=True):
    """Defaults that a layer brings to the sandboxes made from it; see `compose` for how layers' defaults are merged.

    entrypoint and cmd are kept from OCI images for information: a sandbox runs what its user asks.
    """

    env: dict[str, str] = {}
    workdir: str | None = None
    user: str | None = None
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()


class Provenance(msgspec.Struct, frozen=True):
    """Where the content came from. digest names the source exactly where it has a name (`sha256:...`), else is empty."""

    source: Literal["directory", "tar", "oci", "debian"]
    digest: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """entries counts files, directories and the rest; uncompressed_size is the sum of the files' sizes in bytes.

    created (Unix seconds) is when this store published it. It is no part of the canonical form: the same input built
    twice, or on two nodes, has one digest.
    """

    name: str
    version: str
    kind: Kind
    meta: Blob
    data: tuple[Blob, ...]
    config: Config = Config()
    labels: dict[str, str] = {}
    provenance: Provenance
    entries: int
    uncompressed_size: int
    format: Literal["erofs-1"] = "erofs-1"
    created: float = 0.0

    def canonical(self) -> bytes:
        """JSON with sorted keys and without `created`: the bytes that are stored and hashed."""
        fields = {field: getattr(self, field) for field in self.__struct_fields__ if field != "created"}
        return msgspec.json.encode(fields, order="sorted")

    @cached_property
    def digest(self) -> str:
        return "sha256:" + hashlib.sha256(self.canonical()).hexdigest()

    @property
    def size(self) -> int:
        """Bytes that the layer takes in a store."""
        return self.meta.size + sum(blob.size for blob in self.data)

    def blobs(self) -> tuple[Blob, ...]:
        return (self.meta, *self.data)

    def ref(self) -> LayerRef:
        return LayerRef(name=self.name, version=self.version, digest=self.digest, kind=self.kind, size=self.size)

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


def decode_manifest(data: bytes, created: float) -> Manifest:
    """The reverse of `canonical`; msgspec.ValidationError (or DecodeError) when the bytes are no manifest."""
    return msgspec.structs.replace(msgspec.json.decode(data, type=Manifest), created=created)
