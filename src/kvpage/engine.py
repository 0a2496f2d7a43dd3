"""The async face of kvpage: submit, stream, close. The work happens in the engine thread."""

import itertools
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import anyio
import anyio.to_thread
import attrs

from kvpage.admission import AdmissionGate, post_to_current_loop
from kvpage.batch import RunningBatch
from kvpage.block_manager import BlockManager
from kvpage.blocks import PoolGeometry
from kvpage.checks import CheckedScheduler
from kvpage.config import NO_ADAPTERS, Adapters, EngineConfig, KVDtype, default_cpu_kv_bytes
from kvpage.engine_thread import (
    Cancel,
    Close,
    EngineThread,
    MapBlocks,
    Submit,
    WhenIdle,
)
from kvpage.errors import ConfigError, EngineClosed
from kvpage.estimate import Estimate, estimate
from kvpage.events import Trace
from kvpage.latencies import BlockLifetimes, Latencies
from kvpage.plan import Poisonable, Runner
from kvpage.plugins import build_allocator, check_allocator_spec
from kvpage.prefix import ChainedKeys
from kvpage.pretrained import Pretrained, load_pretrained
from kvpage.request import EngineModel, OpenChoice, Prompt, Request, prepare
from kvpage.sampling import MAX_CHOICES, SamplingParams
from kvpage.scheduler import Scheduler
from kvpage.stats import BlockImage, BlockMap, EngineHealth, EngineStatistics
from kvpage.stream import Completion, Mailbox, OpenRequest, TokenStream
from kvpage.swap import SwapSpace
from kvpage.traffic import Traffic

if TYPE_CHECKING:
    import torch

    from kvpage.tracing import RequestTracer

logger = logging.getLogger("kvpage")


TOKENS_AT_ONCE = 16
"""How many tokens `complete` lets come before it looks: each look holds up the engine."""


