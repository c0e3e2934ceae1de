"""Which changes count: nothing outside the allow-list, nothing that decides the tests otherwise, and exactly what is there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.protocol.grading import DropReason
from dsec.protocol.specs import Change, ChangeKind
from dsec.rollout.grading.globs import Globs
from dsec.rollout.grading.ground import Ground
from dsec.rollout.grading.names import folded
from dsec.rollout.grading.sift import Sift, Sifted, shown

GROUND = Ground(
    b"workspace",
    imports=(b"workspace", b"workspace/src"),
    owned=(b"workspace/tests", b"workspace/check.py", b"workspace/src/shop/conftest.py", b"grading/data"),
    entries=(b"workspace/src/shop", b"workspace/src/types.py"),
    installed=("requests",),
    path=(b"usr/bin", b"workspace/bin"),
)


def write(path: str | bytes, data: bytes | None = b"x", **more: object) -> Change:
    raw = path if isinstance(path, bytes) else path.encode()
    size = 10**9 if data is None else len(data)
    return Change(path=raw, kind=ChangeKind.WRITE, mode=0o644, size=size, data=data, **more)  # type: ignore[arg-type]


def sifted(
    *changes: Change, include: tuple[str, ...] = ("**",), exclude: tuple[str, ...] = ()
) -> tuple[list[Change], Sifted]:
    sift = Sift(GROUND, include, exclude)
    kept = [one for change in changes if (one := sift.take(change)) is not None]
    return kept, sift.result()


CASES = {
    "workspace/src/shop/prices.py": None,
    "workspace/src/shop/data.bin": None,
    "workspace/README.md": None,
    "workspace/src/shop/json.py": None,  # found only as shop.json
    "workspace/src/types.py": None,  # the layers have it there: an edit of the repository's own
    "workspace/src/shop/bin/tool": None,
    "workspace/src/conftest.py": DropReason.TEST_CONFIG,
    "workspace/src/Conftest.PY": DropReason.TEST_CONFIG,
    "workspace/src/\uff43onftest.py": DropReason.TEST_CONFIG,  # a letter that normalises to c
    "workspace/pytest.ini": DropReason.TEST_CONFIG,
    "workspace/setup.cfg": DropReason.TEST_CONFIG,
    "workspace/pyproject.toml": DropReason.TEST_CONFIG,
    "workspace/tests/test_x.py": DropReason.TESTS,
    "workspace/tests/new.py": DropReason.TESTS,
    "workspace/Tests/test_x.py": DropReason.TESTS,
    "workspace/check.py": DropReason.TESTS,
    "workspace/check.py/x": DropReason.TESTS,
    "workspace/src/sitecustomize.py": DropReason.STARTUP,
    "workspace/src/usercustomize/__init__.py": DropReason.STARTUP,
    "workspace/src/x.pth": DropReason.STARTUP,
    "workspace/src/x.egg-link": DropReason.STARTUP,
    "workspace/pyvenv.cfg": DropReason.STARTUP,
    "usr/lib/python3/sitecustomize.py": DropReason.STARTUP,
    "workspace/src/plugin.dist-info/entry_points.txt": DropReason.INSTALLED,
    "workspace/src/plugin.egg-info/entry_points.txt": DropReason.INSTALLED,
    "usr/lib/python3.11/site-packages/x.py": DropReason.INSTALLED,
    "workspace/.venv/lib/x.py": DropReason.INSTALLED,
    "workspace/node_modules/x/index.js": DropReason.INSTALLED,
    "usr/bin/python3": DropReason.ON_PATH,
    "workspace/bin/python3": DropReason.ON_PATH,
    "root/.bashrc": DropReason.SHELL,
    "etc/profile": DropReason.SHELL,
    "etc/profile.d/x.sh": DropReason.SHELL,
    "workspace/.bash_profile": DropReason.SHELL,
    "etc/ld.so.preload": DropReason.LOADER,
    "etc/ld.so.conf.d/x.conf": DropReason.LOADER,
    "workspace/.git/hooks/post-checkout": DropReason.GIT,
    "workspace/.git/config": DropReason.GIT,
    "workspace/.GIT/config": DropReason.GIT,
    "workspace/src/x.so": DropReason.COMPILED,
    "workspace/src/x.cpython-311-x86_64-linux-gnu.so": DropReason.COMPILED,
    "workspace/json.py": DropReason.SHADOWS,
    "workspace/src/json/__init__.py": DropReason.SHADOWS,
    "workspace/src/pytest.py": DropReason.SHADOWS,
    "workspace/_pytest/assertion/rewrite.py": DropReason.SHADOWS,
    "workspace/src/requests.py": DropReason.SHADOWS,
    "workspace/src/JSON.py": DropReason.SHADOWS,
    "workspace/src/.wh.x": DropReason.RESERVED,
    "workspace/src/.wh..wh..opq": DropReason.RESERVED,
    "home/agent/notes.txt": DropReason.OUTSIDE,
    "workspaceX/a.py": DropReason.OUTSIDE,
    "workspace": DropReason.OUTSIDE,
    "grading/data/x": DropReason.OUTSIDE,
}


@pytest.mark.parametrize(("path", "why"), CASES.items())
def test_what_a_path_says(path: str, why: DropReason | None) -> None:
    kept, result = sifted(write(path))
    assert [drop.why for drop in result.dropped] == ([why] if why else [])
    assert [change.path for change in kept] == ([] if why else [path.encode()])


@pytest.mark.parametrize(
    "path", ["workspace/src/__pycache__/x.cpython-311.pyc", "workspace/.pytest_cache/v", "workspace/.git/objects/aa"]
)
def test_noise_is_dropped_without_a_word(path: str) -> None:
    assert sifted(write(path)) == ([], sifted()[1])


def test_only_what_the_globs_name() -> None:
    files = [write("workspace/src/shop/a.py"), write("workspace/docs/a.py"), write("workspace/src/shop/gen/a.py")]
    kept, result = sifted(*files, include=("src/**",), exclude=("**/gen/**",))
    assert [change.path for change in kept] == [b"workspace/src/shop/a.py"]
    assert [(drop.path, drop.why, drop.suspicious) for drop in result.dropped] == [
        ("docs/a.py", DropReason.NOT_INCLUDED, False),
        ("src/shop/gen/a.py", DropReason.NOT_INCLUDED, False),
    ]


def test_kinds() -> None:
    """Links and special files never come over; a deletion does; a file in the place of the tests' directory does not."""
    link = Change(path=b"workspace/src/l", kind=ChangeKind.SYMLINK, target=b"shop/prices.py")
    away = Change(path=b"workspace/src/m", kind=ChangeKind.SYMLINK, target=b"../tests/test_x.py")
    out = Change(path=b"workspace/src/n", kind=ChangeKind.SYMLINK, target=b"/etc/passwd")
    fifo = Change(path=b"workspace/src/f", kind=ChangeKind.SPECIAL)
    gone = Change(path=b"workspace/src/shop/old.py", kind=ChangeKind.DELETE)
    kept, result = sifted(link, away, out, fifo, gone, write("workspace/src/shop"), write("workspace/src"))
    assert [change.path for change in kept] == [b"workspace/src/shop/old.py"]
    assert {drop.path: (drop.why, drop.suspicious) for drop in result.dropped} == {
        "src/l": (DropReason.LINK, False),
        "src/m": (DropReason.LINK, True),
        "src/n": (DropReason.LINK, True),
        "src/f": (DropReason.SPECIAL, True),
        "src/shop": (DropReason.TESTS, True),
        "src": (DropReason.TESTS, True),
    }


