"""What a person reads, and a script gets as exit status, when a command fails.

    0    done
    1    done, and the answer is no; or a failure of no other kind
    2    wrong usage: flags, environment or settings file
    3    refused, and will be refused again: change what is asked for
    4    unreachable, busy or draining: the same command may succeed later
    5    something must be installed first
    130  interrupted

One line `error: what happened. facts`, and where it helps one line of what to do next. An error that none of this
knows is a defect of Skerry: its traceback is shown whole.
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


# What brings a module that is not there. Everything else comes with skerry itself.
_EXTRAS: Final[Mapping[str, str]] = {
    "torch": "skerry[torch]",
    "matplotlib": "skerry[demo]",
    "jinja2": "skerry[demo]",
    "transformers": "transformers",
    "lightning": "lightning",
}

# Of commands that read the store themselves, whose errors are not the client's.
_STORE_MAY_ANSWER_LATER: Final = frozenset({"STORE_UNAVAILABLE", "STORE_FULL"})

_NEXT: Final[Mapping[str, str]] = {
    "RUN_NOT_FOUND": "`skerry runs list` shows the runs that there are",
    "RUN_EXISTS": "learners join it by name; `skerry runs delete` takes the name away",
    "RUN_REPLACED": "the name belongs to another run now; `skerry runs show` says which",
    "RUN_CLOSED": "the run is read-only; `skerry export` still reads its weights",
    "BAD_NAME": "names are 1 to 64 of a-z 0-9 . _ - and start and end with a letter or digit",
    "FRAGMENT_NOT_FOUND": "`skerry runs show` lists the fragments",
    "VERSION_NOT_FOUND": "`skerry log` shows the positions, `skerry runs show` the versions",
    "STORE_UNAVAILABLE": "the syncer can't reach its store; its log says why",
    "STORE_FULL": "the store needs room; `skerry gc` collects what no version needs",
    "STORE_ROLLED_BACK": "the store holds less than was acknowledged: stop the learners, then `skerry verify`",
    "DRAINING": "the replica is going away; try again, another one answers",
    "INTERNAL": "the syncer's log says why",
    "UNREACHABLE": "is `skerry serve` running there, and is --target right?",
    "TIMEOUT": "the syncer took longer than --timeout; try again",
}


def run(command: click.Command, arguments: list[str] | None = None) -> ExitStatus | int:
    """Runs a command and returns the exit status; what went wrong is on standard error in words."""
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
    except ImportError as error:
        return _show_missing(error)
    except BrokenPipeError:
        # The reader has seen enough (`skerry watch --json | head`); at exit nothing may be flushed into its pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.FAILED
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        return _show_refusal(error, reason)
    return result if isinstance(result, int) else ExitStatus.DONE


def missing_extra(error: ImportError) -> str | None:
    """Returns what pip installs to bring the module that an import wanted; None where that is not known."""
    return _EXTRAS.get((error.name or "").partition(".")[0])


def _reason(error: Exception) -> str | None:
    """Returns the stable reason that every error of Skerry's packages carries; None for any other exception."""
    reason = getattr(error, "reason", None)
    return str(reason) if isinstance(reason, str) and type(error).__module__.startswith("skerry.") else None


def _show_usage(error: click.ClickException) -> int:
    if isinstance(error, click.UsageError) and error.ctx is not None:
        click.echo(error.ctx.get_usage(), err=True)
    _say(f"error: {error.format_message()}")
    if isinstance(error, click.UsageError) and error.ctx is not None:
        _say(f"next: `{error.ctx.command_path} --help` has an example")
    return error.exit_code


def _show_missing(error: ImportError) -> ExitStatus:
    extra = missing_extra(error)
    if extra is None and (error.name or "").startswith("skerry."):
        _say(f"error: this installation has no such part. module={error.name}")
        _say("next: pip install skerry, whole; images of one service have that service only")
        return ExitStatus.NOT_INSTALLED
    if extra is None:
        raise error
    _say(f"error: this command needs a package that is not installed. package={error.name}")
    _say(f"next: pip install '{extra}'")
    return ExitStatus.NOT_INSTALLED


def _show_refusal(error: Exception, reason: str) -> ExitStatus:
    _say(f"error: {error} [{reason}]")
    if reason in _NEXT:
        _say(f"next: {_NEXT[reason]}")
    return ExitStatus.TRY_AGAIN if _may_succeed_later(error, reason) else ExitStatus.REFUSED


def _may_succeed_later(error: Exception, reason: str) -> bool:
    from skerry.client.errors import TryAgainError  # imports gRPC, which --help does without

    return isinstance(error, TryAgainError) or reason in _STORE_MAY_ANSWER_LATER


def _say(text: str) -> None:
    click.echo(text, err=True)
