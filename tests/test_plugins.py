"""The plugin door: what comes in, what is refused, and in which words."""

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kvpage
from kvpage import AllocatorPlugin, PluginError, PoolGeometry, hookimpl, installed_allocators
from kvpage.allocators.fixed import FixedAllocator
from kvpage.plugins import AllocatorSpec, build_allocator, check_allocator_spec, find_allocator

GEOMETRY = PoolGeometry(num_blocks=8, block_size=4, max_model_len=32)


class Shelf(FixedAllocator):
    """An allocator with options."""

    def __init__(
        self,
        geometry: PoolGeometry,
        *,
        height: int = 1,
        sorted_by: str = "size",
        deep: bool = False,
    ) -> None:
        super().__init__(geometry)
        if height < 1:
            raise ValueError(f"height must be at least 1, got {height}")
        self.options = (height, sorted_by, deep)


class ShelfPlugin:
    """An in-process plugin."""

    @hookimpl
    def kvpage_allocators(self) -> list[AllocatorPlugin]:
        return [AllocatorPlugin("shelf", Shelf, "books on shelves")]


def plugin_of(returned: Callable[[], Any]) -> object:
    """A plugin whose hook returns what `returned` returns."""

    class Custom:
        @hookimpl
        def kvpage_allocators(self) -> Any:
            return returned()

    return Custom()


def refusal(allocator: Any, *plugins: object) -> str:
    """The sentence by which building `allocator` is refused."""
    with pytest.raises(PluginError) as refused:
        build_allocator(allocator, GEOMETRY, plugins=plugins)
    return str(refused.value)


# -- what comes in ---------------------------------------------------------------------------------


def test_an_in_process_plugin_is_found_beside_the_installed_ones() -> None:
    """`plugins=[...]` takes objects with the hook; built-in strategies stay available."""
    assert isinstance(build_allocator("shelf", GEOMETRY, plugins=[ShelfPlugin()]), Shelf)
    assert type(build_allocator("fixed", GEOMETRY, plugins=[ShelfPlugin()])) is FixedAllocator


def test_a_module_can_be_a_plugin() -> None:
    """The hook may be a function of a module, as entry points have it."""
    module = ModuleType("my_plugin")
    module.kvpage_allocators = hookimpl(  # type: ignore[attr-defined]
        lambda: [AllocatorPlugin("mine", Shelf, "a module's own")]
    )
    assert isinstance(build_allocator("mine", GEOMETRY, plugins=[module]), Shelf)


def test_a_hook_may_be_a_generator() -> None:
    """Any iterable of records will do."""

    def records() -> Iterator[AllocatorPlugin]:
        yield AllocatorPlugin("one", FixedAllocator, "first")
        yield AllocatorPlugin("two", Shelf, "second")

    assert find_allocator("two", plugins=[plugin_of(records)]).summary == "second"


def test_a_factory_needs_no_plugin() -> None:
    """A class, or a function that builds one, can be passed itself."""
    assert isinstance(build_allocator(Shelf, GEOMETRY), Shelf)
    built = build_allocator(lambda geometry: Shelf(geometry, height=3), GEOMETRY)
    assert isinstance(built, Shelf)
    assert built.options[0] == 3


def test_built_in_strategies_are_installed_ones() -> None:
    """They come in through the entry points of kvpage's own distribution."""
    assert ("fixed", "kvpage.allocators.fixed") in {
        (allocator.name, allocator.module) for allocator in installed_allocators()
    }


@pytest.mark.parametrize(
    ("text", "name", "block_size", "options"),
    [
        ("shelf", "shelf", None, {}),
        (" shelf ", "shelf", None, {}),
        ("shelf:", "shelf", None, {}),
        ("shelf:height=3", "shelf", None, {"height": 3}),
        ("shelf:block_size=32", "shelf", 32, {}),
        (
            "shelf: height = 3 , deep=TRUE,block_size=8, sorted_by=a=b",
            "shelf",
            8,
            {"height": 3, "deep": True, "sorted_by": "a=b"},
        ),
        ("shelf:share=0.5,deep=false", "shelf", None, {"share": 0.5, "deep": False}),
    ],
)
def test_a_string_names_a_strategy_and_its_options(
    text: str, name: str, block_size: int | None, options: dict[str, Any]
) -> None:
    """`name:key=value,...`: numbers and booleans are read as such, `block_size` is the pool's."""
    spec = AllocatorSpec.parse(text)
    assert (spec.name, spec.block_size, dict(spec.options)) == (name, block_size, options)


