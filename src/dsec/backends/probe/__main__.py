"""`python -m dsec.backends.probe SCRATCH [NAME...]`: run the probes, print a JSON list of capabilities."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec

from dsec.backends.probe import cgroups, filesystems, machine, namespaces, virtual
from dsec.backends.probe.model import REGISTRY, Finding, Probe, capability
from dsec.backends.probe.scratch import in_child
from dsec.protocol.specs import Capability

# In the order in which a reader wants the answers.
_MODULES = (machine, namespaces, cgroups, filesystems, virtual)


def _answer(which: Probe, scratch: Path) -> Capability:
    try:
        finding = in_child(lambda: which.run(scratch)) if which.forked else which.run(scratch)
    except OSError as error:
        finding = Finding(False, error.strerror or str(error))
    return capability(which, finding)


def main() -> None:
    scratch = Path(sys.argv[1])
    scratch.chmod(0o711)  # mapped users must be able to pass through
    wanted = set(sys.argv[2:])
    probes = [which for module in _MODULES for which in REGISTRY if which.run.__module__ == module.__name__]
    unknown = wanted - {which.name for which in probes}
    if unknown:
        sys.exit(f"no such probe: {', '.join(sorted(unknown))}")
    try:
        answers = [_answer(which, scratch) for which in probes if not wanted or which.name in wanted]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # here, since the one who asked may have died meanwhile
    sys.stdout.buffer.write(msgspec.json.encode(answers))


main()
