"""Benchmarks: one module per bench of docs/specification.md, run by `dsec bench NAME`.

create.py, exec.py, density.py    the benches; each defines `main`
report.py      results, promises, output
machine.py     what this machine is and how busy
floor_run.py   the floor program, on a filesystem like that of the uppers
stage.py       a private platform with a client, and environments that nobody has asked for before
peers.py       what a user would run instead
"""
