"""`python3 -m PACKAGE [NAME...]`: run the battery, print one JSON line an attempt."""

from __future__ import annotations

import sys

from . import agent, core, devices, identity, kernel, mounts, network, proc, spaces, storage

# In the order of the report. Importing them registered their attempts.
_ORDER = (mounts, spaces, agent, proc, devices, kernel, identity, storage, network)


def main() -> None:
    core.ALL.sort(key=lambda one: [module.PREFIX for module in _ORDER].index(one.name.partition(".")[0]))
    unknown = set(sys.argv[1:]) - {one.name for one in core.ALL}
    if unknown:
        core.fail(f"no such attempt: {', '.join(sorted(unknown))}")
    core.run_all(sys.argv[1:])


main()
