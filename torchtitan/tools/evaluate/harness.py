"""Run tasks of EleutherAI's lm-evaluation-harness.

The harness turns its tasks into requests of three kinds, and the answers of the `Adapter` into
figures. Texts are tokenized and cut as by the harness's class for `transformers`, so the scores are
the same: `lm_eval --model hf` on an export is the oracle of the tests.

Requests are sorted by length, and a batch is padded on the right, where causal attention does not
look. Requests with the same input tokens, such as one-token answers to one question, share a
forward pass, and logits are computed only for scored tokens. Under tensor parallelism every rank
answers all requests in the same way.

The package is an extra. Only this file imports it, and only --tasks imports this file.
"""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from torchtitan.base.errors import ConfigError, UserError
from torchtitan.finetune.chat import Conversation
from torchtitan.finetune.encoder import with_begin
from torchtitan.generate.generator import Generator
from torchtitan.generate.sampling import generate
from torchtitan.tools.evaluate.perplexity import tracked

Row = tuple[int, ...]
MAX_NEW_TOKENS = 256
"""Default for tasks that generate text."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p")
"""Settings without effect in a task that generates greedily."""
NEUTRAL = (None, 1, False)
"""Values of other settings that change nothing."""


def find_tasks(names: Sequence[str], *, include_path: Path | None) -> TaskManager:
    """Return a manager of the tasks in a folder and, if necessary, of the harness; raise
    ConfigError if a name is no task, group, tag or YAML file."""
    folder = None if include_path is None else str(include_path)
    for include_defaults in (False, True):  # loading the harness's tasks takes 30 s
        manager = TaskManager(include_path=folder, include_defaults=include_defaults)
        task_names = set(manager.all_tasks)
        if not (unknown := [n for n in names if n not in task_names and not Path(n).is_file()]):
            return manager
    raise ConfigError(
        f"--tasks must name tasks of lm-evaluation-harness or --include_path, or YAML files, "
        f"got {unknown[0]!r}"
    )


def run_tasks(adapter: Adapter, names: Sequence[str], **options: Any) -> dict[str, Any]:
    """Return the figures of each task and group on rank 0, else {}.

    `options`: as for lm_eval.simple_evaluate. Raises UserError if a task is not supported.
    """
    # other ranks would repeat the harness's progress bars and warnings
    is_first = os.environ.get("RANK", "0") == "0"
    with nullcontext() if is_first else redirect_stderr(io.StringIO()):
        results = simple_evaluate(adapter, tasks=[*names], log_samples=False, **options)
    if results is None:
        return {}
    return {
        name: {
            "figures": _figures(row),
            "num_examples": results["n-samples"].get(name, {}).get("effective"),
            "num_fewshot": results["n-shot"].get(name),
            "version": results["versions"].get(name),
        }
        for name, row in results["results"].items()
    }


def _figures(row: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return each metric, named with its filter if any, and its standard error if known."""
    figures = {}
    for key, value in row.items():
        metric, comma, filter_name = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            stderr = row.get(f"{metric}_stderr,{filter_name}")
            name = metric if filter_name == "none" else f"{metric}, {filter_name}"
            figures[name] = {"value": value, "stderr": stderr if stderr != "N/A" else None}
    return figures


