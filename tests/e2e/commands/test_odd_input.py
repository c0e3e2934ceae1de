"""Odd commands, arguments, programs and ends: each is exact, or refused by name."""

from __future__ import annotations

import signal
import time

import pytest

import dsec
from dsec import Sandbox

pytestmark = pytest.mark.e2e


# -- bytes -------------------------------------------------------------------------------------------------------------


async def test_binary_output_and_names(sandbox: Sandbox) -> None:
    every = bytes(range(256)) * 40
    assert (await sandbox.exec(["cat"], stdin=every)).stdout == every
    name = b"/tmp/\xff\xfe a\nb"
    await sandbox.exec(["mkdir", "-p", name])
    assert (
        await sandbox.exec(["sh", "-c", 'pwd; cat > "$1"', "sh", b"\xc3("], cwd=name, stdin="x")
    ).stdout == name + b"\n"
    assert (await sandbox.run_shell("ls | od -An -tx1", cwd=name)).text.split() == ["c3", "28", "0a"]


async def test_nul_bytes_are_refused_by_name(sandbox: Sandbox) -> None:
    with pytest.raises(dsec.InvalidRequest, match="argument 1 has a NUL"):
        await sandbox.exec(["echo", b"a\0b"])
    with pytest.raises(dsec.InvalidRequest, match="argument 70000 has a NUL"):
        await sandbox.exec(["echo", *["x"] * 69_999, b"a\0b"])
    with pytest.raises(dsec.InvalidRequest, match="command line has a NUL"):
        await sandbox.run_shell("echo a\0b")
    with pytest.raises(dsec.InvalidRequest, match="command line has a NUL"):
        await sandbox.run_shell("echo \0" + "x" * 300_000)
    with pytest.raises(dsec.InvalidRequest, match=r"\"A\".*NUL"):
        await sandbox.exec(["env"], env={"A": "x\0y"})
    with pytest.raises(dsec.InvalidRequest, match="cwd"):
        await sandbox.exec(["pwd"], cwd="/tmp\0x")
    for name in ("", "A=B"):
        with pytest.raises(dsec.InvalidRequest, match="environment variable"):
            await sandbox.exec(["env"], env={name: "x"})


# -- sizes -------------------------------------------------------------------------------------------------------------


async def test_a_shell_line_of_megabytes_works(sandbox: Sandbox) -> None:
    for size in (131_000, 132_000, 2_500_000):
        line = f"x='{'y' * size}'; echo ${{#x}} $0 $-; ls /proc/self/fd | wc -l; cat; exit 7"
        result = await sandbox.run_shell(line, stdin="in", timeout=30)
        assert (result.exit_code, result.text) == (7, f"{size} /bin/bash hBc\n4\nin"), size
    many = "echo some text of a script\n" * 40_000
    assert (await sandbox.run_shell(many, user="nobody", timeout=60)).stdout_bytes == 22 * 40_000
    with pytest.raises(dsec.TooLarge, match="4194304"):
        await sandbox.run_shell("x" * 5_000_000)


async def test_arguments_up_to_the_kernels_limit(sandbox: Sandbox) -> None:
    many = await sandbox.exec(["sh", "-c", "echo $#", "sh", *["x"] * 190_000])
    assert many.text == "190000\n"
    with pytest.raises(dsec.TooLarge, match=r"128 KiB.*2 MiB.*stdin"):
        await sandbox.exec(["echo", "x" * 2_000_000])
    with pytest.raises(dsec.TooLarge, match="longer than the kernel takes"):
        await sandbox.exec(["true", *["x" * 1000] * 2500])
    assert (await sandbox.exec(["true", "x" * 131_071])).ok


async def test_ten_thousand_variables(sandbox: Sandbox) -> None:
    env = {f"V{number}": "é" * 30 + "\n" for number in range(10_000)}
    result = await sandbox.exec(["python3", "-c", "import os; print(sum(k[0] == 'V' for k in os.environ), os.environ['V9999'])"],
                                env=env)  # fmt: skip
    assert result.text == f"10000 {'é' * 30}\n\n"


async def test_senseless_commands(sandbox: Sandbox) -> None:
    with pytest.raises(dsec.InvalidRequest, match="argv"):
        await sandbox.exec([])
    assert (await sandbox.exec([""])).exit_code == 127
    with pytest.raises(dsec.InvalidRequest, match="line"):
        await sandbox.run_shell("")
    assert (await sandbox.run_shell(" \n")).exit_code == 0


# -- where and who -----------------------------------------------------------------------------------------------------


async def test_directories_and_users(sandbox: Sandbox) -> None:
    await sandbox.run_shell("mkdir -m 700 /tmp/closed; touch /tmp/file")
    with pytest.raises(NotADirectoryError, match="/tmp/file"):
        await sandbox.exec(["true"], cwd="/tmp/file")
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        await sandbox.exec(["true"], cwd="/nowhere")
    with pytest.raises(PermissionError, match="/tmp/closed"):
        await sandbox.exec(["true"], cwd="/tmp/closed", user="nobody")
    for user in ("nobody-of-that-name", "99999999", "nobody:no-such-group"):
        with pytest.raises(dsec.InvalidRequest, match=r"user|group"):
            await sandbox.exec(["true"], user=user)
    assert (await sandbox.exec(["id", "-u"], user="1234")).text == "1234\n"
    assert (await sandbox.exec(["id", "-g"], user="nobody:users")).text == "100\n"


# -- programs ----------------------------------------------------------------------------------------------------------


