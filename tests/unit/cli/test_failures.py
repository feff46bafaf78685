"""What a person reads when a command fails, and what a script gets."""

from __future__ import annotations

import click
import pytest

from skerry.cli import failures
from skerry.wire.errors import NonFiniteError, WireReason


def fail_with(error: BaseException) -> click.Command:
    """Returns a command that fails so."""

    @click.command()
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (
            NonFiniteError(WireReason.NON_FINITE, "value cannot be encoded. tensor=head"),
            failures.ExitStatus.REFUSED,
            "error: value cannot be encoded. tensor=head [NON_FINITE]\n",
        ),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            failures.ExitStatus.NOT_INSTALLED,
            "package=torch\nnext: pip install 'skerry[torch]'\n",
        ),
        (KeyboardInterrupt(), failures.ExitStatus.INTERRUPTED, "interrupted\n"),
    ],
)
def test_an_error_has_its_status_and_says_why(
    error: BaseException, status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failures.run(fail_with(error), []) == status
    assert capsys.readouterr().err.endswith(says)


def test_wrong_usage_shows_the_usage_and_where_an_example_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert failures.run(fail_with(RuntimeError()), ["--no-such-flag"]) == failures.ExitStatus.USAGE
    shown = capsys.readouterr().err
    assert "Usage: skerry" in shown
    assert "error: No such option" in shown
    assert "next: `skerry --help` has an example" in shown


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        failures.run(fail_with(ZeroDivisionError()), [])


def test_a_commands_own_status_is_the_process_status() -> None:
    @click.command()
    @click.pass_context
    def command(context: click.Context) -> None:
        context.exit(1)

    assert failures.run(command, []) == 1
