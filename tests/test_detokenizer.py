"""Pieces of text join to the text of the whole, whatever the tokenizer; a stop string is never half shown."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_paged.detokenizer import REPLACEMENT, Detokenizer, detokenize
from hf_paged.sampling_params import SamplingParams

TEXT = "Hello  world,\n\n  naïve café — 你好世界 😀👨‍👩‍👧‍👦🏳️‍🌈 don't  stop \ttabs  (x == 1)  Ωmega a\u0301  "
PLAIN = SamplingParams()
TRAINING = ["Hello world, hello there. Don't stop the tabs (x == 1) now.", "  two  spaces and   three, naïve café"] * 3


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3, Qwen: tokens are bytes, so a token may end within a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>")


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2, Mistral, Gemma: a space is part of the next word, the first one is dropped, bytes are a fallback."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    special = ["<unk>", "<s>", "</s>"]
    learner.train_from_iterator(TRAINING, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learned = learner.get_vocab()
    pieces = special + [f"<0x{i:02X}>" for i in range(256)] + sorted(learned, key=lambda piece: learned[piece])
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [
        (piece[:i], piece[i:])
        for piece in vocab
        for i in range(1, len(piece))
        if piece in learned and piece[:i] in learned and piece[i:] in learned
    ]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def word_piece() -> PreTrainedTokenizerFast:
    """As BERT: a continuation only shows as one after its word, and clean-up would take spaces back."""
    words = ["[UNK]", "[SEP]", "hel", "##lo", "##s", "wor", "##ld", ",", ".", "do", "n", "'", "t"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", sep_token="[SEP]", eos_token="[SEP]")


BUILDERS = {"byte-level": byte_level, "SentencePiece": sentencepiece, "WordPiece": word_piece}
FOLDERS = ["SmolLM2-135M-Instruct", "stories260K", "small-llama-15m"]


@pytest.fixture(scope="module", params=[*BUILDERS, *FOLDERS])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param in BUILDERS:
        return BUILDERS[request.param]()
    folder: Path = request.getfixturevalue("shared") / "models" / request.param
    return AutoTokenizer.from_pretrained(folder)


def encode(tokenizer: Any, text: str = TEXT) -> list[int]:
    if isinstance(tokenizer.backend_tokenizer.model, models.WordPiece):
        return [2, 3, 5, 6, 7, 2, 3, 4, 8, 9, 10, 11, 12, 1, 5, 6, 4, 2, 3]
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def pieces_of(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    """What a stream shows after each token, and at the end."""
    shown, pieces = "", []
    for token_id in token_ids:
        detokenizer.append(token_id)
        assert detokenizer.text.startswith(shown), "text that was shown has changed"
        pieces.append(detokenizer.text[len(shown) :])
        shown = detokenizer.text
    final = detokenizer.finalize()
    assert final.startswith(shown)
    return [*pieces, final[len(shown) :]]


@pytest.mark.parametrize("skip_special_tokens", [True, False], ids=["specials skipped", "specials shown"])
def test_pieces_join_to_the_decoded_whole_and_never_show_half_a_character(
    tokenizer: Any, skip_special_tokens: bool
) -> None:
    params = SamplingParams(skip_special_tokens=skip_special_tokens)
    ids = encode(tokenizer)
    ids = [tokenizer.eos_token_id, *ids, tokenizer.eos_token_id, *ids, *ids, tokenizer.eos_token_id]
    pieces = pieces_of(Detokenizer(tokenizer, [], params), ids)
    assert REPLACEMENT not in "".join(pieces)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    assert sum(piece != "" for piece in pieces) > len(ids) / 4  # text comes while tokens come


def test_prompt_and_output_read_as_one_text_wherever_the_prompt_ends(tokenizer: Any) -> None:
    ids = encode(tokenizer) * 2
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    for length in range(0, len(ids), 3):
        prompt, output = ids[:length], ids[length:]
        text = "".join(pieces_of(Detokenizer(tokenizer, prompt, PLAIN), output))
        # A character that the prompt leaves unfinished comes with the output.
        assert tokenizer.decode(prompt, skip_special_tokens=True).rstrip(REPLACEMENT) + text == whole
        assert text == detokenize(tokenizer, prompt, output, PLAIN)


def test_the_first_word_after_a_sentencepiece_prompt_keeps_its_space() -> None:
    tokenizer = sentencepiece()
    prompt, output = encode(tokenizer, "Hello"), encode(tokenizer, "world")
    assert detokenize(tokenizer, prompt, output, PLAIN) == " world"
    assert detokenize(tokenizer, [], output, PLAIN) == "world"
    # A skipped special token in between is no new start of the text.
    assert "".join(pieces_of(Detokenizer(tokenizer, prompt, PLAIN), [tokenizer.eos_token_id, *output])) == " world"


@pytest.mark.parametrize("name", ["byte-level", "WordPiece"])
def test_random_tokens_with_broken_bytes_still_join_to_the_decoded_whole(name: str) -> None:
    tokenizer, draw = BUILDERS[name](), random.Random(0)
    for _ in range(50):
        ids = [draw.randrange(len(tokenizer)) for _ in range(80)]
        assert "".join(pieces_of(Detokenizer(tokenizer, [], PLAIN), ids)) == tokenizer.decode(
            ids, skip_special_tokens=True
        )


def test_an_output_that_ends_within_a_character_says_so_only_at_the_end() -> None:
    tokenizer = byte_level()
    ids = encode(tokenizer, "ok 😀")[:-1]
    detokenizer = Detokenizer(tokenizer, [], PLAIN)
    pieces = pieces_of(detokenizer, ids)
    assert "".join(pieces[:-1]).strip() == "ok" and pieces[-1].endswith(REPLACEMENT)
    assert detokenizer.finalize() == detokenizer.text == tokenizer.decode(ids)  # asking again changes nothing


def test_a_step_decodes_a_bounded_window_however_long_the_output_or_the_prompt() -> None:
    """The cost of a token must not grow with the sequence, nor with garbage or special tokens in it."""
    longest = 0

    class Counting:
        """A tokenizer that notes how much it is asked to decode."""

        def __init__(self, tokenizer: Any) -> None:
            self._tokenizer = tokenizer
            self.all_special_ids = tokenizer.all_special_ids

        def decode(self, ids: list[int], **options: bool) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            text: str = self._tokenizer.decode(ids, **options)
            return text

    draw = random.Random(0)
    for tokenizer in (byte_level(), sentencepiece()):
        text = encode(tokenizer) * 20
        noise = [draw.randrange(len(tokenizer)) for _ in range(2000)]
        specials = [tokenizer.eos_token_id] * 2000
        for prompt, output in ((text, text), (noise, noise), (text, specials + text)):
            pieces_of(Detokenizer(Counting(tokenizer), prompt, PLAIN), output)
    assert longest <= 64


STOPS = [
    (("world",), "Hello world, hello", "Hello "),
    (("o, he",), "Hello, hello", "Hell"),  # across tokens
    (("\n\n", "naïve"), "a naïve\n\n", "a "),  # the earlier one, whatever the order
    (("lo", "hello"), "say hello", "say "),  # complete together: the longer
    (("hello", "he"), "say hello", "say "),  # complete first: the shorter
    (("😀",), "so 😀!", "so "),  # found once its last byte is here
    (("there",), "Hello ther", "Hello ther"),  # nothing found: what was held back comes out
]


@pytest.mark.parametrize("build", [byte_level, sentencepiece])
@pytest.mark.parametrize(("stop", "text", "expected"), STOPS)
def test_a_stop_string_ends_the_text_and_none_of_it_is_shown_before(
    build: Any, stop: tuple[str, ...], text: str, expected: str
) -> None:
    tokenizer = build()
    for token_ids in (encode(tokenizer, text), _one_character_at_a_time(tokenizer, text)):
        detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=stop))
        assert "".join(pieces_of(detokenizer, token_ids)) == expected  # pieces_of checks that nothing is taken back
        assert (detokenizer.stop_string is not None) == (expected != text)


def _one_character_at_a_time(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` with no merges: the worst case for a stop string."""
    model = tokenizer.backend_tokenizer.model
    ids: list[int] = []
    if not model.byte_fallback:
        units = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        return [model.token_to_id(c) for unit, _ in units for c in unit]
    for character in "▁" + text.replace(" ", "▁"):
        known = model.token_to_id(character)
        ids += [known] if known is not None else [model.token_to_id(f"<0x{b:02X}>") for b in character.encode()]
    return ids


def test_append_names_the_stop_string_at_its_last_token_and_ignores_what_follows() -> None:
    tokenizer = byte_level()
    ids = _one_character_at_a_time(tokenizer, "say hello there")
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=("hello",), include_stop_str_in_output=True))
    named = [detokenizer.append(token_id) for token_id in ids]
    assert named == [None] * 8 + ["hello"] * 7
    assert detokenizer.text == detokenizer.finalize() == "say hello"


def test_text_that_may_begin_a_stop_string_waits_and_other_text_does_not() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=("end.", "nd!")))
    pieces = pieces_of(detokenizer, _one_character_at_a_time(tokenizer, "an end, end"))
    assert pieces == ["a", "", "n ", "", "", "", "end,", " ", "", "", "", "end"]


def test_a_stop_string_completed_before_min_tokens_does_not_count() -> None:
    tokenizer = byte_level()
    ids = _one_character_at_a_time(tokenizer, "abab")
    for min_tokens, text in ((0, ""), (2, ""), (3, "ab"), (4, "ab"), (5, "abab")):
        params = SamplingParams(stop=("ab",), min_tokens=min_tokens)
        assert "".join(pieces_of(Detokenizer(tokenizer, [], params), ids)) == text
