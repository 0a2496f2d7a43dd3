"""`kvpage serve` as a process of its own, with the embedded default model."""

import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import openai
import pytest
from typer.testing import CliRunner

from kvpage import AsyncEngine, ConfigError
from kvpage.cli import app
from kvpage.cli.serve import KEY_VARIABLE, read_api_keys
from kvpage.pretrained import default_model_path
from tests.integrations.echo import echo_engine

START_S = 120.0
"""A loaded machine may take so long to load the model."""

try:
    default_model_path()
    has_model = True
except ConfigError:
    has_model = False

needs_model = pytest.mark.skipif(not has_model, reason="the default model is not installed")


@attrs.frozen
class Serving:
    """A server process.

    Attributes:
        url: where it listens.
        process: it.
        log: what it has said so far.
    """

    url: str
    process: subprocess.Popen[str]
    log: list[str]

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(START_S)


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[Serving]:
    """`kvpage serve` on a free port, once it listens."""
    command = [sys.executable, "-c", "from kvpage.cli import main; main()", "serve", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--served-model-name", "smol", "--kv-memory", "8192 tokens", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    log: list[str] = []
    found = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            log.append(line)
            if "http://" in line:
                found.set()
        found.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert found.wait(START_S)
        [url] = re.findall(r"http://[^/]*", "".join(log)) or [""]
        yield Serving(url, process, log)
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()  # type: ignore[union-attr]


@needs_model
def test_a_server_from_start_to_end(tmp_path: Path) -> None:
    """A key, an answer, a stream that a SIGTERM lets finish, exit code 0; no secret in its log."""
    keys = tmp_path / "keys"
    keys.write_text("SESAME-1\n\nSESAME-2\n")
    with serving("--api-key-file", str(keys)) as server:
        with server.client("WRONG") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with server.client("SESAME-2") as client:
            answer = client.chat.completions.create(
                model="smol",
                messages=[{"role": "user", "content": "ULTRAVIOLET"}],
                max_completion_tokens=4,
                temperature=0,
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4
            stream = client.completions.create(
                model="smol", prompt="ULTRAVIOLET", max_tokens=40, temperature=0, stream=True
            )
            pieces = [next(stream).choices[0].text]
            server.process.send_signal(signal.SIGTERM)
            pieces += [chunk.choices[0].text for chunk in stream]
            assert len(pieces) > 20
        assert server.process.wait(START_S) == 0
    log = "".join(server.log)
    assert "POST '/v1/completions' 200" in log
    for secret in ("SESAME", "WRONG", "ULTRAVIOLET", str(answer.choices[0].message.content)):
        assert secret not in log
    assert "Traceback" not in log


@pytest.mark.slow
@needs_model
def test_curl() -> None:
    """As in the documents; the server's own guards are up, and Ctrl-C ends it."""
    with serving(**{KEY_VARIABLE: "SESAME"}) as server:
        json_body = '{"model": "smol", "prompt": "Once upon", "max_tokens": 3, "stream": true}'
        curl = ["curl", "--silent", "--show-error", f"{server.url}/v1/completions"]
        asked = subprocess.run(
            [*curl, "--json", json_body, "--header", "Authorization: Bearer SESAME"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert asked.stdout.count("data: {") == 3
        assert asked.stdout.endswith("data: [DONE]\n\n")
        rebound = httpx.get(f"{server.url}/health", headers={"host": "evil.example"})
        assert rebound.status_code == 403
        assert httpx.get(f"{server.url}/health").json()["models"]["smol"]["state"] == "running"
        assert server.end(signal.SIGINT) == 0
    assert "SESAME" not in "".join(server.log)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments])


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded() -> None:
    """In one sentence."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("/no/such/model", "--port", str(port))
    assert isinstance(result.exception, ConfigError)
    assert f"cannot listen on 127.0.0.1, port {port}" in str(result.exception)


def test_a_missing_model_is_one_sentence() -> None:
    """As for every other command."""
    result = run("/no/such/model", "--port", "0")
    assert isinstance(result.exception, ConfigError)
    assert "there is no model at" in str(result.exception)


def test_settings_that_cannot_work_are_refused_first() -> None:
    """Before anything is bound or loaded."""
    result = run("/no/such/model", "--port", "0", "--block-size", "0")
    assert isinstance(result.exception, ConfigError)
    assert "block_size must be" in str(result.exception)


class Unanswering:
    """A server that has not begun to accept who calls.

    Attributes:
        was_called: somebody could call nevertheless.
    """

    was_called = False

    async def serve(self, sockets: list[socket.socket]) -> None:
        with socket.create_connection(sockets[0].getsockname(), timeout=START_S):
            self.was_called = True


def test_an_address_that_is_told_can_be_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However long the server takes to its first `accept`."""
    server = Unanswering()
    module = importlib.import_module("kvpage.cli.serve")
    monkeypatch.setattr(module, "_server", lambda _config: server)
    monkeypatch.setattr(AsyncEngine, "from_pretrained", lambda *_, **__: echo_engine())
    app(["serve", "--port", "0"], standalone_mode=False)
    assert "echo on http://127.0.0.1:" in capsys.readouterr().err
    assert server.was_called


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_server_that_is_open_to_all_says_so(
    host: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who listens to more than this machine, without a key."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    result = run("/no/such/model", "--port", "0", "--host", host)
    assert ("everybody who reaches" in result.stderr) == warned
    monkeypatch.setenv(KEY_VARIABLE, "SESAME")
    result = run("/no/such/model", "--port", "0", "--host", host)
    assert "everybody" not in result.stderr


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a file, one on each line, or from the environment; an empty file is a mistake."""
    monkeypatch.setenv(KEY_VARIABLE, "from-environment\n")
    assert read_api_keys(None) == ("from-environment",)
    file = tmp_path / "keys"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_api_keys(file)
    file.write_text(" \n")
    with pytest.raises(ConfigError, match="no API key"):
        read_api_keys(file)
    file.write_text("a\n b \n")
    assert read_api_keys(file) == ("a", "b")
    monkeypatch.delenv(KEY_VARIABLE)
    assert read_api_keys(None) == ()
