"""lm-evaluation-harness with our models, on tasks from local files, against Llama's
equations in float64."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sparsejax.command import main
from sparsejax.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from sparsejax.interchange.export import export_huggingface
from sparsejax.models.generation import generate
from tests.support.files.exported_models import MODELS, some_model
from tests.support.files.tokenizer_file import write_tokenizer
from tests.support.oracles import llama_oracle

LENGTH = 40
MODEL = some_model(MODELS["reglu2"])
WIDE = some_model(replace(MODELS["reglu2"], vocab_size=320))
"""With room for the ids of the tokenizer.json."""

CHOICES = [
    {"text": "the sparse", "choices": ["tensor", "core of it"], "answer": 0},
    {"text": "x" * 60, "choices": ["abc", "de", "f"], "answer": 2},
    {"text": "é", "choices": ["ü", "u"], "answer": 1},
]
TEXTS = [{"text": "a text that is longer than the model reads at once"}, {"text": "b"}]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
"""
OF_KIND = {
    "multiple_choice": """
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "generate_until": """
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["STOP"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
""",
    "loglikelihood_rolling": """
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model of bytes as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("model") / "out"
    export_huggingface(MODEL, folder, sequence_length=LENGTH, tokenizer=ByteTokenizer())
    return folder


def write_task(place, kind, rows):
    data = place / f"{kind}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = TASK.format(name=f"my-{kind}", data=data, kind=kind)
    (place / f"{kind}.yaml").write_text(common + OF_KIND[kind])


def of_bytes(text):
    return list(text.encode())


def log_probability(folder, context, continuation):
    """That of the continuation after the context, the last LENGTH tokens before its end
    computed as a whole."""
    whole = [*context, *continuation][-(LENGTH + 1) :]
    logits = llama_oracle.logits(folder, np.array(whole[:-1]))[-len(continuation) :]
    log_share = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return log_share[np.arange(len(continuation)), continuation].sum()


def drawn(folder, text, count):
    """The most likely bytes after a text, the whole sequence computed anew for each;
    the text is cut to what leaves room for all."""
    tokens = of_bytes(text)[-(LENGTH - count) :]
    for _ in range(count):
        tokens.append(int(llama_oracle.logits(folder, np.array(tokens))[-1].argmax()))
    return ByteTokenizer().decode(tokens[-count:])


def test_tasks_are_scored_as_by_full_recomputation(folder, tmp_path, capsys):
    answers = [drawn(folder, row["text"], 8) for row in CHOICES]
    # The first is right, the second is not.
    asked = [CHOICES[0] | {"answer": answers[0]}, CHOICES[1] | {"answer": "no"}]
    write_task(tmp_path, "multiple_choice", CHOICES)
    write_task(tmp_path, "generate_until", asked)
    write_task(tmp_path, "loglikelihood_rolling", TEXTS)
    names = [f"my-{kind}" for kind in OF_KIND]
    command = ["eval", str(folder), "--tasks-folder", str(tmp_path), "--json"]
    assert main.run([*command, "--batch-size", "4", "--tasks", *names]) == 0
    found = json.loads(capsys.readouterr().out)
    results = found["results"]
    assert found["n-samples"]["my-multiple_choice"]["effective"] == 3

    right = {"acc": 0, "acc_norm": 0}
    for row in CHOICES:
        scores = [
            log_probability(folder, of_bytes(row["text"]), of_bytes(" " + choice))
            for choice in row["choices"]
        ]
        lengths = [len(choice) for choice in row["choices"]]
        right["acc"] += np.argmax(scores) == row["answer"]
        right["acc_norm"] += np.argmax(np.divide(scores, lengths)) == row["answer"]
    for metric, count in right.items():
        assert results["my-multiple_choice"][f"{metric},none"] == count / 3
    assert results["my-generate_until"]["exact_match,none"] == 0.5

    total, size = 0.0, 0
    for row in TEXTS:
        tokens = of_bytes(row["text"])
        # the first LENGTH of them after a line break, the rest with all that fits
        parts = [([10], tokens[:LENGTH])]
        if rest := tokens[LENGTH:]:
            parts.append((tokens[:LENGTH], rest))
        total += sum(log_probability(folder, *part) for part in parts)
        size += len(tokens)
    found = results["my-loglikelihood_rolling"]["byte_perplexity,none"]
    # float32 against float64, as a mean of logits of order one
    assert found == pytest.approx(np.exp(-total / size), rel=1e-5)


def test_a_table_is_printed_and_what_is_no_task_is_refused(folder, tmp_path, capsys):
    write_task(tmp_path, "multiple_choice", CHOICES)
    command = ["eval", str(folder), "--tasks-folder", str(tmp_path)]
    asked = [*command, "--limit", "1", "--tasks", "my-multiple_choice"]
    assert main.run(asked) == 0
    shown = capsys.readouterr().out
    assert "my-multiple_choice" in shown and "acc_norm" in shown
    missing = ["eval", str(folder), "--tasks-folder", "nowhere", "--tasks", "x"]
    assert main.run(missing) == 1
    assert "nowhere is no folder" in capsys.readouterr().err
    assert main.run([*command, "--tasks", "my-multiple-choise"]) == 1
    error = capsys.readouterr().err
    assert f"nor one in the YAML files of {tmp_path}; like it are my-multi" in error
    for wrong in (["--windows", "3", "--tasks", "x"], ["--limit", "3"]):
        with pytest.raises(SystemExit):
            main.run(["eval", str(folder), *wrong])


@pytest.fixture(params=["bytes", "tokenizer.json"])
def answers(request, tmp_path):
    from sparsejax.reports.harness import HarnessModel

    tokenizer = ByteTokenizer()
    if request.param != "bytes":
        tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path / "tokenizer.json"))
    return HarnessModel(WIDE, tokenizer, length=LENGTH, batch_size=2)


