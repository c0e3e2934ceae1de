"""The `dsec` command: one module per group of commands.

    main.py      the application and the process's outermost loop
    options.py   options that several commands share
    output.py    tables on a terminal, plain columns in a pipe, JSON when asked
    failure.py   what can go wrong, as two lines and an exit code
    connect.py   a client on the running platform
    streams.py   a command's output and input, live

Modules of commands import nothing heavy at their top: `dsec --help` must not wait for an HTTP client.
"""