class AsyncEngine:
    """Generates text with a language model, in this process, on asyncio or trio.

    Several event loops may use one engine, and several engines may live in one process. Close an
    engine with `aclose` or by `async with`; its memory is given back then.

    Attributes:
        config: the effective settings.
        geometry: the pool of blocks.
        model: what is known of the model.
    """

    config: EngineConfig
    geometry: PoolGeometry
    model: EngineModel

    def __init__(
        self,
        *,
        model: Any,
        tokenizer: Any = None,
        adapters: Adapters = NO_ADAPTERS,
        **settings: Any,
    ) -> None:
        """Serve a transformers model that the caller has loaded. It is not changed.

        Takes as long as one forward pass of a token; see `from_pretrained` for an event loop.

        Args:
            model: a decoder-only causal language model; its weights are shared, not copied.
            tokenizer: its tokenizer; without one, prompts are token ids.
            adapters: LoRA adapters (the extra `lora`): a folder or hub id for each name by which
                requests choose them.
            settings: see `EngineConfig`.

        Raises:
            UnsupportedModelError: the model's attention cannot be paged.
            ConfigError: the settings cannot work, or an adapter cannot be read or does not fit.
            PluginError: the allocator is unknown or breaks the rules.
        """
        from kvpage.kernels.cpu_threads import in_a_thread_that_ends
        from kvpage.model import share_model

        name = getattr(model.config, "name_or_path", "") or type(model).__name__
        shared = in_a_thread_that_ends(partial(share_model, model, adapters))
        self._open_model(name, shared, tokenizer, EngineConfig(**settings))

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] | None = None,
        *,
        dtype: "str | torch.dtype | None" = None,
        device: "str | torch.device | None" = None,
        weights: Literal["int8"] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        adapters: Adapters = NO_ADAPTERS,
        compile: bool = False,
        **settings: Any,
    ) -> "OpeningEngine":
        """Load a model and start an engine over it, off the event loop.

        Await what this returns, or use it with `async with`.

        Args:
            model: a hub id, a local folder, a `.gguf` file, or None for the embedded default.
            dtype: of the weights; None takes float32 on a CPU, the checkpoint's own on a GPU.
            device: where to compute; None takes a GPU if torch has one.
            weights: `"int8"` rounds the weights of linear layers and of the embedding to one byte:
                a quarter of the memory, and faster, most so with few requests at once; None leaves
                them as they are.
            cache_dir: where converted models are kept; None takes the user's cache folder.
            adapters: LoRA adapters (the extra `lora`): a folder or hub id for each name by which
                requests choose them.
            compile: compile the layers by `torch.compile`, instead of what kvpage does on a CPU to
                make them fast. Takes a minute the first time, and on a CPU a C++ compiler; there it
                is slower than leaving it out. Not together with `weights` or `adapters`.
            settings: see `EngineConfig`.

        Raises:
            ConfigError: a setting cannot work (some are known only once the model is loaded), or
                there is no such model or adapter.
            UnsupportedModelError: the model's attention cannot be paged.
            PluginError: the allocator is unknown or breaks the rules.
        """
        config = EngineConfig(**settings)

        def load() -> AsyncEngine:
            check_allocator_spec(config.allocator, plugins=config.plugins)
            loaded = load_pretrained(
                model,
                dtype=dtype,
                device=device,
                weights=weights,
                cache_dir=cache_dir,
                adapters=adapters,
                compile=compile,
            )
            return cls.from_loaded(loaded, **settings)

        return OpeningEngine(load)

    @classmethod
    def from_loaded(cls, loaded: Pretrained, **settings: Any) -> Self:
        """Start an engine over what `kvpage.pretrained.load_pretrained` loaded.

        Several engines, one after another or at once, may share the weights. Takes as long as one
        forward pass of a token.

        Args:
            loaded: a model and its tokenizer; not changed.
            settings: see `EngineConfig`.

        Raises:
            ConfigError: the settings cannot work.
            PluginError: the allocator is unknown or breaks the rules.
        """
        engine = cls.__new__(cls)
        engine._open_model(loaded.name, loaded.model, loaded.tokenizer, EngineConfig(**settings))
        return engine

    @classmethod
    def from_runner(
        cls, runner: Runner, geometry: PoolGeometry, model: EngineModel, **settings: Any
    ) -> Self:
        """Serve something else than a transformers model: a `Runner` of the caller's own.

        Args:
            runner: computes the steps; owned by the engine from now on.
            geometry: the pool that `runner` has room for.
            model: what the engine should know of it.
            settings: see `EngineConfig`; the sizes of the pool follow from `geometry`.

        Raises:
            ConfigError: a setting contradicts `geometry`.
            PluginError: the allocator is unknown or breaks the rules.
        """
        config = EngineConfig(**settings).over(geometry)
        engine = cls.__new__(cls)
        engine._start(runner, geometry, model, config)
        return engine

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str = "",
        adapter: str | None = None,
    ) -> TokenStream:
        """Generate tokens for one prompt.

        The request is submitted when the returned stream is first awaited; what can be refused is
        refused there, in the caller's task.

        Args:
            prompt: text, token ids, or chat messages for the model's chat template, bare or in a
                `Chat` with tools and what else the template takes.
            params: how to choose tokens and when to end; None takes what the model's own generation
                configuration says.
            request_id: unique among open requests; None makes one up.
            priority: lower runs first.
            salt: requests of different salts never share cached prefixes.
            adapter: the name of the adapter to use; None uses the model as it is.

        Returns:
            The stream. Iterating it may raise `RequestError` (nothing was done), `RequestFailed`
            (this request only), `EngineBusy`, `EngineClosed` or `EngineBroken`.
        """
        return self._stream(
            prompt, params, 1, request_id=request_id, priority=priority, salt=salt, adapter=adapter
        )

    def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        at_once: int,
        *,
        request_id: str | None,
        priority: int,
        salt: str,
        adapter: str | None,
    ) -> TokenStream:
        """See `generate`; the reader is woken for so many tokens at once."""
        number = next(self._numbers)
        chosen = params or self.model.default_params
        new_keys = partial(
            ChainedKeys, self.geometry.block_size, secret=self._secret, salt=salt, adapter=adapter
        )
        prepare_request = partial(
            prepare,
            prompt,
            chosen,
            number=number,
            model=self.model,
            geometry=self.geometry,
            window=self._window,
            new_keys=new_keys if self.config.prefix_cache else None,
            priority=priority,
            adapter=adapter,
        )
        name = request_id if request_id is not None else f"kvpage-{number // MAX_CHOICES}"

        async def submit() -> OpenRequest:
            self._thread.check_alive()
            # A prompt may take seconds; who leaves meanwhile does not wait for its encoding.
            with self._tracing(name, prompt, chosen) as trace:
                choices = await anyio.to_thread.run_sync(prepare_request, abandon_on_cancel=True)
                return await self._submit(name, choices, trace, at_once)

        return TokenStream(submit, self.model.detokenizer, chosen.n)

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str = "",
        adapter: str | None = None,
    ) -> Completion:
        """Generate until the end, and return it whole. Arguments and errors as in `generate`."""
        stream = self._stream(
            prompt, params, TOKENS_AT_ONCE,
            request_id=request_id, priority=priority, salt=salt, adapter=adapter,
        )  # fmt: skip
        async with stream:
            tokens = [token async for token in stream]
        return Completion.of(tokens)

    async def estimate(self, prompt: Prompt, params: SamplingParams | None = None) -> Estimate:
        """What `generate` would need for the same arguments. It encodes the prompt, no more.

        Raises:
            RequestError: the prompt cannot be encoded. (One that is too long is no error here.)
            EngineClosed: the engine was closed.
            EngineBroken: the engine ended by an exception.
        """
        self._thread.check_alive()
        encode = partial(self.model.encode, prompt)
        tokens = await anyio.to_thread.run_sync(encode, abandon_on_cancel=True)
        return estimate(
            len(tokens),
            params or self.model.default_params,
            self.geometry,
            window=self._window,
            max_batch_tokens=self.config.max_batch_tokens,
            max_num_seqs=self.config.max_num_seqs,
            statistics=self.stats(),
        )

    def stats(self) -> EngineStatistics:
        """The snapshot taken after the last step. Never waits."""
        return self._thread.statistics

    def health(self) -> EngineHealth:
        """Whether the engine is alive and gets on. Cheap; from any thread, and never waits."""
        return self._thread.health()

    def latencies(self) -> Latencies:
        """Histograms of how long things took since the engine was started. Never waits."""
        return self._thread.latencies

    def traffic(self) -> Traffic:
        """Lengths and arrivals of the last 10,000 requests that finished. Never waits."""
        return self._thread.traffic.snapshot()

    async def block_map(self) -> BlockMap:
        """Who holds which block, as it is between two steps.

        Raises:
            EngineClosed: the engine was closed.
        """
        return (await self.block_image()).block_map()

    async def block_image(self) -> BlockImage:
        """The same as `block_map` in arrays: for who looks often, and at large pools.

        It holds up the engine for some microseconds per running sequence.

        Raises:
            EngineClosed: the engine was closed.
        """
        post, event = post_to_current_loop(), anyio.Event()
        answer: list[BlockImage] = []

        def receive(image: BlockImage) -> None:
            answer.append(image)
            post(event.set)

        self._thread.post(MapBlocks(receive))
        self._thread.check_alive()
        await event.wait()
        return answer[0]

    async def idle(self) -> None:
        """Wait until no request is open; leaving a stream before this call counts as its end."""
        post, event = post_to_current_loop(), anyio.Event()
        self._thread.post(WhenIdle(lambda: post(event.set)))
        try:
            self._thread.check_alive()
        except EngineClosed:
            return
        await event.wait()

    async def aclose(self, *, drain: bool = False) -> None:
        """Stop, and give the memory back. Again is a no-op.

        Args:
            drain: finish all open requests first; otherwise, or when this call is cancelled while
                it waits, their streams raise `EngineClosed`.
        """
        if drain:
            self._thread.post(Close("drain"))
            try:
                await anyio.to_thread.run_sync(self._thread.join, abandon_on_cancel=True)
            finally:
                self._thread.post(Close("now"))
        self._thread.post(Close("now"))
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    # -- construction --------------------------------------------------------------------------

    def _open_model(self, name: str, model: Any, tokenizer: Any, config: EngineConfig) -> None:
        """Size the pool for a `PagedModel`, and start."""
        from kvpage.kernels import default_backend
        from kvpage.kernels.cpu_threads import in_a_thread_that_ends
        from kvpage.runner import ModelRunner

        kernels = config.attention
        backend = default_backend(model.device.type) if kernels == "auto" else kernels
        kv_dtype = _kv_dtype(model, config, backend)
        effective, geometry = _sized(config, model, kv_dtype)
        graphs = _graph_options(config) if _captures(model, config, backend) else None
        effective = attrs.evolve(
            effective,
            attention=backend,
            cuda_graphs=graphs is not None,
            kv_dtype=cast(KVDtype, str(kv_dtype).removeprefix("torch.")),
        )
        about = EngineModel(
            name,
            model.vocab_size,
            model.eos_token_ids,
            tokenizer,
            model.default_params,
            model.window,
            model.adapters,
        )
        runner = ModelRunner(
            model,
            geometry,
            backend,
            kv_dtype=kv_dtype,
            graphs=graphs,
            num_swap_blocks=effective.num_swap_blocks,
        )
        in_a_thread_that_ends(runner.warm_up)
        self._start(runner, geometry, about, effective)

    def _start(
        self, runner: Runner, geometry: PoolGeometry, model: EngineModel, config: EngineConfig
    ) -> None:
        self.config = config
        self.geometry = geometry
        self.model = model
        self._numbers = itertools.count(step=MAX_CHOICES)  # each choice has an id of its own
        self._secret = secrets.token_bytes(32)
        self._gate = AdmissionGate(config.max_waiting)
        latencies = Latencies()
        allocator = build_allocator(config.allocator, geometry, plugins=config.plugins)
        blocks = BlockManager(
            geometry,
            allocator,
            max_num_seqs=config.max_num_seqs,
            name=str(config.allocator),
            prefix_cache=config.prefix_cache,
            window=model.window,
            lifetimes=BlockLifetimes(geometry.num_blocks, latencies.block_lifetime),
        )
        self._window = blocks.window if geometry.window_fits(blocks.window) else 0
        batch = RunningBatch(config.max_num_seqs, geometry.max_model_len)
        scheduler = _scheduler(blocks, batch, runner, config)
        self._thread = EngineThread(scheduler, runner, self._gate, geometry, latencies)
        self._tracer = _tracer(config, model)
        self._thread.start()
        _log_start(config, geometry, model)
        # Closes an engine that is dropped without `aclose`.
        weakref.finalize(self, self._thread.post, Close("now")).atexit = False

    # -- submission ----------------------------------------------------------------------------

    def _tracing(
        self, request_id: str, prompt: Prompt, params: SamplingParams
    ) -> AbstractContextManager[Trace | None]:
        if self._tracer is None:
            return nullcontext()
        return self._tracer.submitting(request_id, prompt, params)

    async def _submit(
        self, request_id: str, choices: tuple[OpenChoice, ...], trace: Trace | None, at_once: int
    ) -> OpenRequest:
        if self.config.when_busy == "raise":
            self._gate.try_enter(request_id)
        else:
            await self._gate.enter(request_id)
        # Nothing is awaited from here on, so the place that was taken cannot be lost.
        thread = self._thread
        mailbox = Mailbox(post_to_current_loop(), at_once)
        request = Request(request_id, choices, mailbox, time.perf_counter(), trace=trace)
        thread.post(Submit(request))
        thread.check_alive()
        number = request.number
        return OpenRequest(mailbox, lambda: thread.post(Cancel(number)))


