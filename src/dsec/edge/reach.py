"""How programs inside find the proxy and the mirrors: variables for every command, and a few files.

`FILES` is the whole list of what the platform leaves in a sandbox's own files; nothing else of it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from dsec.protocol.mirrors import Mirror, MirrorKind

from .proxy.rules import Policy, where

ADDRESS, PORT = "127.0.0.1", 18080
PROXY = f"http://{ADDRESS}:{PORT}"
MARK = "Written by DSec for this sandbox's network rules; removed with them."
_DIRECT = "localhost,127.0.0.1,::1"


class _File(NamedTuple):
    """text gives the content, None for no file. Only where its directory exists, and never over somebody else's file."""

    path: str
    text: Callable[[Sequence[Mirror]], str | None]


def of_kind(mirrors: Sequence[Mirror], kind: MirrorKind) -> list[Mirror]:
    return [mirror for mirror in mirrors if mirror.kind is kind]


def _pip(mirrors: Sequence[Mirror]) -> str | None:
    lines = [f"# {MARK}", "[global]", f"proxy = {PROXY}", "disable-pip-version-check = true"]
    indexes = of_kind(mirrors, MirrorKind.PYPI)
    if not indexes:
        return "\n".join([*lines, "retries = 0", ""])
    lines += [f"index-url = {where(indexes[0])}", "retries = 1"]
    if indexes[1:]:
        lines.append("extra-index-url = " + " ".join(map(where, indexes[1:])))
    return "\n".join([*lines, "trusted-host = " + " ".join(mirror.name for mirror in indexes), ""])


def _npm(mirrors: Sequence[Mirror]) -> str | None:
    registries = of_kind(mirrors, MirrorKind.NPM)
    lines = [f"# {MARK}", f"proxy={PROXY}", f"https-proxy={PROXY}", f"noproxy={_DIRECT}", "audit=false", "fund=false",
             "update-notifier=false"]  # fmt: skip
    lines += [f"registry={where(registries[0])}", "fetch-retries=1"] if registries else ["fetch-retries=0"]
    return "\n".join([*lines, ""])


def _apt(mirrors: Sequence[Mirror]) -> str | None:
    return (
        f'// {MARK}\nAcquire::http::Proxy "{PROXY}/";\nAcquire::https::Proxy "{PROXY}/";\nAcquire::Retries "0";\n'
        'Acquire::http::Proxy::localhost "DIRECT";\nAcquire::http::Proxy::127.0.0.1 "DIRECT";\n'
    )


def _sources(mirrors: Sequence[Mirror]) -> str | None:
    stanzas = [
        "\n".join(
            [
                "Types: deb",
                f"URIs: {where(mirror)}",
                f"Suites: {' '.join(mirror.suites)}",
                *([f"Components: {' '.join(mirror.components)}"] if mirror.components else []),
                *(["Trusted: yes"] if mirror.trusted else []),
            ]
        )
        for mirror in of_kind(mirrors, MirrorKind.APT)
    ]
    return f"# {MARK}\n\n" + "\n\n".join(stanzas) + "\n" if stanzas else None


FILES = (
    _File("/etc/pip.conf", _pip),
    _File("/etc/npmrc", _npm),
    _File("/usr/local/etc/npmrc", _npm),
    _File("/etc/apt/apt.conf.d/90dsec-network", _apt),
    _File("/etc/apt/sources.list.d/dsec-network.sources", _sources),
)


def contents(policy: Policy | None) -> dict[str, bytes | None]:
    """Every file with what it should hold; None where there should be none."""
    if policy is None:
        return {file.path: None for file in FILES}
    mirrors = policy.mirrors
    return {file.path: text.encode() if (text := file.text(mirrors)) is not None else None for file in FILES}


def is_ours(data: bytes) -> bool:
    return MARK.encode() in data[:200]


def environment(policy: Policy) -> Mapping[str, str]:
    """Variables under the command's own. Programs disagree about the case of the proxy's; curl wants http_proxy small."""
    mirrors = policy.mirrors
    found = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), PROXY)
    found |= {"no_proxy": _DIRECT, "NO_PROXY": _DIRECT, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    found |= _python(of_kind(mirrors, MirrorKind.PYPI)) | _node(of_kind(mirrors, MirrorKind.NPM))
    return found | _sdk(of_kind(mirrors, MirrorKind.API))


def beside_services(variables: Mapping[str, str], names: Iterable[str]) -> Mapping[str, str]:
    """The same variables, with the services of the caller that have names inside reached directly."""
    direct = ",".join((_DIRECT, *names))
    return {name: direct if value == _DIRECT else value for name, value in variables.items()}


def _python(indexes: Sequence[Mirror]) -> dict[str, str]:
    if not indexes:
        return {"PIP_RETRIES": "0"}
    first, names = where(indexes[0]), " ".join(mirror.name for mirror in indexes)
    found = {"PIP_INDEX_URL": first, "PIP_TRUSTED_HOST": names, "PIP_RETRIES": "1"}
    found |= {"UV_DEFAULT_INDEX": first, "UV_INSECURE_HOST": names}
    if indexes[1:]:
        found["PIP_EXTRA_INDEX_URL"] = found["UV_INDEX"] = " ".join(map(where, indexes[1:]))
    return found


def _sdk(apis: Sequence[Mirror]) -> dict[str, str]:
    """The SDK takes no proxy from variables that are meant for all programs: with them it could lose a service that is near."""
    return {"DSEC_URL": where(apis[0]).rstrip("/"), "DSEC_PROXY": PROXY} if apis else {}


def _node(registries: Sequence[Mirror]) -> dict[str, str]:
    found = {"npm_config_audit": "false", "npm_config_fund": "false", "npm_config_update_notifier": "false"}
    if not registries:
        return found | {"npm_config_fetch_retries": "0"}
    return found | {"npm_config_registry": where(registries[0]), "npm_config_fetch_retries": "1"}
