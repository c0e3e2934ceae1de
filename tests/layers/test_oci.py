"""OCI layouts, made by hand here, collapsed into one layer, compared entry by entry."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from dsec.layers import LayerStore, build_oci_layout
from dsec.protocol.errors import ErrorKind, Fault
from tests.layers.conftest import Look, Tiny
from tests.layers.look import Answer

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners and mounts need root")

_LAYER = "application/vnd.oci.image.layer.v1.tar"
_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
Member = tuple[str, str | None, dict[str, object]]


def layer(*members: str | Member) -> bytes:
    """A layer: `path/` is a directory, `path` a file that holds its own name, a tuple gives (name, text, TarInfo fields)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member in members:
            name, text, fields = (member, None, {}) if isinstance(member, str) else member
            info = tarfile.TarInfo(name.rstrip("/"))
            info.mode, info.mtime = 0o644, 1_700_000_000
            if name.endswith("/"):
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            data = b"" if name.endswith("/") or "type" in fields else (text or name).encode()
            info.size = len(data)
            for key, value in fields.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


class LayoutMaker:
    """Writes blobs and JSON of a layout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs" / "sha256").mkdir(parents=True)
        (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, data: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (self.root / "blobs" / "sha256" / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    def image(self, *layers: bytes, config: dict[str, object] | None = None, squeeze: str = "") -> dict[str, object]:
        pack: dict[str, Callable[[bytes], bytes]] = {"": bytes, "+gzip": gzip.compress, "+zstd": zstandard.compress}
        blobs = [self.blob(pack[squeeze](data), _LAYER + squeeze) for data in layers]
        body = {
            "architecture": _ARCHITECTURE,
            "os": "linux",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": []},
        }
        described = self.blob(json.dumps(body).encode(), "application/vnd.oci.image.config.v1+json")
        manifest = {"schemaVersion": 2, "config": described, "layers": blobs}
        return self.blob(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")

    def index(self, *images: dict[str, object]) -> Path:
        (self.root / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": list(images)}))
        return self.root


@pytest.fixture
def maker(scratch: Path) -> LayoutMaker:
    return LayoutMaker(scratch / "layout")


def import_(store: LayerStore, path: Path, **options: object) -> None:
    build_oci_layout(store, path, name="image", version="1", **options)  # type: ignore[arg-type]


def tree(answer: Answer) -> dict[str, str]:
    """Path -> kind and size, without the root."""
    kinds = {stat.S_IFDIR: "dir", stat.S_IFREG: "file", stat.S_IFLNK: "link", stat.S_IFCHR: "char"}
    return {os.fsdecode(seen.path): f"{kinds[seen.kind]} {seen.size}" for seen in answer.entries if seen.path != b"."}


@pytest.mark.parametrize("squeeze", ["", "+gzip", "+zstd"])
def test_layers_collapse_in_order(store: LayerStore, maker: LayoutMaker, look: Look, squeeze: str) -> None:
    base = layer(
        ("etc/", None, {"mode": 0o750, "uid": 3}),
        ("etc/conf", "one", {"uid": 7, "gid": 8, "mode": 0o600}),
        "etc/gone",
        "opaque/",
        "opaque/old",
        "opaque/sub/",
        "opaque/sub/older",
        "tree/",
        "tree/a",
        "tree/b",
        ("swap", None, {"type": tarfile.SYMTYPE, "linkname": "etc"}),
        "file",
    )
    middle = layer(
        "etc/.wh.gone",
        ("etc/conf", "two", {}),
        "opaque/new",  # before the mark: what is of the same layer stays
        "opaque/.wh..wh..opq",
        "opaque/newer",
        ".wh.tree",
        "swap/",
        "swap/inside",
        ("hard", None, {"type": tarfile.LNKTYPE, "linkname": "file"}),
    )
    top = layer("tree/", "tree/c", "file/", "file/now a directory", ".wh.nothing")
    import_(store, maker.index(maker.image(base, middle, top, squeeze=squeeze)))
    answer = look("image@1")
    assert tree(answer) == {
        "etc": "dir 0",
        "etc/conf": "file 3",
        "file": "dir 0",
        "file/now a directory": "file 20",
        "hard": "file 4",
        "opaque": "dir 0",
        "opaque/new": "file 10",
        "opaque/newer": "file 12",
        "swap": "dir 0",
        "swap/inside": "file 11",
        "tree": "dir 0",
        "tree/c": "file 6",
    }
    seen = {entry.path: entry for entry in answer.entries}
    assert (seen[b"etc"].mode, seen[b"etc"].uid) == (0o750, 3)
    assert (seen[b"etc/conf"].mode, seen[b"etc/conf"].uid) == (0o644, 0)
    assert seen[b"etc/conf"].digest == hashlib.sha256(b"two").hexdigest()
    assert seen[b"etc/conf"].mtime_ns == 1_700_000_000 * 10**9
    assert not any(entry.attributes for entry in answer.entries)


def test_an_upper_part_of_an_image_hides_what_lies_below(
    store: LayerStore, maker: LayoutMaker, tiny: Tiny, look: Look
) -> None:
    """skip_layers: the image was made from the base, and its own layers become a workspace on that base."""
    tiny("base@1", files={"gone": "1", "dir/old": "2", "dir/both": "3", "back/old": "4", "deep/er/x": "5"})
    base = layer("ignored")
    work = layer(".wh.gone", "dir/", "dir/.wh..wh..opq", "dir/both", ".wh.back", "deep/er/.wh.x", "deep/er/y")
    more = layer("back/", "back/new", "dir/.wh.both", "dir/third")
    import_(store, maker.index(maker.image(base, work, more)), kind="workspace", skip_layers=1)
    below, hidden = (
        look("base@1"),
        look("base@1", "image@1", script="ls -R; cat gone back/old dir/old dir/both deep/er/x"),
    )
    assert set(tree(below)) >= {"gone", "back/old"}
    assert sorted(tree(hidden)) == ["back", "back/new", "deep", "deep/er", "deep/er/y", "dir", "dir/third"]
    assert hidden.output.count("No such file") == 5


def test_config_and_provenance_are_kept(store: LayerStore, maker: LayoutMaker) -> None:
    config = {
        "Env": ["PATH=/x", "EMPTY=", "A=b=c"],
        "WorkingDir": "/srv",
        "User": "www:www",
        "Entrypoint": ["/init"],
        "Cmd": None,
    }
    image = maker.image(layer("a"), config=config)
    import_(store, maker.index(image))
    manifest = store.resolve("image@1")
    assert manifest.config.env == {"PATH": "/x", "EMPTY": "", "A": "b=c"}
    assert (manifest.config.workdir, manifest.config.user) == ("/srv", "www:www")
    assert (manifest.config.entrypoint, manifest.config.cmd) == (("/init",), ())
    assert (manifest.provenance.source, manifest.provenance.digest) == ("oci", image["digest"])


def test_an_archive_of_a_layout(store: LayerStore, maker: LayoutMaker, scratch: Path, look: Look) -> None:
    root = maker.index(maker.image(layer("a/", "a/b")))
    subprocess.run(["tar", "-C", str(root), "-cf", str(scratch / "image.tar"), "."], check=True)
    import_(store, scratch / "image.tar")
    assert tree(look("image@1")) == {"a": "dir 0", "a/b": "file 3"}


def test_choosing_among_images_and_platforms(store: LayerStore, maker: LayoutMaker, look: Look) -> None:
    named = [
        {**maker.image(layer(name)), "annotations": {"org.opencontainers.image.ref.name": name}}
        for name in ("one", "two")
    ]
    import_(store, maker.index(*named), reference="two")
    assert list(tree(look("image@1"))) == ["two"]
    for reference, kind in ((None, ErrorKind.INVALID), ("three", ErrorKind.NOT_FOUND)):
        with pytest.raises(Fault) as caught:
            import_(store, maker.root, reference=reference, force=True)
        assert caught.value.body.kind is kind and "one, two" in caught.value.body.hint
    both = [
        {**maker.image(layer("other")), "platform": {"os": "linux", "architecture": "pdp11"}},
        {**maker.image(layer("ours")), "platform": {"os": "linux", "architecture": _ARCHITECTURE}},
    ]
    nested = json.dumps({"schemaVersion": 2, "manifests": both}).encode()
    import_(store, maker.index(maker.blob(nested, "application/vnd.oci.image.index.v1+json")), force=True)
    assert list(tree(look("image@1"))) == ["ours"]
    with pytest.raises(Fault) as caught:
        nested = json.dumps({"schemaVersion": 2, "manifests": both[:1]}).encode()
        import_(store, maker.index(maker.blob(nested, "application/vnd.oci.image.index.v1+json")), force=True)
    assert caught.value.body.kind is ErrorKind.UNSUPPORTED


def _break(maker: LayoutMaker, how: str) -> None:
    image = maker.image(layer("a"))
    blobs = maker.root / "blobs" / "sha256"
    manifest = blobs / str(image["digest"]).removeprefix("sha256:")
    described = json.loads(manifest.read_text())
    (content,) = (blobs / entry["digest"].removeprefix("sha256:") for entry in described["layers"])
    maker.index(image)
    if how == "no index":
        (maker.root / "index.json").unlink()
    elif how == "index is a pipe":
        (maker.root / "index.json").unlink()
        os.mkfifo(maker.root / "index.json")
    elif how == "index is a device":
        (maker.root / "index.json").unlink()
        (maker.root / "index.json").symlink_to("/dev/zero")
    elif how == "malformed index":
        (maker.root / "index.json").write_text('{"manifests": 3}')
    elif how == "huge index":
        (maker.root / "index.json").write_text(" " * (5 << 20) + "{}")
    elif how == "missing layer":
        content.unlink()
    elif how == "changed layer":
        content.write_bytes(content.read_bytes().replace(b"a", b"b", 1))
    elif how == "truncated layer":
        os.truncate(content, 700)
    elif how == "digest with a path":
        maker.index({**image, "digest": "sha256:../../../../etc/passwd"})
    elif how == "no layers":
        described["layers"] = []
        maker.index(maker.blob(json.dumps(described).encode(), str(image["mediaType"])))
    elif how == "hostile layer":
        maker.index(maker.image(layer("../../pwned")))
    elif how == "layer is no tar":
        maker.index(maker.image(b"no tar" * 500))
    elif how == "index in itself":
        inner = {"mediaType": "application/vnd.oci.image.index.v1+json"}
        nested = image
        for _ in range(8):
            nested = maker.blob(json.dumps({"manifests": [nested]}).encode(), inner["mediaType"])
        maker.index(nested)


@pytest.mark.parametrize(
    "how",
    [
        *(
            "no index",
            "index is a pipe",
            "index is a device",
            "malformed index",
            "huge index",
            "missing layer",
            "changed layer",
        ),
        *("truncated layer", "digest with a path", "no layers", "hostile layer", "layer is no tar", "index in itself"),
    ],
)
def test_broken_layouts_are_refused(store: LayerStore, maker: LayoutMaker, how: str) -> None:
    _break(maker, how)
    with pytest.raises(Fault) as caught:
        import_(store, maker.root)
    assert caught.value.body.kind is ErrorKind.INVALID, caught.value
    assert store.list() == [] and os.listdir(store.root / "tmp") == []


def test_an_unknown_kind_of_layer_is_unsupported(store: LayerStore, maker: LayoutMaker) -> None:
    described = maker.blob(layer("a"), "application/vnd.oci.image.layer.v1.tar+encrypted")
    config = maker.blob(b'{"os": "linux"}', "application/vnd.oci.image.config.v1+json")
    manifest = maker.blob(
        json.dumps({"config": config, "layers": [described]}).encode(), "application/vnd.oci.image.manifest.v1+json"
    )
    with pytest.raises(Fault) as caught:
        import_(store, maker.index(manifest))
    assert caught.value.body.kind is ErrorKind.UNSUPPORTED and "encrypted" in caught.value.body.message


def test_skipping_every_layer_is_refused(store: LayerStore, maker: LayoutMaker) -> None:
    with pytest.raises(Fault) as caught:
        import_(store, maker.index(maker.image(layer("a"))), skip_layers=1)
    assert caught.value.body.kind is ErrorKind.INVALID
