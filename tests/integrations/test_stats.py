"""`/stats`, which `kvpage watch` reads."""

import asyncio

import httpx
from typer import Typer
from typer.testing import CliRunner

from kvpage.cli.watch import Server, watch
from kvpage.integrations.asgi import openai_app
from tests.integrations.conftest import Served
from tests.integrations.echo import echo_engine, serving


def test_a_watcher_sees_the_served_engine(served: Served) -> None:
    """By the name it is served as, with its whole pool."""
    (snapshot,) = Server(f"{served.url}/stats").look()
    assert snapshot.name == "echo"
    assert snapshot.block_map.geometry == served.engine.geometry


def test_the_command_prints_it(served: Served) -> None:
    """Given the address of the server alone."""
    app = Typer()
    app.command()(watch)
    printed = CliRunner().invoke(app, [served.url, "--once"]).stdout
    assert "echo  fixed" in printed
    assert "finished" in printed


def test_a_closed_engine_is_said_to_be_so() -> None:
    """503, in the shape of all errors."""
    engine = echo_engine()
    asyncio.run(engine.aclose())
    with serving(openai_app(engine)) as url:
        answer = httpx.get(f"{url}/stats")
    assert answer.status_code == 503
    assert "closed" in answer.json()["error"]["message"]
