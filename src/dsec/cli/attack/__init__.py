"""The escape battery of `dsec doctor --attack`, which the isolation tests run too.

inside/     what runs in the sandbox, as root: one attempt a function
outside.py  attempts that need a second command to see what became of the sandbox
battery.py  both together, through the SDK
command.py  the report
"""
