"""The `kvpage` command."""

import sys

import typer

from kvpage.cli.allocators import allocators
from kvpage.cli.compare import compare
from kvpage.cli.generate import generate
from kvpage.cli.serve import serve
from kvpage.cli.simulate import simulate
from kvpage.cli.tune import tune
from kvpage.cli.watch import watch
from kvpage.errors import KvpageError

app = typer.Typer(
    name="kvpage",
    help="LLM inference whose KV-cache memory management is pluggable.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(generate)
app.command()(serve)
app.command()(allocators)
app.command()(simulate)
app.command()(compare)
app.command()(watch)
app.command()(tune)


def main() -> None:
    """Run the command; an error that a user can act on is one sentence and exit code 2."""
    try:
        app()
    except KvpageError as error:
        print(f"kvpage: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