class OpeningEngine:
    """An engine that is being loaded: await it, or enter it with `async with`."""

    def __init__(self, load: Callable[[], AsyncEngine]) -> None:
        self._load = load
        self._engine: AsyncEngine | None = None
        self._failed_by: Exception | None = None

    def health(self) -> EngineHealth:
        """The engine's own once it is loaded, `"starting"` or `"broken"` before; from any thread.

        It lets a server say so while `async with` loads the model.
        """
        if self._engine is not None:
            return self._engine.health()
        return EngineHealth("broken" if self._failed_by else "starting", cause=self._failed_by)

    def __await__(self) -> Generator[Any, Any, AsyncEngine]:
        return self._open().__await__()

    async def __aenter__(self) -> AsyncEngine:
        return await self._open()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._engine is not None
        await self._engine.aclose()

    async def _open(self) -> AsyncEngine:
        # Left alone on cancellation: the engine is dropped, and so closed, when it is complete.
        try:
            self._engine = await anyio.to_thread.run_sync(self._load, abandon_on_cancel=True)
        except Exception as error:
            self._failed_by = error
            raise
        return self._engine


def _tracer(config: EngineConfig, model: EngineModel) -> "RequestTracer | None":
    if config.tracer_provider is None:
        return None
    from kvpage.tracing import RequestTracer

    return RequestTracer(config.tracer_provider, model.name)


