"""The message and the exit status of a command that fails.

    0    success
    1    a check failed (verify), or any other failure
    2    wrong usage: flags, environment or settings file
    3    refused: the same request will be refused again
    4    unreachable, busy or draining: the same command may succeed later
    5    a package is missing
    130  interrupted
    143  `skerry learn` was told to stop by SIGTERM before its steps were done

The message is one line `error: what happened. facts`, often with a second line `next: what to do`. Any other exception
is a defect of Skerry, and its whole traceback is shown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from enum import IntEnum
from typing import Final

import click


class ExitStatus(IntEnum):
    """How `skerry` exits."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    TRY_AGAIN = 4
    NOT_INSTALLED = 5
    INTERRUPTED = 130


# Reasons of the errors of commands that read the store themselves.
_STORE_MAY_ANSWER_LATER: Final = frozenset({"STORE_UNAVAILABLE", "STORE_FULL"})

_NEXT: Final[Mapping[str, str]] = {
    "RUN_NOT_FOUND": "`skerry runs list` lists the runs",
    "RUN_EXISTS": "learners can join it by name; `skerry runs delete` frees the name",
    "RUN_REPLACED": "another run has the name now; `skerry runs show` shows it",
    "SESSION_FENCED": "give each learner a --learner-id of its own",
    "EJECTED": "ask an admin of the run why",
    "LEARNER_NOT_FOUND": "`skerry runs show` lists the learners",
    "RUN_CLOSED": "the run is read-only; `skerry export` still reads its weights",
    "BAD_NAME": "a name has 1 to 64 of the characters a-z 0-9 . _ - and starts and ends with a letter or digit",
    "FRAGMENT_NOT_FOUND": "`skerry runs show` lists the fragments",
    "VERSION_NOT_FOUND": "`skerry log` shows the positions, `skerry runs show` the versions",
    "STORE_REFUSED": "docs/buckets.md says what a bucket must allow; a folder is begun by `skerry serve --new-store`",
    "STORE_UNAVAILABLE": "the syncer can't reach its store; the syncer's log says why",
    "STORE_FULL": "free some space; `skerry gc` removes objects that no version needs",
    "STORE_ROLLED_BACK": "if the run was ever that far, `skerry verify` says what the store has lost: restore a backup",
    "DRAINING": "the replica is shutting down; try again",
    "NEWER_FORMAT": "a newer version wrote the run: use that version here too",
    "RUN_OPENING": "the syncer is still reading the run's log, and its own log says how far it is; try again",
    "OBJECT_UNREADABLE": "`skerry verify` lists what is lost; `skerry rollback` goes on from weights that are left",
    "INTERNAL": "the syncer's log says why",
    "UNREACHABLE": "check that `skerry serve` is running there, and that --target is right",
    "TLS_FAILED": "`skerry keys --help` has examples of the files that both sides need",
    "UNAUTHENTICATED": "give --tls-cert and --tls-key that the server's operator made for you",
    "PERMISSION_DENIED": "docs/security.md says what each role may do; ask the server's operator for another role",
    "TIMEOUT": "the syncer took longer than --timeout; try again, or raise --timeout",
}

# By name of a package that only some commands need: what to install.
_PACKAGES: Final = {
    "torch": "'skerry[torch]'",
    "matplotlib": "matplotlib",
    **dict.fromkeys(("bokeh", "jinja2", "starlette", "uvicorn"), "'skerry[console]'"),
}


def run(command: click.Command, arguments: list[str] | None = None) -> ExitStatus | int:
    """Runs a command, prints its error, if any, to standard error, and returns the exit status."""
    try:
        result = command.main(args=arguments, prog_name="skerry", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted")
        return ExitStatus.INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())  # `skerry` or `skerry runs` with nothing after it: the help
        return ExitStatus.DONE
    except click.ClickException as error:
        return _show_usage(error)
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:  # all others are dependencies of skerry
            raise
        _say(f"error: this command needs a package that is not installed. package={error.name}")
        _say(f"next: pip install {_PACKAGES[error.name]}")
        return ExitStatus.NOT_INSTALLED
    except BrokenPipeError:
        # The reader has closed the pipe (`skerry watch --json | head`), so nothing may be flushed into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.FAILED
    except Exception as error:
        reason = getattr(error, "reason", None)
        if not isinstance(reason, str) or not type(error).__module__.startswith("skerry"):
            raise
        return _show_refusal(error, str(reason))
    return result if isinstance(result, int) else ExitStatus.DONE


def _show_usage(error: click.ClickException) -> int:
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        _say(context.get_usage())
    _say(f"error: {error.format_message()}")
    if context is not None:
        _say(f"next: `{context.command_path} --help` has an example")
    return error.exit_code


def _show_refusal(error: Exception, reason: str) -> ExitStatus:
    from skerry.errors import TryAgainError  # imports gRPC, which --help does not need

    _say(f"error: {error} [{reason}]")
    if reason in _NEXT:
        _say(f"next: {_NEXT[reason]}")
    may_succeed_later = isinstance(error, TryAgainError) or reason in _STORE_MAY_ANSWER_LATER
    return ExitStatus.TRY_AGAIN if may_succeed_later else ExitStatus.REFUSED


def _say(text: str) -> None:
    click.echo(text, err=True)
