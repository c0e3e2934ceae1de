"""Capabilities given away are gone from every set."""

from __future__ import annotations

import subprocess
import sys


def test_only_what_is_kept_is_left() -> None:
    program = (
        "from dsec.protocol.privilege import keep_capabilities; keep_capabilities([5]);"
        "print(*[l for l in open('/proc/self/status') if l.startswith(('Cap', 'NoNew'))], sep='')"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    values = dict(line.split(":\t") for line in out.split("\n") if line)
    assert int(values["CapPrm"], 16) == int(values["CapEff"], 16) == int(values["CapBnd"], 16) == 1 << 5
    assert int(values["CapInh"], 16) == int(values["CapAmb"], 16) == 0 and values["NoNewPrivs"] == "1"