def _log_start(config: EngineConfig, geometry: PoolGeometry, model: EngineModel) -> None:
    """The effective settings, as far as a log can show them."""
    shown = {
        name: value if isinstance(value, int) else str(value)
        for name, value in attrs.asdict(config, recurse=False).items()
        if name not in ("plugins", "tracer_provider")
    }
    fields = {"model": model.name, "num_blocks": geometry.num_blocks, **shown}
    text = ", ".join(f"{name}={value}" for name, value in fields.items())
    logger.info("engine started: %s", text, extra={"event": "engine_started", **fields})


def _scheduler(
    blocks: BlockManager, batch: RunningBatch, runner: Runner, config: EngineConfig
) -> Scheduler:
    new: Callable[..., Scheduler] = Scheduler
    if config.checks == "everything":
        poison = runner.poison if isinstance(runner, Poisonable) else None
        new = partial(CheckedScheduler, poison=poison)
    return new(
        blocks,
        batch,
        max_batch_tokens=config.max_batch_tokens,
        swap=SwapSpace(config.num_swap_blocks),
    )


def _sized(config: EngineConfig, model: Any, kv_dtype: Any) -> tuple[EngineConfig, PoolGeometry]:
    """The effective settings for a `PagedModel`, and the pool.

    Where a window slides over all layers, sequences may become longer than the pool, unless the
    strategy keeps what is behind the window.
    """
    resolve = partial(
        config.resolve,
        bytes_per_token=model.bytes_per_token_as(kv_dtype),
        model_max_len=model.max_len,
        default_kv_bytes=_default_kv_bytes(model, config),
    )
    if not model.window:
        return resolve()
    effective, geometry = resolve(window=model.window)
    allocator = build_allocator(effective.allocator, geometry, plugins=config.plugins)
    return (effective, geometry) if allocator.sharing else resolve()