def requests_of(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, task_name="it")
        for each in arguments
    ]


def test_context_and_continuation_are_the_tokens_of_the_whole(answers, monkeypatch):
    given = []

    def keep(pairs):
        given.extend(pairs)
        return [(0.0, True)] * len(pairs)

    monkeypatch.setattr(answers, "_scored", keep)
    texts = [("the sparse ", "tensor core"), ("", "the"), (" ", "the sparse")]
    answers.loglikelihood(requests_of("loglikelihood", *texts), disable_tqdm=True)
    encode = lambda text: answers.words.encode(text.encode()).tolist()
    for (context, continuation), (left, right) in zip(texts, given, strict=True):
        start = [answers.prefix] if not context.strip() else []
        assert left + right == start + encode(context + continuation)
    # A space at the border belongs to what follows.
    assert given[0][0] == encode("the sparse")
    assert given[2] == ([answers.prefix], encode(" the sparse"))


@pytest.mark.parametrize("answers", ["tokenizer.json"], indirect=True)
def test_drawn_texts_end_where_they_shall(answers):
    def texts(prompts, **how):
        asked = {"until": [], "max_gen_toks": 8, **how}
        return answers.generate_until(
            requests_of("generate_until", *[(prompt, asked) for prompt in prompts])
        )

    prompts = ["the sparse", "a", "the " * 30]
    free = texts(prompts)
    one_by_one = [texts([prompt])[0] for prompt in prompts]
    assert free == one_by_one and len(set(free)) == 3
    stop = free[0][2:4]
    assert texts(prompts[:1], until=["nowhere", stop]) == [free[0].split(stop)[0]]
    known = answers.words.vocab_size
    first = generate(WIDE, [answers.tok_encode("a")], 1, vocab_size=known)
    answers.end_tokens = tuple(first[0].tolist())
    assert texts(["a"]) == [""]
    hot = {"do_sample": True, "temperature": 2.0}
    assert texts(["a"], **hot) == texts(["a"], **hot) != texts(["b"], **hot)


def test_what_cannot_be_answered_is_refused(answers):
    def refused(kind, *arguments):
        return getattr(answers, kind)(requests_of(kind, arguments))

    with pytest.raises(ValueError, match="max_gen_toks=256.*reads 40 tokens"):
        refused("generate_until", "a", {"until": []})
    with pytest.raises(ValueError, match="num_beams=4"):
        refused("generate_until", "a", {"max_gen_toks": 4, "num_beams": 4})
    with pytest.raises(ValueError, match="no token of its own"):
        refused("loglikelihood", "the", "")
