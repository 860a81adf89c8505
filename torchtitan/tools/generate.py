"""Continue texts, or answer in a chat, with a trained model.

    python -m torchtitan generate --checkpoint outputs --prompt "def main(" --temperature 0.8
    python -m torchtitan generate --checkpoint Qwen3-0.6B --chat
    python -m torchtitan generate --checkpoint Qwen3-0.6B --chat --prompt "Who are you?"
    torchrun --nproc_per_node 2 -m torchtitan generate --checkpoint Qwen3-8B --prompts_file a.txt

The checkpoint is a run's folder or its checkpoint folder (the newest step is taken), one step's
folder, or a folder of Hugging Face, of any size of a family that is built here. Checksums of a step
are verified first: a damaged step that you named is an error, else the newest whole one is taken. A
step knows the settings it was saved under, so it can be copied anywhere by itself; a tokenizer that
is a file must still lie where model.tokenizer_path says.

Several prompts are continued together, each as it would be alone. An empty prompt begins a new
document. In a prompt special tokens are plain text, unless --special asks for them; no begin token
is put before it. With --chat each prompt is what a user says, put into the chat template, and the
answer alone is printed; without a prompt a chat begins in the terminal, or on the lines of standard
input: /help lists its commands. A text ends at the tokenizer's end token, at those that
generation_config.json names, and in a chat at the token that ends a turn.

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

import torch.distributed as dist

from torchtitan.api import open_generator
from torchtitan.base.custom import add_trust_code, trusting_stored
from torchtitan.base.errors import ConfigError, DataError, UserError
from torchtitan.data.text import check_characters
from torchtitan.generate.chat import Chat, talk
from torchtitan.generate.generator import DTYPES, join_tensor_parallel
from torchtitan.generate.sampling import Sampling
from torchtitan.generate.text import BATCH_SIZE, answer, complete
from torchtitan.mesh.faults import refuse_exits
from torchtitan.mesh.ranks import let_rank_0_report, read_rank_info
from torchtitan.tools.verbs import build_parser

MOST_TOKENS = 10**6


def main(argv: Sequence[str]) -> int:
    """Write the texts; 2 with one message for what the user can mend."""
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s")  # names the damaged steps
    try:
        with trusting_stored(args.trust_code), refuse_exits():
            texts = write(args)
    except (UserError, OSError) as error:
        let_rank_0_report()
        sys.stderr.write(f"error: {error}\n")
        return UserError.exit_code
    if not dist.is_initialized() or dist.get_rank() == 0:
        for number, text in enumerate(texts, start=1):
            if len(texts) > 1:
                sys.stdout.write(f"=== {number} of {len(texts)}\n")
            sys.stdout.write(f"{text}\n")
    return 0


def write(args: argparse.Namespace) -> list[str]:
    """Return what is to be printed for each prompt; a chat without one writes by itself.

    Raises:
        UserError: An argument, a file or the model has to be another.
    """
    _check(args)
    prompts = [*args.prompt, *(_lines(args.prompts_file) if args.prompts_file else ())]
    is_talk = args.chat and not args.prompt and args.prompts_file is None
    if not prompts and not is_talk:
        raise ConfigError(
            "there must be a prompt, got none; give --prompt or --prompts_file, or --chat alone "
            "for a chat in the terminal"
        )
    for number, text in enumerate([*prompts, args.system or ""], start=1):
        where = f"prompt {number}" if number <= len(prompts) else "--system"
        check_characters(text, where=where)
    world_size = read_rank_info(os.environ).world_size
    if is_talk and world_size > 1:
        raise ConfigError(
            f"a chat in the terminal runs on one rank, got {world_size}; give --prompt, or start "
            f"one process"
        )
    device, mesh = join_tensor_parallel()
    generator = open_generator(
        args.checkpoint,
        device=device,
        mesh=mesh,
        verify=not args.skip_verify,
        tokenizer=args.tokenizer,
        chats=args.chat,
        chat_template=args.chat_template,
        dtype=args.dtype,
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
    if is_talk:
        chat_in_terminal(Chat(generator, system=args.system, **sampling))
        return []
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    chats = [[*system, {"role": "user", "content": prompt}] for prompt in prompts]
    return answer(generator, chats, batch_size=args.batch_size, **sampling)


def chat_in_terminal(chat: Chat) -> None:
    """Answer the lines of standard input, which a terminal edits; raise DataError if none comes."""
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
        except (EOFError, KeyboardInterrupt) as end:
            if not is_terminal:
                raise
            tell("")  # what was typed ends in the middle of its line
            if isinstance(end, EOFError):
                raise
            return "/help"

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def tell(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    num_lines = talk(chat, read=read, write=write, notify=tell, stops_at_errors=not is_terminal)
    if not num_lines and not is_terminal:
        raise DataError(
            "a chat reads its questions from standard input, a line each, and got none; give "
            "--prompt, or start it in a terminal"
        )


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--prompts_file must be a text in UTF-8, a prompt a line; {file} cannot be read: "
            f"{error}"
        ) from error


def _check(args: argparse.Namespace) -> None:
    mistakes = []
    if not -(2**63) <= args.seed < 2**64:
        mistakes.append(
            f"--seed must fit into 64 bits, -2**63 to 2**64 - 1, got {args.seed}; take a smaller "
            f"number"
        )
    if args.max_new_tokens > MOST_TOKENS:
        mistakes.append(
            f"--max_new_tokens must be at most {MOST_TOKENS}, got {args.max_new_tokens}: memory is "
            f"taken for all of them at the start; take a smaller number"
        )
    if args.batch_size < 1:
        mistakes.append(f"--batch_size must be at least 1, got {args.batch_size}")
    if args.system is not None and not args.chat:
        mistakes.append("--system is said in a chat alone; give --chat with it")
    if args.chat_template is not None and not args.chat:
        mistakes.append("--chat_template is read for a chat alone; give --chat with it")
    if args.special and args.chat:
        mistakes.append("--special is for plain prompts, a chat template writes its own; remove it")
    if mistakes:
        raise ConfigError(mistakes)


def _parser() -> argparse.ArgumentParser:
    parser = build_parser("generate", __doc__)
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="of a run or Hugging Face")
    add("--prompt", action="append", default=[], metavar="TEXT", help="to go on from; repeatable")
    add("--prompts_file", type=Path, metavar="FILE", help="a prompt a line, empty ones left out")
    add("--chat", action="store_true", help="prompts are what a user says; without one, a chat")
    add("--system", metavar="TEXT", help="with --chat: the system's message before it")
    add("--special", action="store_true", help="special tokens named in a prompt are meant")
    add("--max_new_tokens", type=int, default=200, metavar="N", help="at most")
    add("--temperature", type=float, default=1.0, metavar="T", help="0: the likeliest token")
    add("--top_k", type=int, metavar="K", help="draw from the K likeliest alone")
    add("--seed", type=int, default=0, metavar="S", help="of the draws, the same for each prompt")
    add("--batch_size", type=int, default=BATCH_SIZE, metavar="N", help="prompts at a time")
    add("--tokenizer", metavar="PATH", help="in place of the checkpoint's")
    add("--chat_template", metavar="FILE", help="in place of the tokenizer's or the run's")
    add("--dtype", choices=DTYPES, help="to compute in; as the weights are stored if not given")
    add("--skip_verify", action="store_true", help="do not verify checksums")
    add_trust_code(parser)
    return parser