class Adapter(TemplateLM):
    """Answer the harness's requests.

    `first_id` is the token before a text whose first token is scored, `max_length` the most tokens
    of the model's input; `chats`: the requests are rendered by the chat template.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        first_id: int,
        max_length: int,
        batch_size: int,
        chats: bool = False,
    ) -> None:
        super().__init__()
        self.max_length, self._batch_size, self._chats = max_length, batch_size, chats
        self._generator, self._first_id = generator, first_id
        self._stop_ids = generator.answer_stop_ids() if chats else generator.stop_ids

    @property
    def eot_token_id(self) -> int:
        """Return the token that ends a document."""
        return self._generator.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Return the token before a text whose first token is scored."""
        return self._first_id

    @property
    def tokenizer_name(self) -> str:
        """Return an identifier of the tokenizer."""
        return self._generator.tokenizer.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Return the ids of a text, after the BOS token if the tokenizer adds one.

        In a chat the template wrote the text, so names of special tokens are these tokens.
        """
        tokenizer = self._generator.tokenizer
        special = tokenizer.encode_special
        ids = [*special([string])[0].ids] if self._chats else tokenizer.encode(string)
        begin_ids = () if add_special_tokens is False else self._generator.begin_ids
        return with_begin(ids, begin_ids=begin_ids)

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a chat as text; without the generation prompt it ends with the last message."""
        template = self._generator.template
        assert template is not None, "checked before"
        chat = Conversation(chat_history, None, "a chat of --tasks")
        text = template.render(chat, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = True
    ) -> list[float]:
        """Return the log-likelihood of each text, in windows; only the last one overlaps."""
        windows: list[tuple[int, list[int], list[int]]] = []
        for number, request in enumerate(requests):
            cut = get_rolling_token_windows(
                self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(number, *make_disjoint_window(window)) for window in cut]
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows)
        for (number, *_), (score, _) in zip(windows, scores, strict=True):
            totals[number] += score
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        """Score the continuation of each request, given the tokens before it."""
        rows: dict[Row, list[int]] = defaultdict(list)
        for number, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise ConfigError(
                    f"a continuation must have 1 to {self.max_length} tokens (--seq_len), got "
                    f"{len(continuation)}: {self._generator.tokenizer.decode(continuation)!r:.60}"
                )
            rows[tuple([*context, *continuation][-self.max_length - 1 : -1])].append(number)
        answers = [(0.0, False)] * len(requests)
        for batch in self._batches(rows, "scoring"):
            num_scored = [max(len(requests[n][2]) for n in rows[row]) for row in batch]
            for row, scores_TV in zip(batch, self._scores(batch, num_scored), strict=True):
                for number in rows[row]:
                    ids_T = torch.tensor(requests[number][2], device=scores_TV.device)
                    here_TV = scores_TV[-len(ids_T) :]
                    score = here_TV.gather(1, ids_T[:, None]).sum().item()
                    answers[number] = score, bool((here_TV.argmax(1) == ids_T).all())
        return answers

    def _batches(self, rows: Iterable[Row], noun: str) -> Iterator[Sequence[Row]]:
        """Yield the rows, the longest first, so that running out of memory fails early."""
        sorted_rows, size = sorted(rows, key=lambda row: (-len(row), row)), self._batch_size
        starts = range(0, len(sorted_rows), size)
        for first in tracked(starts, noun, total=len(starts)):
            yield sorted_rows[first : first + size]

    @torch.no_grad()
    def _scores(self, rows: Sequence[Row], num_scored: Sequence[int]) -> Sequence[Tensor]:
        """Return log-probabilities (T, V) after the last `num_scored` tokens of each row."""
        model, width = self._generator.model, len(rows[0])
        assert model.output is not None, "no pipeline parallelism"
        device = next(model.parameters()).device
        padded = [[*row, *[0] * (width - len(row))] for row in rows]
        positions = [
            (b, s)
            for b, (row, count) in enumerate(zip(rows, num_scored, strict=True))
            for s in range(len(row) - count, len(row))
        ]
        b_T, s_T = torch.tensor(positions, device=device).T

        def select(_: object, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x_BSC, *rest_of_inputs = inputs
            return x_BSC[b_T, s_T][None], *rest_of_inputs

        # before the hook of tensor parallelism, which then gets the selected positions
        handle = model.output.register_forward_pre_hook(select, prepend=True)
        try:
            logits_TV = model(torch.tensor(padded, device=device))[0]
        finally:
            handle.remove()
        if not logits_TV.isfinite().all():
            raise UserError(
                f"the model's logits must be finite, and are not in {logits_TV.dtype}; try "
                f"--dtype float32, or another checkpoint"
            )
        return logits_TV.float().log_softmax(-1).split([*num_scored])

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Return the greedy continuation of each context, up to its first stop text."""
        groups: dict[str, dict[int, Row]] = defaultdict(dict)
        for number, request in enumerate(requests):
            context, settings = request.args
            ids = self.tok_encode(context) or [self.prefix_token_id]
            groups[json.dumps(settings, sort_keys=True)][number] = tuple(ids)
        texts = [""] * len(requests)
        for text, contexts in groups.items():
            generated = self._generate({*contexts.values()}, json.loads(text))
            for number, row in contexts.items():
                texts[number] = generated[row]
        return texts

    def _generate(self, rows: Iterable[Row], settings: Mapping[str, Any]) -> dict[Row, str]:
        """Return the text after each row of tokens; long rows are cut on the left."""
        until = settings.get("until") or []
        until = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        lengths = (settings[key] for key in LENGTHS if settings.get(key) is not None)
        num_new = int(next(lengths, MAX_NEW_TOKENS))
        supported = {"until", *LENGTHS, *SAMPLING}
        samples = settings.get("do_sample", float(settings.get("temperature") or 0) > 0)
        if samples or any(settings[key] not in NEUTRAL for key in settings.keys() - supported):
            raise ConfigError(f"generation_kwargs must decode greedily, got {settings}")
        if not 0 < num_new < self.max_length:
            raise ConfigError(
                f"a task must generate 1 to {self.max_length - 1} tokens (less than --seq_len), "
                f"got max_gen_toks {num_new}"
            )
        tokenizer = self._generator.tokenizer
        special = {*tokenizer.special_tokens.values()}

        def text_of(new: Sequence[int]) -> str:
            return tokenizer.decode([i for i in new if i not in special])

        texts = {}
        for batch in self._batches(rows, "generating"):
            generated = generate(
                self._generator.model,
                [row[num_new - self.max_length :] for row in batch],
                max_new_tokens=num_new,
                temperature=0.0,
                stop_ids=self._stop_ids,
                stops=lambda new: any(stop in text_of(new) for stop in until),
            )
            for row, new in zip(batch, generated, strict=True):
                texts[row] = text_of(new)
                for stop in until:
                    texts[row] = texts[row].split(stop)[0]
        return texts
