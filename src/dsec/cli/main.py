"""The application: which commands there are, and the outermost loop that turns every failure into two lines and a code."""

from __future__ import annotations

import os
import sys

import typer

from dsec.cli import (
    bench,
    copy,
    demo,
    doctor,
    forward,
    jobs,
    key,
    layer,
    network,
    platform,
    rollouts,
    run,
    sandboxes,
    top,
    version,
)
from dsec.cli.failure import CliFailure, ExitCode, report

app = typer.Typer(
    name="dsec",
    help="Sandboxes for agents, on this machine. Start with: dsec up; dsec run debian@12 -- python3 -V",
    no_args_is_help=True,
    rich_markup_mode=None,  # its help costs more time than everything else together
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (platform, doctor, run, sandboxes, top, network, copy, forward, demo, bench, version):
    group.register(app)
app.add_typer(jobs.app, name="job")
app.add_typer(rollouts.app, name="rollout")
app.add_typer(layer.app, name="layer")
app.add_typer(key.app, name="key")


def main() -> None:
    """Entry point of the `dsec` script."""
    sys.exit(int(invoke(sys.argv[1:])))


def invoke(arguments: list[str]) -> int:
    """Run one command line; its exit code. Never raises, never prints a traceback unless DSEC_DEBUG is set."""
    try:
        code = app(args=arguments, prog_name="dsec", standalone_mode=False)
        sys.stdout.flush()
    except CliFailure as failure:
        report(failure.message, failure.hint)
        return failure.code
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as leaving:  # the parser's answer to a broken pipe
        return _reader_left() if isinstance(leaving.__context__, BrokenPipeError) else int(leaving.code or 0)
    except Exception as error:  # noqa: BLE001 - the process's outermost loop
        return _explained(error)
    return code if isinstance(code, int) else 0


def _reader_left() -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more at its end
    return ExitCode.BROKEN_PIPE


def _explained(error: Exception) -> int:
    if os.environ.get("DSEC_DEBUG"):
        raise error
    if isinstance(error, typer.Exit):
        return error.exit_code
    show = getattr(error, "format_message", None)  # every usage error of the parser has one
    if callable(show):
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "dsec"
        report(str(show()), f"see: {path} --help")
        return int(getattr(error, "exit_code", ExitCode.USAGE))
    while isinstance(error, ExceptionGroup):  # of tasks that ran together, the first to fail says it
        error = error.exceptions[0]
    from dsec.cli.connect import explained

    failure = explained(error)
    if failure is None:
        failure = CliFailure(
            f"{type(error).__name__}: {error}", hint="this is a fault of dsec; DSEC_DEBUG=1 shows where"
        )
    report(failure.message, failure.hint)
    return failure.code


if __name__ == "__main__":
    main()
