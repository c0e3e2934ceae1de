"""The same without async: for scripts, notebooks and frameworks that have no event loop.

sudo dsec up && sudo python examples/sync_client.py
"""

import tempfile
from pathlib import Path

from dsec import CommandFailed, DSecContainerRunArgs, Exit, Stdout
from dsec.sync import DSecClient

with DSecClient() as client, client.run_container(DSecContainerRunArgs(container_image="debian@12")) as sandbox:
    sandbox.files.write("/project/count.sh", "for i in 1 2 3; do echo $i; done\n", mode=0o755)

    process = sandbox.start(["sh", "/project/count.sh"])
    for event in process.events():
        if isinstance(event, Stdout):
            print(event.data.decode(), end="")
        elif isinstance(event, Exit):
            print("exit code", event.result.exit_code)

    try:
        sandbox.run_shell("ls /nowhere", check=True)
    except CommandFailed as failed:
        print(failed.message)

    for change in sandbox.changes(include=("project/**",)).changes:
        print(change.kind.value, change.path.decode())

    with tempfile.TemporaryDirectory() as directory:
        print(sandbox.files.download("/project", Path(directory) / "project"))
