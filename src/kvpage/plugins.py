"""The plugin door: find an allocator by name, check it, build it.

pluggy is asked once, when an engine is built. Each call makes a plugin manager of its own; nothing
is kept at module level. An entry point of the group `kvpage` is named like the allocator it
offers, so only the module of the requested one is imported. Built-in strategies use the same door.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

import attrs
import pluggy

from kvpage import hookspecs
from kvpage.allocators.base import Allocator, AllocatorFactory, AllocatorPlugin
from kvpage.blocks import PoolGeometry
from kvpage.errors import PluginError

ENTRY_POINT_GROUP = "kvpage"

_PROTOCOL_MEMBERS = ("sharing", "admit", "extend", "free", "finish", "statistics")


def _read_only(options: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(options))


@attrs.frozen
class AllocatorSpec:
    """What `allocator="name:key=value,..."` says.

    Attributes:
        name: the strategy's name, or the name of the factory that was passed.
        factory: the factory, where one was passed instead of a name.
        block_size: the pool's block size in tokens, if the string has this key.
        options: all other keys, for the strategy.
    """

    name: str
    factory: AllocatorFactory | None = None
    block_size: int | None = None
    options: Mapping[str, Any] = attrs.field(factory=dict, converter=_read_only)

    @classmethod
    def parse(cls, allocator: "str | AllocatorFactory | AllocatorSpec") -> "AllocatorSpec":
        """Read a name, a `"name:key=value,..."` string, or a factory.

        Raises:
            PluginError: the string has no such form.
        """
        if isinstance(allocator, AllocatorSpec):
            return allocator
        if not isinstance(allocator, str):
            return cls._of_factory(allocator)
        name, _, rest = allocator.strip().partition(":")
        pairs = [pair.partition("=") for pair in rest.split(",") if pair.strip()]
        if not name or any(not key.strip() or not sign for key, sign, _ in pairs):
            raise PluginError(
                f"allocator {allocator!r} is not of the form 'name' or 'name:key=value,key=value'"
            )
        options = {key.strip(): _value(text.strip()) for key, _, text in pairs}
        if len(options) < len(pairs):
            raise PluginError(f"allocator {allocator!r} gives an option twice")
        block_size = options.pop("block_size", None)
        if block_size is not None and (type(block_size) is not int or block_size < 1):
            raise PluginError(f"block_size in {allocator!r} must be a whole number of at least 1")
        return cls(name, None, block_size, options)

    @classmethod
    def _of_factory(cls, factory: AllocatorFactory) -> "AllocatorSpec":
        if not callable(factory):
            raise PluginError(f"allocator must be a name or a factory, got {factory!r}")
        return cls(getattr(factory, "__name__", type(factory).__name__), factory)

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name


@attrs.frozen
class InstalledAllocator:
    """An allocator that an installed distribution offers, as its metadata tells.

    Attributes:
        name: what to write in `allocator="name"`.
        module: the module that will be imported for it.
        distribution: name and version of the package that brings it.
    """

    name: str
    module: str
    distribution: str


def installed_allocators() -> tuple[InstalledAllocator, ...]:
    """All allocators that installed packages offer, by name, without importing any."""
    found = [
        InstalledAllocator(point.name, point.module, _distribution(point))
        for point in entry_points(group=ENTRY_POINT_GROUP)
    ]
    return tuple(sorted(found, key=lambda allocator: (allocator.name, allocator.distribution)))


def build_allocator(
    allocator: str | AllocatorFactory | AllocatorSpec,
    geometry: PoolGeometry,
    *,
    plugins: Iterable[object] = (),
) -> Allocator:
    """Build the allocator that `allocator` names over the pool `geometry`.

    Args:
        allocator: a name, a `"name:key=value,..."` string, or a factory.
        geometry: the pool.
        plugins: objects or modules with a `kvpage_allocators` hook, beside the installed ones.

    Raises:
        PluginError: no such allocator, a plugin that breaks the rules, an unknown or refused
            option, or an object without the methods of the contract; the sentence says which.
    """
    spec = AllocatorSpec.parse(allocator)
    factory = check_allocator_spec(spec, plugins=plugins)
    try:
        built = factory(geometry, **spec.options)
    except (TypeError, ValueError) as error:
        raise PluginError(f"allocator {str(spec)!r} was refused: {error}") from error
    except Exception as error:
        raise PluginError(
            f"allocator {str(spec)!r} raised {type(error).__name__} when it was built: {error}"
        ) from error
    missing = [member for member in _PROTOCOL_MEMBERS if not hasattr(built, member)]
    if missing:
        raise PluginError(
            f"allocator {spec.name!r} built a {type(built).__name__} without {', '.join(missing)}; "
            f"the contract is kvpage.Allocator"
        )
    return built


def check_allocator_spec(
    allocator: str | AllocatorFactory | AllocatorSpec, *, plugins: Iterable[object] = ()
) -> AllocatorFactory:
    """The factory that `allocator` names, once it is known to take the options named with it.

    Raises:
        PluginError: see `build_allocator`; what depends on the pool is found out only there.
    """
    spec = AllocatorSpec.parse(allocator)
    factory = spec.factory or find_allocator(spec.name, plugins=plugins).factory
    _check_options(spec, factory)
    return factory


def find_allocator(name: str, *, plugins: Iterable[object] = ()) -> AllocatorPlugin:
    """The one record of this name among `plugins` and the installed entry points of this name.

    Raises:
        PluginError: none, or several, or a plugin that breaks the rules.
    """
    manager = pluggy.PluginManager("kvpage")
    manager.add_hookspecs(hookspecs)
    for plugin in plugins:
        _register(manager, plugin, getattr(plugin, "__name__", type(plugin).__name__))
    points = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    for point in points:
        _register(manager, _load(point), f"{point.module} of {_distribution(point)}")
    offers = [
        (implementation.plugin_name, record)
        for implementation in manager.hook.kvpage_allocators.get_hookimpls()
        for record in _records(implementation)
    ]
    matches = [(source, record) for source, record in offers if record.name == name]
    if len(matches) > 1:
        sources = " and ".join(source for source, _ in matches)
        raise PluginError(f"two plugins offer an allocator named {name!r}: {sources}")
    if not matches:
        raise PluginError(_unknown(name, [record.name for _, record in offers], points))
    return matches[0][1]


def _register(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except (ValueError, pluggy.PluginValidationError) as error:
        raise PluginError(f"plugin {name!r} was refused: {error}") from error
    if not manager.get_hookcallers(plugin):
        raise PluginError(
            f"plugin {name!r} has no function 'kvpage_allocators' marked with @kvpage.hookimpl"
        )


def _load(point: EntryPoint) -> object:
    try:
        return point.load()
    except Exception as error:
        raise PluginError(
            f"plugin {point.name!r} ({point.value} of {_distribution(point)}) cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error


def _records(implementation: pluggy.HookImpl) -> Sequence[AllocatorPlugin]:
    """What one plugin's hook returns, checked."""
    name = implementation.plugin_name
    try:
        returned: Any = implementation.function()
        records = None if _is_single(returned) else list(returned)  # may be a generator, and raise
    except Exception as error:
        raise PluginError(
            f"plugin {name!r} raised {type(error).__name__} in kvpage_allocators: {error}"
        ) from error
    if records is None:
        raise PluginError(
            f"plugin {name!r} returned {returned!r} from kvpage_allocators; "
            f"a list of AllocatorPlugin records is due"
        )
    for record in records:
        if not isinstance(record, AllocatorPlugin):
            raise PluginError(
                f"plugin {name!r} offers {record!r}, which is not an AllocatorPlugin record"
            )
    return records


def _is_single(returned: object) -> bool:
    return not isinstance(returned, Iterable) or isinstance(returned, (str, bytes, Mapping))


def _unknown(name: str, in_process: Iterable[str], points: Sequence[EntryPoint]) -> str:
    if points:
        offered = ", ".join(sorted(in_process)) or "none"
        return (
            f"entry point {name!r} ({points[0].value}) offers no allocator of that name; "
            f"it offers: {offered}"
        )
    known = {allocator.name for allocator in installed_allocators()} | set(in_process)
    return f"no allocator named {name!r}; installed are: {', '.join(sorted(known))}"


def _check_options(spec: AllocatorSpec, factory: AllocatorFactory) -> None:
    """Refuse an option that the factory has no keyword for, by name."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())[1:]
    except ValueError:  # a compiled factory may hide its parameters; it will speak for itself
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    unknown = [option for option in spec.options if option not in known]
    if unknown:
        options = ", ".join(["block_size", *known])
        raise PluginError(
            f"allocator {spec.name!r} has no option {unknown[0]!r}; its options are: {options}"
        )


def _value(text: str) -> int | float | bool | str:
    """The value of an option: a number or true/false where it reads as one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
