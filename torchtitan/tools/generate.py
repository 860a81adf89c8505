"""Continue texts, or answer in a chat, with a trained model.

    torchtitan generate --checkpoint outputs --prompt "def main(" --temperature 0.8
    torchtitan generate --checkpoint Qwen3-0.6B --chat
    torchtitan generate --checkpoint Qwen3-0.6B --chat --prompt "Who are you?"
    torchrun --nproc_per_node 2 -m torchtitan generate --checkpoint Qwen3-8B --prompts_file a.txt

The checkpoint is a run (its newest step is used), a step, or a Hugging Face folder of a known model
family. Checksums of a step are verified first: a damaged step is an error if it was named, else the
newest undamaged step is used. A tokenizer file must still be at the run's model.tokenizer_path.

Several prompts are continued together, with the same results as one by one. An empty prompt starts
a new document. With --chat, each prompt is a user's message, rendered by the chat template, and
only the answer is printed. Without a prompt, the chat runs in the terminal or on the lines of
standard input; /help lists its commands. A text ends at the tokenizer's end token or one in
generation_config.json, an answer also at the token that ends a turn.

Under torchrun the ranks share the model's matrices (tensor parallelism), and rank 0 prints.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.base.custom import trusting_stored
from torchtitan.base.errors import ConfigError, DataError, Mistakes, printable
from torchtitan.base.files import read_text
from torchtitan.data.text import check_characters
from torchtitan.tools.verbs import (
    add_model_options,
    at_least,
    build_parser,
    load_args,
    report_errors,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from torchtitan.generate.chat import Chat

MOST_TOKENS = 10**6


@report_errors
def main(argv: Sequence[str]) -> int:
    """Print the texts and return 0; return 2 for a user's mistake."""
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s")  # names damaged steps
    prompts = _check(args)
    from torchtitan.mesh.faults import refuse_exits

    with trusting_stored(args.trust_code), refuse_exits():
        texts = generate(args, prompts)
    if os.environ.get("RANK", "0") == "0":
        for number, text in enumerate(texts, start=1):
            if len(texts) > 1:
                sys.stdout.write(f"=== {number} of {len(texts)}\n")
            write(f"{text}\n")
    return 0


def write(text: str) -> None:
    """Print text, on a terminal without control characters, which would be commands there."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def join_tensor_parallel() -> tuple[torch.device, DeviceMesh | None]:
    """Return this process's device, and the mesh of all ranks, which share a model's matrices.

    The mesh is None if this process is the only rank.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from torchtitan.base.device import local_device
    from torchtitan.mesh.ranks import init_process_group, read_rank_info
    from torchtitan.mesh.settings import CommConfig

    launch = read_rank_info(os.environ)
    device = local_device(launch.local_rank)
    if launch.world_size == 1:
        return device, None
    settings = CommConfig(trace_buf_size=0)
    init_process_group(launch, device_type=device.type, settings=settings, dump_folder=Path())
    return device, init_device_mesh(device.type, (launch.world_size,), mesh_dim_names=("tp",))


