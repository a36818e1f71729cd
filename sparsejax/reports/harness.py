"""The tasks of lm-evaluation-harness (the package `lm-eval`), answered by our models.

The harness finds the tasks, makes the texts and computes the metrics; this computes
what it asks a model for. Source: Gao et al., "A framework for few-shot language model
evaluation", doi 10.5281/zenodo.10256836.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from difflib import get_close_matches
from itertools import batched
from pathlib import Path
from typing import Any

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import (
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(
        "--tasks needs the package `lm-eval`; run `uv sync --extra eval` or "
        "`pip install 'sparsejax[eval]'`"
    ) from error

from sparsejax.data.tokenizers import Tokenizer
from sparsejax.models.generation import generate_in_parts
from sparsejax.models.transformer import Transformer
from sparsejax.reports.scoring import padded_length, score_continuations

DRAWN_AT_ONCE = 32
"""Tokens that are drawn before their text is searched for what ends it."""
UNASKED = 256
"""Tokens that are drawn at most where a task does not say, as in the harness."""
DRAWS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}
"""The settings of a drawn text that are understood."""
BOOTSTRAPS = 1000
"""Draws of a standard error that has no formula, in one process."""


class HarnessModel(TemplateLM):
    """A model as the harness asks it: log-probabilities of texts, and texts."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        length: int,
        batch_size: int,
        prefix_token: int | None = None,
        end_tokens: Sequence[int] = (),
    ) -> None:
        """Keeps what answers need.

        Args:
          model: on one device; it computes as it is, sparse or dense.
          tokenizer: the one that the model was trained with.
          length: the most tokens that the model reads at once. What is longer loses its
            first tokens.
          batch_size: texts per call of the model.
          prefix_token: the token that stands before a text without a context; None: the
            first of `end_tokens`, and without one the last token of a line break.
          end_tokens: ids that end a drawn text.
        """
        super().__init__()
        self.model = model
        self.words = tokenizer
        self.length = length
        self.batch_size = batch_size
        self.end_tokens = tuple(end_tokens)
        if prefix_token is None:
            line_break = self.tok_encode("\n")
            prefix_token = [*self.end_tokens, *line_break[-1:]][0]
        self.prefix = prefix_token

    @property
    def eot_token_id(self) -> int:
        return self.prefix

    @property
    def tokenizer_name(self) -> str:
        return self.words.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns the ids of a text, to which no special tokens are added."""
        return self.words.encode(string.encode()).tolist()

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Returns log p(continuation | context), and whether it is the greedy one."""
        pairs = []
        for texts, context, continuation in requests:
            if not continuation:
                raise ValueError(
                    f"the continuation of {texts!r} has no token of its own: the "
                    f"tokenizer {self.words.name} makes one of its characters and of "
                    f"those before; change the task's target_delimiter"
                )
            # Of a context of spaces alone all have become part of the continuation.
            pairs.append((context or [self.prefix], continuation))
        return [tuple(scored) for scored in self._scored(pairs)]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-probability of each whole text. It is cut into windows; each
        token is predicted once, and those of the last window see as many tokens before
        them as fit."""
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix, self.length, 1
                )
            ]
            for request in requests
        ]
        scored = iter(self._scored([pair for of in windows for pair in of]))
        return [sum(next(scored).log_probability for _ in of) for of in windows]

    def _scored(self, pairs: list[tuple[list[int], list[int]]]):
        return score_continuations(
            self.model, pairs, length=self.length, batch_size=self.batch_size
        )

    def generate_until(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """Returns a text after each context, up to the first of its strings `until`, an
        end token, or `max_gen_toks` tokens: the most likely tokens, or draws where the
        task asks for a temperature. Requests of one length and one way of drawing are
        computed together."""
        prompts: list[list[int]] = []
        groups: dict[tuple[str, int], list[int]] = {}
        for index, request in enumerate(requests):
            context, asked = request.args
            how = self._how(asked)
            most = self.length - how["max_gen_toks"]
            if most < 1:
                raise ValueError(
                    f"the task {request.task_name} asks for max_gen_toks="
                    f"{how['max_gen_toks']}, and the model reads {self.length} tokens "
                    f"at once; say fewer in the task's generation_kwargs, or give a "
                    f"larger --sequence-length"
                )
            prompts.append((self.tok_encode(context) or [self.prefix])[-most:])
            longest = padded_length(len(prompts[-1]), most)
            groups.setdefault((json.dumps(how), longest), []).append(index)
        texts: dict[int, str] = {}
        with tqdm(total=len(requests), desc="generate_until", disable=None) as bar:
            for (how, longest), group in groups.items():
                for seed, batch in enumerate(batched(group, self.batch_size)):
                    rows = [prompts[index] for index in batch]
                    drawn = self._draw(rows, longest, json.loads(how), seed)
                    texts |= zip(batch, drawn, strict=True)
                    bar.update(len(batch))
        return [texts[index] for index in range(len(requests))]

    def _how(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Returns how a task's texts are drawn, by the names of `DRAWS`."""
        how = dict(normalize_gen_kwargs(asked, UNASKED))
        if unknown := sorted(how.keys() - DRAWS):
            raise ValueError(
                f"a task draws its texts with {unknown[0]}={how[unknown[0]]!r}, and "
                f"ours know {', '.join(sorted(DRAWS))}; leave it out of the task's "
                f"generation_kwargs"
            )
        return how

    def _draw(
        self, prompts: list[list[int]], longest: int, how: dict[str, Any], seed: int
    ) -> list[str]:
        """Returns the text after each prompt, at most `batch_size` of them."""
        until = how["until"]
        # A batch that is not full repeats its last text, which ends when that does.
        rows = [*prompts, *[prompts[-1]] * (self.batch_size - len(prompts))]
        parts = generate_in_parts(
            self.model,
            rows,
            how["max_gen_toks"],
            every=DRAWN_AT_ONCE,
            longest=longest,
            temperature=how.get("temperature", 0.0) if how["do_sample"] else 0.0,
            top_p=how.get("top_p", 1.0),
            vocab_size=min(self.words.vocab_size, self.model.config.vocab_size),
            seed=seed,
            end_tokens=self.end_tokens,
        )
        texts: list[str] = []
        for drawn in parts:
            texts = [self._text(tokens) for tokens in drawn[: len(prompts)]]
            if all(any(end and end in text for end in until) for text in texts):
                break
        return [postprocess_generated_text(text, until, None) for text in texts]

    def _text(self, tokens) -> str:
        ids = tokens.tolist()
        ends = (place for place, id in enumerate(ids) if id in self.end_tokens)
        return self.words.decode(ids[: next(ends, len(ids))])


