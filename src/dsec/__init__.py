"""DSec: elastic sandboxes for agentic reinforcement learning and evaluation.

Everything public is here (async) and in `dsec.sync` (the same without `await`). Names are loaded when they are first used, so
that `import dsec` costs a training process nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from dsec.protocol.compare import Comparison as Comparison
    from dsec.protocol.compare import Difference as Difference
    from dsec.protocol.errors import ErrorKind as ErrorKind
    from dsec.protocol.grading import CommandRunner as CommandRunner
    from dsec.protocol.grading import Dropped as Dropped
    from dsec.protocol.grading import DropReason as DropReason
    from dsec.protocol.grading import Evidence as Evidence
    from dsec.protocol.grading import ExitCode as ExitCode
    from dsec.protocol.grading import FailedTest as FailedTest
    from dsec.protocol.grading import GradeReason as GradeReason
    from dsec.protocol.grading import GradeTimes as GradeTimes
    from dsec.protocol.grading import JUnit as JUnit
    from dsec.protocol.grading import PytestRunner as PytestRunner
    from dsec.protocol.grading import Score as Score
    from dsec.protocol.grading import Signal as Signal
    from dsec.protocol.grading import TestSet as TestSet
    from dsec.protocol.grading import Verdict as Verdict
    from dsec.protocol.mirrors import Mirror as Mirror
    from dsec.protocol.mirrors import MirrorKind as MirrorKind
    from dsec.protocol.mirrors import Mirrors
    from dsec.protocol.rollouts import Blob as Blob
    from dsec.protocol.rollouts import JobInfo as JobInfo
    from dsec.protocol.rollouts import JobLimits as JobLimits
    from dsec.protocol.rollouts import JobState as JobState
    from dsec.protocol.rollouts import JobUsage as JobUsage
    from dsec.protocol.rollouts import RolloutInfo as RolloutInfo
    from dsec.protocol.rollouts import RolloutState as RolloutState
    from dsec.protocol.rollouts import StepRecord as StepRecord
    from dsec.protocol.scopes import ScopedKey as ScopedKey
    from dsec.protocol.specs import Capabilities as Capabilities
    from dsec.protocol.specs import Capability as Capability
    from dsec.protocol.specs import Change as Change
    from dsec.protocol.specs import ChangeKind as ChangeKind
    from dsec.protocol.specs import ChangeSet as ChangeSet
    from dsec.protocol.specs import DSecContainerRunArgs as DSecContainerRunArgs
    from dsec.protocol.specs import ExecLimits as ExecLimits
    from dsec.protocol.specs import FileChange as FileChange
    from dsec.protocol.specs import FileChangeKind as FileChangeKind
    from dsec.protocol.specs import FileInfo as FileInfo
    from dsec.protocol.specs import FileKind as FileKind
    from dsec.protocol.specs import LayerRef as LayerRef
    from dsec.protocol.specs import Limits as Limits
    from dsec.protocol.specs import Network as Network
    from dsec.protocol.specs import ProcessInfo as ProcessInfo
    from dsec.protocol.specs import PtySize as PtySize
    from dsec.protocol.specs import Reason as Reason
    from dsec.protocol.specs import SandboxInfo as SandboxInfo
    from dsec.protocol.specs import SessionInfo as SessionInfo
    from dsec.protocol.specs import State as State
    from dsec.protocol.specs import Usage as Usage
    from dsec.sdk.archive import Downloaded as Downloaded
    from dsec.sdk.bursts import Burst as Burst
    from dsec.sdk.bursts import Outcome as Outcome
    from dsec.sdk.client import DSecClient as DSecClient
    from dsec.sdk.errors import AuthenticationError as AuthenticationError
    from dsec.sdk.errors import CapacityError as CapacityError
    from dsec.sdk.errors import CommandFailed as CommandFailed
    from dsec.sdk.errors import CommandTimedOut as CommandTimedOut
    from dsec.sdk.errors import Conflict as Conflict
    from dsec.sdk.errors import ConnectionLost as ConnectionLost
    from dsec.sdk.errors import ConnectTimeout as ConnectTimeout
    from dsec.sdk.errors import CreateFailed as CreateFailed
    from dsec.sdk.errors import CreateTimeout as CreateTimeout
    from dsec.sdk.errors import DSecError as DSecError
    from dsec.sdk.errors import FileError as FileError
    from dsec.sdk.errors import InternalError as InternalError
    from dsec.sdk.errors import InvalidRequest as InvalidRequest
    from dsec.sdk.errors import NoSpace as NoSpace
    from dsec.sdk.errors import NotFound as NotFound
    from dsec.sdk.errors import OutcomeUnknown as OutcomeUnknown
    from dsec.sdk.errors import PermissionDenied as PermissionDenied
    from dsec.sdk.errors import QuotaExceeded as QuotaExceeded
    from dsec.sdk.errors import ReplayDivergence as ReplayDivergence
    from dsec.sdk.errors import RequestTimeout as RequestTimeout
    from dsec.sdk.errors import RolloutFenced as RolloutFenced
    from dsec.sdk.errors import SandboxUnavailable as SandboxUnavailable
    from dsec.sdk.errors import SessionEnded as SessionEnded
    from dsec.sdk.errors import TooLarge as TooLarge
    from dsec.sdk.errors import Unsupported as Unsupported
    from dsec.sdk.files import Files as Files
    from dsec.sdk.jobs import Job as Job
    from dsec.sdk.keys import Keys as Keys
    from dsec.sdk.layers import Layers as Layers
    from dsec.sdk.ports import Exposed as Exposed
    from dsec.sdk.ports import Forward as Forward
    from dsec.sdk.ports import LocalUrl as LocalUrl
    from dsec.sdk.process import Process as Process
    from dsec.sdk.results import Event as Event
    from dsec.sdk.results import ExecResult as ExecResult
    from dsec.sdk.results import Exit as Exit
    from dsec.sdk.results import LogLine as LogLine
    from dsec.sdk.results import Stderr as Stderr
    from dsec.sdk.results import Stdout as Stdout
    from dsec.sdk.rollout import Rollout as Rollout
    from dsec.sdk.rollout import RolloutOpening as RolloutOpening
    from dsec.sdk.rollout_files import RolloutFiles as RolloutFiles
    from dsec.sdk.rollout_process import RolloutProcess as RolloutProcess
    from dsec.sdk.rollout_process import RolloutSession as RolloutSession
    from dsec.sdk.rollouts import Exported as Exported
    from dsec.sdk.rollouts import Rollouts as Rollouts
    from dsec.sdk.sandbox import Sandbox as Sandbox
    from dsec.sdk.session import Session as Session

_HOMES: dict[str, tuple[str, ...]] = {
    "dsec.protocol.compare": ("Comparison", "Difference"),
    "dsec.protocol.errors": ("ErrorKind",),
    "dsec.protocol.grading": (
        "CommandRunner", "Dropped", "DropReason", "Evidence", "ExitCode", "FailedTest", "GradeReason", "GradeTimes", "JUnit",
        "PytestRunner", "Score", "Signal", "TestSet", "Verdict",
    ),
    "dsec.protocol.mirrors": ("Mirror", "MirrorKind"),
    "dsec.protocol.scopes": ("ScopedKey",),
    "dsec.protocol.rollouts": (
        "Blob", "JobInfo", "JobLimits", "JobState", "JobUsage", "RolloutInfo", "RolloutState", "StepRecord",
    ),
    "dsec.protocol.specs": (
        "Capabilities", "Capability", "Change", "ChangeKind", "ChangeSet", "DSecContainerRunArgs", "ExecLimits", "FileChange",
        "FileChangeKind", "FileInfo", "FileKind",
        "LayerRef", "Limits", "Network", "ProcessInfo", "PtySize", "Reason", "SandboxInfo", "SessionInfo", "State", "Usage",
    ),
    "dsec.sdk.archive": ("Downloaded",),
    "dsec.sdk.bursts": ("Burst", "Outcome"),
    "dsec.sdk.client": ("DSecClient",),
    "dsec.sdk.errors": (
        "AuthenticationError", "CapacityError", "CommandFailed", "CommandTimedOut", "Conflict", "ConnectTimeout",
        "ConnectionLost", "CreateFailed", "CreateTimeout", "DSecError", "FileError", "InternalError", "InvalidRequest",
        "NoSpace", "NotFound", "OutcomeUnknown", "PermissionDenied", "QuotaExceeded", "ReplayDivergence", "RequestTimeout",
        "RolloutFenced", "SandboxUnavailable", "SessionEnded", "TooLarge", "Unsupported",
    ),
    "dsec.sdk.files": ("Files",),
    "dsec.sdk.jobs": ("Job",),
    "dsec.sdk.keys": ("Keys",),
    "dsec.sdk.layers": ("Layers",),
    "dsec.sdk.ports": ("Exposed", "Forward", "LocalUrl"),
    "dsec.sdk.process": ("Process",),
    "dsec.sdk.results": ("Event", "ExecResult", "Exit", "LogLine", "Stderr", "Stdout"),
    "dsec.sdk.rollout": ("Rollout", "RolloutOpening"),
    "dsec.sdk.rollout_files": ("RolloutFiles",),
    "dsec.sdk.rollout_process": ("RolloutProcess", "RolloutSession"),
    "dsec.sdk.rollouts": ("Exported", "Rollouts"),
    "dsec.sdk.sandbox": ("Sandbox",),
    "dsec.sdk.session": ("Session",),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = [*sorted(_HOME), "embedded", "sync"]


def __getattr__(name: str) -> object:
    if name == "sync":
        return importlib.import_module("dsec.sync")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'dsec' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return __all__


@asynccontextmanager
async def embedded(state_dir: str | Path | None = None, *, mirrors: Mirrors | None = None) -> AsyncIterator[DSecClient]:
    """An open client on a private DSec of this machine (as root) that ends with the block, its sandboxes with it.

    state_dir: where its journal, key and logs lie and stay; without it in a temporary directory that goes too.
    mirrors: what `network_rules` can name, as {"pypi": URL}, the path of a mirrors file, or `Mirror`s.
    """
    import asyncio
    from contextlib import ExitStack

    from dsec.cluster.embedded import private
    from dsec.protocol.errors import Fault
    from dsec.sdk.client import DSecClient
    from dsec.sdk.errors import from_body

    with ExitStack() as stack:
        try:
            endpoint = await asyncio.to_thread(stack.enter_context, private(state_dir, mirrors=mirrors))
        except Fault as fault:
            raise from_body(fault.body) from fault
        try:
            with open(endpoint.key_file, encoding="ascii") as file:  # noqa: ASYNC230 - one line
                key = file.read().strip()
            async with DSecClient(endpoint.url, key) as client:
                yield client
        finally:
            await asyncio.to_thread(stack.close)
