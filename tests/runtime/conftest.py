"""A launcher with its own uppers, layers built for the tests, and a check that nothing is left behind."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec.backends.runtime import runtime_path
from tests.runtime.driver import MIB, Launcher

NAME = f"rttest{secrets.token_hex(3)}"  # of this run: others may go on beside it
_HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """On a disk: EROFS is not mounted from tmpfs."""
    with tempfile.TemporaryDirectory(prefix="dsec-runtime-", dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


@pytest.fixture(scope="session")
def images(place: Path) -> dict[str, Path]:
    """`base`: the test program and empty directories; `top`: one file, and a whiteout over one of the base's."""
    if os.geteuid() != 0 or shutil.which("mkfs.erofs") is None:
        pytest.skip("needs root and mkfs.erofs (apt-get install erofs-utils)")
    base = place / "base"
    for directory in ("proc", "dev", "tmp", "etc", "home/user"):
        (base / directory).mkdir(parents=True)
    os.chmod(base / "tmp", 0o1777)
    os.chown(base / "home/user", 1000, 1000)
    os.chmod(base / "home/user", 0o700)
    (base / "home/user/sub").mkdir()
    (base / "home/user/mark").write_text("home")
    (base / "sub").mkdir()
    (base / "mark").write_text("root")
    (base / "sub/mark").write_text("below")
    (base / "etc/passwd").write_text(
        "root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
        "lost:x:1001:1001::/home/lost:/bin/sh\nout:x:1002:1002::/home/user:/bin/sh\n"
    )
    (base / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")
    (base / "hidden").write_text("of the base")
    (base / "secret").write_text("of root")
    os.chmod(base / "secret", 0o600)
    build = [
        "rustc",
        "--edition=2021",
        "-O",
        "-C",
        "target-feature=+crt-static",
        "-o",
        base / "attacker",
        _HERE / "attacker.rs",
    ]
    subprocess.run(build, check=True)
    top = place / "top"
    top.mkdir()
    (top / "on-top").write_text("of the top")
    os.mknod(top / "hidden", 0o600 | 0o020000, os.makedev(0, 0))
    made = {}
    for name, tree in (("base", base), ("top", top)):
        made[name] = place / f"{name}.erofs"
        subprocess.run(["mkfs.erofs", "-x-1", made[name], tree], check=True, capture_output=True)
    return made


@pytest.fixture(scope="session", params=["btrfs", "dir"])
def uppers(request: pytest.FixtureRequest, place: Path) -> str:
    if request.param == "dir":
        return f"dir:{place}/uppers"
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("needs mkfs.btrfs (apt-get install btrfs-progs)")
    return f"btrfs:{place}/uppers.btrfs:{1024 * MIB}"


Start = Callable[[], Launcher]


@pytest.fixture
def start(place: Path, images: dict[str, Path], uppers: str) -> Iterator[Start]:
    """Starts launchers of one name on the same directories; at the end all is stopped and looked over."""
    started: list[Launcher] = []

    def one() -> Launcher:
        launcher = Launcher(runtime_path(), place / "run", uppers, NAME)
        started.append(launcher)
        for name, image in images.items():
            launcher.add_layer(name, image)
        return launcher

    try:
        yield one
        last = next((one for one in started if one.process.poll() is None), None) or one()
        last.call("sweep", keep=[])
    finally:
        for launcher in started:
            launcher.close()
    assert leftovers(place) == []


@pytest.fixture
def launcher(start: Start) -> Launcher:
    return start()


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits for init to reap it does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def leftovers(place: Path) -> list[str]:
    """Groups, sockets and uppers of ours."""
    found = [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/dsec-{NAME}")]
    found += [str(path) for path in (place / "run/sb").iterdir()]
    found += [str(path) for path in place.glob("uppers/s[0-9]*")]
    return found