def test_options_reach_the_factory() -> None:
    """All keys but `block_size`, with their types."""
    built = build_allocator("shelf:height=3,deep=true", GEOMETRY, plugins=[ShelfPlugin()])
    assert isinstance(built, Shelf)
    assert built.options == (3, "size", True)


def test_a_spec_reads_like_what_it_was_parsed_from() -> None:
    """Messages name an allocator with its options."""
    assert str(AllocatorSpec.parse("shelf:height=3,deep=true")) == "shelf:height=3,deep=True"
    assert str(AllocatorSpec.parse("shelf")) == "shelf"
    assert str(AllocatorSpec.parse(Shelf)) == "Shelf"


# -- what is refused -------------------------------------------------------------------------------


def test_an_unknown_name_lists_what_is_installed() -> None:
    """In-process plugins included."""
    sentence = refusal("shelve", ShelfPlugin())
    assert sentence.startswith("no allocator named 'shelve'; installed are: ")
    assert {"fixed", "shelf"} <= set(sentence.partition("installed are: ")[2].split(", "))


def test_an_unknown_option_is_named_with_the_known_ones() -> None:
    """Before anything is built."""
    assert refusal("shelf:hight=3", ShelfPlugin()) == (
        "allocator 'shelf' has no option 'hight'; "
        "its options are: block_size, height, sorted_by, deep"
    )
    with pytest.raises(PluginError, match=r"has no option 'x'; its options are: block_size$"):
        check_allocator_spec("fixed:x=1")


@pytest.mark.parametrize("text", ["", ":", ":a=1", "shelf:height", "shelf:=3", "shelf:a=1,b"])
def test_a_string_of_another_form_is_refused(text: str) -> None:
    """With the form that is due."""
    assert refusal(text) == (
        f"allocator {text!r} is not of the form 'name' or 'name:key=value,key=value'"
    )


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "true", "many", "16.0", "nan"])
def test_a_block_size_that_is_no_size_is_refused(value: str) -> None:
    """Only whole numbers of at least 1."""
    assert refusal(f"fixed:block_size={value}") == (
        f"block_size in 'fixed:block_size={value}' must be a whole number of at least 1"
    )


def test_an_option_given_twice_is_refused() -> None:
    """Neither of the two values is silently dropped."""
    assert refusal("shelf:height=1,height=2") == (
        "allocator 'shelf:height=1,height=2' gives an option twice"
    )


@pytest.mark.parametrize("allocator", [None, 5, Shelf(GEOMETRY), ["fixed"]])
def test_neither_name_nor_factory_is_refused(allocator: Any) -> None:
    """An allocator that is built already included: it was not built for this pool."""
    assert refusal(allocator) == f"allocator must be a name or a factory, got {allocator!r}"


def test_a_misspelt_hook_is_refused() -> None:
    """A marked function that is no hook of kvpage."""

    class Misspelt:
        @hookimpl
        def kvpage_alocators(self) -> list[AllocatorPlugin]:
            return []

    sentence = refusal("shelf", Misspelt())
    assert sentence.startswith("plugin 'Misspelt' was refused: unknown hook 'kvpage_alocators' in ")


def test_a_hook_that_is_not_marked_is_refused() -> None:
    """The decorator is easily forgotten."""

    class Unmarked:
        def kvpage_allocators(self) -> list[AllocatorPlugin]:
            return []

    assert refusal("shelf", Unmarked()) == (
        "plugin 'Unmarked' has no function 'kvpage_allocators' marked with @kvpage.hookimpl"
    )


