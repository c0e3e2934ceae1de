"""The minimal session: create a sandbox, run a command in it, stop it.

sudo dsec up && sudo python examples/quickstart.py
"""

import asyncio

from dsec import DSecClient, DSecContainerRunArgs


async def main() -> None:
    client = DSecClient()
    await client.open()
    args = DSecContainerRunArgs(
        container_image="debian@12",
        memory_limit_mb=1024,
        cpu_cores_limit=1,
        ttl_running_stop=600,  # idle seconds
        network_rules={"pypi": True, "npm": False},
        init_user="root",
    )
    sandbox = await client.run_container(args, timeout=120)
    result = await sandbox.run_shell("python3 --version && echo hello from $(hostname)")
    print(result.text, end="")
    info = await sandbox.info()
    print("pypi:", info.network.enforced["pypi"])
    await sandbox.stop()
    await client.close()


asyncio.run(main())
