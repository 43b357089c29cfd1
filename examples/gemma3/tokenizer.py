"""The tokenizer of Gemma: byte-pair merges of SentencePiece, from the scores in a GGUF file."""

from __future__ import annotations

import codecs
import heapq
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_SPACE = "\u2581"  # how SentencePiece writes a space

# token_type of GGUF
_CONTROL = 3
_USER_DEFINED = 4
_BYTE = 6


class GGUFSentencePiece:
    """SentencePiece BPE built in memory from GGUF metadata.

    Parameters
    ----------
    metadata : Mapping[str, Any]
        GGUF key-value pairs; ``tokenizer.ggml.*`` are read.

    Raises
    ------
    ValueError
        If the vocabulary is of another kind.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        kind = metadata["tokenizer.ggml.model"]
        if kind != "llama":
            raise ValueError(f"got a tokenizer of kind {kind!r}, expected 'llama' (SentencePiece)")
        self._pieces: list[str] = metadata["tokenizer.ggml.tokens"]
        self._scores = metadata["tokenizer.ggml.scores"]
        self._types = metadata["tokenizer.ggml.token_type"]
        self._ids = {piece: i for i, piece in enumerate(self._pieces)}
        whole = [p for p, t in zip(self._pieces, self._types, strict=True) if t == _USER_DEFINED]
        # Tokens that are taken as they stand, the longest first, and never merged.
        longest_first = map(re.escape, sorted(whole, key=len, reverse=True))
        self._whole = re.compile("|".join(longest_first) or "(?!)")
        self.bos_id: int = metadata["tokenizer.ggml.bos_token_id"]
        self.eos_id: int = metadata["tokenizer.ggml.eos_token_id"]
        self.stop_ids = {self.eos_id}

    def encode(self, text: str) -> list[int]:
        """Turn text into token ids, after the token that begins every text."""
        ids, end = [self.bos_id], 0
        for whole in self._whole.finditer(text):
            ids += self._merged(text[end : whole.start()])
            ids.append(self._ids[whole.group()])
            end = whole.end()
        return ids + self._merged(text[end:])

    def _merged(self, text: str) -> list[int]:
        """Merge neighbours, the pair of the best score first, from single characters on."""
        pieces = list(text.replace(" ", _SPACE))
        after, before = list(range(1, len(pieces) + 1)), list(range(-1, len(pieces) - 1))
        merges: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left < 0 or right == len(pieces):
                return
            merged = pieces[left] + pieces[right]
            if merged in self._ids:
                heapq.heappush(merges, (-self._scores[self._ids[merged]], left, right, merged))

        for left, right in enumerate(after):
            offer(left, right)
        while merges:
            _, left, right, merged = heapq.heappop(merges)
            # A piece that was merged into the one before it is empty.
            if after[left] != right or pieces[left] + pieces[right] != merged:
                continue
            pieces[left], pieces[right] = merged, ""
            after[left] = after[right]
            if after[left] < len(pieces):
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        return [i for piece in pieces if piece for i in self._ids_of(piece)]

    def _ids_of(self, piece: str) -> list[int]:
        if piece in self._ids:
            return [self._ids[piece]]
        return [self._ids[f"<0x{byte:02X}>"] for byte in piece.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """Turn token ids into text, without the tokens that only control."""
        return "".join(self.stream(ids))

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield text as ids arrive, holding back bytes that are not yet a whole character."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for i in ids:
            if piece := decoder.decode(self._bytes_of(i)):
                yield piece
        if rest := decoder.decode(b"", final=True):
            yield rest

    def _bytes_of(self, i: int) -> bytes:
        if self._types[i] == _CONTROL:
            return b""
        if self._types[i] == _BYTE:
            return bytes([int(self._pieces[i][3:-1], 16)])
        return self._pieces[i].replace(_SPACE, " ").encode()
