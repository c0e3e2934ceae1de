"""`dsec layer`: the layers of this machine's store. Works without a running platform."""

from __future__ import annotations

import sys
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import options
from dsec.cli.failure import usage
from dsec.cli.output import age, megabytes, note, print_facts, print_json, print_table

if TYPE_CHECKING:
    from dsec.layers import LayerStore, Manifest
    from dsec.protocol.specs import LayerRef

app = typer.Typer(
    help="List, build and remove layers of environments.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Layer = Annotated[str, typer.Argument(metavar="LAYER", help="name@version or name@sha256:...", show_default=False)]


class Kind(str, Enum):
    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"


def _store() -> LayerStore:
    from dsec.layers import LayerStore

    return LayerStore()


@app.command("ls")
def list_(json: options.Json = False) -> None:
    """List the layers.

    \b
    dsec layer ls
    dsec layer ls --json | jq -r '.[] | "\\(.name)@\\(.version) \\(.size)"'
    """
    found = _store().list()
    if json:
        print_json(found)
        return
    rows = [(str(ref), ref.kind, megabytes(ref.size) if ref.size >= 0 else "damaged", ref.digest[:19]) for ref in found]
    print_table(
        ("layer", "kind", "size", "digest"), rows, empty="no layers; build the first with: dsec layer build debian"
    )


@app.command()
def build(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME@VERSION|debian", help="The new layer, or the recipe `debian`.", show_default=False
        ),
    ],
    from_dir: Annotated[Path | None, typer.Option(metavar="PATH", help="A directory that becomes /.")] = None,
    from_tar: Annotated[Path | None, typer.Option(metavar="PATH", help="A tar archive, compressed or not.")] = None,
    from_oci: Annotated[
        str | None, typer.Option(metavar="PATH[:REF]", help="An OCI image layout (directory or archive).")
    ] = None,
    kind: Annotated[Kind, typer.Option(help="Where it may stand in an environment.")] = Kind.BASE,
    cut_history: Annotated[
        bool, typer.Option("--cut-history", help="Git repositories of --from-dir keep what HEAD reaches, nothing else.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is published under this version.")] = False,
    json: options.Json = False,
) -> None:
    """Build and publish a layer. `debian` builds debian@12, with Python 3, bash, git and the usual tools.

    \b
    dsec layer build debian
    dsec layer build --from-dir ./harness --kind toolkit harness@1
    dsec layer build --from-tar rootfs.tar.zst --kind base alpine@3.20
    dsec layer build --from-oci ./image:latest --kind base app@2024-11
    """
    sources = [source for source in (from_dir, from_tar, from_oci) if source is not None]
    if len(sources) > 1:
        raise usage("give one of --from-dir, --from-tar and --from-oci")
    if not sources and name != "debian":
        raise usage(
            f"what shall {name!r} be built from?",
            hint="give --from-dir, --from-tar or --from-oci, or name the recipe debian",
        )
    if cut_history and from_dir is None:
        raise usage("--cut-history goes with --from-dir", hint="unpack the archive and build from the directory")
    started = time.monotonic()
    ref = _debian(force) if not sources else _from(name, from_dir, from_tar, from_oci, kind, force, cut_history)
    if json:
        print_json(ref)
    else:
        print(f"{ref}  {ref.kind}  {megabytes(ref.size)}  {ref.digest}")
        note(f"built in {time.monotonic() - started:.1f} s")


def _from(
    name: str, directory: Path | None, tar: Path | None, oci: str | None, kind: Kind, force: bool, cut_history: bool
) -> LayerRef:
    from dsec import layers

    label, at, version = name.partition("@")
    if not at or not version:
        raise usage(f"{name!r} is not NAME@VERSION", hint=f"for example: {label or 'tools'}@1")
    store = _store()
    if directory is not None:
        return layers.build_directory(
            store, directory, name=label, version=version, kind=kind.value, cut_history=cut_history, force=force
        )
    if tar is not None:
        return layers.build_tar(store, tar, name=label, version=version, kind=kind.value, force=force)
    assert oci is not None
    path, _, reference = oci.partition(":")
    return layers.build_oci_layout(
        store, Path(path), reference or None, name=label, version=version, kind=kind.value, force=force
    )


def _debian(force: bool) -> LayerRef:
    """With a bar on a terminal, else one line a stage; both on stderr."""
    from dsec.layers import build_debian

    if not sys.stderr.isatty():
        last = ""

        def say(stage: str, done: float) -> None:
            nonlocal last
            if stage != last:
                note(f"debian@12: {stage}")
                last = stage

        return build_debian(_store(), force=force, progress=say)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("debian@12"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        return build_debian(
            _store(), force=force, progress=lambda stage, done: bar.update(task, completed=done, description=stage)
        )


@app.command()
def sdk(json: options.Json = False) -> None:
    """Build the toolkit dsec-sdk: this installation's SDK, for programs inside sandboxes that drive others.

    \b
    dsec layer sdk
    dsec run --layer dsec-sdk@0.1.0 --network dsec -- python3 -c 'import dsec'
    """
    from dsec.layers import build_sdk

    ref = build_sdk(_store())
    if json:
        print_json(ref)
    else:
        print(f"{ref}  {ref.kind}  {megabytes(ref.size)}  {ref.digest}")


@app.command()
def inspect(layer: Layer, json: options.Json = False) -> None:
    """Show what a layer is made of.

    \b
    dsec layer inspect debian@12
    """
    manifest = _store().resolve(layer)
    if json:
        print_json({"digest": manifest.digest, **_fields(manifest)})
        return
    facts = [
        ("layer", str(manifest)),
        ("kind", manifest.kind),
        ("digest", manifest.digest),
        ("source", manifest.provenance.source),
        (
            "created",
            f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(manifest.created))} ({age(manifest.created)} ago)",
        ),
        ("entries", f"{manifest.entries:,}"),
        ("size", f"{megabytes(manifest.size)} stored, {megabytes(manifest.uncompressed_size)} of files"),
        ("metadata", f"{manifest.meta.digest}  {megabytes(manifest.meta.size)}"),
        *(("data", f"{blob.digest}  {megabytes(blob.size)}") for blob in manifest.data),
        *(("env", f"{name}={value}") for name, value in manifest.config.env.items()),
        *(("label", f"{name}={value}") for name, value in sorted(manifest.labels.items())),
    ]
    print_facts(facts)


def _fields(manifest: Manifest) -> dict[str, object]:
    return {name: getattr(manifest, name) for name in manifest.__struct_fields__}


@app.command("rm")
def remove(
    layers: Annotated[list[str], typer.Argument(metavar="LAYER...", show_default=False)],
    json: options.Json = False,
) -> None:
    """Remove names of layers. Blobs go when nothing names them and no sandbox runs on them.

    \b
    dsec layer rm harness@1 harness@2
    """
    store = _store()
    removed = [store.remove(layer) for layer in layers]
    if json:
        print_json(removed)
    else:
        for ref in removed:
            print(f"removed {ref}")


@app.command()
def tag(layer: Layer, name: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", show_default=False)]) -> None:
    """Give a layer another name.

    \b
    dsec layer tag harness@7 harness@stable
    """
    print(_store().tag(layer, name))


@app.command()
def verify(layer: Layer, json: options.Json = False) -> None:
    """Read every byte of a layer and compare with its digests.

    \b
    dsec layer verify debian@12
    """
    manifest = _store().verify(layer)
    if json:
        print_json({"layer": str(manifest), "digest": manifest.digest, "size": manifest.size, "whole": True})
    else:
        print(f"{manifest} is whole: {megabytes(manifest.size)} in {len(manifest.blobs())} blobs")
