"""Where the service is and which key opens it: arguments, then environment, then what `dsec up` left on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from .errors import AuthenticationError, ConnectionLost

DEFAULT_STATE = "/var/lib/dsec"


class Endpoint(msgspec.Struct, frozen=True):
    """proxy: of DSEC_PROXY, which a sandbox has whose rules let it reach the API; http://host:port."""

    url: str
    api_key: str
    project: str = ""
    proxy: str = ""

    def __repr__(self) -> str:  # keys do not belong in logs and tracebacks
        return f"Endpoint(url={self.url!r})"


class _Left(msgspec.Struct):
    """`<state>/endpoint.json`."""

    url: str
    key_file: str


def discover(url: str | None = None, api_key: str | None = None, project: str | None = None) -> Endpoint:
    """The endpoint to use. ConnectionLost when no service is known, AuthenticationError when no key is."""
    url = url or os.environ.get("DSEC_URL")
    api_key = api_key or os.environ.get("DSEC_API_KEY")
    project = project or os.environ.get("DSEC_PROJECT") or ""
    left: _Left | None = None
    if url is None or api_key is None:
        left = _left_here()
    if url is None:
        if left is None:
            raise ConnectionLost(
                f"no DSec service is known: no url argument, no DSEC_URL, no {_state() / 'endpoint.json'}",
                hint="run `dsec up`, or set DSEC_URL and DSEC_API_KEY",
            )
        url = left.url
    if api_key is None:
        api_key = _key_of(left, url)
    return Endpoint(url.rstrip("/"), api_key, project, os.environ.get("DSEC_PROXY", ""))


def _state() -> Path:
    return Path(os.environ.get("DSEC_STATE") or DEFAULT_STATE)


def _left_here() -> _Left | None:
    try:
        return msgspec.json.decode((_state() / "endpoint.json").read_bytes(), type=_Left)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise AuthenticationError(
            f"{error.filename} may not be read by this user",
            hint="run as the user who ran `dsec up`, or set DSEC_URL and DSEC_API_KEY",
        ) from error
    except msgspec.DecodeError as error:
        raise ConnectionLost(
            f"{_state() / 'endpoint.json'} is damaged: {error}", hint="run `dsec down` and `dsec up`"
        ) from error


def _key_of(left: _Left | None, url: str) -> str:
    """The key file's contents, but only for the service it belongs to: a local key is not sent to another host."""
    if left is None or left.url.rstrip("/") != url.rstrip("/"):
        raise AuthenticationError(
            f"no API key for {url}: no api_key argument, no DSEC_API_KEY, and no key of it on this machine",
            hint="set DSEC_API_KEY; on the machine that runs the service `dsec up` leaves the key where the SDK finds it",
        )
    try:
        return Path(left.key_file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise AuthenticationError(
            f"the key file {left.key_file} cannot be read: {error.strerror}",
            hint="run as the user who ran `dsec up`, or set DSEC_API_KEY",
        ) from error
