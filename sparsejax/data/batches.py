"""Batches of token windows: a resumable order that any number of processes share."""

from collections.abc import Sequence

import grain
import numpy as np
from jaxtyping import Int32

from sparsejax.config import DataConfig
from sparsejax.data.corpus import Corpus
from sparsejax.data.tokenizers import Tokens


def train_batches(
    corpus: Corpus,
    config: DataConfig,
    *,
    batch_size: int,
    micro_batches: int = 1,
    rows: Sequence[int] | None = None,
) -> grain.DatasetIterator[dict[str, Int32[np.ndarray, "micro rows length"]]]:
    """Returns endless shuffled batches of training windows, with a state to save.

    Window i of an array is tokens [i L, (i + 1) L], L = `sequence_length`: inputs do
    not overlap, and the last token, only ever a target, is the first of the next
    window. Every epoch has its own order, given by `config.seed`; a batch may span two
    epochs, so that no window is left out.

    The order is that of the whole batch in every process. A process names the sequences
    it wants as `rows`, and reads no others.

    Args:
      corpus: where the windows come from.
      config: sequence length and seed.
      batch_size: sequences per optimiser step, of all processes together.
      micro_batches: how many equal parts a step is cut into.
      rows: which sequences of each micro-batch, 0 to batch_size / micro_batches - 1, in
        the order in which they are returned. None: all.
    Returns:
      An iterator over {"tokens": int32 (micro_batches, rows, sequence_length + 1)}.
      `get_state()` is a JSON object that counts the batches taken; `set_state()`
      continues exactly there, with the same `batch_size` and any `rows`.
    Raises:
      ValueError: batch_size does not divide or exceeds the windows there are, there are
        more windows than the shuffle counts, or a row is not in the micro-batch.
    """
    if micro_batches < 1 or batch_size < 1 or batch_size % micro_batches:
        raise ValueError(
            f"batch_size={batch_size} is not a positive multiple of "
            f"micro_batches={micro_batches}; change one of them"
        )
    sequences = batch_size // micro_batches
    rows = list(range(sequences) if rows is None else rows)
    if not rows or min(rows) < 0 or max(rows) >= sequences:
        raise ValueError(
            f"rows={rows} must be at least one of 0 to {sequences - 1}, the "
            f"sequences of a micro-batch (batch_size={batch_size} / "
            f"micro_batches={micro_batches})"
        )
    windows = _Windows(corpus.train, config.sequence_length)
    _check_enough(windows, batch_size, corpus, side="training", remedy="add data")
    if len(windows) > 2**32:
        raise ValueError(
            f"sequence_length={config.sequence_length} cuts the training tokens into "
            f"{len(windows)} windows, and the shuffle counts to 2**32; lengthen the "
            f"sequence or match fewer shards"
        )

    def read(indices: Sequence[int]) -> dict[str, np.ndarray]:
        chosen = np.reshape(indices, (micro_batches, sequences))[:, rows]
        tokens = windows.read(chosen.ravel())
        return {"tokens": tokens.reshape(*chosen.shape, -1)}

    # Indices are shuffled by a bijection, so no permutation of them is in memory.
    batches = (
        grain.MapDataset.range(len(windows))
        .shuffle(seed=config.seed)
        .repeat()
        .batch(batch_size, drop_remainder=True, batch_fn=read)
    )
    # A few threads, a few batches ahead: a batch from a disk is many small reads.
    return iter(
        batches.to_iter_dataset(
            grain.ReadOptions(num_threads=4, prefetch_buffer_size=4)
        )
    )


def validation_batches(
    corpus: Corpus, config: DataConfig, *, batch_size: int, batches: int
) -> list[Int32[np.ndarray, "batch length"]]:
    """Returns the same held-out windows every time, spread evenly over the held-out
    tokens.

    Args:
      corpus: where the windows come from.
      config: sequence length.
      batch_size: sequences per batch.
      batches: how many batches; fewer come back where the held-out tokens do not fill
        them, for no window is used twice and all batches have one shape.
    Returns:
      At least one int32 array (batch_size, sequence_length + 1).
    Raises:
      ValueError: the held-out tokens do not fill a single batch.
    """
    if batch_size < 1 or batches < 1:
        raise ValueError(
            f"batch_size={batch_size} and batches={batches} must be positive"
        )
    windows = _Windows(corpus.validation, config.sequence_length)
    remedy = (
        "hold out more with --data.validation-share, or, of shards with val in their "
        "names, where they are made"
    )
    _check_enough(windows, batch_size, corpus, side="held-out", remedy=remedy)
    batches = min(batches, len(windows) // batch_size)
    chosen = np.arange(batches * batch_size) * len(windows) // (batches * batch_size)
    return list(windows.read(chosen).reshape(batches, batch_size, -1))


class _Windows:
    """The windows of all arrays of a side, numbered through."""

    def __init__(self, parts: Sequence[Tokens], length: int) -> None:
        self._parts = parts
        self.length = length
        counts = [max(0, part.size - 1) // length for part in parts]
        self._ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(
        self, indices: Int32[np.ndarray, " windows"]
    ) -> Int32[np.ndarray, "windows length"]:
        tokens = np.empty((len(indices), self.length + 1), np.int32)
        for row, index in enumerate(indices):
            owner = np.searchsorted(self._ends, index, side="right")
            first = self._ends[owner - 1] if owner else 0
            start = int(index - first) * self.length
            tokens[row] = self._parts[owner][start : start + self.length + 1]
        return tokens


def _check_enough(
    windows: _Windows, batch_size: int, corpus: Corpus, *, side: str, remedy: str
) -> None:
    """Raises ValueError where a side of the corpus has too few windows for a batch."""
    if len(windows) < batch_size:
        raise ValueError(
            f"batch_size={batch_size} exceeds the {len(windows)} {side} windows of "
            f"sequence_length={windows.length} ({corpus.description}); make one of "
            f"them smaller (--batch-size, --data.sequence-length), or {remedy}"
        )
