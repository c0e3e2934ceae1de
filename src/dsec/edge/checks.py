"""Is a creation request sane? Every refusal names the field, the value and the range."""

from __future__ import annotations

import math

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import DSecContainerRunArgs

from .admission import memory
from .proxy.rules import check_rules

MAX_CORES = 1024
MAX_PIDS = 32_768
MAX_DISK_MB = 16 * 1024 * 1024
MIN_MEMORY_MB = 8
MAX_TEXT = 32 * 1024
_TOTAL_MEMORY_MB = memory()[1] >> 20


def _invalid(field: str, message: str) -> Fault:
    return Fault(ErrorKind.INVALID, f"{field}: {message}", hint="see DSecContainerRunArgs", field=field)


def _in_range(field: str, value: float, low: float, high: float, unit: str) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise _invalid(field, f"{value} is not between {low:g} and {high:g} {unit}")


def _text(field: str, value: str, limit: int = 4096) -> None:
    if "\0" in value:
        raise _invalid(field, "holds a NUL character")
    if len(value) > limit:
        raise _invalid(field, f"is longer than {limit} characters")


def check_args(args: DSecContainerRunArgs) -> None:
    _in_range("cpu_cores_limit", args.cpu_cores_limit, 0.01, MAX_CORES, "cores")
    _in_range("memory_limit_mb", args.memory_limit_mb, MIN_MEMORY_MB, _TOTAL_MEMORY_MB, "MiB (the node's memory)")
    _in_range("disk_limit_mb", args.disk_limit_mb, 1, MAX_DISK_MB, "MiB")
    _in_range("pids_limit", args.pids_limit, 2, MAX_PIDS, "processes")
    for field, ttl in (("ttl_running_stop", args.ttl_running_stop), ("ttl_total", args.ttl_total)):
        if ttl is not None and not (math.isfinite(ttl) and ttl > 0):
            raise _invalid(field, f"{ttl} is not a positive number of seconds (None: never)")
    _check_texts(args)


def _check_texts(args: DSecContainerRunArgs) -> None:
    _text("init_user", args.init_user, 256)
    if not args.init_user:
        raise _invalid("init_user", "is empty")
    if args.workdir is not None:
        _text("workdir", args.workdir)
        if not args.workdir.startswith("/"):
            raise _invalid("workdir", f"{args.workdir!r} is not an absolute path")
    total = 0
    for key, value in args.env.items():
        if not key or "=" in key:
            raise _invalid("env", f"{key!r} is not a name of a variable")
        _text(f"env[{key[:64]}]", key + value, MAX_TEXT)
        total += len(key) + len(value)
    if total > MAX_TEXT:
        raise _invalid("env", f"{total} characters in all are more than {MAX_TEXT}; pass large ones with each command")
    if len(args.labels) > 64:
        raise _invalid("labels", f"{len(args.labels)} labels are more than 64")
    for key, value in args.labels.items():
        _text(f"labels[{key[:64]}]", key + value, 1024)
    if args.idempotency_key is not None:
        _text("idempotency_key", args.idempotency_key, 256)
        if not args.idempotency_key:
            raise _invalid("idempotency_key", "is empty, and would be everybody's")
    check_rules(args.network_rules)