def test_contents_and_modes() -> None:
    """Compiled code by what is in it; no set-id bit, no writable file, no attribute, each with a word about it."""
    binary = write("workspace/src/shop/tool", b"\x7fELF...")
    marked = write("workspace/src/shop/a.py", links=2, xattrs=True)
    set_id = Change(path=b"workspace/src/shop/b.sh", kind=ChangeKind.WRITE, mode=0o6777, size=1, data=b"#")
    private = Change(path=b"workspace/src/shop/c.py", kind=ChangeKind.WRITE, mode=0o000, size=1, data=b"#")
    kept, result = sifted(binary, marked, set_id, private)
    assert {change.path.rpartition(b"/")[2]: oct(change.mode) for change in kept} == {
        b"a.py": "0o644", b"b.sh": "0o755", b"c.py": "0o444",
    }  # fmt: skip
    assert [drop.why for drop in result.dropped] == [DropReason.COMPILED]
    assert {signal.name for signal in result.signals} == {"dropped_compiled", "hard_link", "xattrs", "set_id"}
    assert all(change.links == 1 and not change.xattrs for change in kept)


def test_exact_names() -> None:
    """Newlines and bytes that are no text stay as they are, and can be shown."""
    raw = b"workspace/src/a\n\xff\x1b[31m.py"
    kept, result = sifted(write(raw), write(b"workspace/notes\n\xff/conftest.py"))
    assert [change.path for change in kept] == [raw] and result.written == (b"src/a\n\xff\x1b[31m.py",)
    assert result.dropped[0].path == "notes\\n\\xff/conftest.py"


def test_names_alike_are_said() -> None:
    kept, result = sifted(write("workspace/src/shop/A.py"), write("workspace/src/shop/a.py"))
    assert len(kept) == 2 and [signal.name for signal in result.signals] == ["names_alike"]


def test_too_large_is_told() -> None:
    kept, result = sifted(write("workspace/src/shop/big.bin", None))
    assert not kept and "big.bin has 1,000,000,000 bytes" in result.too_large
    assert not sifted(write("home/big.bin", None))[1].too_large


