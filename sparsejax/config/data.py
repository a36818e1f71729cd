"""The settings that say where the tokens of a run come from."""

from dataclasses import dataclass
from typing import Annotated, Literal

from sparsejax.annotations import check_fields
from sparsejax.config.ranges import Count, Interval, Seed, check_intervals


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The source of a run's tokens, and how they are split."""

    text: str | None = None
    """Glob of text files ("**" allowed). None: the Python standard library's source."""
    shards: str | None = None
    """Tokens instead of text: a folder, or a glob, of .bin and .npy files of uint16 or
    uint32 (nanoGPT, llm.c). Files named val are held out, files named test left out."""
    shard_dtype: Literal["uint16", "uint32"] = "uint16"
    """Dtype of .bin files without a header; llm.c's files and .npy files state
    theirs."""
    tokenizer: str | None = None
    """Path of a Hugging Face tokenizer.json. None: text is read as bytes, with a
    vocabulary of 256, and the ids of shards are not turned into text."""
    sequence_length: Count = 128
    """Tokens the model sees per sequence (one more is read, for the targets)."""
    validation_share: Annotated[float, Interval(above=0, below=1)] = 0.05
    """Share of the files that is held out; a file is always on the same side. Not read
    where shards are named val."""
    split_by: Literal["file", "package"] = "file"
    """The unit that lies on one side of the split as a whole: each file of a text, or
    each package, all files in the same folder at the top of the glob, so that no copy
    of a file's neighbours is held out while it is trained on. The held-out share is
    then one of packages."""
    drop_duplicates: bool = False
    """Whether, of text files with the same content, only the first by name is read."""
    seed: Seed = 0
    """The seed of the order of the training windows."""

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        check_intervals(self, "data.")
        if self.text is not None and self.shards is not None:
            raise ValueError(
                f"data.text={self.text!r} and data.shards={self.shards!r} are both "
                f"set, and the tokens come from one of them; leave the other out"
            )
        for name in ("split_by", "drop_duplicates"):
            value, unset = getattr(self, name), getattr(DataConfig, name)
            if self.shards is not None and value != unset:
                raise ValueError(
                    f"data.{name}={value!r} is about the files of a text, and "
                    f"data.shards={self.shards!r} are tokens; leave it out, and split "
                    f"the text before it becomes shards"
                )
