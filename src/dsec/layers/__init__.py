"""Layers: immutable, content-addressed pieces of a root filesystem, and how environments are composed of them (report, 4)."""

from dsec.layers.build import build_directory, build_oci_layout, build_tar
from dsec.layers.compose import DEFAULT_BASE, Environment, compose
from dsec.layers.debian import build_debian
from dsec.layers.manifest import Blob, Config, Kind, Manifest, Provenance
from dsec.layers.mount import mount_layer
from dsec.layers.names import Ref, parse_ref
from dsec.layers.scan import Bounds
from dsec.layers.sdk import build_sdk
from dsec.layers.store import Collected, LayerStore, default_root

__all__ = [
    "Blob",
    "Bounds",
    "Collected",
    "Config",
    "DEFAULT_BASE",
    "Environment",
    "Kind",
    "LayerStore",
    "Manifest",
    "Provenance",
    "Ref",
    "build_debian",
    "build_directory",
    "build_oci_layout",
    "build_sdk",
    "build_tar",
    "compose",
    "default_root",
    "mount_layer",
    "parse_ref",
]
