"""Pre-trains a transformer: the main job, `sparsejax train`, as a script.

    uv run experiments/pretrain.py
    uv run --extra cuda experiments/pretrain.py --preset gpt-124m --recipe paper \\
        --data.text 'corpus/**/*.txt' --data.tokenizer tokenizer.json

On two CPU cores the first takes 3 to 13 minutes, reads the bytes of the Python standard
library's source, and ends with a validation loss of about 1.1 nats per byte (unigram
model 3.4). `--help` lists every setting.
"""

import sys

from sparsejax.command import main

if __name__ == "__main__":
    main.leave(main.run(["train", *sys.argv[1:]]))