def evaluate_tasks(
    answers: HarnessModel,
    names: Sequence[str],
    *,
    folder: str | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
) -> dict[str, Any]:
    """Returns what the harness finds: its objects `results`, `groups`, `n-shot`,
    `n-samples` and `versions`, each by task.

    Args:
      answers: the model.
      names: of tasks, groups or tags.
      folder: one whose YAML files define tasks, which come before the harness' own.
      limit: only so many documents of each task, the first ones.
      fewshot: solved examples before each question; None: as the task says.
    Raises:
      ValueError: there is no such task or folder, or the model cannot answer one.
      ImportError, OSError: a task needs another package, or data that is not there.
    """
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(
            f"--tasks-folder {folder} is no folder; give one with the YAML files of "
            f"tasks"
        )
    manager = TaskManager(include_path=folder, include_defaults=False)
    # The harness' own tasks are thousands, and take seconds to be listed.
    if not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=folder)
    if unknown := sorted(set(names) - set(manager.all_tasks)):
        near = [name for name in manager.all_tasks if unknown[0] in name]
        near += get_close_matches(unknown[0], manager.all_tasks)
        like = f"; like it are {', '.join(near[:5])}" if near else ""
        also = "" if folder is None else f", nor one in the YAML files of {folder}"
        raise ValueError(
            f"{unknown[0]} is no task of lm-evaluation-harness{also}{like}; give "
            f"another, or the folder of your own ones with --tasks-folder"
        )
    # A process with JAX's threads must not be forked, as it is for standard errors.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    # What the harness prints stands beside the result, and not in it.
    with redirect_stdout(sys.stderr):
        found = simple_evaluate(
            answers,
            tasks=list(names),
            num_fewshot=fewshot,
            limit=limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
            task_manager=manager,
        )
    kept = ("results", "groups", "n-shot", "n-samples", "versions")
    return {name: found[name] for name in kept if name in found}


def rows_of(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    """Yields task, examples before each question, metric, value and standard error of
    what `evaluate_tasks` has returned, as text."""
    for task, metrics in found["results"].items():
        for name, value in metrics.items():
            metric, _, kind = name.partition(",")
            if not kind or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{kind}")
            yield (
                task,
                str(found["n-shot"].get(task, "")),
                metric if kind == "none" else f"{metric} ({kind})",
                f"{value:.4f}" if isinstance(value, float) else str(value),
                f"{error:.4f}" if isinstance(error, float) else "",
            )
