"""A device for scheduler tests: it executes steps on blocks whose every slot remembers what was written there.

The key of position p depends on all tokens up to p, so a slot holds (group, position, digest of the tokens up to it).
Attention is "every key the window needs is exactly that one"; the model is deterministic, the next token is a function
of the last key's digest. So a request must produce what `reference_output` computes with no scheduler at all.
"""

from __future__ import annotations

from hf_paged.request import Request, ScheduledRequest, SchedulerOutput

VOCAB = 12
EOS = 0


def digest(parent: int, token: int) -> int:
    return hash((parent, token))


def next_token(key: int) -> int:
    return (key >> 7) % VOCAB


def digests(tokens: list[int]) -> list[int]:
    keys, key = [], 1
    for token in tokens:
        key = digest(key, token)
        keys.append(key)
    return keys


def reference_output(request: Request, max_model_len: int) -> list[int]:
    """What the request produces when it is alone in the world, with eos as the only stop token."""
    params = request.params
    limit = max_model_len - request.num_prompt_tokens
    limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
    key, output = digests(request.prompt_token_ids)[-1], []
    while len(output) < limit:
        token = next_token(key)
        output.append(token)
        key = digest(key, token)
        if token == EOS and not params.ignore_eos and len(output) >= params.min_tokens:
            break
    return output


class Device:
    """Executes steps in the order they are scheduled, as a stream does; when the host learns the tokens is up to it."""

    def __init__(self, windows: list[int | None], block_size: int, num_blocks: int, num_cpu_blocks: int) -> None:
        self.windows = windows
        self.block_size = block_size
        self.pages: list[list[object]] = [[None] * block_size for _ in range(num_blocks)]
        self.cpu_pages: list[list[object]] = [[None] * block_size for _ in range(num_cpu_blocks)]
        self.rows: dict[int, tuple[Request, int | None]] = {}  # row -> its request, the token sampled last
        self.true_tokens: dict[Request, list[int]] = {}  # those in flight included

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        """The sampled tokens of one step, None for an entry that does not sample."""
        self._copy(self.pages, self.cpu_pages, output.swap_out)
        self._copy(self.cpu_pages, self.pages, output.swap_in)
        self._copy(self.pages, self.pages, output.block_copies)
        for request in output.admitted:
            self.rows[request.row] = (request, None)
        steps = [(entry, self._keys(entry)) for entry in output.scheduled]
        written: set[tuple[int, int]] = set()
        for entry, keys in steps:
            self._write(entry.request, keys, entry.start, written)
        tokens: list[int | None] = []
        for entry, keys in steps:
            self._attend(entry.request, keys, entry.start)
            tokens.append(self._sample(entry.request, keys) if entry.samples else None)
        return tokens

    def _copy(self, source: list[list[object]], destination: list[list[object]], pairs: list[tuple[int, int]]) -> None:
        sources, destinations = {pair[0] for pair in pairs}, [pair[1] for pair in pairs]
        assert len(destinations) == len(set(destinations)), "two copies into one block"
        assert source is not destination or sources.isdisjoint(destinations), "a copy reads what another one writes"
        for start, end in [(list(source[start]), end) for start, end in pairs]:
            destination[end] = start

    def _keys(self, entry: ScheduledRequest) -> list[int]:
        """Keys up to the step's last position, from tokens that the host sends or the row of the request holds."""
        request, end = entry.request, entry.start + entry.num_scheduled_tokens
        tokens = self.true_tokens.setdefault(request, list(request.prompt_token_ids))
        assert tokens[: len(request.token_ids)] == request.token_ids, "the host and the device disagree on known tokens"
        owner, last = self.rows[request.row]
        assert owner is request, "the row belongs to somebody else, or was not set up"
        if end > len(request.token_ids):
            assert entry.start + 1 == end == len(tokens), "only the token sampled last may be fed on the device"
            assert last == tokens[-1], "the row does not hold the token in flight"
        return digests(tokens[:end])

    def _write(self, request: Request, keys: list[int], start: int, written: set[tuple[int, int]]) -> None:
        for group, table in enumerate(request.block_tables):
            for position in range(start, len(keys)):
                slot = (table[position // self.block_size], position % self.block_size)
                assert slot[0] != 0, "a write into the null block"
                assert slot not in written, "two writes into one slot"
                written.add(slot)
                self.pages[slot[0]][slot[1]] = (group, position, keys[position])

    def _attend(self, request: Request, keys: list[int], start: int) -> None:
        for group, window in enumerate(self.windows):
            table = request.block_tables[group]
            for position in range(0 if window is None else max(0, start - window + 1), len(keys)):
                block = table[position // self.block_size]
                assert block != 0, f"{request} needs position {position}, whose block is gone"
                seen = self.pages[block][position % self.block_size]
                assert seen == (group, position, keys[position]), f"{request} sees {seen} at position {position}"

    def _sample(self, request: Request, keys: list[int]) -> int:
        token = next_token(keys[-1])
        assert len(keys) == len(self.true_tokens[request]), "a token is sampled before the last one is computed"
        self.true_tokens[request].append(token)
        self.rows[request.row] = (request, token)
        return token
