"""Windows and batches: none lost, none crossing, one order for any readers."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax.config import DataConfig
from sparsejax.data.batches import train_batches, validation_batches
from sparsejax.data.corpus import Corpus, load_corpus
from tests.support.files.shard_files import write_shard


def corpus_of(*train, validation=((0,),)) -> Corpus:
    return Corpus(
        train=tuple(np.asarray(part, np.uint16) for part in train),
        validation=tuple(np.asarray(part, np.uint16) for part in validation),
        vocab_size=2**16,
        tokenizer=None,
        description="a description",
        fingerprint="",
    )


def windows_of(parts, length: int) -> list[list[int]]:
    """All windows, one part after the other."""
    return [
        list(part[start : start + length + 1])
        for part in parts
        for start in range(0, len(part) - length, length)
    ]


def take(batches, count: int) -> np.ndarray:
    return np.stack([next(batches)["tokens"] for _ in range(count)])


def test_an_epoch_is_every_window_once_and_the_next_is_in_another_order():
    corpus = corpus_of(np.arange(8 * 12 + 5))  # 12 windows, and a rest too short
    batches = train_batches(corpus, DataConfig(sequence_length=8), batch_size=4)
    epochs = [take(batches, 3).reshape(12, 9) for _ in range(4)]
    for rows in epochs:
        order = np.argsort(rows[:, 0])
        expected = [np.arange(8 * i, 8 * i + 9) for i in range(12)]
        np.testing.assert_array_equal(rows[order], expected)
    orders = {tuple(rows[:, 0].tolist()) for rows in epochs}
    assert len(orders) == 4
    assert tuple(range(0, 96, 8)) not in orders


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    length=st.integers(1, 4),
)
def test_no_window_crosses_from_one_array_into_the_next(sizes, length):
    ends = np.cumsum([0, *sizes])
    parts = [range(*span) for span in pairwise(ends)]
    expected = windows_of(parts, length)
    assert len(expected) == sum(max(0, size - 1) // length for size in sizes)
    corpus = corpus_of(*parts)
    config = DataConfig(sequence_length=length)
    if not expected:
        with pytest.raises(ValueError, match="exceeds the 0 training windows"):
            train_batches(corpus, config, batch_size=1)
        return
    batches = train_batches(corpus, config, batch_size=1)
    found = take(batches, len(expected)).reshape(len(expected), length + 1)
    assert sorted(found.tolist()) == expected


def test_batches_span_epochs_so_that_no_window_is_left_out():
    corpus = corpus_of(np.arange(5 * 2 + 1))  # 5 windows in batches of 3
    batches = train_batches(corpus, DataConfig(sequence_length=2), batch_size=3)
    starts = take(batches, 10)[..., 0].ravel()
    assert set(Counter(starts.tolist()).values()) == {6}


@pytest.mark.parametrize("micro_batches", [1, 2, 6])
def test_micro_batches_cut_the_same_batch(micro_batches):
    corpus = corpus_of(np.arange(200))
    config = DataConfig(sequence_length=5, seed=3)
    whole = take(train_batches(corpus, config, batch_size=6), 1)
    parts = take(
        train_batches(corpus, config, batch_size=6, micro_batches=micro_batches), 1
    )
    assert parts.shape == (1, micro_batches, 6 // micro_batches, 6)
    assert parts.dtype == np.int32
    np.testing.assert_array_equal(parts.reshape(1, 1, 6, 6), whole)


def test_the_seed_gives_the_order():
    corpus = corpus_of(np.arange(1000))

    def first(seed):
        config = DataConfig(sequence_length=4, seed=seed)
        return take(train_batches(corpus, config, batch_size=8), 3)

    np.testing.assert_array_equal(first(5), first(5))
    assert not np.array_equal(first(5), first(6))


@pytest.mark.parametrize("readers", [2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_readers_together_see_the_batch_of_one(readers, micro_batches):
    corpus = corpus_of(np.arange(100), np.arange(1000, 1234))
    config = DataConfig(sequence_length=3, seed=1)
    size = 8 * micro_batches

    def batches(rows):
        iterator = train_batches(
            corpus, config, batch_size=size, micro_batches=micro_batches, rows=rows
        )
        return take(iterator, 12)

    shares = np.arange(8).reshape(readers, -1).tolist()
    together = np.concatenate([batches(rows) for rows in shares], axis=2)
    np.testing.assert_array_equal(together, batches(None))
    np.testing.assert_array_equal(batches([6, 0, 3]), batches(None)[:, :, [6, 0, 3]])


def test_a_reader_touches_its_own_windows_only():
    class Watched(np.ndarray):
        read = 0

        def __getitem__(self, key):
            Watched.read += 1
            return super().__getitem__(key)

    corpus = corpus_of(np.arange(1000))
    watched = corpus.train[0].view(Watched)
    object.__setattr__(corpus, "train", (watched,))
    batches = train_batches(
        corpus, DataConfig(sequence_length=4), batch_size=100, rows=[3]
    )
    next(batches)
    # Read ahead: four batches in the buffer, up to four more in the threads.
    assert 1 <= Watched.read <= 12


@settings(deadline=None, max_examples=15)
@given(
    taken=st.integers(0, 40),
    more=st.integers(1, 20),
    past=st.integers(0, 12),
    readers=st.sampled_from([1, 3]),
)
def test_a_saved_state_continues_bit_for_bit_with_any_readers(
    taken, more, past, readers
):
    corpus = corpus_of(np.arange(60 * 3 + 1))  # 60 windows: several epochs are seen
    config = DataConfig(sequence_length=3, seed=11)

    def fresh(rows):
        return train_batches(corpus, config, batch_size=6, micro_batches=2, rows=rows)

    batches = fresh([0, 2])  # saved by a reader of other rows than those that resume
    for _ in range(taken):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))  # as a checkpoint holds it
    assert len(json.dumps(state)) < 100
    expected = take(fresh(None), taken + more)[taken:]
    resumed = []
    for rows in np.arange(3).reshape(readers, -1).tolist():
        reader = fresh(rows)
        for _ in range(past):  # the threads that read ahead have already started
            next(reader)
        reader.set_state(state)
        resumed.append(take(reader, more))
    np.testing.assert_array_equal(np.concatenate(resumed, axis=2), expected)


def test_shards_give_the_batches_of_the_same_tokens_in_memory(tmp_path):
    parts = {
        "a_train": range(100),
        "b_train": range(200, 265),
        "c_val": range(300, 340),
    }
    for name, tokens in parts.items():
        write_shard(tmp_path / name, tokens, "llm.c gpt-2")
    config = DataConfig(shards=str(tmp_path), sequence_length=6)
    shards = load_corpus(config, vocab_size=400)
    memory = corpus_of(parts["a_train"], parts["b_train"], validation=(parts["c_val"],))
    for corpus in (shards, memory):
        assert corpus.vocab_size >= 340
    found, expected = (
        take(train_batches(corpus, config, batch_size=5), 9)
        for corpus in (shards, memory)
    )
    np.testing.assert_array_equal(found, expected)
    found, expected = (
        validation_batches(corpus, config, batch_size=2, batches=2)
        for corpus in (shards, memory)
    )
    np.testing.assert_array_equal(found, expected)


def test_the_order_of_billions_of_windows_needs_no_memory():
    one = np.uint16(7)
    # 2^31 windows that share one token: a permutation of them would take 8 GiB.
    corpus = corpus_of()
    object.__setattr__(corpus, "train", (np.broadcast_to(one, 2**32 + 1),))
    batches = train_batches(corpus, DataConfig(sequence_length=2), batch_size=3)
    assert take(batches, 2).tolist() == [[[[7, 7, 7]] * 3]] * 2
    message = r"sequence_length=1 cuts .* into 4294967297 windows, .* counts to 2\*\*32"
    object.__setattr__(corpus, "train", (np.broadcast_to(one, 2**32 + 2),))
    with pytest.raises(ValueError, match=message):
        train_batches(corpus, DataConfig(sequence_length=1), batch_size=3)


def test_training_never_sees_held_out_tokens(tmp_path):
    for index in range(40):
        (tmp_path / f"{index}.txt").write_bytes(bytes([index]) * 30)
    config = DataConfig(
        text=f"{tmp_path}/*.txt", sequence_length=8, validation_share=0.2
    )
    corpus = load_corpus(config, vocab_size=256)
    (train,), (validation,) = corpus.train, corpus.validation
    held_out = set(validation.tolist())
    batches = train_batches(corpus, config, batch_size=10)
    epochs = 2 * (train.size // 8) // 10 + 1
    seen = set(take(batches, epochs).ravel().tolist())
    assert seen == set(train.tolist())
    assert not seen & held_out
    for tokens in validation_batches(corpus, config, batch_size=2, batches=3):
        assert set(tokens.ravel().tolist()) <= held_out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 6, "micro_batches": 4}, r"batch_size=6 is not a positive"),
        ({"batch_size": 0}, r"batch_size=0 is not a positive multiple"),
        ({"batch_size": 6, "micro_batches": 0}, r"micro_batches=0; change one"),
        (
            {"batch_size": 13},
            r"batch_size=13 exceeds the 12 training windows of sequence_length=8 \(a "
            r"description\)",
        ),
        (
            {"batch_size": 6, "micro_batches": 2, "rows": [0, 3]},
            r"rows=\[0, 3\] must be at least one of 0 to 2, the sequences of a micro-",
        ),
        (
            {"batch_size": 6, "rows": [-1]},
            r"rows=\[-1\] must be at least one of 0 to 5",
        ),
        ({"batch_size": 6, "rows": []}, r"rows=\[\] must be at least one of 0 to 5"),
    ],
)
def test_unusable_batches_are_refused(options, message):
    corpus = corpus_of(np.arange(100))
    with pytest.raises(ValueError, match=message):
        train_batches(corpus, DataConfig(sequence_length=8), **options)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 80), min_size=1, max_size=4),
    length=st.integers(1, 7),
    batch_size=st.integers(1, 8),
    batches=st.integers(1, 8),
)
def test_validation_windows_are_distinct_whole_and_even(
    sizes, length, batch_size, batches
):
    ends = np.cumsum([0, *sizes])
    parts = [range(*span) for span in pairwise(ends)]
    windows = windows_of(parts, length)
    corpus = corpus_of([0], validation=parts)
    config = DataConfig(sequence_length=length)
    if batch_size > len(windows):
        message = r"exceeds the \d+ held-out windows .*--data.validation-share"
        with pytest.raises(ValueError, match=message):
            validation_batches(corpus, config, batch_size=batch_size, batches=batches)
        return
    found = validation_batches(corpus, config, batch_size=batch_size, batches=batches)
    assert len(found) == min(batches, len(windows) // batch_size) >= 1
    rows = np.concatenate(found)
    assert rows.dtype == np.int32
    assert rows.shape == (len(found) * batch_size, length + 1)
    indices = [windows.index(row) for row in rows.tolist()]
    gaps = np.diff([*indices, len(windows)])
    assert indices[0] == 0
    assert gaps.min() >= 1  # distinct
    assert gaps.max() - gaps.min() <= 1  # even


@pytest.mark.parametrize("options", [(0, 1), (1, 0)])
def test_validation_needs_at_least_one_sequence(options):
    corpus = corpus_of([0], validation=(range(9),))
    batch_size, batches = options
    with pytest.raises(ValueError, match=r"batch_size=\d and batches=\d must be pos"):
        validation_batches(
            corpus,
            DataConfig(sequence_length=2),
            batch_size=batch_size,
            batches=batches,
        )
