"""Composition: from the references a user gives to the ordered layers and the merged defaults of one sandbox (report, 4)."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from dsec.layers.manifest import Config, Manifest
from dsec.layers.store import LayerStore
from dsec.protocol.errors import ErrorKind, Fault

DEFAULT_BASE = "debian@12"  # what a sandbox without `container_image` is made from
MAX_LAYERS = 32  # of one environment; overlay look-ups cost 2 us for each lower directory that lacks a name
# what a variable is when no layer sets it
_IMPLIED = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_RANK = {"base": 0, "workspace": 1, "toolkit": 2}


class Environment(msgspec.Struct, frozen=True):
    """What a sandbox is made from: layers base first, and their merged defaults.

    env, workdir and user are defaults that the sandbox's own arguments override.
    """

    layers: tuple[Manifest, ...]
    env: dict[str, str]
    workdir: str | None
    user: str | None

    def refs(self) -> tuple[str, ...]:
        """`name@sha256:...` of each layer, base first."""
        return tuple(f"{layer.name}@{layer.digest}" for layer in self.layers)

    def digests(self) -> tuple[str, ...]:
        return tuple(layer.digest for layer in self.layers)


def compose(store: LayerStore, container_image: str | None, layers: tuple[str, ...] = ()) -> Environment:
    """Resolve and check an environment: one base, then workspaces, then toolkits, no layer twice.

    Faults: NOT_FOUND (unknown reference), INVALID (order or kinds wrong: says which).
    """
    if len(layers) + 1 > MAX_LAYERS:
        raise Fault(
            ErrorKind.INVALID,
            f"an environment of {len(layers) + 1} layers; at most {MAX_LAYERS} are possible",
            hint="build several of them into one layer",
            limit=MAX_LAYERS,
        )
    base = DEFAULT_BASE if container_image is None else container_image
    chosen = tuple(store.resolve(ref) for ref in (base, *layers))
    _check_order(chosen)
    merged = Config()
    for layer in chosen:
        merged = _over(merged, layer.config)
    return Environment(layers=chosen, env=merged.env, workdir=merged.workdir, user=merged.user)


def _check_order(layers: tuple[Manifest, ...]) -> None:
    order = "the order is: one base (container_image), then workspaces, then toolkits (layers)"
    if layers[0].kind != "base":
        raise Fault(ErrorKind.INVALID, f"container_image {layers[0]} is a {layers[0].kind}, not a base", hint=order)
    seen = {layers[0].digest}
    for below, layer in pairwise(layers):
        if layer.kind == "base":
            raise Fault(ErrorKind.INVALID, f"layer {layer} is a base; only container_image can be one", hint=order)
        if _RANK[layer.kind] < _RANK[below.kind]:
            raise Fault(ErrorKind.INVALID, f"{layer.kind} {layer} comes after {below.kind} {below}", hint=order)
        if layer.digest in seen:
            raise Fault(ErrorKind.INVALID, f"layer {layer} is there twice", hint="name each layer once")
        seen.add(layer.digest)


def _over(below: Config, above: Config) -> Config:
    """Defaults of a stack: the upper layer wins; `${NAME}` in the upper's variable NAME is the lower's value of it, so that a
    toolkit can say PATH=/opt/tool/bin:${PATH}."""
    env = dict(below.env)
    for name, value in above.env.items():
        env[name] = value.replace("${%s}" % name, below.env.get(name, _IMPLIED.get(name, "")))  # noqa: UP031 (braces)
    return Config(env=env, workdir=above.workdir or below.workdir, user=above.user or below.user)
