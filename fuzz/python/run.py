"""`python fuzz/python/run.py TARGET SECONDS`: one target under atheris, from the kept corpus on.

What is new goes to build/fuzz/TARGET; an input that breaks it to build/fuzz/crash-TARGET-*, and the exit code is not 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "python"))

with atheris.instrument_imports(include=["dsec", "tarfile"]):
    from targets import TARGETS


def main(name: str, seconds: str) -> None:
    run, corpus = TARGETS[name]
    build = ROOT.parent / "build" / "fuzz"
    (build / name).mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        "-max_len=8192",
        "-timeout=20",
        "-rss_limit_mb=1024",
        "-print_final_stats=1",
    ]
    prefix = f"-artifact_prefix={build}/crash-{name}-"
    atheris.Setup([sys.argv[0], str(build / name), str(ROOT / "corpus" / corpus), prefix, *options], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
