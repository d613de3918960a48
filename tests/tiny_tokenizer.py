"""A character tokenizer for models with random weights: token 3 is "!", token 4 is '"', and so on through ASCII."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = ("<pad>", "<s>", "</s>")
FIRST = 33  # "!"


def tiny_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Ids 0, 1, 2 are pad, bos and eos, as in `model_zoo`; pads on the left."""
    characters = [chr(FIRST + i) for i in range(vocab_size - len(_SPECIAL))]
    vocab = {token: i for i, token in enumerate([*_SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )
