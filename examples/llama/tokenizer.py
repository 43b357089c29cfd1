"""The tokenizer and the chat template that a GGUF file carries; no network, no other files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

# token_type of GGUF
_CONTROL = 3
_USER_DEFINED = 4


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """Give the pre-tokenizer that GGUF calls ``name``."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "default"):
        return gpt2
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    raise ValueError(
        f"got pre-tokenizer {name!r}, expected 'smollm' or 'gpt-2'; add it to _pre_tokenizer"
    )


class GGUFTokenizer:
    """Byte-level BPE built in memory from GGUF metadata.

    Parameters
    ----------
    metadata : Mapping[str, Any]
        GGUF key-value pairs; ``tokenizer.ggml.*`` and ``tokenizer.chat_template`` are read.

    Raises
    ------
    ValueError
        If the vocabulary is not byte-level BPE or its pre-tokenizer is unknown.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        kind = metadata["tokenizer.ggml.model"]
        if kind != "gpt2":
            raise ValueError(f"got a tokenizer of kind {kind!r}, expected 'gpt2' (byte-level BPE)")
        tokens = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(pair.split(" ", 1)) for pair in metadata["tokenizer.ggml.merges"]]
        vocab = {token: i for i, token in enumerate(tokens)}
        self._tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        self._tokenizer.pre_tokenizer = _pre_tokenizer(
            metadata.get("tokenizer.ggml.pre", "default")
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        types = metadata["tokenizer.ggml.token_type"]
        for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            self._tokenizer.add_tokens(
                [
                    AddedToken(token, special=special, normalized=False)
                    for token, token_type in zip(tokens, types, strict=True)
                    if token_type == wanted
                ]
            )
        self.vocab_size = len(tokens)
        self.bos_id = (
            metadata["tokenizer.ggml.bos_token_id"]
            if metadata.get("tokenizer.ggml.add_bos_token", False)
            else None
        )
        self.eos_id: int = metadata["tokenizer.ggml.eos_token_id"]
        # Chat models end a turn with one and a document with another; stop at all of them.
        self.stop_ids = {self.eos_id} | {
            vocab[name] for name in ("<|endoftext|>", "<|im_end|>", "<|eot_id|>") if name in vocab
        }
        self._special = {
            name: tokens[metadata[key]] if key in metadata else ""
            for name, key in (
                ("bos_token", "tokenizer.ggml.bos_token_id"),
                ("eos_token", "tokenizer.ggml.eos_token_id"),
            )
        }
        self._chat_template = metadata.get("tokenizer.chat_template")

    def encode(self, text: str) -> list[int]:
        """Turn text into token ids; special tokens written out in it are recognised."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids if self.bos_id is None or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turn token ids into text."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield text as ids arrive, holding back bytes that are not yet a whole character."""
        stream = DecodeStream(skip_special_tokens=True)
        for token in ids:
            piece = stream.step(self._tokenizer, token)
            if piece:
                yield piece

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Apply the chat template of the model, ready for the assistant's answer.

        Parameters
        ----------
        messages : sequence of mappings
            Each has ``role`` (``system``, ``user`` or ``assistant``) and ``content``.
        """
        if self._chat_template is None:
            raise ValueError("the GGUF file carries no chat template; encode the text as it is")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(self._chat_template).render(
            messages=messages, add_generation_prompt=True, **self._special
        )