async def test_programs_that_cannot_be_executed(sandbox: Sandbox) -> None:
    files = sandbox.files
    await files.write("/tmp/plain", "echo plain\n", mode=0o755)
    await files.write("/tmp/crlf", "#!/bin/sh\r\necho x\r\n", mode=0o755)
    await files.write("/tmp/arm", b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\0\xb7\0" + bytes(44), mode=0o755)
    await files.write("/tmp/closed", "#!/bin/sh\n", mode=0o644)

    async def ended(*argv: str) -> tuple[int, str]:
        result = await sandbox.exec(argv)
        return result.exit_code, result.stderr_text

    assert await ended("no-such-program") == (127, "dsec: no-such-program: command not found\n")
    assert await ended("/no/such") == (127, "dsec: /no/such: No such file or directory\n")
    assert await ended("/tmp") == (126, "dsec: /tmp: Permission denied\n")
    assert await ended("/tmp/closed") == (126, "dsec: /tmp/closed: Permission denied\n")
    assert await ended("/tmp/plain") == (126, "dsec: /tmp/plain: Exec format error\n")
    assert (await sandbox.run_shell("/tmp/plain")).text == "plain\n", "a shell runs what has no first line"
    assert await ended("/tmp/arm") == (126, "dsec: /tmp/arm: Exec format error\n")
    assert (await ended("/tmp/crlf"))[0] == 127
    assert (await sandbox.run_shell("/tmp/crlf")).exit_code in (126, 127)


async def test_a_program_that_is_being_written(sandbox: Sandbox) -> None:
    await sandbox.run_shell("cp /bin/true /tmp/busy")
    writer = await sandbox.start("exec 9<>/tmp/busy; echo open; exec sleep 60")
    assert isinstance(await anext(writer.events()), dsec.Stdout)
    busy = await sandbox.exec(["/tmp/busy"])
    assert (busy.exit_code, busy.stderr_text) == (126, "dsec: /tmp/busy: Text file busy\n")
    waiting = sandbox.exec(["/tmp/busy"])
    await writer.kill()
    assert (await waiting).ok, "one that is not written any more is executed"


# -- ends --------------------------------------------------------------------------------------------------------------


async def test_every_exit_code(sandbox: Sandbox) -> None:
    for code in range(256):
        result = await sandbox.exec(["sh", "-c", f"exit {code}"])
        assert (result.exit_code, result.signal, result.reason, result.ok) == (code, None, None, code == 0)


async def test_every_signal_by_name(sandbox: Sandbox) -> None:
    ignored = {"CHLD", "CONT", "URG", "WINCH"}
    stopping = {"STOP", "TSTP", "TTIN", "TTOU"}
    names = {number: signal.Signals(number).name.removeprefix("SIG") for number in range(1, 32)}
    names |= {34: "RTMIN", 40: "RTMIN+6", 64: "RTMAX"}
    for number, name in names.items():
        if name in ignored | stopping:
            continue
        process = await sandbox.start(["sleep", "60"])
        await process.signal(name if number % 2 else f"sig{name.lower()}" if number < 32 else name)
        result = await process.wait()
        told = name if number < 32 else f"RTMIN+{number - 34}"
        assert (result.exit_code, result.signal) == (128 + number, told), "core-dumping ones, too"
        assert not await sandbox.files.exists("/core")
    process = await sandbox.start(["sleep", "60"])
    for name in sorted(ignored | stopping):
        await process.signal(name)
    await process.signal("CONT")
    await process.signal(15)
    assert (await process.wait()).signal == "TERM"
    for wrong in ("NOSUCH", "", "SIG", "RTMIN+99", 0, 65, -9):
        with pytest.raises(dsec.InvalidRequest, match="signal"):
            await process.signal(wrong)


async def test_closed_and_crowded_output(sandbox: Sandbox) -> None:
    result = await sandbox.run_shell("echo a; exec 1>&- 2>&-; sleep 0.2; exit 5")
    assert (result.exit_code, result.text) == (5, "a\n") and result.duration_s >= 0.2
    result = await sandbox.run_shell("yes | head -c 5 > /dev/full; exit ${PIPESTATUS[1]}")
    assert result.exit_code == 1 and result.reason is None, "that device is always full: not the sandbox's disk"


async def test_processes_that_fork_and_leave(sandbox: Sandbox) -> None:
    code = "import os\nfor i in range(3000):\n  if not os.fork():\n    if os.fork(): os._exit(0)\n    os._exit(7)\n  os.wait()"
    result = await sandbox.exec(["python3", "-c", code], timeout=60)
    assert result.ok, "PID 1 reaps orphans by the thousand"
    left = await sandbox.run_shell("ps -eo stat= | grep -c Z")
    assert left.text == "0\n"
    started = time.monotonic()
    result = await sandbox.run_shell("(sleep 30 &) ; exit 3")
    assert result.exit_code == 3 and time.monotonic() - started < 10


async def test_output_of_any_length_is_bounded_and_counted(sandbox: Sandbox) -> None:
    result = await sandbox.run_shell("timeout 1 yes", max_output_bytes=100_000)
    assert result.exit_code == 124 and len(result.stdout) == 100_000
    assert result.stdout_truncated and result.stdout_bytes > 1_000_000 and result.reason is None
    nothing = await sandbox.run_shell("echo hello; echo error >&2", max_output_bytes=0)
    assert (nothing.stdout, nothing.stdout_bytes, nothing.stdout_truncated) == (b"", 6, True)