def test_a_hook_with_parameters_is_refused() -> None:
    """It would never be given any."""

    class Curious:
        @hookimpl
        def kvpage_allocators(self, geometry: PoolGeometry) -> list[AllocatorPlugin]:
            return []

    assert refusal("shelf", Curious()).startswith("plugin 'Curious' was refused: Plugin 'Curious'")


@pytest.mark.parametrize("returned", [None, "shelf", 5, {"shelf": Shelf}])
def test_a_hook_that_returns_no_list_is_refused(returned: Any) -> None:
    """Nothing, a text, a number, a mapping: a list of records is due."""
    assert refusal("shelf", plugin_of(lambda: returned)) == (
        f"plugin 'Custom' returned {returned!r} from kvpage_allocators; "
        f"a list of AllocatorPlugin records is due"
    )


@pytest.mark.parametrize("item", [Shelf, "shelf", ("shelf", Shelf), None])
def test_a_list_of_something_else_is_refused(item: Any) -> None:
    """Every item must be a record."""
    assert refusal("shelf", plugin_of(lambda: [item])) == (
        f"plugin 'Custom' offers {item!r}, which is not an AllocatorPlugin record"
    )


BAD_RECORDS: dict[str, tuple[tuple[Any, Any, Any], str]] = {
    "name with a space": (
        ("my shelf", Shelf, "books"),
        "ValueError in kvpage_allocators: an allocator name is a word of letters, digits, '-' "
        "and '_', got 'my shelf'",
    ),
    "no name": (("", Shelf, "books"), "ValueError in kvpage_allocators: an allocator name is "),
    "name of another type": ((5, Shelf, "books"), "ValueError in kvpage_allocators: an allocator "),
    "factory": (
        ("shelf", "Shelf", "books"),
        "TypeError in kvpage_allocators: factory must be callable as factory(geometry, **options), "
        "got 'Shelf'",
    ),
    "summary": (
        ("shelf", Shelf, "two\nlines"),
        "ValueError in kvpage_allocators: summary must be one line of text, got 'two\\nlines'",
    ),
    "no summary": (("shelf", Shelf, " "), "ValueError in kvpage_allocators: summary must be one"),
}


