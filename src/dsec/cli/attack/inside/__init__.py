"""The part of the battery that runs inside a sandbox, as root, on the image's own Python (3.11 or later, nothing else).

Copied in as a package and started with `python3 -m`, so it imports nothing but itself and the standard library. Every
attempt is harmless where it succeeds: it writes back the value it read, opens without writing, or calls with arguments that
the kernel refuses only after it has checked the permission. Numbers of system calls are those of x86-64.
"""