def test_too_many_are_told() -> None:
    sift = Sift(GROUND, ("**",), most=1_000)
    for number in range(1_001):
        sift.take(Change(path=b"workspace/src/shop/%d" % number, kind=ChangeKind.DELETE))
    assert "1,000 changes" in sift.result().too_large and sift.result().kept == 1_000


def test_the_digest_is_of_what_counts() -> None:
    first, second = write("workspace/src/shop/a.py"), write("workspace/src/shop/b.py")
    _, one = sifted(first, second)
    _, other = sifted(second, write("workspace/tests/x.py"), first)
    assert one.digest == other.digest != sifted(first)[1].digest


# -- generated ---------------------------------------------------------------------------------------------------------

_TELLING = [
    b"src", b"shop", b"tests", b"Tests", b"conftest.py", b"sitecustomize.py", b"a.py", b".git", b"hooks", b"x.pth", b"bin",
    b"..", b".", b"json.py", b"site-packages", b".wh.a", b"check.py", b"etc", b"workspace", b"__pycache__", b"a\nb", b"\xff",
]  # fmt: skip
_names = st.one_of(
    st.sampled_from(_TELLING), st.binary(min_size=1, max_size=6).filter(lambda b: b"/" not in b and b"\0" not in b)
)
_paths = st.lists(_names, min_size=1, max_size=6).map(b"/".join)
_changes = st.builds(
    Change,
    path=st.one_of(
        _paths, _paths.map(lambda path: b"workspace/" + path), _paths.map(lambda path: b"workspace/src/" + path)
    ),
    kind=st.sampled_from(ChangeKind),
    mode=st.integers(0, 0o7777),
    data=st.one_of(st.none(), st.binary(max_size=8)),
    opaque=st.booleans(),
    links=st.integers(1, 3),
    target=st.one_of(st.none(), _paths),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(_changes, max_size=12))
def test_nothing_outside_the_allow_list_ever_passes(changes: list[Change]) -> None:
    kept, result = sifted(*changes, include=("src/**", "*.md"))
    for change in kept:
        inside = change.path.removeprefix(b"workspace/")
        assert change.path.startswith(b"workspace/")
        assert inside == b"src" or inside.startswith(b"src/") or (b"/" not in inside and inside.endswith(b".md"))
        assert not GROUND.owned.has(change.path)
        assert change.kind in (ChangeKind.WRITE, ChangeKind.DELETE, ChangeKind.MKDIR)
        assert change.mode & ~0o755 == 0 and change.target is None
        for part in map(folded, inside.split(b"/")):
            assert part not in ("conftest.py", "sitecustomize.py", ".git", "site-packages", "..") and not part.endswith(
                ".pth"
            )
            assert not part.startswith(".wh.")
    assert len(result.dropped) <= result.dropped_total <= len(changes)
    assert all(text.isprintable() for text in (drop.path for drop in result.dropped))


@given(st.binary(max_size=40))
def test_anything_can_be_shown(raw: bytes) -> None:
    assert shown(raw, b"workspace").isprintable()


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("src/**", "src/a/b.py", True), ("src/**", "src", True), ("/src/*.py", "src/a.py", True),
        ("src/*.py", "src/a/b.py", False), ("**/*.py", "a.py", True), ("**/*.py", "a/b/c.py", True), ("**", "any/thing", True),
        ("a/**/z", "a/z", True), ("a/**/z", "a/b/c/z", True), ("a/**/z", "a/b/c/y", False), ("a?c", "abc", True),
        ("a?c", "ac", False), ("[a-c]x", "bx", True), ("[!a-c]x", "bx", False), ("[^a-c]x", "bx", False), ("[x", "[x", True),
        ("a*b*c", "aXbYbZc", True), ("a*b*c", "aXbYbZ", False), ("", "a", False), ("*", "a\nb", True),
    ],
)  # fmt: skip
def test_patterns_mean_what_they_mean_to_the_walk(pattern: str, path: str, expected: bool) -> None:
    """The same table as that of `helper/glob.rs`."""
    assert Globs((pattern,)).match(path.encode()) is expected


def test_a_hostile_path_costs_little() -> None:
    globs = Globs(("**/a*a*a*a*a*a*b/**/c",))
    assert not globs.match(b"/".join([b"a" * 200] * 200))


@pytest.mark.parametrize("path", [b"/".join([b"d"] * 3000), b"/".join([b"d" * 200] * 30)])
def test_what_no_program_can_name_costs_nothing_and_is_told(path: bytes) -> None:
    """An agent makes such a tree step by step; judging it name by name must not end the service's stack or its patience."""
    deep = b"workspace/src/" + path
    directory = Change(path=deep, kind=ChangeKind.MKDIR, mode=0o755)
    kept, told = sifted(directory, write(deep + b"/a.py"), write("workspace/src/shop/prices.py"))
    assert [change.path for change in kept] == [b"workspace/src/shop/prices.py"]
    assert [one.why for one in told.dropped] == [DropReason.TOO_DEEP]
