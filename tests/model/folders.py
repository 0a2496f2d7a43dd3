"""Folders with tiny models, as `from_pretrained` loads them."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GenerationConfig
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from tests.model.families import family_model


def write_model(folder: Path, model_type: str = "llama") -> Path:
    """A model with a tokenizer and settings of its own."""
    model = family_model(model_type)
    model.generation_config = GenerationConfig(
        eos_token_id=[5, 7], do_sample=True, temperature=0.6, top_k=9
    )
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(model.config.get_text_config().vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    TokenizersBackend(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