def _default_kv_bytes(model: Any, config: EngineConfig) -> int:
    if config.kv_memory is not None or model.device.type != "cuda":
        return default_cpu_kv_bytes()
    from kvpage.gpu_memory import gpu_kv_bytes

    return gpu_kv_bytes(
        model, max_batch_tokens=config.max_batch_tokens, max_num_seqs=config.max_num_seqs
    )


def _kv_dtype(model: Any, config: EngineConfig, backend: str) -> "torch.dtype":
    """How K and V are stored: as the model computes them, or as asked for where that works."""
    import torch

    if config.kv_dtype == "auto":
        return model.dtype  # type: ignore[no-any-return]
    dtype: torch.dtype = getattr(torch, config.kv_dtype)
    if backend == "triton" and dtype != model.dtype:
        raise ConfigError(
            f"kv_dtype is {config.kv_dtype}, but on a GPU K and V are stored as the model computes "
            f"them, here {model.dtype}; leave kv_dtype out"
        )
    return dtype


def _captures(model: Any, config: EngineConfig, backend: str) -> bool:
    """Can decode steps be captured, and were they asked to be?"""
    return config.cuda_graphs and backend == "triton" and model.device.type == "cuda"


def _graph_options(config: EngineConfig) -> Any:
    from kvpage.kernels.graphs import CudaRecorder
    from kvpage.runner import GraphOptions

    return GraphOptions(config.max_num_seqs, CudaRecorder)
