"""OpenAI's client for JavaScript, where node and its package registry are at hand."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integrations.conftest import Served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="there is no node"),
]

PROGRAM = """
import OpenAI from 'openai';
const client = new OpenAI({baseURL: process.argv[2], apiKey: 'none', maxRetries: 0});
const messages = [{role: 'user', content: 'Hello'}];
const whole = await client.chat.completions.create({model: 'echo', messages});
let streamed = '';
for await (const chunk of await client.chat.completions.create(
  {model: 'echo', messages, stream: true})) {
  streamed += chunk.choices[0]?.delta?.content ?? '';
}
const response = await client.responses.create({model: 'echo', input: 'Hello'});
let status;
try {
  await client.completions.create({model: 'echo', prompt: 'a'.repeat(600)});
} catch (error) {
  status = [error.status, error.code];
}
const left = await client.completions.create(
  {model: 'echo', prompt: 'a', max_tokens: 400, stream: true});
for await (const chunk of left) break;
console.log(JSON.stringify(
  [whole.choices[0].message.content, streamed, response.output_text, status]));
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package `openai` in it."""
    folder = tmp_path_factory.mktemp("node")
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), "openai"]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("npm cannot install openai here")
    return folder


def test_the_javascript_client(served: Served, folder: Path) -> None:
    """Whole, streamed, an error, and a stream that is left."""
    program = folder / "program.mjs"
    program.write_text(PROGRAM)
    done = subprocess.run(
        ["node", str(program), f"{served.url}/v1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout) == [
        *["Hello"] * 3,
        [400, "context_length_exceeded"],
    ]
