"""What the edge tells its proxy process at its start, as one line of JSON."""

from __future__ import annotations

import msgspec

from dsec.protocol.mirrors import Mirror

from .limits import Limits


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    mirrors: tuple[Mirror, ...] = ()
    limits: Limits = Limits()