@pytest.mark.parametrize(("fields", "sentence"), BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_a_bad_record_is_refused(fields: tuple[Any, Any, Any], sentence: str) -> None:
    """Records check themselves, so the author's traceback points at the line."""
    plugin = plugin_of(lambda: [AllocatorPlugin(*fields)])
    assert refusal("shelf", plugin).startswith(f"plugin 'Custom' raised {sentence}")


def test_a_hook_that_raises_is_refused() -> None:
    """At once, or as a generator in the middle; the cause is attached."""

    def breaks() -> Iterator[AllocatorPlugin]:
        yield AllocatorPlugin("shelf", Shelf, "books")
        raise LookupError("no more shelves")

    for returned in (breaks, lambda: list(breaks())):
        with pytest.raises(PluginError) as refused:
            build_allocator("shelf", GEOMETRY, plugins=[plugin_of(returned)])
        assert str(refused.value) == (
            "plugin 'Custom' raised LookupError in kvpage_allocators: no more shelves"
        )
        assert isinstance(refused.value.__cause__, LookupError)


def test_two_offers_of_one_name_are_refused() -> None:
    """Both plugins are named; a strategy that is installed cannot be replaced silently."""

    class OtherPlugin(ShelfPlugin):
        pass

    assert refusal("shelf", ShelfPlugin(), OtherPlugin()) == (
        "two plugins offer an allocator named 'shelf': ShelfPlugin and OtherPlugin"
    )
    impostor = plugin_of(lambda: [AllocatorPlugin("fixed", Shelf, "not the real one")])
    assert refusal("fixed", impostor).startswith(
        "two plugins offer an allocator named 'fixed': Custom and kvpage.allocators.fixed of kvpage"
    )


def test_an_object_without_the_methods_of_the_contract_is_refused() -> None:
    """The sentence lists what is missing."""

    def half_done(_geometry: PoolGeometry) -> Any:
        return SimpleNamespace(sharing=True, admit=print, extend=print)

    assert refusal(half_done) == (
        "allocator 'half_done' built a SimpleNamespace without free, finish, statistics; "
        "the contract is kvpage.Allocator"
    )


def test_an_option_that_the_strategy_refuses_is_told_in_its_own_words() -> None:
    """A `ValueError` or a missing argument of the factory."""
    assert refusal("shelf:height=0", ShelfPlugin()) == (
        "allocator 'shelf:height=0' was refused: height must be at least 1, got 0"
    )


def test_a_factory_that_raises_is_refused() -> None:
    """Whatever it raises, with the cause attached."""

    def broken(_geometry: PoolGeometry) -> Any:
        raise LookupError("no shelf")

    with pytest.raises(PluginError) as refused:
        build_allocator(broken, GEOMETRY)
    assert str(refused.value) == "allocator 'broken' raised LookupError when it was built: no shelf"
    assert isinstance(refused.value.__cause__, LookupError)


def test_a_factory_that_hides_its_parameters_speaks_for_itself() -> None:
    """Compiled callables may have no signature; they refuse on their own what they do not know."""
    with pytest.raises(ValueError, match="no signature found"):
        inspect.signature(dict)
    assert refusal(dict).startswith("allocator 'dict' was refused: 'PoolGeometry' object is not ")


# -- entry points ----------------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Installs a distribution of one module with one entry point, for the time of the test."""
    monkeypatch.syspath_prepend(tmp_path)

    def install_one(entry_point: str, module: str, source: str) -> None:
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[kvpage]\n{entry_point} = {module}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install_one


SOURCE = """
import kvpage
from kvpage.allocators.fixed import FixedAllocator

@kvpage.hookimpl
def kvpage_allocators():
    return [kvpage.AllocatorPlugin({name!r}, FixedAllocator, "installed by a test")]
"""


def test_an_installed_plugin_is_found_by_its_entry_point(
    install: Callable[[str, str, str], None],
) -> None:
    """It is listed without being imported, and imported when it is asked for."""
    install("stack", "kvpage_stack", SOURCE.format(name="stack"))
    assert ("stack", "kvpage_stack", "kvpage_stack 1.2") in {
        (found.name, found.module, found.distribution) for found in installed_allocators()
    }
    assert "kvpage_stack" not in sys.modules
    assert isinstance(build_allocator("stack", GEOMETRY), FixedAllocator)
    assert "kvpage_stack" in sys.modules


def test_only_the_requested_plugin_is_imported(install: Callable[[str, str, str], None]) -> None:
    """A broken plugin that nobody asked for does no harm."""
    install("bomb", "kvpage_bomb", "raise ImportError('half installed')")
    build_allocator("fixed", GEOMETRY)
    assert refusal("bomb") == (
        "plugin 'bomb' (kvpage_bomb of kvpage_bomb 1.2) cannot be imported: "
        "ImportError: half installed"
    )


def test_an_entry_point_must_offer_its_own_name(install: Callable[[str, str, str], None]) -> None:
    """Otherwise the sentence says what it does offer."""
    install("stack", "kvpage_stack", SOURCE.format(name="heap"))
    assert refusal("stack") == (
        "entry point 'stack' (kvpage_stack) offers no allocator of that name; it offers: heap"
    )


def test_an_entry_point_without_a_hook_is_refused(
    install: Callable[[str, str, str], None],
) -> None:
    """The plugin is named by its module and distribution."""
    install("stack", "kvpage_stack", "")
    assert refusal("stack") == (
        "plugin 'kvpage_stack of kvpage_stack 1.2' has no function 'kvpage_allocators' marked "
        "with @kvpage.hookimpl"
    )


def test_nothing_is_kept_from_one_engine_to_the_next() -> None:
    """A plugin of one call is unknown to the next one."""
    build_allocator("shelf", GEOMETRY, plugins=[ShelfPlugin()])
    assert refusal("shelf").startswith("no allocator named 'shelf'")
    assert not [name for name in vars(kvpage.plugins) if name.endswith("manager")]
