"""Ask a trained model; the answer streams to the screen.

python recipes/generate.py runs/llama_packed "What is the capital of France?"
python recipes/generate.py runs/llama_packed                     (a chat; an empty line ends it)
python recipes/generate.py meta-llama/Llama-3.2-1B-Instruct "Hello" --temperature 0.7
"""

from __future__ import annotations

import sys

from automodel_lite.cli import argument_parser, run_tool
from automodel_lite.config.rules import PathText, Range, argument


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; raises ConfigError."""
    parser = argument_parser(__doc__)
    parser.add_argument("model", type=argument(str, PathText()), help="a run, a model or adapter folder, or a hub name")
    parser.add_argument("prompt", nargs="?", type=argument(str), help="what to ask; without it, a chat")
    parser.add_argument("--system", type=argument(str), help="a system message")
    parser.add_argument("--max-new-tokens", type=argument(int, Range(1)), default=256)
    of_temperature = "0 (the default): the likeliest token each time"
    parser.add_argument("--temperature", type=argument(float, Range(0, 1000)), default=0.0, help=of_temperature)
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--seed", type=argument(int, Range(0, 2**32 - 1)), default=0, help="with --temperature")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code of the model's repository")
    args = parser.parse_args(argv)

    from transformers import set_seed  # --help needs no torch

    from automodel_lite.models.generate import load_generator
    from automodel_lite.run.export import exported_folder
    from automodel_lite.telemetry.console import quiet_libraries

    quiet_libraries()
    generator = load_generator(exported_folder(args.model), args.trust_remote_code)
    set_seed(args.seed)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    prompts = [args.prompt] if args.prompt is not None else iter(_ask, "")
    for prompt in prompts:
        messages.append({"role": "user", "content": prompt})
        answer = generator.answer(
            messages,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            is_chat=not args.raw,
            write=_write,
        )
        messages.append({"role": "assistant", "content": answer})
    return 0


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    run_tool(main)
