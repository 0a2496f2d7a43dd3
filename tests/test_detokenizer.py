"""Text as it comes: joined pieces are the whole decoding, and nothing is shown too early."""

import json
from string import ascii_letters

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from kvpage.detokenizer import Detokenizer
from kvpage.request import EngineModel

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, twice; then  it   sleeps.",
    "Ein süßer Käse für die Straße, déjà vu, naïve façade.",
    "今日は良い天気ですね。東京へ行きましょう。",
    "Привет, мир! Как дела?",
    "def f(x):\n    return x ** 2\n\n\tprint(f(3))",
    "Ship it 🚀🚀 and party 🎉 with 👩‍👩‍👧 families 🇩🇪.",
]
NUM_SEQUENCES = 10_000
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    """GPT-2's kind: tokens are byte strings, so a character may be cut anywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return with_added_tokens(tokenizer)


def sentencepiece_like() -> Tokenizer:
    """Llama 2's kind: spaces are part of tokens, unknown characters fall back to bytes."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = BpeTrainer(
        vocab_size=150,
        special_tokens=["<unk>"],
        initial_alphabet=list(ascii_letters),
        limit_alphabet=60,  # the rest of the characters will fall back to bytes
        show_progress=False,
    )
    trained.train_from_iterator(SENTENCES, trainer)
    model = json.loads(trained.to_str())["model"]
    vocabulary = model["vocab"]
    vocabulary |= {byte: len(vocabulary) + i for i, byte in enumerate(BYTES)}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return with_added_tokens(tokenizer)


def metaspace() -> Tokenizer:
    """The same vocabulary, with the decoder that T5 has."""
    tokenizer = sentencepiece_like()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


KINDS = {"byte level": byte_level, "SentencePiece": sentencepiece_like, "Metaspace": metaspace}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return int(found)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text that each token brings, and then what the end brings."""
    detokenizer = Detokenizer(tokenizer.decode, tokenizer.token_to_id("<0x80>"))
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


def test_joined_pieces_are_the_whole_decoding(tokenizer: Tokenizer) -> None:
    """For any sequence of ids, special tokens, stray bytes and cut characters included."""
    rng = np.random.default_rng(0)
    size = tokenizer.get_vocab_size()
    for _ in range(NUM_SEQUENCES):
        ids = rng.integers(0, size, rng.integers(1, 16)).tolist()
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_joined_pieces_of_text_with_cuts_and_strays(tokenizer: Tokenizer) -> None:
    """Real text with some tokens dropped, doubled and exchanged: long runs of whole characters."""
    rng = np.random.default_rng(1)
    for _ in range(500):
        ids = list(tokenizer.encode("".join(rng.choice(SENTENCES, 2))).ids)
        for place in rng.integers(0, len(ids), 3).tolist():
            ids[place : place + 1] = rng.integers(0, tokenizer.get_vocab_size(), 2).tolist()
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_text_comes_without_replacement_characters(tokenizer: Tokenizer, sentence: str) -> None:
    """No piece of good text has a character that the text does not have."""
    found = pieces(tokenizer, tokenizer.encode(sentence).ids)
    assert "".join(found) == sentence
    assert not any(REPLACEMENT in piece for piece in found)


def test_plain_text_is_shown_at_once(tokenizer: Tokenizer) -> None:
    """Each token of ASCII text brings its own text, and nothing is left for the end."""
    ids = tokenizer.encode("The quick brown fox").ids
    *found, rest = pieces(tokenizer, ids)
    shown = ""
    for count, piece in enumerate(found, start=1):
        shown += piece
        assert shown == tokenizer.decode(ids[:count])
    assert rest == ""


def test_the_bytes_of_an_emoji_come_as_one_character() -> None:
    """Byte-level: three tokens show nothing, the fourth shows the emoji."""
    tokenizer = byte_level()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("🦜")[0][0]
    ids = [token_id(tokenizer, letter) for letter in letters]
    assert pieces(tokenizer, [*ids, *ids]) == ["", "", "", "🦜", "", "", "", "🦜", ""]


def test_fallback_bytes_are_shown_once_their_run_has_ended() -> None:
    """One broken byte would turn the whole run into replacement characters: wait for its end."""
    tokenizer = sentencepiece_like()
    run = [token_id(tokenizer, f"<0x{byte:02X}>") for byte in "🦜".encode()]
    word = tokenizer.encode("dog").ids[-1]
    assert pieces(tokenizer, [*run, word])[:4] == ["", "", "", ""]
    assert "".join(pieces(tokenizer, [*run, word])[:5]).startswith("🦜")
    assert pieces(tokenizer, run) == ["", "", "", "", "🦜"]
    broken = [*run, token_id(tokenizer, "<0xF0>")]
    assert pieces(tokenizer, broken) == ["", "", "", "", "", REPLACEMENT * 5]


def test_a_cut_character_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    """When the length ends a text inside a character, the end brings what the decoding has."""
    ids = tokenizer.encode("A 🦜").ids[:-1]
    *_, rest = pieces(tokenizer, ids)
    assert rest.endswith(REPLACEMENT)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_special_tokens_bring_no_text(tokenizer: Tokenizer) -> None:
    """Neither at the beginning, nor between words, nor at the end."""
    special = token_id(tokenizer, "<|end|>")
    ids = tokenizer.encode("The lazy dog").ids
    with_specials = [special, *ids[:3], special, special, *ids[3:], special]
    found = pieces(tokenizer, with_specials)
    assert "".join(found) == "The lazy dog"
    assert (found[0], found[4], found[5], found[-2]) == ("", "", "", "")


def test_an_engine_finds_out_whether_its_tokenizer_falls_back_to_bytes(
    tokenizer: Tokenizer,
) -> None:
    """A transformers tokenizer needs no hint from the user."""
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    model = EngineModel("fake", tokenizer.get_vocab_size(), tokenizer=wrapped)
    rng = np.random.default_rng(2)
    for _ in range(300):
        ids = rng.integers(0, model.vocab_size, 12).tolist()
        detokenizer = model.detokenizer()
        assert detokenizer is not None
        joined = "".join(detokenizer.push(token) for token in ids) + detokenizer.finish()
        assert joined == tokenizer.decode(ids)
