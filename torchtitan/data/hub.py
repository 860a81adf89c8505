"""Text streamed from the Hugging Face Hub and tokenized on the fly.

    python -m torchtitan.train --training.dataset torchtitan.data.hub:HubText \
        --training.dataset_options.name HuggingFaceFW/fineweb-edu \
        --training.dataset_options.subset sample-10BT

It is custom data (`data/custom.py`) in the form of a stream: each rank reads all documents and
keeps its own samples, so a run resumes exactly on any number of ranks, but each rank fetches
everything. For many ranks or many passes, download and prepare the text instead: then samples are
shuffled too. The samples of a stream are in the order of its files. (The shuffle buffer of
`datasets` is not used: its content is lost when a run resumes.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torchtitan.base.errors import ConfigError
from torchtitan.data.readers import Row, TextTemplate
from torchtitan.data.tokenizer import Tokenizer

OPTIONS = "training.dataset_options"


class HubText:
    """Documents in order, each followed by an end token, cut into samples.

    Args:
        tokenizer: Encodes the text.
        seq_len: Tokens per sample.
        seed: Unused: documents have the order of the files.
        held_out: Unused: a stream cannot be validated on.
        name: owner/name on the Hub, or a format of `datasets` such as json, with data_files.
        subset: Subset of the dataset, if it has several.
        split: Split of the dataset.
        revision: Commit on the Hub, which ensures that a resumed run reads the same text.
        data_files: Files of the dataset or of this machine; all if not given.
        text_key: Column that holds the text.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        seq_len: int,
        seed: int,
        held_out: bool,
        name: str,
        subset: str | None = None,
        split: str = "train",
        revision: str | None = None,
        data_files: Sequence[str] = (),
        text_key: str = "text",
    ) -> None:
        self._tokenizer, self._seq_len = tokenizer, seq_len
        files = list(data_files) or None
        self._source: dict[str, Any] = {"path": name, "name": subset, "split": split}
        self._source |= {"revision": revision, "data_files": files}
        self._text_of = TextTemplate(text_key)
        self._documents, self._left = self._open(), list[int]()
        self._position: dict[str, Any] | None = None
        """State of the documents that were opened, None at the start of a pass."""
        self._has_read = False
        """Whether any of them was read. Before that, `datasets` returns a state at the start."""
        self.fingerprint = f"{self._source}, {text_key}, without empty texts"

    def _open(self) -> Any:
        from datasets import __version__, load_dataset

        if __version__ == "5.0.0":  # https://github.com/huggingface/datasets/issues/8308
            raise ConfigError.at(
                OPTIONS, "datasets 5.0.0 repeats text on a resume; install another"
            )
        return load_dataset(**self._source, streaming=True)

    def __iter__(self) -> Iterator[list[int]]:
        documents = iter(self._documents)
        while True:
            while len(self._left) > self._seq_len:
                sample = self._left[: self._seq_len + 1]
                self._left = self._left[self._seq_len :]
                yield sample
            document = next(documents, None)
            if document is None:
                # the remaining tokens start the next pass
                self._documents, self._position, self._has_read = self._open(), None, False
                return
            self._has_read = True
            # as files are read: an empty text is no document
            if text := self._text_of(Row(document, f"each document of {self._source['path']}")):
                self._left += [*self._tokenizer.encode(text), self._tokenizer.eos_id]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream, and the tokens after the last sample."""
        position = self._documents.state_dict() if self._has_read else self._position
        return {"documents": position, "left": self._left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a stored state."""
        self._documents, self._left = self._open(), [*state["left"]]
        self._position, self._has_read = state["documents"], False
        if self._position is not None:
            self._documents.load_state_dict(self._position)
