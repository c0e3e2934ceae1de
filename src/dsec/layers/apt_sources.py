"""The machine's own apt sources of one Debian release, and its apt settings for getting there (proxy, CA, credentials)."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from dsec.protocol.errors import ErrorKind, Fault

_ETC = Path("/etc/apt")
_ONE_LINE = re.compile(r"deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s+(?P<components>.+)")
# Settings that tell apt how to reach a server; the others (translations, index targets, hooks) are not ours to take over.
_REACH = re.compile(r"Acquire::(https?|ftp|Retries|ForceIPv4|ForceIPv6|Proxy|Check-Valid-Until)\b", re.IGNORECASE)

Stanza = dict[str, str]


def debian_sources(release: str, etc: Path = _ETC) -> str:
    """A deb822 file with the machine's sources of the Debian archive's `release` (component main).

    Fault UNSUPPORTED when it has none.
    """
    stanzas = [stanza for found in _all_stanzas(etc) if (stanza := _for_release(found, release)) is not None]
    if not stanzas:
        raise Fault(
            ErrorKind.UNSUPPORTED,
            f"apt on this machine has no sources of Debian {release}",
            hint=f"add them below {etc}, or import a base layer from an OCI image instead",
        )
    unique = dict.fromkeys("\n".join(f"{key}: {value}" for key, value in stanza.items()) for stanza in stanzas)
    return "\n\n".join(unique) + "\n"


def reach_settings() -> str:
    """apt.conf lines: the machine's proxies, certificates and retries, and the place of its credentials."""
    dump = subprocess.run(["apt-config", "dump", "--no-empty"], capture_output=True, text=True, check=False).stdout
    lines = [line for line in dump.splitlines() if _REACH.match(line)]
    lines += [f'Dir::Etc::netrc "{_ETC}/auth.conf";', f'Dir::Etc::netrcparts "{_ETC}/auth.conf.d/";']
    return "\n".join(lines) + "\n"


def _all_stanzas(etc: Path) -> list[Stanza]:
    parts = etc / "sources.list.d"
    stanzas: list[Stanza] = []
    for path in [etc / "sources.list", *sorted(parts.glob("*.list"))]:
        if path.is_file():
            stanzas += _one_line(path.read_text(errors="replace"))
    for path in sorted(parts.glob("*.sources")):
        stanzas += _deb822(path.read_text(errors="replace"))
    return stanzas


def _one_line(text: str) -> list[Stanza]:
    """`deb [options] uri suite components` lines as stanzas."""
    stanzas: list[Stanza] = []
    for line in text.splitlines():
        match = _ONE_LINE.fullmatch(line.partition("#")[0].strip())
        if match is None:
            continue
        stanza = {
            "Types": "deb",
            "URIs": match["uri"],
            "Suites": match["suite"],
            "Components": match["components"],
        }
        for option in (match["options"] or "").split():
            key, _, value = option.partition("=")
            if key.lower() == "signed-by":
                stanza["Signed-By"] = value
        stanzas.append(stanza)
    return stanzas


def _deb822(text: str) -> list[Stanza]:
    stanzas: list[Stanza] = []
    for block in re.split(r"\n\s*\n", text):
        stanza: Stanza = {}
        last = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t") and last:
                stanza[last] += "\n" + line
            elif ":" in line:
                key, _, value = line.partition(":")
                last = _canonical(key.strip())
                stanza[last] = value.strip()
        if stanza:
            stanzas.append(stanza)
    return stanzas


def _canonical(key: str) -> str:
    """Field names are case-insensitive; these are the ones we look at."""
    known = {name.lower(): name for name in ("Types", "URIs", "Suites", "Components", "Signed-By", "Enabled")}
    return known.get(key.lower(), key)


def _for_release(stanza: Stanza, release: str) -> Stanza | None:
    """The part of a stanza that is the Debian archive's `release`, component main; None when there is none."""
    enabled = stanza.get("Enabled", "yes").lower() not in ("no", "false", "0")
    suites = [suite for suite in stanza.get("Suites", "").split() if suite in _suites(release)]
    signer = stanza.get("Signed-By", "")
    foreign = "/" in signer and "debian-archive" not in signer  # another vendor's repository for this release
    if not enabled or not suites or foreign:
        return None
    if "deb" not in stanza.get("Types", "").split() or "main" not in stanza.get("Components", "").split():
        return None
    part = {"Types": "deb", "URIs": stanza.get("URIs", ""), "Suites": " ".join(suites), "Components": "main"}
    return part | {"Signed-By": signer} if signer else part


def _suites(release: str) -> set[str]:
    return {release, f"{release}-updates", f"{release}-security"}