def generate(args: argparse.Namespace, prompts: Sequence[str]) -> list[str]:
    """Return the text to print for each prompt. Without prompts, chat in the terminal. Raises
    UserError if an option, a file or the model is invalid."""
    from torchtitan.api import load_generator
    from torchtitan.generate.chat import Chat
    from torchtitan.generate.sampling import Sampling
    from torchtitan.generate.text import answer, complete
    from torchtitan.mesh.ranks import read_rank_info

    world_size = read_rank_info(os.environ).world_size
    if not prompts and world_size > 1:
        raise ConfigError(
            f"a chat in the terminal runs on one rank, got {world_size}; give --prompt, or start "
            f"one process"
        )
    device, mesh = join_tensor_parallel()
    generator = load_generator(
        args.checkpoint,
        device=device,
        mesh=mesh,
        chats=args.chat,
        **load_args(args),
    )
    sampling = Sampling(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    if not args.chat:
        special, batch_size = args.special, args.batch_size
        return complete(generator, prompts, special=special, batch_size=batch_size, **sampling)
    if not prompts:
        chat_in_terminal(Chat(generator, system=args.system, **sampling))
        return []
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    chats = [[*system, {"role": "user", "content": prompt}] for prompt in prompts]
    return answer(generator, chats, batch_size=args.batch_size, **sampling)


def chat_in_terminal(chat: Chat) -> None:
    """Answer the lines of standard input, with line editing in a terminal; raise DataError if
    standard input is empty or not UTF-8."""
    from torchtitan.generate.chat import talk

    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):  # Windows has none
            import readline  # noqa: F401, input() then edits lines and remembers them
        sys.stderr.write("/help lists the commands; Ctrl-C ends an answer\n")

    def read() -> str:
        if sys.stdin is None:  # closed
            raise EOFError
        try:
            return input("> " if is_terminal else "")
        except UnicodeDecodeError as error:
            raise DataError(f"the lines of standard input must be UTF-8: {error}") from error
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            notify("")  # ends the line that was typed
            return "/help"

    def notify(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    num_lines = talk(chat, read=read, write=write, notify=notify, stops_at_errors=not is_terminal)
    if not num_lines and not is_terminal:
        raise DataError(
            "a chat reads its questions from standard input, one per line, and got none; give "
            "--prompt, or start it in a terminal"
        )


def _check(args: argparse.Namespace) -> list[str]:
    """Return the prompts, none for a chat in the terminal; raise UserError if options are invalid
    or in conflict, or a prompt is not text."""
    mistakes = Mistakes()
    if not -(2**63) <= args.seed < 2**64:
        mistakes.add("--seed", f"must fit into 64 bits, got {args.seed}")
    if args.max_new_tokens > MOST_TOKENS:
        rule = f"must be at most {MOST_TOKENS}, whose memory is allocated at the start, got"
        mistakes.add("--max_new_tokens", f"{rule} {args.max_new_tokens}")
    for key in () if args.chat else ("system", "chat_template"):
        if getattr(args, key) is not None:
            mistakes.add(f"--{key}", "needs --chat")
    if args.special and args.chat:
        mistakes.add("--special", "cannot be combined with --chat, whose template adds its own")
    mistakes.report()
    prompts = [*args.prompt, *([] if args.prompts_file is None else _read(args.prompts_file))]
    if not prompts and (args.prompts_file is not None or not args.chat):
        raise ConfigError(
            "there must be a prompt, got none; give --prompt or --prompts_file, or only --chat "
            "for a chat in the terminal"
        )
    for number, prompt in enumerate(prompts, start=1):
        check_characters(prompt, where=f"prompt {number}")
    check_characters(args.system or "", where="--system")
    return prompts


def _read(file: Path) -> list[str]:
    try:
        return [line for line in read_text(file).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        rule = f"must be UTF-8 text with one prompt per line; {file} cannot be read: {error}"
        raise DataError.at("--prompts_file", rule) from error


def _parser() -> argparse.ArgumentParser:
    parser = build_parser("generate", __doc__)
    add_model_options(parser)
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="to continue; repeatable")
    add("--prompts_file", type=Path, metavar="FILE", help="one prompt per line; skips empty lines")
    add("--chat", action="store_true", help="prompts are user messages; without one, a chat")
    add("--system", metavar="TEXT", help="system message of a chat")
    add("--special", action="store_true", help="names of special tokens in a prompt are tokens")
    add("--max_new_tokens", type=int, default=200, metavar="N", help="most tokens per text (200)")
    text = "of the draws (1); 0: the most likely token"
    add("--temperature", type=float, default=1.0, metavar="T", help=text)
    add("--top_k", type=int, metavar="K", help="draw from the K most likely tokens")
    add("--seed", type=int, default=0, metavar="S", help="of the draws, the same for each prompt")
    add("--batch_size", type=at_least(1), default=8, metavar="N", help="prompts per batch")
    return parser
