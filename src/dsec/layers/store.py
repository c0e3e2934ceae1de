"""The layer store: content-addressed blobs and manifests, and tags that name them.

    blobs/<blake3 hex>       metadata and data blobs
    manifests/<sha256 hex>   canonical JSON
    tags/<name>/<version>    the digest of a manifest, as text
    tmp/<random>/            work of builds that are going on, locked (flock) by their builder
    lock                     flock: taken by who publishes, tags, removes or collects

A blob becomes visible before its manifest and the manifest before its tag, each by rename; so whoever follows a tag
finds everything, and what a crash leaves behind is only garbage, which `gc` removes.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import blake3
import msgspec

from dsec.layers.erofs import read_superblock
from dsec.layers.manifest import Blob, Config, Kind, Manifest, Provenance, decode_manifest
from dsec.layers.names import LATEST, Ref, check_name, check_version, parse_ref
from dsec.layers.place import check_place, sync_file, write_durably
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import LayerRef

DEFAULT_ROOT = Path("/var/cache/dsec/layers")
_KNOWN = 4096  # manifests kept in memory
Paths = list[Path]  # inside LayerStore the word `list` is a method
Refs = list[LayerRef]
Strings = list[str]
Tags = list[tuple[str, str, str]]  # name, version, digest


def default_root() -> Path:
    """DSEC_STORE, else /var/cache/dsec/layers."""
    return Path(os.environ.get("DSEC_STORE") or DEFAULT_ROOT)


class Collected(msgspec.Struct, frozen=True):
    """What a collection removed: numbers of manifests, blobs and abandoned builds, and the bytes that came free."""

    manifests: int = 0
    blobs: int = 0
    builds: int = 0
    bytes: int = 0


Identity = tuple[int, int, int]


def _identity_of(status: os.stat_result) -> Identity:
    """Another for each file that takes a name by rename, as all files of the store do."""
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _identity(path: str) -> Identity | None:
    try:
        return _identity_of(os.stat(path))
    except FileNotFoundError:
        return None


class _Resolved(msgspec.Struct, frozen=True):
    """What a reference means as long as its tag and its manifest are these files: looked up at each creation, for every layer."""

    files: tuple[tuple[str, Identity], ...]
    manifest: Manifest

    def holds(self) -> bool:
        return all(_identity(path) == identity for path, identity in self.files)


class LayerStore:
    """The layers below one directory. Several processes may use it at once; reading takes no lock."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else default_root()
        self._blobs = self.root / "blobs"
        self._manifests = self.root / "manifests"
        self._tags = self.root / "tags"
        self._tmp = self.root / "tmp"
        self._known: dict[str, tuple[Identity, Manifest]] = {}  # read and checked, with the file's identity
        self._resolved: dict[str, _Resolved] = {}  # by exact reference

    # -- reading -----------------------------------------------------------------------------------------------------

    def resolve(self, ref: str) -> Manifest:
        """The manifest that `ref` names.

        `name@version` and `name@sha256:...` are exact; `name` is `name@latest` if that is tagged, else the only version
        there is. Faults: INVALID (no reference, or a bare name of several versions), NOT_FOUND (hint: near matches).
        """
        known = self._resolved.get(ref)
        if known is not None and known.holds():
            return known.manifest
        parsed = parse_ref(ref)
        if parsed.digest is not None:
            return self._by_digest(parsed)
        version = parsed.version or self._only_version(parsed)
        tag = _identity(self._tag_path(parsed.name, version))  # before it is read: one moved meanwhile is read again
        manifest = self._read_manifest(self._read_tag(parsed.name, version), f"{parsed.name}@{version}")
        if tag is not None and parsed.version is not None:
            self._remember(ref, self._tag_path(parsed.name, version), tag, manifest)
        return manifest

    def inspect(self, ref: str) -> Manifest:
        """The manifest that `ref` names (as `resolve`)."""
        return self.resolve(ref)

    def list(self) -> Refs:
        """Every tagged layer, sorted by name and version; an alias is listed under its own name.

        A layer whose manifest is damaged is listed with size -1, so that it can be seen and removed.
        """
        return [self._listed(*tag) for tag in sorted(self._walk_tags())]

    def paths(self, manifest: Manifest) -> tuple[Path, Paths]:
        """Paths of the metadata blob and the data blobs, after the cheap checks: there, whole, EROFS.

        Faults: CREATE_FAILED (stage "layer", detail `blob`) for a damaged layer, UNSUPPORTED for a store that lies where
        EROFS cannot be mounted from.
        """
        if self.root.is_dir():
            check_place(self.root)
        for blob in manifest.blobs():
            self._check_size(manifest, blob)
        meta = self._blob_path(manifest.meta)
        superblock = read_superblock(meta)
        if superblock is None:
            raise _damaged(manifest, manifest.meta, "is not an EROFS image")
        if superblock.devices != len(manifest.data) or superblock.size > manifest.meta.size:
            raise _damaged(manifest, manifest.meta, "does not belong to the layer's data blobs")
        return meta, [self._blob_path(blob) for blob in manifest.data]

    def verify(self, ref: str) -> Manifest:
        """Read every byte of a layer and compare with the digests; a Fault names the blob that differs."""
        manifest = self.resolve(ref)
        self.paths(manifest)
        for blob in manifest.blobs():
            if hash_file(self._blob_path(blob)) != blob:
                raise _damaged(manifest, blob, "does not hold the bytes it is named after")
        return manifest

    # -- changing ----------------------------------------------------------------------------------------------------

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A private directory on the store's filesystem to build in; removed at the end, or by `gc` after a crash."""
        self._make_directories()
        directory = self._tmp / os.urandom(8).hex()
        with self._no_space_is_a_fault(), self._locked():  # locked: gc never sees the directory without its own lock
            directory.mkdir(mode=0o700)
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield directory
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise no_space(self.root) from error
            raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(fd)

    def publish(
        self,
        meta: Path,
        data: Paths,
        *,
        name: str,
        version: str,
        kind: Kind,
        config: Config,
        labels: dict[str, str],
        provenance: Provenance,
        entries: int,
        uncompressed_size: int,
        force: bool = False,
    ) -> LayerRef:
        """Move finished blobs (files in a `staging` directory) into the store and name them `name@version`.

        Publishing the same content again changes nothing. A version is immutable: other content under the same name is a
        Fault CONFLICT unless `force`, which moves the tag. Fault NO_SPACE leaves the store as it was.
        """
        check_name(name)
        check_version(version)
        manifest = Manifest(
            name=name,
            version=version,
            kind=kind,
            meta=hash_file(meta),
            data=tuple(hash_file(path) for path in data),
            config=config,
            labels=labels,
            provenance=provenance,
            entries=entries,
            uncompressed_size=uncompressed_size,
        )
        for path in (meta, *data):
            sync_file(path)
        with self._locked():
            present = self._tagged_digest(name, version)
            if present not in (None, manifest.digest) and not force:
                raise Fault(
                    ErrorKind.CONFLICT,
                    f"layer {name}@{version} is already published with other content ({present})",
                    hint="publish it under a new version, remove the old one, or force",
                )
            self._commit(manifest, [meta, *data])
        return manifest.ref()

    def tag(self, ref: str, name: str) -> LayerRef:
        """Give a layer another name, `name@version` or `name` (which is `name@latest`), moving it if it is taken."""
        target = parse_ref(name)
        if target.digest is not None:
            raise Fault(ErrorKind.INVALID, f"{name!r} is a digest, not a name", hint="write NAME or NAME@VERSION")
        version = target.version or LATEST
        self._make_directories()
        with self._no_space_is_a_fault(), self._locked():
            manifest = self.resolve(ref)
            self._write_tag(target.name, version, manifest.digest)
        return msgspec.structs.replace(manifest.ref(), name=target.name, version=version)

    def remove(self, ref: str) -> LayerRef:
        """Forget a name (`name@version`), or with a digest all names of that manifest.

        Manifest and blobs stay until `gc`; sandboxes that run on the layer are not touched. Returns what was named.
        """
        parsed = parse_ref(ref)
        self._make_directories()
        with self._locked():
            named = self._named(parsed)
            for name, version, _ in named:
                self._remove_tag(name, version)
        return self._listed(*named[0])

    def gc(self, keep: set[str]) -> Collected:
        """Remove every manifest that neither a tag nor `keep` (digests `sha256:...`) names, blobs of no manifest, and
        builds whose builder is gone."""
        if not self.root.is_dir():
            return Collected()
        self._make_directories()
        with self._locked():
            kept = keep | {digest for _, _, digest in self._walk_tags()}
            manifests, freed = self._drop_manifests(kept)
            blobs, freed_blobs = self._drop_blobs()
            builds = self._drop_builds()
        return Collected(manifests=manifests, blobs=blobs, builds=builds, bytes=freed + freed_blobs)

    # -- parts of reading ---------------------------------------------------------------------------------------------

    def _blob_path(self, blob: Blob) -> Path:
        return self._blobs / blob.digest.removeprefix("blake3:")

    def _manifest_path(self, digest: str) -> Path:
        return self._manifests / digest.removeprefix("sha256:")

    def _check_size(self, manifest: Manifest, blob: Blob) -> None:
        try:
            size = self._blob_path(blob).stat().st_size
        except FileNotFoundError:
            raise _damaged(manifest, blob, "is missing") from None
        if size != blob.size:
            word = "truncated" if size < blob.size else "too long"
            raise _damaged(manifest, blob, f"is {word}: {size} bytes instead of {blob.size}")

    def _read_manifest(self, digest: str, name: str) -> Manifest:
        path = self._manifest_path(digest)
        try:
            status = path.stat()
            identity = _identity_of(status)
            known = self._known.get(digest)
            if known is not None and known[0] == identity:
                return known[1]
            manifest = decode_manifest(path.read_bytes(), status.st_mtime)
        except FileNotFoundError:
            raise _broken(name, digest, "is missing") from None
        except msgspec.MsgspecError as error:  # malformed JSON and wrong types both
            raise _broken(name, digest, f"cannot be read: {error}") from None
        if manifest.digest != digest:
            raise _broken(name, digest, "was changed after it was published")
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known[digest] = (identity, manifest)
        return manifest

    def _remember(self, ref: str, path: str, tag: Identity, manifest: Manifest) -> None:
        if len(self._resolved) >= _KNOWN:
            self._resolved.clear()
        files = ((path, tag), (str(self._manifest_path(manifest.digest)), self._known[manifest.digest][0]))
        self._resolved[ref] = _Resolved(files, manifest)

    def _by_digest(self, parsed: Ref) -> Manifest:
        digest = str(parsed.digest)
        if not self._manifest_path(digest).is_file():
            raise self._unknown(parsed)
        manifest = self._read_manifest(digest, str(parsed))
        if parsed.name == manifest.name:
            return manifest
        if not any(name == parsed.name and tagged == digest for name, _, tagged in self._walk_tags()):
            raise Fault(
                ErrorKind.INVALID,
                f"{digest} is not a layer {parsed.name!r} but {manifest}",
                hint=f"write {manifest.name}@{digest}",
            )
        return manifest

    def _only_version(self, ref: Ref) -> str:
        """What a bare name means: the version tagged `latest`, or the only one."""
        versions = self._versions(ref.name)
        if LATEST in versions:
            return LATEST
        if not versions:
            raise self._unknown(ref)
        if len(versions) > 1:
            raise Fault(
                ErrorKind.INVALID,
                f"layer {ref.name!r} has several versions: {', '.join(sorted(versions))}",
                hint=f"write {ref.name}@VERSION, or tag one of them {ref.name!r}",
            )
        return versions[0]

    def _named(self, ref: Ref) -> Tags:
        """The tags that removing `ref` removes; needs no readable manifest."""
        tags = sorted(self._walk_tags())
        if ref.digest is not None:
            found = [tag for tag in tags if tag[2] == ref.digest]
        elif ref.version is not None:
            found = [tag for tag in tags if tag[:2] == (ref.name, ref.version)]
        else:
            manifest = self.resolve(ref.name)  # says so when the name is ambiguous
            found = [tag for tag in tags if tag[0] == ref.name and tag[2] == manifest.digest]
        if not found or (ref.digest is not None and ref.name not in {name for name, _, _ in found}):
            raise self._unknown(ref)
        return found

    def _listed(self, name: str, version: str, digest: str) -> LayerRef:
        try:
            manifest = self._read_manifest(digest, f"{name}@{version}")
        except Fault:
            return LayerRef(name=name, version=version, digest=digest, size=-1)
        return msgspec.structs.replace(manifest.ref(), name=name, version=version)

    def _versions(self, name: str) -> Strings:
        try:
            return os.listdir(self._tags / name)
        except FileNotFoundError:
            return []

    def _walk_tags(self) -> Iterator[tuple[str, str, str]]:
        """(name, version, digest) of every tag."""
        try:
            names = os.listdir(self._tags)
        except FileNotFoundError:
            return
        for name in names:
            for version in self._versions(name):
                digest = self._tagged_digest(name, version)
                if digest is not None:
                    yield name, version, digest

    def _tag_path(self, name: str, version: str) -> str:
        return f"{self._tags}/{name}/{version}"

    def _tagged_digest(self, name: str, version: str) -> str | None:
        try:
            with open(self._tag_path(name, version), encoding="ascii") as file:
                return file.read().strip()
        except FileNotFoundError:
            return None

    def _read_tag(self, name: str, version: str) -> str:
        digest = self._tagged_digest(name, version)
        if digest is None:  # removed since the directory was listed
            raise self._unknown(Ref(name, version=version))
        return digest

    def _unknown(self, ref: Ref) -> Fault:
        """NOT_FOUND with what the user may have meant."""
        known = sorted(f"{name}@{version}" for name, version, _ in self._walk_tags())
        same_name = [text for text in known if text.partition("@")[0] == ref.name]
        near = same_name or difflib.get_close_matches(str(ref), known, n=4, cutoff=0.5)
        if not near:
            names = sorted({text.partition("@")[0] for text in known})
            matches = difflib.get_close_matches(ref.name, names, n=3, cutoff=0.6)
            near = [text for text in known if text.partition("@")[0] in matches]
        if near:
            hint = "did you mean " + ", ".join(near[:6]) + "?"
        elif known:
            hint = f"this store ({self.root}) has: {', '.join(known[:8])}"
        else:
            hint = f"the store {self.root} is empty; `dsec layer build debian` builds a base layer"
        return Fault(ErrorKind.NOT_FOUND, f"there is no layer {str(ref)!r}", hint=hint)

    # -- parts of changing --------------------------------------------------------------------------------------------

    def _make_directories(self) -> None:
        with self._no_space_is_a_fault():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for directory in (self._blobs, self._manifests, self._tags, self._tmp):
                directory.mkdir(mode=0o700, exist_ok=True)
        check_place(self.root)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def _no_space_is_a_fault(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise no_space(self.root) from error
            raise

    def _commit(self, manifest: Manifest, files: Paths) -> None:
        """Blobs, manifest, tag, in this order; what was new is taken back when a step fails."""
        new: Paths = []
        try:
            with self._no_space_is_a_fault():
                for blob, file in zip(manifest.blobs(), files, strict=True):
                    self._place_blob(blob, file, new)
                sync_file(self._blobs)
                path = self._manifest_path(manifest.digest)
                if not path.is_file() or path.read_bytes() != manifest.canonical():
                    new.append(path)
                    write_durably(path, manifest.canonical(), self._tmp)
                self._write_tag(manifest.name, manifest.version, manifest.digest)
        except (OSError, Fault):
            if (
                self._tagged_digest(manifest.name, manifest.version) != manifest.digest
            ):  # else all is there, if not yet durable
                for path in reversed(new):
                    path.unlink(missing_ok=True)
            raise

    def _place_blob(self, blob: Blob, file: Path, new: Paths) -> None:
        """Move a file to its name; a damaged blob of that name (wrong size) is replaced, a whole one is kept."""
        target = self._blob_path(blob)
        if target.is_file() and target.stat().st_size == blob.size:
            return
        if not target.exists():
            new.append(target)
        file.chmod(0o400)
        file.rename(target)

    def _write_tag(self, name: str, version: str, digest: str) -> None:
        directory = self._tags / name
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            write_durably(directory / version, digest.encode() + b"\n", self._tmp)
        except OSError:
            if not self._versions(name):
                directory.rmdir()
            raise

    def _remove_tag(self, name: str, version: str) -> None:
        (self._tags / name / version).unlink()
        if not self._versions(name):
            (self._tags / name).rmdir()

    def _drop_manifests(self, kept: set[str]) -> tuple[int, int]:
        count = freed = 0
        for path in self._manifests.iterdir():
            if f"sha256:{path.name}" not in kept:
                freed += path.stat().st_size
                path.unlink()
                count += 1
        return count, freed

    def _drop_blobs(self) -> tuple[int, int]:
        used: set[str] = set()
        for path in self._manifests.iterdir():
            try:
                used.update(blob.digest for blob in self._read_manifest(f"sha256:{path.name}", path.name).blobs())
            except Fault:
                continue  # a damaged manifest can never be mounted again, so it keeps no blobs
        count = freed = 0
        for path in self._blobs.iterdir():
            if f"blake3:{path.name}" not in used:
                freed += path.stat().st_size
                path.unlink()
                count += 1
        return count, freed

    def _drop_builds(self) -> int:
        """Remove builds whose lock is free, and files of writes that never ended (their writers held the store's lock)."""
        count = 0
        for path in self._tmp.iterdir():
            if not path.is_dir():
                path.unlink()
                count += 1
                continue
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                count += 1
            except BlockingIOError:
                pass  # its builder lives
            finally:
                os.close(fd)
        return count


def hash_file(path: Path) -> Blob:
    """Name and size of a file as a blob."""
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    hasher.update_mmap(path)
    return Blob(digest=f"blake3:{hasher.hexdigest()}", size=path.stat().st_size)


def no_space(root: Path) -> Fault:
    return Fault(
        ErrorKind.NO_SPACE,
        f"the disk that holds the layer store {root} is full; nothing was published",
        hint="remove layers (`dsec layer rm`), free space there, or move the store (DSEC_STORE)",
    )


def _damaged(manifest: Manifest, blob: Blob, why: str) -> Fault:
    return Fault(
        ErrorKind.CREATE_FAILED,
        f"layer {manifest} is damaged: its blob {blob.digest} {why}",
        hint=f"build or import {manifest} again; the whole blob then replaces this one",
        stage="layer",
        blob=blob.digest,
    )


def _broken(name: str, digest: str, why: str) -> Fault:
    return Fault(
        ErrorKind.CREATE_FAILED,
        f"layer {name} is damaged: its manifest {digest} {why}",
        hint=f"remove {name} and build or import it again",
        stage="layer",
        blob=digest,
    )
